"""The oracle against a plain softmax under every kind of sound schedule, and its exact wrongness under unsound ones."""

import math
import random

import pytest
import torch

from stalegraph.attention import (
    accumulator_shapes,
    max_splits,
    mla_decode_fp8,
    mla_decode_fp8_into,
    mla_reference,
)
from stalegraph.errors import DeviceAssertError, IllegalAddressError, UsageError
from stalegraph.schedule import plan

SCALE = 192**-0.5
ONE = torch.ones(1)


def problem(seq_lens, heads=16, queries=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    width = max(1, max(-(-length // 64) for length in seq_lens))
    pages = 1 + len(seq_lens) * width
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(torch.float8_e4m3fn)  # noqa: E731
    q, k_cache = draw(len(seq_lens), queries, heads, 576), draw(pages, 64, 1, 576)
    order = 1 + torch.randperm(pages - 1, generator=generator)
    block_table = order.view(len(seq_lens), width).int()
    return q, k_cache, block_table, torch.tensor(seq_lens, dtype=torch.int32)


def relative(got, want):
    return float((got.double() - want).norm() / want.norm())


GROUPS = {
    "regular": [130, 64, 200],
    "growing": [1, 63, 64, 65, 128, 500],
    "shrinking": [700, 129, 65, 1],
    "empty": [0, 70, 0, 0, 5],
    "largest": [3000, 1],
}


@pytest.mark.parametrize("parts", [1, 2, 7, 39, 132])
@pytest.mark.parametrize("group", GROUPS)
def test_equals_plain_softmax_whatever_the_split(group, parts):
    q, k_cache, table, lens = problem(GROUPS[group])
    out, lse = mla_decode_fp8(q, k_cache, table, lens, *plan(lens, parts), SCALE, ONE, ONE)
    want, want_lse = mla_reference(q, k_cache, table, lens, SCALE, ONE, ONE)
    assert relative(out, want) < 1e-3
    assert torch.allclose(lse.double(), want_lse, atol=1e-4)


@pytest.mark.parametrize("heads,queries", [(16, 2), (32, 4), (128, 2)])
def test_several_queries_see_what_is_before_them(heads, queries):
    q, k_cache, table, lens = problem([130, 66, 640], heads, queries)
    for causal in (True, False):
        out, _ = mla_decode_fp8(q, k_cache, table, lens, *plan(lens, 11), SCALE, ONE, ONE, causal)
        want, _ = mla_reference(q, k_cache, table, lens, SCALE, ONE, ONE, causal)
        assert relative(out, want) < 1e-3


def test_descales_multiply_scores_and_values():
    q, k_cache, table, lens = problem([200, 90])
    scales = torch.tensor([0.5]), torch.tensor([1.5])
    out, lse = mla_decode_fp8(q, k_cache, table, lens, *plan(lens, 5), SCALE, *scales)
    want, want_lse = mla_reference(q, k_cache, table, lens, SCALE, *scales)
    assert relative(out, want) < 1e-3 and torch.allclose(lse.double(), want_lse, atol=1e-4)


def test_a_capture_time_plan_sees_only_the_first_block():
    q, k_cache, table, lens = problem([500, 300])
    stale = plan([1, 1], 132)
    out, _ = mla_decode_fp8(q, k_cache, table, lens, *stale, SCALE, ONE, ONE)
    # Parts end at block 1 of a longer request: a partial is written, and num_splits says there is nothing to combine.
    assert out.isnan().all()


def test_rows_that_no_part_visits_keep_their_content():
    q, k_cache, table, lens = problem([70, 70])
    metadata, num_splits = plan(lens, 1)
    metadata[0, 2], metadata[0, 3] = 0, 70  # ends after request 0
    out, lse = torch.full((2, 1, 16, 512), 7.0, dtype=torch.bfloat16), torch.full((2, 16, 1), 7.0)
    accum = [torch.zeros(shape) for shape in accumulator_shapes(2, 1, 16)]
    mla_decode_fp8_into(q, k_cache, table, lens, metadata, num_splits, SCALE, ONE, ONE, True, out, lse, *accum)
    want, _ = mla_reference(q, k_cache, table, lens, SCALE, ONE, ONE)
    assert relative(out[0], want[0]) < 5e-3  # bfloat16 rounds to 2^-8
    assert (out[1] == 7).all() and (lse[1] == 7).all()


def test_announced_partials_are_read_as_they_lie():
    q, k_cache, table, lens = problem([70])
    metadata, _ = plan(lens, 4)
    out, lse = torch.zeros(1, 1, 16, 512), torch.zeros(1, 16, 1)
    out_accum, lse_accum = (torch.zeros(shape) for shape in accumulator_shapes(1, 4, 16))
    metadata[:, 0] = 9  # every part returns at once
    out_accum[0], out_accum[1] = 2.0, 4.0
    splits = torch.tensor([0, 2], dtype=torch.int32)
    mla_decode_fp8_into(q, k_cache, table, lens, metadata, splits, SCALE, ONE, ONE, True, out, lse, out_accum, lse_accum)
    assert torch.allclose(out, torch.full_like(out, 3.0)) and torch.allclose(lse, torch.full_like(lse, math.log(2)))


@pytest.mark.parametrize("parts,limit", [(1, 32), (32, 32), (33, 64), (78, 96), (132, 160), (400, 160)])
def test_more_splits_than_the_kernel_was_built_for_trip_its_assert(parts, limit):
    q, k_cache, table, lens = problem([70])
    metadata, _ = plan(lens, parts)
    assert max_splits(parts) == limit
    with pytest.raises(DeviceAssertError, match=f"{limit + 1} splits .* at most {limit}"):
        splits = torch.tensor([0, limit + 1], dtype=torch.int32)
        mla_decode_fp8(q, k_cache, table, lens, metadata, splits, SCALE, ONE, ONE)


def test_an_empty_row_loads_the_last_entry_of_the_row_before():
    q, k_cache, table, lens = problem([70, 0, 0])
    table[1:] = -1
    with pytest.raises(IllegalAddressError, match=r"page -1 of k_cache, named by block_table\[2, -1\]"):
        mla_decode_fp8(q, k_cache, table, lens, *plan(lens, 132), SCALE, ONE, ONE)
    table[1:] = 0
    out, lse = mla_decode_fp8(q, k_cache, table, lens, *plan(lens, 132), SCALE, ONE, ONE)
    assert (out[1:] == 0).all() and (lse[1:] == math.inf).all()


def test_one_empty_row_alone_reads_a_live_page():
    q, k_cache, table, lens = problem([70, 0])
    table[1:] = -1
    out, _ = mla_decode_fp8(q, k_cache, table, lens, *plan(lens, 132), SCALE, ONE, ONE)
    assert (out[1] == 0).all() and not out[0].isnan().any()


def test_foreign_memory_is_read_through_the_device():
    q, k_cache, table, lens = problem([0, 0])
    table[:] = -1
    reads = []

    class Memory:
        def read(self, address, nbytes):
            reads.append((address, nbytes))
            return torch.zeros(nbytes, dtype=torch.uint8)

    out, lse = torch.zeros(2, 1, 16, 512), torch.zeros(2, 16, 1)
    accum = [torch.zeros(shape) for shape in accumulator_shapes(2, 3, 16)]
    args = (q, k_cache, table, lens, *plan(lens, 3), SCALE, ONE, ONE, True, out, lse, *accum)
    mla_decode_fp8_into(*args, memory=Memory())
    assert (table.data_ptr() - 4, 4) in reads  # request 0 reads the int32 before the table
    assert (k_cache.data_ptr() - 64 * 576, 64 * 576) in reads  # request 1 reads page -1


def test_a_part_that_runs_past_the_batch_is_an_illegal_address():
    q, k_cache, table, lens = problem([70])
    metadata, num_splits = plan(lens, 2)
    metadata[0, 2] = 5
    with pytest.raises(IllegalAddressError, match="request 1 of a batch of 1"):
        mla_decode_fp8(q, k_cache, table, lens, metadata, num_splits, SCALE, ONE, ONE)


def test_random_batches_and_parts():
    draw = random.Random(5)
    for case in range(25):
        lens = [draw.choice([0, 1, 64, 65, draw.randrange(900)]) for _ in range(draw.randrange(1, 9))]
        q, k_cache, table, seq_lens = problem(lens, seed=case)
        out, _ = mla_decode_fp8(q, k_cache, table, seq_lens, *plan(lens, draw.randrange(1, 133)), SCALE, ONE, ONE)
        want, _ = mla_reference(q, k_cache, table, seq_lens, SCALE, ONE, ONE)
        assert sum(lens) == 0 or relative(out, want) < 1e-3


def test_bad_input_names_argument_value_and_limits():
    q, k_cache, table, lens = problem([70])
    good = plan(lens, 2)
    cases = {
        "seq_lens is torch.int64": (q, k_cache, table, lens.long(), *good),
        "k_cache.shape\\[1\\] is 32; allowed: 64": (q, k_cache[:, :32], table, lens, *good),
        "num_splits.shape\\[0\\] is 3; allowed: 2": (q, k_cache, table, lens, good[0], torch.zeros(3, dtype=torch.int32)),
        "q is torch.bfloat16": (q.bfloat16(), k_cache, table, lens, *good),
    }
    for message, arguments in cases.items():
        with pytest.raises(UsageError, match=message):
            mla_decode_fp8(*arguments, SCALE, ONE, ONE)
