"""The family of bugs that an audit tells apart, and what an address that a graph holds can turn out to be."""

from __future__ import annotations

from dataclasses import dataclass

LIVE, MOVED, FREED, REUSED = "live", "moved", "freed", "reused"
GRAPH_OWNED, FOREIGN_POOL, EXTERNAL = "graph-owned", "foreign-pool", "external"
# In words, one a verdict; the order is the order of tables.
VERDICTS = {
    MOVED: "the caller's tensor is elsewhere now",
    FREED: "no tensor owns the address",
    REUSED: "another tensor owns the address",
    FOREIGN_POOL: "the address lies in the pool of another graph",
    LIVE: "the tensor that was captured still lives there",
    GRAPH_OWNED: "the address lies in the graph's own pool",
    EXTERNAL: "the allocator does not know the address",
}


@dataclass(frozen=True)
class Hazard:
    """One class of bug: the invariant that it breaks, and what to do about it in one sentence."""

    id: str
    title: str
    invariant: str
    advice: str


HAZARDS = {
    hazard.id: hazard
    for hazard in (
        Hazard(
            "A", "re-bound tensor", "captured address = address the step writes",
            "Keep one tensor for the life of the graph and copy_ or write each step's values into it.",
        ),
        Hazard(
            "B", "orphaned owner", "storage outlives the graph",
            "Keep a reference to the tensor for as long as the graph may replay.",
        ),
        Hazard(
            "C", "workspace grown or moved after capture", "shared scratch never moves once captured",
            "Reserve the workspace's largest size before capture; if it must grow, keep the old one and capture again.",
        ),
        Hazard(
            "D", "borrowed scratch", "the graph owns all it reads",
            "Hold the tensor that the other graph made, or capture both graphs in one pool and keep that.",
        ),
        Hazard(
            "E", "block re-carved inside a shared graph pool", "one live owner per pool block over all graphs",
            "Allocate what outlives a capture before it, and keep alive what later graphs read while they replay.",
        ),
        Hazard(
            "F", "address right, value old", "every captured input written before each replay",
            "Write the very slice that the graph captured, all of it, before each replay.",
        ),
        Hazard(
            "G", "host scalar passed by value", "what varies lives on the device",
            "Put the value into a device tensor that the captured kernel reads, and update that tensor.",
        ),
        Hazard(
            "H", "work bound fixed at capture", "captured work bound >= any replay",
            "Capture with the largest bound, or choose a graph whose bound covers the step and fall back to eager.",
        ),
        Hazard(
            "I1", "padded row out of bounds", "the sentinel is safe for every consumer",
            "Fill padded rows with an index that every consumer may read, for example a reserved page.",
        ),
        Hazard(
            "J2", "captured host copy re-reads a recycled block", "host source outlives the graph",
            "Keep the pinned tensor for as long as the graph may replay, and write each step's values into it.",
        ),
    )
}  # fmt: skip
