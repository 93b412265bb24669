"""The memory of a simulated GPU: one arena with true addresses, in which only mapped segments may be touched."""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_right, insort

import torch

from stalegraph.errors import IllegalAddressError, OutOfMemoryError

PAGE = 1 << 21  # segments start and end on 2 MiB, as cudaMalloc's do
GUARD = PAGE  # left unmapped behind each segment: on an H200 the page before a cache lay in no segment (repro/recorded)


class Memory:
    """`size` bytes from `base` on. Nothing is resident before it is touched; fresh segments hold what lay there before."""

    def __init__(self, size: int):
        self.size = size
        self._map = mmap.mmap(-1, size + PAGE)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        skip = -whole.data_ptr() % PAGE
        self.base = whole.data_ptr() + skip
        self.bytes = whole[skip : skip + size]
        self.version = 0  # counts maps and unmaps, so that a graph knows when to look at its addresses again
        self._starts: list[int] = []  # mapped segments, sorted
        self._sizes: dict[int, int] = {}

    @property
    def end(self) -> int:
        return self.base + self.size

    def map(self, size: int, what: str) -> int:
        """Map the lowest gap of `size` bytes and return its address."""
        at = self.base
        for start in self._starts:
            if start - at >= size + GUARD:
                break
            at = start + self._sizes[start] + GUARD
        if at + size > self.end:
            free = self.size - sum(self._sizes.values())
            raise OutOfMemoryError(
                f"{what}: no room for a segment of {size} bytes; {free} of the device's {self.size} bytes are free"
            )
        insort(self._starts, at)
        self._sizes[at] = size
        self.version += 1
        return at

    def unmap(self, address: int) -> None:
        self._starts.remove(address)
        del self._sizes[address]
        self.version += 1

    def is_mapped(self, address: int, nbytes: int = 1) -> bool:
        """Whether all of [address, address + nbytes) is mapped; segments that touch count as one."""
        end = address + max(nbytes, 1)
        at = bisect_right(self._starts, address) - 1
        if at < 0:
            return False
        while at < len(self._starts) and self._starts[at] <= address < self._starts[at] + self._sizes[self._starts[at]]:
            address = self._starts[at] + self._sizes[self._starts[at]]
            if address >= end:
                return True
            at += 1
        return False

    def check(self, address: int, nbytes: int, what: str) -> None:
        if not self.is_mapped(address, nbytes):
            raise IllegalAddressError(f"an illegal memory access was encountered: {what}, {nbytes} bytes at 0x{address:x}")

    def read(self, address: int, nbytes: int) -> torch.Tensor:
        """The `nbytes` bytes at `address` as they lie now: a uint8 view; IllegalAddressError where nothing is mapped."""
        self.check(address, nbytes, "a read")
        return self.bytes[address - self.base : address - self.base + nbytes]

    def write(self, address: int, data: torch.Tensor) -> None:
        """Overwrite the bytes at `address` with those of `data` (any dtype, contiguous)."""
        raw = data.contiguous().view(-1).view(torch.uint8)
        self.check(address, raw.numel(), "a write")
        self.bytes[address - self.base : address - self.base + raw.numel()].copy_(raw)

    def tensor(self, address: int, shape, strides, dtype) -> torch.Tensor:
        """A raw view of the arena, which keeps nothing alive and is kept alive by nothing: what a kernel argument is."""
        offset = address - self.base + self.bytes.storage_offset()
        storage = self.bytes.untyped_storage()
        if offset % dtype.itemsize:
            raise IllegalAddressError(f"a misaligned address was encountered: 0x{address:x} for {dtype}")
        return torch.empty(0, dtype=dtype).set_(storage, offset // dtype.itemsize, tuple(shape), tuple(strides))

    def owned(self, address: int, nbytes: int, dtype, on_death) -> torch.Tensor:
        """A flat tensor of its own storage over [address, address + nbytes); `on_death(address)` runs when it dies."""
        buffer = (ctypes.c_char * nbytes).from_address(address)
        buffer_ref = _Death(buffer, on_death, address, self)
        del buffer_ref
        return torch.frombuffer(buffer, dtype=dtype)


class _Death:
    """Calls `on_death(address)` once `buffer` is gone; the registry keeps the weak reference alive until then."""

    registry: dict[int, object] = {}

    def __new__(cls, buffer, on_death, address, memory):
        import weakref

        def gone(ref):
            cls.registry.pop(id(ref), None)
            on_death(address)

        ref = weakref.ref(buffer, gone)
        cls.registry[id(ref)] = (ref, memory)
        return ref
