"""On a Hopper GPU: the scheduling kernel bit-equal to FlashMLA's, in captures, on streams, and its refusals."""

import os
import subprocess
import sys

import pytest
import torch
from test_kernel_model import EDGES, PARTS, random_lengths

from stalegraph import kernels, ops, schedule
from stalegraph.errors import CaptureError, StalegraphError, UsageError
from stalegraph.recorded.metadata import cases
from stalegraph.rungs import open_rung

pytestmark = pytest.mark.gpu
FLASHMLA_BATCH = 4096  # its planner asserts that the batch is smaller


@pytest.fixture(scope="module")
def device():
    with open_rung("flashmla") as device:
        kernels.ensure_compiled(device.torch_device)
        yield device


def buffers(device, parts, capacity):
    """Poisoned buffers: an entry that is not written shows."""
    return (
        torch.full((parts, 8), -77, dtype=torch.int32, device=device.torch_device),
        torch.full((capacity,), -77, dtype=torch.int32, device=device.torch_device),
    )


def tensor(device, lengths):
    return torch.tensor(lengths, dtype=torch.int32, device=device.torch_device)


def test_ten_thousand_random_batches_are_bit_equal_to_flashmla(device):
    wrong, count = torch.zeros((), dtype=torch.int64, device=device.torch_device), 0
    for case in cases(seed=6, count=10_000):
        seq_lens = tensor(device, case.seq_lens)
        rows, num_splits = ops.get_mla_metadata_dense_fp8(seq_lens, case.q_tokens_per_kv_head, 1)
        capacity = len(case.seq_lens) + 1 + count % 5
        ours, our_splits = buffers(device, len(rows), capacity)
        kernels.schedule_into(seq_lens, ours, our_splits)
        wrong += (ours[:, :5] != rows[:, :5]).any() | (our_splits[: len(num_splits)] != num_splits).any()
        wrong += (our_splits[len(num_splits) :] != num_splits[-1]).any() | (ours[:, 5:] != 0).any()
        count += 1
    assert count == 10_000 and int(wrong) == 0


@pytest.mark.parametrize("lengths", EDGES.values(), ids=EDGES)
def test_every_edge_equals_flashmla_and_the_reference(device, lengths):
    seq_lens = tensor(device, lengths)
    for parts in PARTS + (kernels.MAX_PARTS,):
        ours, our_splits = buffers(device, parts, len(lengths) + 3)
        kernels.schedule_into(seq_lens, ours, our_splits)
        rows, num_splits = schedule.plan(lengths, parts)
        assert torch.equal(ours.cpu(), rows) and torch.equal(our_splits.cpu()[:-2], num_splits)
        assert our_splits[-2:].tolist() == [int(num_splits[-1])] * 2
    if len(lengths) < FLASHMLA_BATCH and max(lengths) < 2**24:  # FlashMLA's own sums are int32
        for tokens in (16, 128, 256):
            rows, num_splits = ops.get_mla_metadata_dense_fp8(seq_lens, tokens, 1)
            ours, our_splits = buffers(device, len(rows), len(lengths) + 1)
            kernels.schedule_into(seq_lens, ours, our_splits)
            assert torch.equal(ours[:, :5], rows[:, :5]) and torch.equal(our_splits, num_splits)


def test_largest_batches_equal_flashmla(device):
    import random

    draw = random.Random(4)
    for _ in range(200):
        lengths = (random_lengths(draw) * schedule.MAX_BATCH)[: draw.randint(1025, FLASHMLA_BATCH - 1)]
        seq_lens = tensor(device, lengths)
        rows, num_splits = ops.get_mla_metadata_dense_fp8(seq_lens, 16, 1)
        ours, our_splits = buffers(device, len(rows), len(lengths) + 1)
        kernels.schedule_into(seq_lens, ours, our_splits)
        assert torch.equal(ours[:, :5], rows[:, :5]) and torch.equal(our_splits, num_splits)


def test_a_captured_plan_follows_its_lengths_and_allocates_nothing(device):
    seq_lens = tensor(device, [1] * 8)
    ours, our_splits = buffers(device, 132, 65)
    graph = device.graph()
    with graph.capture():
        before = device.counters  # the capture itself holds the random generator's two state tensors
        kernels.schedule_into(seq_lens, ours, our_splits)
        assert (device.counters - before).allocations == 0
    (node,) = graph.nodes
    assert {a.address for a in node.arguments} == {seq_lens.data_ptr(), ours.data_ptr(), our_splits.data_ptr()}
    for lengths in ([204] * 8, [0] * 8, [90_000, 3, 0, 0, 70, 1, 1, 64]):
        seq_lens.copy_(tensor(device, lengths))
        graph.replay()
        rows, num_splits = schedule.plan(lengths, 132)
        assert torch.equal(ours.cpu(), rows) and torch.equal(our_splits[:9].cpu(), num_splits)


def test_negative_lengths_count_as_empty_and_are_refused_when_asked(device):
    seq_lens = tensor(device, [-5, 130, -(2**31)])
    ours, our_splits = buffers(device, 66, 4)
    kernels.schedule_into(seq_lens, ours, our_splits)
    rows, num_splits = schedule.plan([0, 130, 0], 66)
    assert torch.equal(ours.cpu(), rows) and torch.equal(our_splits.cpu(), num_splits)
    with pytest.raises(UsageError, match="seq_lens holds -2147483648"):
        kernels.schedule_into(seq_lens, ours, our_splits, check=True)


