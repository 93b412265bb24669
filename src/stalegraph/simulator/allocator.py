"""A caching allocator after PyTorch's rules, for one stream: pools, best fit, splitting, merging, private graph pools.

Source of the rules: pytorch/pytorch, c10/cuda/CUDACachingAllocator.cpp, with its default settings; tests compare the
addresses with traces recorded on an H200.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left, bisect_right, insort
from collections import deque

import torch

from stalegraph.blocks import DEFAULT_POOL, Block
from stalegraph.errors import CaptureError, OutOfMemoryError
from stalegraph.simulator.events import AllocationEvent
from stalegraph.simulator.memory import Memory

MIN_BLOCK = 512  # bytes: every size is rounded up to a multiple
SMALL_SIZE = 1 << 20  # largest "small" allocation
SMALL_SEGMENT = 2 << 20  # small allocations are packed in segments of this size
LARGE_SEGMENT = 20 << 20  # allocations between 1 and 10 MiB are packed in segments of this size
MIN_LARGE_ALLOCATION = 10 << 20  # from here on an allocation gets a segment of its own
ROUND_LARGE = 2 << 20  # those segments are multiples of this


class Allocation:
    """One allocation from birth to death: what a tensor's storage owns. `generation` counts those at its address."""

    __slots__ = ("address", "nbytes", "generation", "label", "pool", "chunk", "reference", "capture", "__weakref__")

    def __init__(self, address: int, nbytes: int, generation: int, pool, chunk, capture):
        self.address = address
        self.nbytes = nbytes
        self.generation = generation
        self.label = None
        self.pool = pool
        self.chunk = chunk
        self.capture = capture  # index of the graph during whose capture it was made, else None
        self.reference = None


class Owner(weakref.ref):
    """The weak reference to a storage's buffer whose death frees the allocation."""

    __slots__ = ("allocation",)


class _Chunk:
    """A block of a segment, free or allocated, linked to its neighbours by address."""

    __slots__ = ("address", "size", "segment", "previous", "next", "allocation", "since")

    def __init__(self, address, size, segment, since):
        self.address, self.size, self.segment, self.since = address, size, segment, since
        self.previous = self.next = self.allocation = None


class _Segment:
    __slots__ = ("address", "size", "small", "pool", "first")

    def __init__(self, address, size, small, pool):
        self.address, self.size, self.small, self.pool = address, size, small, pool


class _Pool:
    """The free blocks of the default pool or of one private pool, small and large apart, by (size, address)."""

    def __init__(self, identity: tuple[int, int]):
        self.identity = identity
        self.users = 0  # graphs that hold it
        self.segments = 0
        self.small: list[tuple[int, int]] = []
        self.large: list[tuple[int, int]] = []


