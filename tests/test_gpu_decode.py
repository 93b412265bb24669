"""On a Hopper GPU: the bug and its fixes with FlashMLA's kernels and real CUDA graphs."""

import pytest
import torch

from stalegraph import decode
from stalegraph.builders import BUILDERS
from stalegraph.isolate import run_isolated
from stalegraph.record import pointers, text
from stalegraph.rungs import open_rung

pytestmark = pytest.mark.gpu
FIXED = [name for name in BUILDERS if name != "regressed"]
PROMPT = text.PROMPT


def recite(builder, batch, mode, life):
    """(accuracy, stale fields, failure) of a run in a process of its own."""
    with open_rung("flashmla") as device:
        run = decode.run(device, builder=builder, prompt=PROMPT, batch=batch, tokens=250, mode=mode, life=life)
    return run.accuracy, run.stale_fields, run.failure


@pytest.mark.parametrize("batch", [1, 2, 3, 8])
def test_eager_is_right(batch):
    assert recite("regressed", batch, "eager", "taken") == (1.0, [], None)


@pytest.mark.parametrize("life", ["taken", "kept"])
@pytest.mark.parametrize("batch", [1, 2, 3, 8])
@pytest.mark.parametrize("builder", FIXED)
def test_every_fixed_builder_is_right(builder, batch, life):
    assert recite(builder, batch, "graph", life) == (1.0, [], None)


@pytest.mark.parametrize("life", ["taken", "kept"])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_regressed_builder_is_wrong(batch, life):
    result = run_isolated(recite, "regressed", batch, "graph", life)
    if result.ok:
        accuracy, stale, failure = result.value
        assert accuracy < 0.1 and (failure or "tile_scheduler_metadata" in stale)
    else:  # a wild num_splits may trip the kernel's own assert
        assert result.cuda_error


@pytest.mark.parametrize("builder", list(BUILDERS))
def test_the_schedules_addresses_are_found_in_every_graph(builder):
    with open_rung("flashmla") as device:
        found = pointers.record_builder(device, builder)
    attention = next(node for node in found["nodes"] if "splitkv_mla_kernel" in node["name"])
    combine = next(node for node in found["nodes"] if "combine" in node["name"])
    offsets = {argument["field"]: argument["offset"] for argument in attention["arguments"]}
    assert {"tile_scheduler_metadata", "num_splits", "seq_lens", "block_table", "q", "k_cache"} <= set(offsets)
    assert "num_splits" in {argument["field"] for argument in combine["arguments"]}
    assert not any(node["opaque"] for node in found["nodes"])
    moved = found["moved_at_the_next_build"]
    assert moved["tile_scheduler_metadata"] == (builder == "regressed")
    assert not moved["seq_lens"] and not moved["block_table"]


def test_memory_is_read_by_raw_address():
    from stalegraph.errors import IllegalAddressError

    with open_rung("flashmla") as device:
        tensor = torch.arange(64, dtype=torch.int32, device=device.torch_device)
        assert device.memory.read(tensor.data_ptr() + 4, 8).view(torch.int32).tolist() == [1, 2]
        with pytest.raises(IllegalAddressError):
            device.memory.read(64, 4)
        assert device.memory.is_mapped(tensor.data_ptr(), 256) and not device.memory.is_mapped(64)
        assert tensor.sum().item() == 2016  # the refused read left the device usable


def count(builder):
    """What the last build of a run had the device do."""
    with open_rung("flashmla") as device:
        run = decode.run(device, builder=builder, prompt=PROMPT, batch=4, tokens=3, life="kept")
    return {name: run.build_counters[-1][name] for name in ("allocations", "launches", "copies")}


def test_launches_and_copies_of_a_build_are_counted():
    found = {builder: run_isolated(count, builder).value for builder in BUILDERS}
    assert found["regressed"] == {"allocations": 2, "launches": 1, "copies": 0}
    assert found["copying"]["copies"] == 2 and found["copying"]["launches"] > 1
    assert found["inplace"] == {"allocations": 0, "launches": 1, "copies": 0}
    assert found["ingraph"] == {"allocations": 0, "launches": 0, "copies": 0}
