"""The four builders: the bug's few lines, addresses that stay or move, bad input refused before anything changes."""

import pytest
import torch

from stalegraph.builders import BUILDERS, builder_diff, make_builder
from stalegraph.errors import UsageError
from stalegraph.schedule import plan
from stalegraph.simulator import Device

SIZES = dict(num_heads=16, max_batch=8, max_blocks=6)
PERSISTENT = ("copying", "inplace", "ingraph")


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture
def device():
    with Device() as device:
        yield device


def made(name, device, **more):
    return make_builder(name, **SIZES, sm_count=device.sm_count, device=device.torch_device, **more)


def built(builder, lens, table):
    metadata = builder.build(lens, table)
    builder.head(metadata)
    return metadata


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize(
    "lens", [(300,), (1, 64, 65), (320, 10, 0, 0), (7,) * 8], ids=["one", "regular", "padded", "largest"]
)
def test_every_builder_plans_what_the_reference_plans(device, name, lens):
    table = torch.ones(len(lens), 6, dtype=torch.int32)
    metadata = built(made(name, device), ints(*lens), table)
    want = plan(lens, 132)
    assert torch.equal(metadata.tile_scheduler_metadata, want[0]) and torch.equal(metadata.num_splits, want[1])


@pytest.mark.parametrize("name", BUILDERS)
def test_addresses_stay_in_all_but_the_regressed(device, name):
    builder, table = made(name, device), torch.ones(2, 6, dtype=torch.int32)
    seen, held = set(), []
    for length in (1, 100, 300):
        metadata = built(builder, ints(length, 5), table)
        seen.add((metadata.tile_scheduler_metadata.data_ptr(), metadata.num_splits.data_ptr()))
        held += [metadata, torch.zeros(132 * 8, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)]
    assert (len(seen) == 1) == (name in PERSISTENT)


@pytest.mark.parametrize(
    "name,allocations,copies", [("regressed", 2, 0), ("copying", 2, 2), ("inplace", 0, 0), ("ingraph", 0, 0)]
)
def test_what_a_step_costs_the_host(device, name, allocations, copies):
    builder, lens, table = made(name, device), ints(300, 5), torch.ones(2, 6, dtype=torch.int32)
    before = device.counters.snapshot()
    builder.build(lens, table)
    cost = device.counters - before
    assert (cost.allocations, cost.copies) == (allocations, copies)
    assert (cost.launches == 0) == (name == "ingraph")


@pytest.mark.parametrize("name", PERSISTENT)
def test_padded_rows_are_made_safe_in_place(device, name):
    table = torch.full((3, 6), -1, dtype=torch.int32)
    metadata = built(made(name, device), ints(9, 0, 0), table)
    assert metadata.block_table.data_ptr() == table.data_ptr()
    assert table[0, -1] == table[1, -1] == 0  # what the two empty rows' loads find before them


def test_without_sanitising_padded_rows_keep_their_sentinel(device):
    table = torch.full((3, 6), -1, dtype=torch.int32)
    built(made("copying", device, sanitize_padding=False), ints(9, 0, 0), table)
    assert int(table.max()) == -1


def test_the_bug_is_a_few_lines():
    changed = [line for line in builder_diff().splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    assert 0 < len(changed) <= 5
    assert any("copy_" in line for line in changed)


@pytest.mark.parametrize(
    "lens,table,longest,message",
    [
        (ints(*[1] * 9), torch.zeros(9, 6, dtype=torch.int32), None, "batch 9; allowed: 1 to max_batch 8"),
        (torch.ones(2), torch.zeros(2, 6, dtype=torch.int32), None, "seq_lens is torch.float32"),
        (torch.ones(2, dtype=torch.int64), torch.zeros(2, 6, dtype=torch.int32), None, "seq_lens is torch.int64"),
        (ints(1, 1), torch.zeros(2, 6), None, "block_table is torch.float32"),
        (ints(1, 1), torch.zeros(3, 6, dtype=torch.int32), None, "block_table has 3 rows; allowed: 2"),
        (ints(385, 1), torch.zeros(2, 6, dtype=torch.int32), 385, "max_seq_len is 385; allowed: at most 384"),
        (ints(1, 1), torch.zeros(2, 7, dtype=torch.int32), None, "block_table is 7 wide; allowed: max_blocks 6"),
    ],
)
@pytest.mark.parametrize("name", BUILDERS)
def test_bad_input(device, name, lens, table, longest, message):
    builder = made(name, device)
    with pytest.raises(UsageError, match=message):
        builder.build(lens, table, longest)


def test_unknown_builder_and_sizes(device):
    with pytest.raises(UsageError, match="builder is 'fancy'; allowed: regressed, copying, inplace, ingraph"):
        made("fancy", device)
    with pytest.raises(UsageError, match="max_batch is 5000; allowed: 1 to 4096"):
        make_builder("copying", num_heads=16, max_batch=5000, max_blocks=1, sm_count=132, device="cpu")


def test_the_tensors_of_the_step_before_are_not_checked_again_but_others_are(device):
    builder = made("ingraph", device)
    lens, table = ints(300, 5), torch.ones(2, 6, dtype=torch.int32)
    first = builder.build(lens, table, 300)
    assert builder.build(lens, table, 384) is first
    with pytest.raises(UsageError, match="max_seq_len is 385"):
        builder.build(lens, table, 385)
    with pytest.raises(UsageError, match="batch 9"):
        builder.build(ints(*[1] * 9), table, 300)
    other = builder.build(ints(7, 7), table, 300)
    assert other is not first and other.num_splits.data_ptr() == first.num_splits.data_ptr()
