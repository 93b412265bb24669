"""Labels, generations and steps of a CUDA device from a snapshot and an event log like torch's, without a GPU."""

import pytest
import torch

from stalegraph.cuda import device as module
from stalegraph.cuda.device import Counters, CudaDevice
from stalegraph.errors import RungUnavailable

BASE, POOL = 0x7F00_0000_0000, (0, 3)


class Fake(CudaDevice):
    """A CudaDevice whose allocator is a script: `now` is the clock, in microseconds."""

    def __init__(self, monkeypatch, history=True):
        self.index, self._history, self._labels, self._steps, self.replays = 0, history, [], [(0, 0)], 0
        self.now, self.log, self.states = 0, [], {}
        monkeypatch.setattr(module, "_now", lambda: self.now)

    def memory_snapshot(self):
        blocks = [{"address": address, "size": 512, "state": state} for address, state in sorted(self.states.items())]
        return [{"address": BASE, "total_size": 1 << 20, "segment_pool_id": POOL, "device": 0, "blocks": blocks}]

    def _trace(self):
        return self.log if self._history else []

    def alloc(self, address):
        self.now += 10
        self.states[address] = "active_allocated"
        self.log.append({"action": "alloc", "addr": address, "size": 512, "time_us": self.now})

    def free(self, address):
        self.now += 10
        self.states[address] = "inactive"
        for action in ("free_requested", "free_completed"):
            self.log.append({"action": action, "addr": address, "size": 512, "time_us": self.now})

    def name(self, address, label):
        """Labels the block at `address`; returns what keeps the label's tensor alive."""
        self.now += 10
        tensor = torch.zeros(4)
        self.label(tensor, label)
        self._labels[-1] = module.replace(self._labels[-1], address=address)
        return tensor

    def at_step(self, step):
        self.now += 10
        self.step = step


@pytest.fixture
def device(monkeypatch):
    return Fake(monkeypatch)


def test_a_blocks_life_is_told_by_label_generation_and_step(device):
    device.alloc(BASE)
    held = device.name(BASE, "metadata")
    block = device.memory_map().find(BASE)
    assert (block.label, block.generation, block.since, block.pool) == ("metadata", 1, 0, POOL)
    device.at_step(5)
    del held
    device.free(BASE)
    block = device.memory_map().find(BASE)
    assert (block.label, block.state, block.since) == ("metadata", "freed", 5)  # a freed block says whose it was
    device.at_step(6)
    device.alloc(BASE)
    block = device.memory_map().find(BASE)
    assert (block.label, block.generation, block.since) == (None, 2, 6)
    held = device.name(BASE, "logits")
    assert device.memory_map().find(BASE).label == "logits"
    assert [(event.step, event.action, event.label) for event in device.history] == [
        (0, "alloc", "metadata"), (5, "free", "metadata"), (6, "alloc", "logits"),
    ]  # fmt: skip
    assert {event.pool for event in device.history} == {POOL}


def test_without_history_a_label_dies_with_its_tensor(monkeypatch):
    device = Fake(monkeypatch, history=False)
    device.alloc(BASE)
    held = device.name(BASE, "metadata")
    block = device.memory_map().find(BASE)
    assert (block.label, block.generation, block.since) == ("metadata", 0, None)
    del held
    device.free(BASE)
    assert device.memory_map().find(BASE).label is None and device.history == []


def test_a_label_does_not_cross_to_the_next_tensor_at_its_address(device):
    device.alloc(BASE)
    held = device.name(BASE, "metadata")
    del held
    device.free(BASE)
    device.alloc(BASE)
    device.free(BASE)
    assert device.memory_map().find(BASE).label is None


def test_counters_subtract_and_what_hardware_does_not_count_stays_unknown():
    assert Counters(5, 3, replays=9) - Counters(1, 2, replays=4).snapshot() == Counters(4, 1, None, None, None, 5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_device_says_what_is_missing():
    with pytest.raises(RungUnavailable, match="without CUDA|no CUDA device"):
        CudaDevice()