def test_the_page_before_an_empty_row_is_made_safe_and_no_other(device):
    table = torch.full((6, 4), -1, dtype=torch.int32, device=device.torch_device)
    table[2, 3] = 9
    ours, our_splits = buffers(device, 132, 7)
    kernels.schedule_into(tensor(device, [70, 0, 0, 0, 70, 0]), ours, our_splits, block_table=table)
    expected = torch.full((6, 4), -1, dtype=torch.int32)
    expected[0, 3] = expected[1, 3] = expected[4, 3] = 0
    expected[2, 3] = 9
    assert torch.equal(table.cpu(), expected)
    wide = torch.full((6, 8), -1, dtype=torch.int32, device=device.torch_device)
    kernels.schedule_into(tensor(device, [70, 0, 1, 1, 1, 1]), ours, our_splits, block_table=wide[:, :4])
    assert wide.ge(0).nonzero().tolist() == [[0, 7]]  # what lies before the row in memory


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(seq_lens=lambda t: t.long()), "seq_lens is torch.int64"),
        (dict(seq_lens=lambda t: t.cpu()), "seq_lens is on cpu"),
        (dict(seq_lens=lambda t: t.repeat(2)[::2]), "seq_lens has strides"),
        (dict(seq_lens=lambda t: t[:0]), "seq_lens has 0 entries"),
        (dict(seq_lens=lambda t: t.repeat(2000)), "seq_lens has 6000 entries"),
        (dict(rows=lambda t: t[:, :5]), "tile_scheduler_metadata has strides"),
        (dict(rows=lambda t: t[:100]), "at least 132 rows"),
        (dict(rows=lambda t: t.float()), "tile_scheduler_metadata is torch.float32"),
        (dict(rows=lambda t: t.flatten()), "of 1 dims"),
        (dict(num_splits=lambda t: t[:3]), "num_splits has 3 entries"),
        (dict(num_splits=lambda t: t.cpu()), "num_splits is on cpu"),
        (dict(block_table=lambda t: t.long()), "block_table is torch.int64"),
        (dict(block_table=lambda t: t[:2]), "at least 3 rows"),
        (dict(block_table=lambda t: t.t()), "block_table has shape"),
    ],
)
def test_bad_buffers_are_refused_before_any_launch(device, change, message):
    ours, our_splits = buffers(device, 132, 4)
    table = torch.zeros((3, 5), dtype=torch.int32, device=device.torch_device)
    given = {"seq_lens": tensor(device, [3, 4, 5]), "rows": ours, "num_splits": our_splits, "block_table": table}
    for name, alter in change.items():
        given[name] = alter(given[name])
    table = given["block_table"]
    with pytest.raises(UsageError, match=message):
        kernels.schedule_into(given["seq_lens"], given["rows"], given["num_splits"], 132, block_table=table)
    assert ours.eq(-77).all() and our_splits.eq(-77).all()


def test_rows_that_are_not_aligned_are_refused(device):
    storage = torch.zeros(132 * 8 + 1, dtype=torch.int32, device=device.torch_device)
    with pytest.raises(UsageError, match="multiple of 16 bytes"):
        kernels.schedule_into(tensor(device, [3]), storage[1:].view(132, 8), buffers(device, 1, 2)[1])


CHILD = """
import torch
from stalegraph import kernels
from stalegraph.errors import CaptureError
lengths, rows, splits = (torch.ones(s, dtype=torch.int32, device="cuda") for s in (4, (132, 8), 5))
{before}
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph):
        kernels.schedule_into(lengths, rows, splits)
except CaptureError as error:
    print("CaptureError", error)
else:
    graph.replay()
    print(splits.tolist())
"""


@pytest.mark.parametrize(
    ("before", "said"),
    [("", "CaptureError the scheduling kernel is not compiled yet"), ("kernels.ensure_compiled()", "[0, 1, 2, 3, 4]")],
    ids=["not compiled", "compiled"],
)
def test_a_capture_needs_the_kernel_compiled_and_nothing_more(before, said, tmp_path):
    environment = {**os.environ, "STALEGRAPH_CACHE": str(tmp_path)}
    child = subprocess.run(
        [sys.executable, "-c", CHILD.format(before=before)], env=environment, capture_output=True, text=True, timeout=99
    )
    assert child.stdout.startswith(said), child.stdout + child.stderr
    assert len(list(tmp_path.glob("*.cubin"))) == (1 if before else 0)


def test_a_damaged_cache_is_compiled_again(device, tmp_path, monkeypatch):
    from stalegraph.kernels import compiler, launch

    monkeypatch.setenv("STALEGRAPH_CACHE", str(tmp_path))
    source = launch.SOURCE.read_text()
    compiler.load(source, "sm_90", ("schedule_1",))
    (path,) = tmp_path.glob("*.cubin")
    path.write_bytes(b"\x7fELF" + b"\0" * 100)
    compiler.load(source, "sm_90", ("schedule_1",))
    with pytest.raises(StalegraphError, match="cuModuleGetFunction"):
        compiler.load(source, "sm_90", ("no_such_kernel",))


def test_check_is_refused_within_a_capture(device):
    seq_lens, (ours, our_splits) = tensor(device, [3]), buffers(device, 132, 2)
    graph = device.graph()
    with pytest.raises(CaptureError, match="check is True"):
        with graph.capture():
            kernels.schedule_into(seq_lens, ours, our_splits, check=True)
