"""Sets of byte ranges, half open, and the byte ranges that a tensor covers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import torch

MAX_RUNS = 4096  # a tensor of more separate runs counts as one range, from its first byte to its last


class Extents:
    """A set of bytes as sorted ranges [low, high) that neither touch nor overlap.

    >>> extents = Extents(); extents.add(0, 4); extents.add(8, 12); extents.missing(2, 10)
    [(4, 8)]
    """

    __slots__ = ("_lows", "_highs")

    def __init__(self, ranges=()):
        self._lows: list[int] = []
        self._highs: list[int] = []
        for low, high in ranges:
            self.add(low, high)

    def __bool__(self) -> bool:
        return bool(self._lows)

    def __iter__(self):
        return iter(list(zip(self._lows, self._highs)))

    def add(self, low: int, high: int) -> None:
        if low >= high:
            return
        first = bisect_left(self._highs, low)
        last = bisect_right(self._lows, high)
        if first < last:
            low, high = min(low, self._lows[first]), max(high, self._highs[last - 1])
        self._lows[first:last], self._highs[first:last] = [low], [high]

    def update(self, ranges) -> None:
        for low, high in ranges:
            self.add(low, high)

    def missing(self, low: int, high: int) -> list[tuple[int, int]]:
        """The parts of [low, high) that are not in the set."""
        gaps = []
        for at in range(bisect_right(self._highs, low), len(self._lows)):
            if self._lows[at] >= high:
                break
            if self._lows[at] > low:
                gaps.append((low, self._lows[at]))
            low = max(low, self._highs[at])
        if low < high:
            gaps.append((low, high))
        return gaps

    def overlaps(self, low: int, high: int) -> bool:
        at = bisect_right(self._highs, low)
        return low < high and at < len(self._lows) and self._lows[at] < high


def ranges(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """The bytes of `tensor` within its storage, as ranges [low, high)."""
    if tensor.numel() == 0:
        return []
    size = tensor.itemsize
    low = tensor.storage_offset() * size
    dimensions = sorted((stride, count) for count, stride in zip(tensor.shape, tensor.stride()) if count > 1 and stride)
    run, starts = 1, [0]
    for stride, count in dimensions:
        if stride <= run and len(starts) == 1:
            run = stride * (count - 1) + run
        elif len(starts) * count > MAX_RUNS:
            span = 1 + sum(stride * (count - 1) for stride, count in dimensions)
            return [(low, low + span * size)]
        else:
            starts = [start + stride * step for step in range(count) for start in starts]
    return [(low + start * size, low + (start + run) * size) for start in sorted(starts)]
