"""The scheduling kernel's algorithm in Python, step for step: what schedule.cu does, to be read and tested without a GPU.

All requests lie end to end on one axis, each as long as it costs: its KV blocks plus 5. A part that begins at `at` reaches
to `at + budget`; with `start` the last request start at or before that, the next part begins at max(start, reach - 5).
Sections, names and order are those of schedule.cu.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from stalegraph.schedule import BLOCK_SIZE, FIXED_OVERHEAD_BLOCKS, METADATA_WIDTH, blocks_of

LANES = 32
WALK_COST, LEAP_COST = 1, 2  # of a part in `walk`, of an event in `leap`


def starts(lengths: list[int]) -> np.ndarray:
    """Where each request begins, in blocks of cost; one entry more: the total."""
    costs = [blocks_of(max(length, 0)) + FIXED_OVERHEAD_BLOCKS for length in lengths]
    return np.concatenate([[0], np.cumsum(costs, dtype=np.int64)])


def request_at(first: np.ndarray, position: int) -> int:
    """The last request that begins at or before `position`."""
    return bisect_right(first, position) - 1


def walk(first: np.ndarray, parts: int, budget: int) -> list[tuple[int, int]]:
    """The ends (request, block) of all parts, one after another."""
    at, cuts = 0, []
    for _ in range(parts):
        reach = min(at + budget, int(first[-1]))
        request = request_at(first, reach)
        left = reach - int(first[request])
        cuts.append((request, max(left - FIXED_OVERHEAD_BLOCKS, 0)))
        at = reach - min(left, FIXED_OVERHEAD_BLOCKS)
    return cuts


def leap(first: np.ndarray, parts: int, budget: int) -> list[tuple[int, int]]:
    """The same ends, 32 parts at a time: as if no part lost any blocks, then put right at each part that does (an event)."""
    total, at, cuts = int(first[-1]), 0, []
    lane = np.arange(LANES)
    for base in range(0, parts, LANES):
        reach = np.minimum(at + np.minimum(lane, parts - base) * (budget - FIXED_OVERHEAD_BLOCKS) + budget, total)
        settled = 0  # lanes below are final
        while True:
            request = np.searchsorted(first, reach, side="right") - 1
            left = reach - first[request]
            event = (left < FIXED_OVERHEAD_BLOCKS) & (reach < total) & (lane >= settled)
            if not event.any():
                break
            where = int(np.argmax(event))
            settled = where + 1
            reach = np.minimum(reach + np.where(lane > where, FIXED_OVERHEAD_BLOCKS - left[where], 0), total)
        blocks = np.maximum(left - FIXED_OVERHEAD_BLOCKS, 0)
        cuts += list(zip(request.tolist(), blocks.tolist()))[: parts - base]
        at = int(reach[-1] - min(left[-1], FIXED_OVERHEAD_BLOCKS))
    return cuts


def events(first: np.ndarray, parts: int, budget: int) -> int:
    """How many parts would lose blocks if none before them did: the kernel's forecast of what `leap` would cost."""
    total = int(first[-1])
    reach = np.minimum(np.arange(parts) * (budget - FIXED_OVERHEAD_BLOCKS) + budget, total)
    left = reach - first[np.searchsorted(first, reach, side="right") - 1]
    return int(((left < FIXED_OVERHEAD_BLOCKS) & (reach < total)).sum())


def plan(lengths: list[int], num_sm_parts: int, method=None) -> tuple[list[list[int]], list[int]]:
    """(tile_scheduler_metadata, num_splits) as lists; `method` is walk or leap, by default the one the kernel would take.

    >>> plan([1], 2)
    ([[0, 0, 0, 1, 0, 0, 0, 0], [1, 0, 0, 1, 0, 0, 0, 0]], [0, 1])
    """
    first = starts(lengths)
    budget = -(-int(first[-1]) // num_sm_parts) + FIXED_OVERHEAD_BLOCKS
    if method is None:
        few = events(first, num_sm_parts, budget) * LEAP_COST < num_sm_parts * WALK_COST
        method = leap if few else walk
    cut = [(0, 0), *method(first, num_sm_parts, budget)]
    inside = np.cumsum([block > 0 for _, block in cut])
    requests = [request for request, _ in cut]

    def cuts_before(request: int) -> int:
        found = int(np.searchsorted(requests, request))
        return int(inside[found - 1]) if found else 0

    rows = []
    for part in range(num_sm_parts):
        (request, block), (end, end_block) = cut[part], cut[part + 1]
        split = int(inside[part]) - cuts_before(request)
        end_seqlen = end_block * BLOCK_SIZE if end_block else max(lengths[end - 1], 0)
        row = [request, block * BLOCK_SIZE, end if end_block else end - 1, end_seqlen, split]
        rows.append(row + [0] * (METADATA_WIDTH - len(row)))
    return rows, [request + cuts_before(request) for request in range(len(lengths) + 1)]
