"""A caching allocator after PyTorch's rules, for one stream, with a private pool for each graph.

Source: c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.11 with its default settings; compared address for address with traces
recorded on an H200.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from stalegraph.blocks import DEFAULT_POOL
from stalegraph.errors import OutOfMemoryError, UsageError

MIN_BLOCK = 512
SMALL_SIZE = 1 << 20  # requests up to here come from small segments
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
MIN_LARGE = 10 << 20  # requests from here on get a segment of their own
ROUND_LARGE = 2 << 20


def round_size(nbytes: int) -> int:
    """What a request of `nbytes` takes, in bytes."""
    return max(MIN_BLOCK, -(-nbytes // MIN_BLOCK) * MIN_BLOCK)


def segment_size(size: int) -> int:
    """How large a segment is mapped for a block of `size` bytes."""
    if size <= SMALL_SIZE:
        return SMALL_SEGMENT
    if size < MIN_LARGE:
        return LARGE_SEGMENT
    return -(-size // ROUND_LARGE) * ROUND_LARGE


@dataclass(eq=False)
class Chunk:
    """A block as the allocator keeps it, linked to its neighbours in the segment."""

    address: int
    size: int
    segment: int
    pool: tuple[int, int]
    small: bool
    allocated: bool = False
    requested: int = 0
    before: Chunk | None = None
    behind: Chunk | None = None
    label: str | None = None
    since: int = 0

    @property
    def key(self):
        return (self.size, self.address)


class CachingAllocator:
    """Hands out blocks of `memory`; `tell(action, address, size, label, pool)` hears of everything it does."""

    def __init__(self, memory, tell):
        self.memory = memory
        self.tell = tell
        self.step = 0
        self.generations: dict[int, int] = {}  # block address -> how often an allocation started there
        self.chunks: dict[int, Chunk] = {}  # every chunk by address
        self._free: dict[tuple, list] = {}  # (pool, small) -> sorted keys of free chunks
        self._pool_users: dict[tuple[int, int], int] = {DEFAULT_POOL: 1}
        self._next_pool = 1
        self.allocated_bytes = 0

    # pools
    def new_pool(self) -> tuple[int, int]:
        pool = (0, self._next_pool)
        self._next_pool += 1
        self._pool_users[pool] = 0
        return pool

    def retain_pool(self, pool) -> None:
        if pool not in self._pool_users:
            raise UsageError(f"pool is {pool!r}; allowed: a pool of this device, from graph.pool()")
        self._pool_users[pool] += 1

    def release_pool(self, pool) -> None:
        self._pool_users[pool] -= 1

    # blocks
    def allocate(self, nbytes: int, pool=DEFAULT_POOL) -> Chunk:
        size = round_size(nbytes)
        small = size <= SMALL_SIZE
        free = self._free.setdefault((pool, small), [])
        at = bisect_left(free, (size, 0))
        if at < len(free):
            chunk = self.chunks[free.pop(at)[1]]
        else:
            chunk = self._map(size, pool, small, nbytes)
        rest = chunk.size - size
        if rest >= MIN_BLOCK if small else rest > SMALL_SIZE:
            self._split(chunk, size)
        chunk.allocated, chunk.requested, chunk.label, chunk.since = True, nbytes, None, self.step
        self.generations[chunk.address] = self.generations.get(chunk.address, 0) + 1
        self.allocated_bytes += chunk.size
        self.tell("alloc", chunk.address, chunk.size, None, pool)
        return chunk

    def free(self, address: int) -> None:
        chunk = self.chunks[address]
        self.tell("free", chunk.address, chunk.size, chunk.label, chunk.pool)
        self.allocated_bytes -= chunk.size
        chunk.allocated, chunk.since = False, self.step
        free = self._free.setdefault((chunk.pool, chunk.small), [])
        for other in (chunk.before, chunk.behind):
            if other is not None and not other.allocated:
                free.pop(bisect_left(free, other.key))
                first, second = (other, chunk) if other is chunk.before else (chunk, other)
                first.size += second.size
                first.behind = second.behind
                if second.behind is not None:
                    second.behind.before = first
                del self.chunks[second.address]
                first.since, first.label, chunk = self.step, chunk.label, first
        insort(free, chunk.key)

    def _map(self, size: int, pool, small: bool, nbytes: int) -> Chunk:
        whole = segment_size(size)
        what = f"an allocation of {nbytes} bytes"
        try:
            address = self.memory.map(whole, what)
        except OutOfMemoryError:
            if not self.empty_cache():
                raise
            address = self.memory.map(whole, what)
        chunk = self.chunks[address] = Chunk(address, whole, address, pool, small, since=self.step)
        self.tell("segment_alloc", address, whole, None, pool)
        return chunk

    def _split(self, chunk: Chunk, size: int) -> None:
        rest = Chunk(chunk.address + size, chunk.size - size, chunk.segment, chunk.pool, chunk.small, since=chunk.since)
        rest.before, rest.behind, chunk.behind, chunk.size = chunk, chunk.behind, rest, size
        if rest.behind is not None:
            rest.behind.before = rest
        self.chunks[rest.address] = rest
        insort(self._free.setdefault((chunk.pool, chunk.small), []), rest.key)

    def empty_cache(self) -> int:
        """Give back segments that are free as a whole, those of a private pool once no graph uses it; bytes given back."""
        given = 0
        for (pool, _), free in self._free.items():
            if pool != DEFAULT_POOL and self._pool_users.get(pool, 0) > 0:
                continue
            for key in list(free):
                chunk = self.chunks[key[1]]
                if chunk.before is None and chunk.behind is None:
                    free.remove(key)
                    del self.chunks[chunk.address]
                    self.memory.unmap(chunk.address)
                    self.tell("segment_free", chunk.address, chunk.size, None, pool)
                    given += chunk.size
        return given

    def find(self, address: int) -> Chunk | None:
        """The chunk that starts at `address`, or the one it falls in."""
        chunk = self.chunks.get(address)
        if chunk is not None:
            return chunk
        for chunk in self.chunks.values():
            if chunk.address <= address < chunk.address + chunk.size:
                return chunk
        return None

    def snapshot(self) -> list[dict]:
        """Segments with their blocks, in the form of `torch.cuda.memory_snapshot()`, and generation, label and since."""
        segments: dict[int, dict] = {}
        for chunk in sorted(self.chunks.values(), key=lambda chunk: chunk.address):
            segment = segments.setdefault(
                chunk.segment,
                {"device": 0, "address": chunk.segment, "total_size": 0, "allocated_size": 0, "active_size": 0, "stream": 0,
                 "segment_type": "small" if chunk.small else "large", "segment_pool_id": chunk.pool,
                 "is_expandable": False, "blocks": []},
            )  # fmt: skip
            segment["total_size"] += chunk.size
            if chunk.allocated:
                segment["allocated_size"] += chunk.size
                segment["active_size"] += chunk.size
            segment["blocks"].append(
                {"address": chunk.address, "size": chunk.size, "requested_size": chunk.requested if chunk.allocated else 0,
                 "state": "active_allocated" if chunk.allocated else "inactive", "frames": [],
                 "generation": self.generations.get(chunk.address, 0), "label": chunk.label, "since": chunk.since}
            )  # fmt: skip
        return list(segments.values())
