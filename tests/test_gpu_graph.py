"""On a Hopper GPU: what a captured decode step bakes in, and that graphs come and go without a trace."""

import pytest
import torch

from stalegraph import ops
from stalegraph.errors import CaptureError
from stalegraph.recorded.decode import SOFTMAX_SCALE, DecodeCase, tensors
from stalegraph.rungs import open_rung

pytestmark = pytest.mark.gpu


@pytest.fixture
def device():
    with open_rung("flashmla") as device:
        yield device


@pytest.fixture
def inputs(device):
    case = DecodeCase("gpu", (204, 70), (204, 70), (204, 70))
    return {name: tensor.to(device.torch_device) for name, tensor in tensors(case).items()}


def attend(inputs, metadata, num_splits):
    return ops.flash_mla_with_kvcache_fp8(
        inputs["q"], inputs["k_cache"], inputs["block_table"], inputs["seq_lens"], 512, metadata, num_splits,
        SOFTMAX_SCALE, True, inputs["descale_q"], inputs["descale_k"],
    )  # fmt: skip


def test_the_addresses_of_the_schedule_are_found_in_the_parameter_struct(device, inputs):
    metadata, num_splits = ops.get_mla_metadata_dense_fp8(inputs["seq_lens"], 16, 1)
    attend(inputs, metadata, num_splits)
    graph = device.graph()
    with graph.capture():
        out, lse = attend(inputs, metadata, num_splits)
    kernels = [node for node in graph.nodes if node.kind == "kernel"]
    assert len(kernels) == 2 and not any(node.opaque for node in kernels)
    attention, combine = ({a.address: a.offset for a in node.arguments} for node in kernels)
    for tensor in (metadata, num_splits, out, lse, inputs["block_table"], inputs["seq_lens"], inputs["q"]):
        assert tensor.data_ptr() in attention
    assert num_splits.data_ptr() in combine
    eager, _ = attend(inputs, metadata, num_splits)
    graph.replay()
    device.synchronize()
    assert torch.equal(out, eager)


def test_copies_fills_and_pinned_memory_are_nodes(device):
    source = device.pin(torch.arange(256, dtype=torch.int32))
    target = torch.zeros(256, dtype=torch.int32, device=device.torch_device)
    graph = device.graph()
    with graph.capture():
        target.copy_(source, non_blocking=True)
        other = torch.zeros(1024, device=device.torch_device)
        other.add_(1)
    copy = next(node for node in graph.nodes if node.kind == "memcpy")
    assert [a.address for a in copy.arguments] == [source.data_ptr(), target.data_ptr()]
    assert [a.access for a in copy.arguments] == ["read", "write"]
    assert any(a.address == other.data_ptr() for node in graph.nodes for a in node.arguments)


def test_labels_generations_and_steps_follow_a_block(device):
    tensor = device.label(torch.empty(4224, dtype=torch.uint8, device=device.torch_device), "metadata")
    address = tensor.data_ptr()
    before = device.memory_map().find(address)
    assert (before.label, before.state) == ("metadata", "allocated") and before.generation >= 1
    device.step = 7
    del tensor
    freed = device.memory_map().find(address)
    assert (freed.label, freed.state, freed.since) == ("metadata", "freed", 7)
    device.step = 8
    again = torch.empty(4224, dtype=torch.uint8, device=device.torch_device)
    assert again.data_ptr() == address  # last in, first out for one size
    taken = device.memory_map().find(address)
    assert (taken.label, taken.state, taken.since) == (None, "allocated", 8)
    assert taken.generation == before.generation + 1
    events = [event for event in device.history if event.address == address][-3:]
    assert [(event.step, event.action, event.label) for event in events] == [
        (0, "alloc", "metadata"), (7, "free", "metadata"), (8, "alloc", None),
    ]  # fmt: skip


def test_counters_can_be_subtracted(device):
    before = device.counters
    held = [torch.empty(100, device=device.torch_device) for _ in range(3)]
    del held
    done = device.counters - before
    assert (done.allocations, done.frees, done.replays, done.launches) == (3, 3, 0, None)


def test_ten_thousand_nodes_are_read(device):
    tensor = torch.zeros(64, device=device.torch_device)
    graph = device.graph()
    with graph.capture():
        for _ in range(10_000):
            tensor.add_(1)
    assert len(graph.nodes) == 10_000
    assert all(tensor.data_ptr() in {a.address for a in node.arguments} for node in graph.nodes)


def test_graphs_of_one_pool_share_its_segments(device):
    first = device.graph()
    with first.capture():
        torch.zeros(1000, device=device.torch_device).add_(1)
    second = device.graph(pool=first.pool())
    with second.capture():
        tensor = torch.zeros(1000, device=device.torch_device).add_(1)
    assert first.pool() == second.pool() != (0, 0)
    assert device.memory_map().find(tensor.data_ptr()).pool == tuple(first.pool())


def test_a_graph_used_in_the_wrong_state_says_so(device):
    graph = device.graph()
    with pytest.raises(CaptureError, match="before capture"):
        graph.replay()
    tensor = torch.zeros(4, device=device.torch_device)
    with pytest.raises(RuntimeError):
        with graph.capture():
            tensor.sum().item()  # waits for the device, which a capturing stream does not permit
    with graph.capture():
        tensor.add_(1)
    with pytest.raises(CaptureError, match="captured already"):
        with graph.capture():
            pass
    graph.reset()
    with graph.capture():
        tensor.add_(2)
    graph.replay()
    assert tensor.tolist() == [2.0] * 4


def test_captures_and_releases_leave_no_memory_behind(device):
    from stalegraph.record.leak import record

    found, _ = record(device, captures=200)
    for what in ("allocated", "reserved"):  # used_on_device counts other processes too: the record has it, taken alone
        assert found["after"][what] - found["before"][what] <= found["segment"], what