def round_size(nbytes: int) -> int:
    """Bytes of the block that `nbytes` asks for."""
    return max(MIN_BLOCK, -(-nbytes // MIN_BLOCK) * MIN_BLOCK)


def segment_size(size: int) -> int:
    """Bytes of the segment that is mapped for a block of `size` bytes when no free block fits."""
    if size <= SMALL_SIZE:
        return SMALL_SEGMENT
    if size < MIN_LARGE_ALLOCATION:
        return LARGE_SEGMENT
    return -(-size // ROUND_LARGE) * ROUND_LARGE


class CachingAllocator:
    """Hands out blocks of `memory`. `live` maps the address of each allocation to it; `step` dates what is done."""

    def __init__(self, memory: Memory):
        self.memory = memory
        self.step = 0
        self.live: dict[int, Allocation] = {}
        self.allocations = self.frees = 0
        self.allocated_bytes = self.peak_bytes = 0  # in whole blocks, as `torch.cuda.memory_allocated` counts
        self._pools: dict[tuple[int, int], _Pool] = {DEFAULT_POOL: _Pool(DEFAULT_POOL)}
        self._issued = 0
        self._segments: dict[int, _Segment] = {}
        self._addresses: list[int] = []
        self._chunks: dict[int, _Chunk] = {}  # free chunks by address
        self._born: dict[int, int] = {}
        self._last_label: dict[int, str | None] = {}
        self._log: list[tuple] = []
        self._capture_pool: _Pool | None = None
        self._carved: list[Block] = []
        self._capture: int | None = None
        # A storage may die at any moment, also inside this class while the garbage collector runs.
        self._dead: deque[Allocation] = deque()
        self._lock = threading.Lock()

    # -- allocations

    def malloc(self, nbytes: int) -> Allocation:
        """A block for `nbytes` > 0 bytes; OutOfMemoryError where neither cache nor memory has room."""
        with self._lock:
            allocation = self._malloc(nbytes)
        if self._dead:
            self._drain()
        return allocation

    def buffer(self, nbytes: int) -> memoryview:
        """The bytes of a new allocation, which is freed when nothing holds the buffer any more."""
        allocation = self.malloc(nbytes)
        buffer = self.memory.buffer(allocation.address, nbytes)
        owner = allocation.reference = Owner(buffer, self._bury)
        owner.allocation = allocation
        return buffer

    def free(self, allocation: Allocation) -> None:
        """Gives a block back to its pool; at once, or as soon as the allocator is at rest."""
        self._dead.append(allocation)
        self._drain()

    def _bury(self, owner: Owner) -> None:
        self._dead.append(owner.allocation)
        self._drain()

    def _drain(self) -> None:
        while self._dead and self._lock.acquire(blocking=False):
            try:
                while self._dead:
                    self._free(self._dead.popleft())
            finally:
                self._lock.release()

    def _malloc(self, nbytes: int) -> Allocation:
        size = round_size(nbytes)
        pool = self._capture_pool or self._pools[DEFAULT_POOL]
        small = size <= SMALL_SIZE
        free = pool.small if small else pool.large
        at = bisect_left(free, (size, 0))
        if at < len(free):
            chunk = self._chunks.pop(free.pop(at)[1])
        else:
            chunk = self._new_segment(size, small, pool, nbytes)
        remaining = chunk.size - size
        if remaining >= MIN_BLOCK if small else remaining > SMALL_SIZE:
            rest = _Chunk(chunk.address + size, remaining, chunk.segment, chunk.since)
            rest.previous, rest.next = chunk, chunk.next
            if chunk.next is not None:
                chunk.next.previous = rest
            chunk.next = rest
            chunk.size = size
            self._chunks[rest.address] = rest
            insort(free, (remaining, rest.address))
        address = chunk.address
        generation = self._born[address] = self._born.get(address, 0) + 1
        self._last_label[address] = None
        chunk.since = self.step
        allocation = Allocation(address, nbytes, generation, pool.identity, chunk, self._capture)
        chunk.allocation = allocation
        self.live[address] = allocation
        self.allocations += 1
        self.allocated_bytes += chunk.size
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        if self._capture is not None:
            segment = chunk.segment.address
            self._carved.append(
                Block(address, chunk.size, nbytes, "allocated", pool.identity, segment, generation, None, self.step)
            )
        self._log.append((chunk.since, "alloc", address, nbytes, allocation, pool.identity))
        return allocation

    def _new_segment(self, size: int, small: bool, pool: _Pool, nbytes: int) -> _Chunk:
        wanted = segment_size(size)
        what = f"out of memory, an allocation of {nbytes} bytes"
        try:
            address = self.memory.map(wanted, what)
        except OutOfMemoryError:
            if self._capture_pool is not None:  # cudaFree is not permitted then
                raise
            self._release_cached()
            address = self.memory.map(wanted, what)
        segment = _Segment(address, wanted, small, pool)
        chunk = segment.first = _Chunk(address, wanted, segment, self.step)
        self._segments[address] = segment
        insort(self._addresses, address)
        pool.segments += 1
        self._log.append((chunk.since, "segment_alloc", address, wanted, None, pool.identity))
        return chunk

    def _free(self, allocation: Allocation) -> None:
        chunk = allocation.chunk
        if chunk is None:
            return
        allocation.chunk = allocation.reference = None
        del self.live[allocation.address]
        self.frees += 1
        self.allocated_bytes -= chunk.size
        now = self.step
        self._log.append((now, "free", allocation.address, allocation.nbytes, allocation, allocation.pool))
        chunk.allocation = None
        segment = chunk.segment
        free = segment.pool.small if segment.small else segment.pool.large
        before, after = chunk.previous, chunk.next
        if before is not None and before.allocation is None:
            self._take(free, before)
            before.size += chunk.size
            before.next = after
            if after is not None:
                after.previous = before
            chunk = before
        if after is not None and after.allocation is None:
            self._take(free, after)
            chunk.size += after.size
            chunk.next = after.next
            if after.next is not None:
                after.next.previous = chunk
        chunk.since = now
        self._chunks[chunk.address] = chunk
        insort(free, (chunk.size, chunk.address))

    def _take(self, free: list, chunk: _Chunk) -> None:
        del free[bisect_left(free, (chunk.size, chunk.address))]
        del self._chunks[chunk.address]

    def reset_peak(self) -> None:
        """Counts the peak of the allocated bytes anew, from what is allocated now."""
        self.peak_bytes = self.allocated_bytes

    def name(self, allocation: Allocation, label: str) -> None:
        """Labels an allocation; the label stays with its block until the block is handed out again."""
        allocation.label = self._last_label[allocation.address] = label

    # -- pools

    def is_pool(self, identity) -> bool:
        """Whether `identity` is a private pool's id that this allocator has given out."""
        try:
            space, number = identity
        except (TypeError, ValueError):
            return False
        return space == 0 and number in range(1, self._issued + 1)

    def new_pool(self) -> tuple[int, int]:
        """The id of a private pool that does not exist yet."""
        self._issued += 1
        return (0, self._issued)

    def begin_pool(self, identity: tuple[int, int], capture: int) -> None:
        """Routes allocations to the private pool `identity` and counts the graph `capture` among its users."""
        pool = self._pools.get(identity)
        if pool is None:
            pool = self._pools[identity] = _Pool(identity)
        elif not pool.users:  # torch asserts the same
            raise CaptureError(f"pool {identity} lost its last graph by reset(); allowed: a pool that a graph holds")
        pool.users += 1
        self._capture_pool, self._capture, self._carved = pool, capture, []

    def end_pool(self) -> tuple[Block, ...]:
        """Routes allocations to the default pool again; returns the blocks that the capture has allocated."""
        self._capture_pool = self._capture = None
        return tuple(self._carved)

    def release_pool(self, identity: tuple[int, int]) -> None:
        """One graph less holds the pool; without any, `empty_cache` may return its free segments."""
        self._pools[identity].users -= 1

    def empty_cache(self) -> None:
        """Unmaps every segment that is free as a whole, of the default pool and of pools that no graph holds."""
        with self._lock:
            self._release_cached()
        if self._dead:
            self._drain()

    def _release_cached(self) -> None:
        for pool in list(self._pools.values()):
            if pool.users:
                continue
            for free in (pool.large, pool.small):
                for size, address in list(free):
                    chunk = self._chunks[address]
                    if chunk.previous is None and chunk.next is None:
                        self._take(free, chunk)
                        self._unmap(chunk.segment)
            if pool.identity != DEFAULT_POOL and not pool.segments:
                del self._pools[pool.identity]

    def _unmap(self, segment: _Segment) -> None:
        del self._segments[segment.address]
        self._addresses.remove(segment.address)
        segment.pool.segments -= 1
        self.memory.unmap(segment.address)
        self._log.append((self.step, "segment_free", segment.address, segment.size, None, segment.pool.identity))

    # -- looking

    def find(self, address: int) -> dict | None:
        """The block that `address` falls in, in the form of a snapshot's block, or None where nothing is mapped."""
        at = bisect_right(self._addresses, address) - 1
        if at < 0:
            return None
        segment = self._segments[self._addresses[at]]
        if address >= segment.address + segment.size:
            return None
        chunk = segment.first
        while address >= chunk.address + chunk.size:
            chunk = chunk.next
        return self._describe(chunk)

    def _describe(self, chunk: _Chunk) -> dict:
        allocation = chunk.allocation
        return {
            "address": chunk.address,
            "size": chunk.size,
            "requested_size": allocation.nbytes if allocation else 0,
            "state": "active_allocated" if allocation else "inactive",
            "frames": [],
            "generation": self._born.get(chunk.address, 0),
            "label": self._last_label.get(chunk.address),
            "since": chunk.since,
        }

    def snapshot(self) -> list[dict]:
        """Segments in order of address, each with its blocks: the form of `torch.cuda.memory_snapshot()`."""
        found = []
        for address in self._addresses:
            segment = self._segments[address]
            blocks, chunk = [], segment.first
            while chunk is not None:
                blocks.append(self._describe(chunk))
                chunk = chunk.next
            active = [block for block in blocks if block["state"] == "active_allocated"]
            allocated = sum(block["size"] for block in active)
            found.append(
                {
                    "device": 0,
                    "address": address,
                    "total_size": segment.size,
                    "allocated_size": allocated,
                    "active_size": allocated,
                    "requested_size": sum(block["requested_size"] for block in active),
                    "stream": 0,
                    "segment_type": "small" if segment.small else "large",
                    "segment_pool_id": segment.pool.identity,
                    "is_expandable": False,
                    "frames": [],
                    "blocks": blocks,
                }
            )
        return found

    @property
    def history(self) -> list[AllocationEvent]:
        """Everything done so far, oldest first."""
        return [
            AllocationEvent(step, action, address, size, owner.label if owner else None, pool)
            for step, action, address, size, owner, pool in self._log
        ]

    # -- tensors

    def empty(self, shape, strides, dtype: torch.dtype) -> torch.Tensor:
        """A tensor whose storage is a new block, contents as they lie; freed when its storage dies."""
        extent = 1
        for length, stride in zip(shape, strides):
            if length == 0:
                return torch.empty_strided(shape, strides, dtype=dtype)
            extent += (length - 1) * stride
        flat = torch.frombuffer(self.buffer(extent * dtype.itemsize), dtype=dtype)
        if len(shape) == 1 and shape[0] == extent:
            return flat
        return flat.as_strided(shape, strides)
