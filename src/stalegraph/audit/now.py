"""The present as the caller and the device tell it, and answers that every question needs: who, where, what name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from stalegraph.audit.capture import Capture
from stalegraph.audit.hazards import FREED, REUSED
from stalegraph.audit.ledger import Ledger
from stalegraph.audit.pointers import describe
from stalegraph.audit.storages import StorageBook
from stalegraph.blocks import MemoryMap


@dataclass
class Now:
    """The present, as the caller and the device tell it; `memory()` is asked for only where something is wrong."""

    memory: Callable[[], MemoryMap]
    fields: dict[str, torch.Tensor | None] = field(default_factory=dict)
    caches: set[str] = field(default_factory=set)
    inputs: set[str] = field(default_factory=set)
    scalars: dict[str, object] = field(default_factory=dict)
    work: dict[str, object] = field(default_factory=dict)
    book: StorageBook | None = None
    ledger: Ledger | None = None
    captures: list[Capture] = field(default_factory=list)
    paused: Callable | None = None
    variables: Callable[[], dict[str, torch.Tensor]] = dict  # what the program's variables hold now


# who has an address
@dataclass(frozen=True)
class Owner:
    text: str | None
    since: int | None = None
    stack: tuple[str, ...] = ()


def owner_of(address: int, now: Now) -> Owner:
    for name, tensor in now.fields.items():
        if tensor is not None and tensor.numel():
            start = tensor.untyped_storage().data_ptr()
            if start <= address < start + tensor.untyped_storage().nbytes():
                return Owner(f"the caller's {name}")
    block = now.memory().find(address)
    note = now.book.owner(address) if now.book is not None else None
    if note is not None:
        where = f" at {note.stack[0]}" if note.stack else ""
        text = block.label if block is not None and block.label else f"a tensor made by {note.made or 'an op'}{where}"
        return Owner(text, note.born, note.stack)
    if block is None:
        return Owner(describe(None))
    return Owner(describe(block), block.since, block.stack)


def dead_verdict(address: int, now: Now) -> str:
    block = now.memory().find(address)
    if block is not None and block.state == "allocated":
        return REUSED
    if block is None and now.book is not None and now.book.owner(address) is not None:
        return REUSED
    return FREED


def place_of(capture: Capture, note, prefer: str | None = None, fieldnote=None) -> dict:
    """Node, argument, address and byte of the first pointer into `note`'s storage."""
    touch = capture.touch(note)
    prefer = prefer or (touch.argument if touch else None)
    found = None
    if fieldnote is not None:
        found = capture.find(fieldnote.address, fieldnote.address + 1, prefer)
    found = found or capture.find(note.address, max(note.end, note.address + 1), prefer)
    place = {"graph": capture.index, "argument": None if touch is None else touch.argument, "address": note.address}
    if found is not None:
        node, argument = found
        place.update(node=node.index, node_name=node.name, address=argument.address, offset=argument.offset)
        if place["argument"] is None or argument.offset is None:
            place["argument"] = argument.name
    elif touch is not None:
        place["node_name"] = touch.op
    return place


def name_of(capture, note) -> str | None:
    """What to call a tensor: as declared, as the program's variable at capture, or as its block was labelled then."""
    if note.names or note.variable:
        return note.names[0] if note.names else note.variable
    block = capture.memory.find(note.address) if capture.memory is not None else None
    return block.label if block is not None else None


def bytes_of(tensor, now) -> torch.Tensor:
    from contextlib import nullcontext

    with now.paused() if now.paused is not None else nullcontext():
        storage = tensor.untyped_storage()
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        return flat.cpu().clone()
