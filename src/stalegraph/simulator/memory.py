"""The memory of a simulated GPU: a range of true addresses, in which only mapped segments may be touched."""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_right, insort

import torch

from stalegraph.errors import IllegalAddressError, OutOfMemoryError, UsageError

PAGE = 1 << 21  # segments start and end on 2 MiB, as cudaMalloc's do
GUARD = PAGE  # left unmapped behind each segment: on an H200 the page before a cache lay in no segment (repro/recorded)
SPAN = 4  # bytes of addresses for each byte of memory: guards double the smallest segments, and gaps remain
# Python 3.10 lacks the name for Linux's flag.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if hasattr(mmap, "MAP_POPULATE") else 0)


def span(tensor: torch.Tensor) -> int:
    """Bytes from the first to behind the last element of `tensor`, strides included."""
    if tensor.numel() == 0:
        return 0
    return (1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))) * tensor.itemsize


class Addresses:
    """Reserved addresses from `base` to `base + size` (exclusive); nothing is resident before it is touched."""

    def __init__(self, size: int):
        try:
            self._mapping = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        except (OSError, ValueError, OverflowError) as error:
            raise UsageError(
                f"memory_bytes needs {size} bytes of addresses, which this machine refuses: {error}"
            ) from None
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self._bytes = memoryview(self._mapping)
        self._whole = {torch.uint8: torch.frombuffer(self._mapping, dtype=torch.uint8)}
        self.base = self._start + -self._start % PAGE
        self.size = size

    @property
    def end(self) -> int:
        return self.base + self.size

    def __contains__(self, address: int) -> bool:
        return self.base <= address < self.base + self.size

    def tensor(self, address: int, shape, strides, dtype: torch.dtype) -> torch.Tensor:
        """A raw view, which keeps nothing alive and is kept alive by nothing: what a kernel argument is."""
        whole = self._whole.get(dtype)
        if whole is None:
            whole = self._whole[dtype] = self._whole[torch.uint8].view(dtype)
        offset, rest = divmod(address - self._start, dtype.itemsize)
        if rest:
            raise IllegalAddressError(f"a misaligned address was encountered: 0x{address:x} for {dtype}")
        return whole.as_strided(shape, strides, offset)

    def buffer(self, address: int, nbytes: int) -> memoryview:
        """The bytes at `address` as an object of their own, whose death tells that nobody uses them any more."""
        at = address - self._start
        return self._bytes[at : at + nbytes]

    def discard(self, address: int, nbytes: int) -> None:
        """Lets go of what is resident; the bytes read as zero from now on."""
        if hasattr(self._mapping, "madvise"):
            self._mapping.madvise(mmap.MADV_DONTNEED, address - self._start, nbytes)

    def clean(self) -> None:
        """Lets go of everything where the first bytes are not zero any more."""
        start = self.base - self._start
        if any(self._bytes[start : start + 64]):
            self.discard(self.base, self.size)


class Memory(Addresses):
    """Device memory: at most `capacity` bytes of the addresses are mapped at a time; a fresh segment reads as zero."""

    def __init__(self, capacity: int):
        super().__init__(SPAN * capacity)
        self.capacity = capacity
        self.mapped = 0
        self.version = 0  # counts maps and unmaps, so that a graph knows when to look at its addresses again
        self._starts: list[int] = []  # mapped segments, sorted
        self._sizes: dict[int, int] = {}

    def map(self, size: int, what: str) -> int:
        """Maps the lowest gap of `size` bytes and returns its address; `what` says whom an error is about."""
        at = self.base
        for start in self._starts:
            if start - at >= size + GUARD:
                break
            at = start + self._sizes[start] + GUARD
        if self.mapped + size > self.capacity or at + size > self.end:
            raise OutOfMemoryError(
                f"{what}: no room for a segment of {size} bytes; {self.capacity - self.mapped} of the device's "
                f"{self.capacity} bytes are free"
            )
        insort(self._starts, at)
        self._sizes[at] = size
        self.mapped += size
        self.version += 1
        return at

    def unmap(self, address: int) -> None:
        """Gives a segment back; its contents are lost and its addresses are nobody's."""
        self._starts.remove(address)
        size = self._sizes.pop(address)
        self.mapped -= size
        self.version += 1
        self.discard(address, size)

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
        """IllegalAddressError where not all of [address, address + nbytes) is mapped."""
        if not self.is_mapped(address, nbytes):
            raise IllegalAddressError(
                f"an illegal memory access was encountered: {what}, {nbytes} bytes at 0x{address:x}"
            )

    def read(self, address: int, nbytes: int) -> torch.Tensor:
        """The `nbytes` bytes at `address` as they lie now, a host copy (uint8); IllegalAddressError if not mapped."""
        self.check(address, nbytes, "a read")
        with torch._C._DisableTorchDispatch():
            return self.tensor(address, (nbytes,), (1,), torch.uint8).clone()

    def write(self, address: int, data: torch.Tensor) -> None:
        """Overwrites the bytes at `address` with those of `data`; IllegalAddressError where not mapped."""
        with torch._C._DisableTorchDispatch():
            raw = data.detach().contiguous().view(-1).view(torch.uint8)
            self.check(address, raw.numel(), "a write")
            self.tensor(address, (raw.numel(),), (1,), torch.uint8).copy_(raw)
