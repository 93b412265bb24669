"""What schedule.cu does, step for step in Python, to be read and tested without a GPU.

All requests lie end to end on one axis, each as long as it costs: its KV blocks plus 5. A part that begins at `s`
reaches to `s + budget`; with `start` the last request start at or before that, the next part begins at
max(start, reach - 5). So the reach moves on by `stride` = budget - 5 from part to part, and by what is lost where a
request begins less than 5 before it. Names and order are those of schedule.cu.
"""

from __future__ import annotations

import numpy as np

from stalegraph.kernels.launch import FEW, table_bytes
from stalegraph.schedule import BLOCK_SIZE, FIXED_OVERHEAD_BLOCKS, METADATA_WIDTH, blocks_of

STEPS, JUMP = 4, 4


def starts(lengths: list[int]) -> np.ndarray:
    """Where each request begins, in blocks of cost; one entry more: the total."""
    costs = [blocks_of(max(length, 0)) + FIXED_OVERHEAD_BLOCKS for length in lengths]
    return np.concatenate([[0], np.cumsum(costs, dtype=np.int64)])


def lost_blocks(first: np.ndarray, reach: np.ndarray) -> np.ndarray:
    """What parts lose that reach so far: 5 less its distance to the last request start, where that is below 5."""
    left = reach - first[np.searchsorted(first, reach, side="right") - 1]
    return np.maximum(FIXED_OVERHEAD_BLOCKS - left, 0)


def walk(first: np.ndarray, parts: int, stride: int) -> np.ndarray:
    """Every part's reach, one after another: four parts a step from a table, the three between from the first."""
    total = int(first[-1])
    axis = np.arange(total + 1)
    lost = lost_blocks(first, axis)
    lost[total] = 0
    jumped = axis.copy()
    for _ in range(JUMP):
        jumped = np.minimum(jumped + stride + lost[jumped], total)
    reaches = np.full(parts, total)
    reach = min(stride + FIXED_OVERHEAD_BLOCKS, total)
    for part in range(0, parts, JUMP):
        reaches[part] = reach
        reach = jumped[reach]
    for part in range(parts):
        if part % JUMP:
            reaches[part] = min(reaches[part - 1] + stride + lost[reaches[part - 1]], total)
    return reaches


def leap(first: np.ndarray, parts: int, stride: int) -> np.ndarray:
    """The same, all parts at once: as if no part lost any blocks, then put right at each part that does (an event)."""
    total, place = int(first[-1]), np.arange(parts)
    reach = np.minimum(place * stride + stride + FIXED_OVERHEAD_BLOCKS, total)
    settled = 0  # places below are final
    while True:
        lost = lost_blocks(first, reach)
        event = (lost > 0) & (reach < total) & (place >= settled)
        if not event.any():
            return reach
        where = int(np.argmax(event))
        settled = where + 1
        reach = np.minimum(reach + np.where(place >= settled, lost[where], 0), total)


def few(first: np.ndarray, parts: int, stride: int) -> np.ndarray:
    """The same from request to request: the first part that reaches to where one begins, and what it loses there."""
    place = np.arange(parts)
    reach = place * stride + stride + FIXED_OVERHEAD_BLOCKS
    base, least = stride + FIXED_OVERHEAD_BLOCKS, 0
    for start in first[1:].tolist():
        hit = max(-(-(start - base) // stride), least)
        lost = max(FIXED_OVERHEAD_BLOCKS - (base + hit * stride - start), 0)
        base, least = base + lost, hit + (lost > 0)
        reach = reach + np.where(place > hit, lost, 0)
    return np.minimum(reach, int(first[-1]))


def chosen(first: np.ndarray, parts: int, stride: int):
    """The way that the kernel takes; it walks where the table has room for all positions that a walk can look at."""
    batch = len(first) - 1
    if batch <= FEW:
        return few
    fits = int(first[-1]) + STEPS * JUMP * (stride + FIXED_OVERHEAD_BLOCKS) < table_bytes(batch)
    return walk if fits else leap


def plan(lengths: list[int], num_sm_parts: int, method=None) -> tuple[list[list[int]], list[int]]:
    """(tile_scheduler_metadata, num_splits) as lists; `method` is few, walk or leap, by default the one that the kernel takes.

    >>> plan([1], 2)
    ([[0, 0, 0, 1, 0, 0, 0, 0], [1, 0, 0, 1, 0, 0, 0, 0]], [0, 1])
    """
    first = starts(lengths)
    stride = -(-int(first[-1]) // num_sm_parts)
    budget = stride + FIXED_OVERHEAD_BLOCKS
    reach = (method or chosen(first, num_sm_parts, stride))(first, num_sm_parts, stride)
    ends = np.searchsorted(first, reach, side="right") - 1
    left = reach - first[ends]
    requests = [0, *ends.tolist()]  # cut i: where part i begins, and part i - 1 ends
    blocks = [0, *np.maximum(left - FIXED_OVERHEAD_BLOCKS, 0).tolist()]
    inside = [False, *(left > FIXED_OVERHEAD_BLOCKS).tolist()]
    leads = [True, *(first[ends] + budget > reach).tolist()]  # the first cut in its request, or before it

    rows, num_splits = [], [0]
    count = same = 0  # cuts inside any request so far; of those, in the part's own
    for part in range(num_sm_parts):
        count += inside[part]
        same = inside[part] if leads[part] else same + inside[part]
        request, block, end, end_block = requests[part], blocks[part], requests[part + 1], blocks[part + 1]
        num_splits += [ended + count for ended in range(request + 1, end + 1)]
        end_seqlen = end_block * BLOCK_SIZE if end_block else max(lengths[end - 1], 0)
        row = [request, block * BLOCK_SIZE, end if end_block else end - 1, end_seqlen, int(same)]
        rows.append(row + [0] * (METADATA_WIDTH - len(row)))
    return rows, num_splits
