"""Pinned host memory with a caching allocator: blocks by power of two, the one freed last is handed out first."""

from __future__ import annotations

import torch

from stalegraph.errors import OutOfMemoryError
from stalegraph.simulator.memory import Memory

REGION = 1 << 26  # bytes of pinnable host memory
SMALLEST = 4096


class PinnedAllocator:
    """Host memory that the device can reach. Source of the rule: ATen's CachingHostAllocator rounds up to a power of two."""

    def __init__(self):
        self.memory = Memory(REGION)
        self.memory.map(REGION, "pinned memory")
        self._next = self.memory.base
        self._free: dict[int, list[int]] = {}
        self._size: dict[int, int] = {}

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A pinned copy of `tensor`, contiguous; its block is reused once it dies."""
        nbytes = max(tensor.numel() * tensor.itemsize, 1)
        size = max(SMALLEST, 1 << (nbytes - 1).bit_length())
        free = self._free.setdefault(size, [])
        if free:
            address = free.pop()
        else:
            address, self._next = self._next, self._next + size
            if self._next > self.memory.end:
                self._next = address
                raise OutOfMemoryError(f"pinned memory: {size} bytes asked for, {self.memory.end - address} free of {REGION}")
        self._size[address] = size
        flat = self.memory.owned(address, nbytes, torch.uint8, self._died)
        return flat.view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def owner_is_alive(self, address: int) -> bool:
        """Whether the block that `address` falls in is still somebody's."""
        return any(start <= address < start + size for start, size in self._size.items())

    def _died(self, address: int) -> None:
        self._free[self._size.pop(address)].append(address)
