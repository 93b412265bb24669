"""The reference scheduler: equal to a plain re-reading of the rule, sound for any batch, and its checks see what is wrong."""

import random

import pytest
import torch

from stalegraph.errors import UsageError
from stalegraph.schedule import blocks_of, check, num_sm_parts, plan, work_items


def spend(seq_lens, parts):
    """The rule walked block by block: a plain oracle that shares no code with `plan`. Rows of five, and num_splits."""
    cost = [-(-n // 64) for n in seq_lens]
    payload = -(-sum(c + 5 for c in cost) // parts) + 5
    rows, splits, r, done, cut = [], [0], 0, 0, 0
    for _ in range(parts):
        begin, purse = (r, done * 64, cut), payload
        while r < len(cost) and purse >= cost[r] - done + 5:
            purse, splits, r, done, cut = purse - (cost[r] - done + 5), splits + [splits[-1] + cut + 1], r + 1, 0, 0
        stepped = False
        while r < len(cost) and purse > 5:
            purse, done, stepped = purse - 1, done + 1, True
        cut += stepped
        end = (r, done * 64) if done else (r - 1, seq_lens[r - 1])
        rows.append([begin[0], begin[1], end[0], end[1], begin[2]])
    return rows, splits


def batches(count, seed):
    draw = random.Random(seed)
    for _ in range(count):
        size = draw.choice([1, 2, 3, 8, 40])
        yield [draw.choice([0, 1, 63, 64, 65, draw.randrange(200_000)]) for _ in range(size)], draw.randrange(1, 140)


def test_equals_the_plain_rule():
    for lens, parts in batches(300, seed=1):
        metadata, num_splits = plan(lens, parts)
        assert (metadata[:, :5].tolist(), num_splits.tolist()) == spend(lens, parts)
        assert metadata.dtype == num_splits.dtype == torch.int32 and (metadata[:, 5:] == 0).all()


def test_every_plan_is_sound():
    for lens, parts in batches(300, seed=2):
        assert check(lens, *plan(lens, parts)) == []


@pytest.mark.parametrize(
    "sm_count,tokens,heads,parts",
    [(132, 16, 1, 132), (132, 64, 1, 132), (132, 65, 1, 66), (132, 128, 1, 66), (132, 256, 1, 33), (78, 16, 1, 78)],
)
def test_number_of_sm_parts(sm_count, tokens, heads, parts):
    assert num_sm_parts(sm_count, tokens, heads) == parts


def broken(change):
    lens = [500, 70, 3000]
    metadata, num_splits = plan(lens, 6)
    change(metadata, num_splits)
    return {defect.kind for defect in check(lens, metadata, num_splits)}


def test_checks_say_what_is_wrong():
    def shift_end(metadata, _):
        metadata[1, 3] -= 64

    def start_early(metadata, _):
        metadata[2, 1] -= 64

    def drop_part(metadata, _):
        metadata[5, 0] = -1

    def past_batch(metadata, _):
        metadata[5, 2] = 3

    def past_request(metadata, _):
        metadata[5, 3] += 64

    def miscount(_, num_splits):
        num_splits[1:] += 1

    assert broken(lambda *_: None) == set()
    assert broken(shift_end) == {"gap"}
    assert broken(start_early) == {"overlap"}
    assert "gap" in broken(drop_part)
    assert "out-of-range" in broken(past_batch)
    assert "out-of-range" in broken(past_request)
    assert broken(miscount) == {"splits"}


def test_the_capture_plan_does_not_do_a_longer_request():
    lens = [2000, 2000]
    kinds = {defect.kind for defect in check(lens, *plan([1, 1], 132))}
    assert kinds == {"gap"}


def test_work_items_cover_each_block_once():
    for lens, parts in batches(100, seed=3):
        blocks = [(item.request, b) for item in work_items(lens, plan(lens, parts)[0])
                  for b in range(item.block_begin, item.block_end)]  # fmt: skip
        assert sorted(blocks) == [(r, b) for r, n in enumerate(lens) for b in range(blocks_of(n))]


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda: plan([], 4), "seq_lens has 0 entries; allowed: 1 to 4096"),
        (lambda: plan([1] * 4097, 4), "seq_lens has 4097 entries"),
        (lambda: plan([3, -1], 4), "seq_lens holds -1; allowed: 0 or more"),
        (lambda: plan(torch.ones(2), 4), "seq_lens is torch.float32"),
        (lambda: plan([1], 0), "num_sm_parts is 0"),
        (lambda: num_sm_parts(0, 16), "sm_count is 0"),
        (lambda: num_sm_parts(132, 64 * 133), "q_tokens_per_kv_head is 8512; allowed: at most 8448"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(UsageError, match=message):
        call()
