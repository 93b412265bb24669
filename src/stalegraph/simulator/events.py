"""What a simulated device has done so far: its counters and what its allocator and its replays have to tell."""

from __future__ import annotations

from dataclasses import dataclass, fields

from stalegraph.blocks import AllocationEvent

__all__ = ["AllocationEvent", "Counters", "StaleRead"]


@dataclass(frozen=True)
class Counters:
    """What the host has had the device do; subtract two for the cost of what lies between.

    `launches` are kernels that the host launched, a replay of a whole graph being one; `copies` are memcpy operations
    that the host asked for (not those inside of a graph), `bytes_copied` theirs.
    """

    allocations: int = 0
    frees: int = 0
    launches: int = 0
    copies: int = 0
    bytes_copied: int = 0
    replays: int = 0

    def snapshot(self) -> Counters:
        """Itself: what was taken does not change."""
        return self

    def __sub__(self, earlier: Counters) -> Counters:
        return Counters(*(getattr(self, field.name) - getattr(earlier, field.name) for field in fields(self)))


@dataclass(frozen=True)
class StaleRead:
    """A replayed node read `argument` at `address` from a block that is no longer the one that was captured.

    `state_now` is "allocated", "freed" or "unmapped"; `owner_now` names who owns the block now, None for nobody.
    """

    step: int
    graph: int
    node: int
    argument: str
    address: int
    generation_captured: int
    generation_now: int
    owner_now: str | None = None
    state_now: str = "allocated"
