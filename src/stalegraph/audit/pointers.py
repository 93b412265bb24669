"""Every pointer that a graph has baked in, with its verdict."""

from __future__ import annotations

from stalegraph.audit.capture import Capture, is_sure
from stalegraph.audit.hazards import EXTERNAL, FOREIGN_POOL, FREED, GRAPH_OWNED, LIVE, REUSED
from stalegraph.audit.report import Pointer
from stalegraph.blocks import DEFAULT_POOL, Block, MemoryMap


def describe(block: Block | None) -> str | None:
    """Who has a block now, in words; None where nothing is known of it."""
    if block is None:
        return "nobody: not mapped"
    if block.state != "allocated":
        return "nobody: free"
    if block.label:
        return block.label
    return f"a tensor allocated at {block.stack[0]}" if block.stack else f"an unnamed tensor of {block.requested} bytes"


def pointers(capture: Capture, now: MemoryMap) -> list[Pointer]:
    """The pointers of `capture`'s nodes in order; the time is linear in nodes but for one search per pointer."""
    stale = _stale_ranges(capture)
    found, known = [], {}
    for node in capture.nodes:
        for argument in node.arguments:
            address = argument.address
            if address not in known:
                known[address] = _verdict(capture, address, now, stale)
            verdict, owner = known[address]
            sure = is_sure(node, argument) or (node.index, argument.name) in capture.confirmed
            found.append(
                Pointer(
                    node.index, node.name, argument.name, address, verdict, argument.offset, argument.nbytes,
                    argument.access, owner, sure,
                )
            )  # fmt: skip
    return found


def _stale_ranges(capture: Capture) -> list[tuple[int, int]]:
    touches = capture.sighting.touches if capture.sighting else {}
    return [(note.address, max(note.end, note.address + 1)) for note in touches if not note.intact()]


def _verdict(capture, address, now, stale) -> tuple[str, str | None]:
    block = now.find(address)
    if block is None:
        if capture.backend.is_host(address):
            dead = any(low <= address < high for low, high in stale)
            return (FREED, "nobody: the host tensor is gone") if dead else (EXTERNAL, "pinned host memory")
        was = capture.memory is not None and capture.memory.find(address) is not None
        return (FREED, describe(None)) if was else (EXTERNAL, None)
    if block.pool == capture.pool and block.pool != DEFAULT_POOL:
        return GRAPH_OWNED, block.label
    if block.pool != DEFAULT_POOL:
        return FOREIGN_POOL, describe(block)
    if block.state != "allocated":
        return FREED, describe(block)
    if any(low <= address < high for low, high in stale):
        return REUSED, describe(block)
    return LIVE, block.label
