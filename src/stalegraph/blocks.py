"""Blocks of device memory as a caching allocator sees them, and a map that says in which block an address falls."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

DEFAULT_POOL = (0, 0)


@dataclass(frozen=True)
class Block:
    """One block of a segment. `address`, `size` and `requested` in bytes; `segment` is the segment's address.

    `generation` counts how often an allocation has started at this address (simulator and watch only, else 0); `since`
    is the step at which the present state began; `label` names the tensor where a caller has named it.
    """

    address: int
    size: int
    requested: int
    state: str
    pool: tuple[int, int] = DEFAULT_POOL
    segment: int = 0
    generation: int = 0
    label: str | None = None
    since: int | None = None
    stack: tuple[str, ...] = ()

    @property
    def end(self) -> int:
        return self.address + self.size


@dataclass(frozen=True)
class AllocationEvent:
    """One thing that the caching allocator did during `step`: "alloc", "free", "segment_alloc" or "segment_free".

    `size` in bytes as asked for (segments: as mapped); `label` is the tensor's name, also where it was given later.
    """

    step: int
    action: str
    address: int
    size: int
    label: str | None = None
    pool: tuple[int, int] = DEFAULT_POOL


class MemoryMap:
    """The blocks of a device in address order; `find` is logarithmic."""

    def __init__(self, blocks):
        self.blocks: tuple[Block, ...] = tuple(sorted(blocks, key=lambda block: block.address))
        self._starts = [block.address for block in self.blocks]

    def find(self, address: int) -> Block | None:
        """The block that `address` falls in, or None where nothing is mapped."""
        at = bisect_right(self._starts, address) - 1
        if at >= 0 and address < self.blocks[at].end:
            return self.blocks[at]
        return None

    @classmethod
    def from_snapshot(cls, segments) -> MemoryMap:
        """From `torch.cuda.memory_snapshot()` (a list of segments, each with its blocks)."""
        blocks = []
        for segment in segments:
            for block in segment["blocks"]:
                frames = block.get("frames") or ()
                blocks.append(
                    Block(
                        address=block["address"],
                        size=block["size"],
                        requested=block.get("requested_size", block["size"]),
                        # "active_awaiting_free": freed by the program, held back by another stream's event.
                        state="allocated" if block["state"] == "active_allocated" else "freed",
                        pool=tuple(segment.get("segment_pool_id", DEFAULT_POOL)),
                        segment=segment["address"],
                        generation=block.get("generation", 0),
                        label=block.get("label"),
                        since=block.get("since"),
                        stack=tuple(f"{frame['filename']}:{frame['line']} {frame['name']}" for frame in frames),
                    )
                )
        return cls(blocks)
