"""Pinned host memory: what a captured copy may read again at every replay, from a caching allocator of its own.

PyTorch's rules (aten/src/ATen/core/CachingHostAllocator.h): sizes are rounded up to powers of two, a freed block goes
on the list of its size, and the last one freed is handed out first. Nothing is ever unmapped.
"""

from __future__ import annotations

from collections import deque

import torch

from stalegraph.blocks import Block
from stalegraph.errors import OutOfMemoryError
from stalegraph.simulator.allocator import Allocation, Owner
from stalegraph.simulator.memory import Addresses

HOST_POOL = (-1, 0)  # how blocks of pinned memory are told from a device's in a memory map
SIZE = 1 << 30  # bytes of addresses; memory is used only where it is touched
ALIGNMENT = 512  # bytes: an address has to suit every dtype, and differ from its neighbour's


class PinnedMemory(Addresses):
    """Host memory that the device can reach; `live` maps the address of each allocation to it."""

    def __init__(self, size: int = SIZE):
        super().__init__(size)
        self.live: dict[int, Allocation] = {}
        self.step = 0
        self._used = 0
        self._sizes: dict[int, int] = {}  # address of each block ever handed out -> its size
        self._free: dict[int, list[int]] = {}
        self._born: dict[int, int] = {}
        self._since: dict[int, int] = {}
        self._last_label: dict[int, str | None] = {}
        self._dead: deque[Allocation] = deque()

    @property
    def memory(self) -> Addresses:
        """The addresses themselves, to read raw."""
        return self

    def owner_is_alive(self, address: int) -> bool:
        """Whether the block that `address` falls in is still somebody's."""
        self.settle()
        return any(start <= address < start + self._sizes[start] for start in self.live)

    def empty(self, shape, dtype: torch.dtype) -> torch.Tensor:
        """A contiguous pinned tensor, contents as they lie; its block is free again when its storage dies."""
        numel = 1
        for length in shape:
            numel *= length
        if numel == 0:
            return torch.empty(shape, dtype=dtype)
        self.settle()
        nbytes = numel * dtype.itemsize
        size = max(ALIGNMENT, 1 << (nbytes - 1).bit_length())
        free = self._free.get(size)
        if free:
            address = free.pop()
        elif self._used + size <= self.size:
            address = self.base + self._used
            self._used += size
            self._sizes[address] = size
        else:
            raise OutOfMemoryError(
                f"out of pinned host memory, an allocation of {nbytes} bytes: {self.size - self._used} bytes of "
                f"{self.size} are free"
            )
        generation = self._born[address] = self._born.get(address, 0) + 1
        self._since[address] = self.step
        self._last_label[address] = None
        allocation = self.live[address] = Allocation(address, nbytes, generation, HOST_POOL, None, None)
        buffer = self.buffer(address, nbytes)
        owner = allocation.reference = Owner(buffer, self._bury)
        owner.allocation = allocation
        return torch.frombuffer(buffer, dtype=dtype).view(shape)

    def _bury(self, owner: Owner) -> None:
        self._dead.append(owner.allocation)

    def settle(self) -> None:
        """Puts the blocks whose storages have died on their free lists."""
        while self._dead:
            allocation = self._dead.popleft()
            del self.live[allocation.address]
            allocation.reference = None
            self._since[allocation.address] = self.step
            self._free.setdefault(self._sizes[allocation.address], []).append(allocation.address)

    def name(self, allocation: Allocation, label: str) -> None:
        allocation.label = self._last_label[allocation.address] = label

    def blocks(self) -> list[Block]:
        """Every block ever handed out, in order of address, allocated or freed."""
        self.settle()
        found = []
        for address, size in self._sizes.items():
            allocation = self.live.get(address)
            found.append(
                Block(
                    address=address,
                    size=size,
                    requested=allocation.nbytes if allocation else 0,
                    state="allocated" if allocation else "freed",
                    pool=HOST_POOL,
                    segment=self.base,
                    generation=self._born[address],
                    label=self._last_label[address],
                    since=self._since[address],
                )
            )
        return found

    def find(self, address: int) -> dict | None:
        """The block that `address` falls in, in the form of a snapshot's block, None where nothing was handed out."""
        for block in self.blocks():
            if block.address <= address < block.end:
                state = "active_allocated" if block.state == "allocated" else "inactive"
                return {"address": block.address, "state": state, "generation": block.generation, "label": block.label}
        return None
