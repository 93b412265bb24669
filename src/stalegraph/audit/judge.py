"""From what a capture holds and what is there now to findings, one function a question."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from stalegraph.audit import rules
from stalegraph.audit.capture import Capture, is_sure
from stalegraph.audit.extents import Extents, ranges
from stalegraph.audit.hazards import FOREIGN_POOL, FREED, LIVE, MOVED, REUSED
from stalegraph.audit.ledger import Ledger
from stalegraph.audit.pointers import describe
from stalegraph.audit.report import Finding, Report
from stalegraph.audit.storages import StorageBook
from stalegraph.audit.witness import RESIZE, revive
from stalegraph.blocks import DEFAULT_POOL, MemoryMap

MOST_REPLAYS = 64  # after so many replays of a graph the program's variables are not looked at any more
COMMON = (0, 1, -1)  # numbers that stand in so many calls that finding one proves nothing


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


def judge(capture: Capture, now: Now, report: Report) -> list[Finding]:
    """Adds what is wrong with `capture` at a replay that starts now to `report`; returns what is new."""
    before = len(report.findings)
    explained: set = set()
    _fields(capture, now, report, explained)
    _owners(capture, now, report, explained)
    _newcomers(capture, now, report, explained)
    _clobbered(capture, now, report)
    _raw_pointers(capture, now, report)
    _scalars(capture, now, report)
    _work(capture, now, report)
    _inputs(capture, now, report)
    _lost_writes(capture, now, report)
    _reading_rules(capture, now, report)
    return report.findings[before:]


# who has an address
@dataclass(frozen=True)
class Owner:
    text: str | None
    since: int | None = None
    stack: tuple[str, ...] = ()


def _owner(address: int, now: Now) -> Owner:
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


def _dead_verdict(address: int, now: Now) -> str:
    block = now.memory().find(address)
    if block is not None and block.state == "allocated":
        return REUSED
    if block is None and now.book is not None and now.book.owner(address) is not None:
        return REUSED
    return FREED


def _place(capture: Capture, note, prefer: str | None = None, fieldnote=None) -> dict:
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


def _leaf(path: str) -> str:
    return path.rsplit(".", 1)[-1].split("[", 1)[0]


# A, C, and F where the caller hands over another slice
def _fields(capture, now, report, explained) -> None:
    for path, was in capture.fields.items():
        if not capture.holds(was):
            continue
        tensor = now.fields.get(path)
        note = was.note
        if path not in now.fields or tensor is None or tensor.numel() == 0:
            continue  # judged as an owner, by its name, if it died
        if note.is_of(tensor):
            explained.add(note)
            _slice(capture, now, report, path, was, tensor)
            continue
        explained.add(note)
        place = _place(capture, note, None, was)
        touch = capture.touch(note)
        nbytes = tensor.untyped_storage().nbytes()
        grown, written = nbytes > note.nbytes, touch is not None and bool(touch.writes)
        hazard = "C" if path in now.caches or (grown and written) or note.moved_to() is not None else "A"
        if note.intact():
            verdict, owner = MOVED, Owner("the tensor that was captured, still held")
        else:
            verdict, owner = _dead_verdict(place["address"], now), _owner(place["address"], now)
        if tensor.data_ptr() == was.address:
            told = _lucky(path, was.address)
        else:
            size = f", grown from {note.nbytes} to {nbytes} bytes" if grown and hazard == "C" else ""
            told = f"{path} was captured at 0x{was.address:x} and is at 0x{tensor.data_ptr():x} now{size}."
        report.add(
            Finding(
                verdict, hazard, message=told, field=path, owner=owner.text, since=owner.since, stack=owner.stack,
                moved_to=tensor.data_ptr(), dropped=note.died or (), **place,
            )
        )  # fmt: skip


def _lucky(name: str, address: int) -> str:
    return f"{name} is a new tensor that happens to lie at the captured address 0x{address:x}: right by luck."


def _slice(capture, now, report, path, was, tensor) -> None:
    if tensor.data_ptr() == was.address:
        return
    touch = capture.touch(was.note)
    reads = touch.all_reads if touch is not None else Extents(was.ranges)
    if all(not reads.missing(low, high) for low, high in ranges(tensor)):
        return
    if path not in now.inputs:
        return  # a view that moves along inside its own buffer may well be meant
    told = f"{path} is another slice of its buffer than at capture: 0x{was.address:x} then, 0x{tensor.data_ptr():x} now."
    report.add(Finding(MOVED, "F", message=told, field=path, owner=path, **_place(capture, was.note, None, was)))


# B, C by resize_, D, E, J2
def _owners(capture, now, report, explained) -> None:
    touches = capture.sighting.touches if capture.sighting else {}
    for note, touch in touches.items():
        if note in explained or note.intact():
            continue
        place = _place(capture, note)
        baked = "node" in place
        if not baked and (touch.pinned or capture.backend.is_host(note.address) or not capture.opaque):
            # Read the parameters and not found: passed to the op, not to a kernel. Matrix products are told by
            # the dispatcher alone, since their operands can sit in descriptors.
            if touch.pinned or touch.op not in DESCRIBED:
                continue
        name = _name(capture, note)
        moved = note.moved_to()
        if moved is not None:
            told = f"the storage of {name or touch.argument} was at 0x{note.address:x} and was moved to 0x{moved:x} by resize_."
            owner = _owner(note.address, now)
            report.add(
                Finding(
                    MOVED, "C", message=told, field=name, owner=owner.text, since=owner.since, stack=owner.stack, **place
                )
            )  # fmt: skip
            continue
        if touch.pinned or capture.backend.is_host(note.address):
            owner = _host_owner(capture, note, now)
            told = f"a captured copy reads {name or touch.argument} at host address 0x{place['address']:x}, whose tensor is gone."
            report.add(
                Finding(
                    REUSED if owner else FREED, "J2", message=told, field=name, owner=owner or "nobody: the host tensor is gone",
                    since=note.died_at, dropped=note.died or (), **place,
                )
            )  # fmt: skip
            continue
        pool = _pool_of(capture, note)
        if pool != DEFAULT_POOL:
            _pooled(capture, now, report, note, touch, place, pool, name)
            continue
        verdict, owner = _dead_verdict(place["address"], now), _owner(place["address"], now)
        does = {"read": "reads", "write": "writes", "read-write": "reads and writes"}[touch.access]
        told = f"the graph {does} {name or touch.argument} at 0x{place['address']:x}, whose tensor is gone."
        since = owner.since if verdict == REUSED else note.died_at if note.died_at is not None else owner.since
        newcomer = _newcomer(capture, now, note)
        if newcomer is not None:
            told = f"{name} was captured at 0x{place['address']:x} and is a new tensor at 0x{newcomer.address:x} now."
            told = _lucky(name, note.address) if newcomer.address == note.address else told
        grown = newcomer is not None and newcomer.nbytes > note.nbytes
        scratch = grown and (bool(touch.writes) or newcomer.made == RESIZE)
        hazard = "B" if newcomer is None or grown and not scratch else "C" if scratch else "A"
        report.add(
            Finding(
                verdict, hazard, message=told, field=name, owner=owner.text, since=since, stack=owner.stack,
                moved_to=None if newcomer is None else newcomer.address, dropped=note.died or (), **place,
            )
        )  # fmt: skip


# A without a word from the caller
def _newcomer(capture, now, note):
    """The note of a tensor made since capture that bears the name that `note`'s had then, and is no smaller; or None."""
    if note.variable is None or note.names or now.book is None:
        return None
    tensor = now.variables().get(note.variable)
    other = now.book.find(tensor) if tensor is not None and tensor.numel() else None
    if other is None or other is note or other.nbytes < note.nbytes or other.born is None or other.born < capture.begun:
        return None
    return other if capture.touch(other) is None else None


def _newcomers(capture, now, report, explained) -> None:
    """A tensor made anew for each replay that no op reads, under the name of one that the graph reads and nobody writes."""
    if capture.sighting is None or now.ledger is None or capture.replays > MOST_REPLAYS:
        return
    for note, touch in capture.sighting.touches.items():
        if note.variable is None or note in explained or not touch.reads or touch.writes or not note.intact():
            continue
        entry = now.ledger.entries.get(note)
        if entry is None or entry.ever:
            continue
        before, after = capture.suspects.get(note), _newcomer(capture, now, note)
        if after is not None and after.nbytes != note.nbytes:
            after = None
        if after is not None:
            capture.suspects[note] = after
        if before is None or after is None or before is after or before.read or after.read:
            continue
        told = (
            f"each step makes a new {note.variable}, now at 0x{after.address:x}, that no op reads; the graph reads the one of "
            f"the capture at 0x{note.address:x}, which nobody has written since."
        )
        owner = "the tensor that was captured, still held"
        place = _place(capture, note)
        report.add(Finding(MOVED, "A", message=told, field=note.variable, owner=owner, moved_to=after.address, **place))


# Their operands go into tensor maps or library structs, where no plain pointer needs to stand.
DESCRIBED = frozenset(f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "convolution"))


def _name(capture, note) -> str | None:
    """What to call a tensor: as declared, as a variable of the program at capture, or as its block was labelled then."""
    if note.names or note.variable:
        return note.names[0] if note.names else note.variable
    block = capture.memory.find(note.address) if capture.memory is not None else None
    return block.label if block is not None else None


def _host_owner(capture, note, now) -> str | None:
    blocks = capture.backend.host_map()
    if blocks is not None:
        block = blocks.find(note.address)
        return None if block is None or block.state != "allocated" else block.label or "another pinned tensor"
    other = None if now.book is None else now.book.owner(note.address)
    return None if other is None else "another pinned tensor"


def _pool_of(capture, note) -> tuple[int, int]:
    block = capture.memory.find(note.address) if capture.memory is not None else None
    return block.pool if block is not None else DEFAULT_POOL


def _pooled(capture, now, report, note, touch, place, pool, name) -> None:
    """A tensor of a graph pool that died: wrong once another graph's node has written its bytes after its maker did."""
    hazard = "E" if pool == capture.pool else "D"
    if not touch.reads:
        return
    writer, write, watched = _last_writer(now.captures, note)
    if writer is not None and now.ledger is not None:
        if now.ledger.written_at_since(note.address, note.end, writer.last_replay):
            return  # the host has put new bytes there since, as cudagraph trees do with their inputs
    if writer is not None and write.note is not note:
        told = (
            f"the graph reads {name or touch.argument} at 0x{place['address']:x}; its tensor is gone and its block in pool "
            f"{pool} was handed on: graph {writer.index} ({write.op}) wrote there last."
        )
        report.add(
            Finding(
                REUSED, hazard, message=told, field=name, owner=f"a result of graph {writer.index} ({write.op})",
                since=writer.last_replay, dropped=note.died or (), **place,
            )
        )  # fmt: skip
        return
    if watched:
        return  # its maker wrote it last: still the right bytes
    block = now.memory().find(place["address"])
    if block is None or block.pool != pool or block.state == "allocated":
        owner = _owner(place["address"], now)
        told = f"the graph reads {name or touch.argument} at 0x{place['address']:x} in pool {pool}, whose tensor is gone."
        verdict = FREED if block is None else REUSED
        report.add(
            Finding(
                verdict, hazard, message=told, field=name, owner=owner.text, since=owner.since, stack=owner.stack,
                dropped=note.died or (), **place,
            )
        )  # fmt: skip
    elif pool != capture.pool:
        told = f"the graph reads {name or touch.argument} at 0x{place['address']:x}, a freed block in another graph's pool."
        report.add(
            Finding(
                FOREIGN_POOL, hazard, message=told, field=name, owner="nobody: free", since=note.died_at,
                dropped=note.died or (), **place,
            )
        )  # fmt: skip
    else:
        report.miss(
            f"{name or touch.argument} of graph {capture.index}",
            "a freed tensor of the graph's pool; the graph that makes it was captured or replayed before the watch began",
            capture.index,
        )


def _last_writer(captures, note):
    """(capture, its last write, whether any watched graph writes there at all) of the latest replay over `note`'s bytes."""
    best, write, watched = None, None, False
    for other in captures:
        if other.sighting is None:
            continue
        last = None
        for one in other.sighting.writes:
            if one.low < note.end and note.address < one.high:
                last = one
        if last is None:
            continue
        watched = True
        if other.last_replay is not None and (best is None or other.last_replay > best.last_replay):
            best, write = other, last
    return best, write, watched


# E: a tensor that a capture made, that outlives it, over bytes that the graph writes for another
def _clobbered(capture, now, report) -> None:
    if capture.sighting is None or now.ledger is None:
        return
    for note, touch in capture.sighting.inner.items():
        if touch.writes or not note.intact():
            continue
        entry = now.ledger.entries.get(note)
        if not touch.reads and not (entry is not None and entry.ever):
            continue
        for one in capture.sighting.writes:
            if one.note is not note and one.low < note.end and note.address < one.high:
                place = _place(capture, note)
                place["argument"] = place["argument"] if touch.read_by is None else touch.read_by[1]
                place["address"] = note.address
                name = _name(capture, note)
                told = (
                    f"{name or 'a tensor'} was made during capture in a block that the graph has another use for: "
                    f"each replay lets {one.op} write over it."
                )
                where = note.stack[0] if note.stack else "during capture"
                report.add(
                    Finding(
                        REUSED, "E", message=told, field=name, owner=f"a tensor made by {note.made} at {where}, and {one.op}",
                        since=note.born, stack=note.stack, **place,
                    )
                )  # fmt: skip
                break


# B for launches that no dispatcher shows
def _raw_pointers(capture, now, report) -> None:
    if capture.backend.name != "cuda" or capture.memory is None or capture.replays & (capture.replays - 1):
        return  # a snapshot of the allocator at each replay would cost too much: at replays 0, 1, 2, 4, 8, ...
    seen = []
    if capture.sighting is not None:
        seen = [note for table in (capture.sighting.touches, capture.sighting.inner) for note in table]
    doubtful = 0
    for node in capture.nodes:
        for argument in node.arguments:
            address = argument.address
            was = capture.memory.find(address)
            if was is None or was.state != "allocated" or was.pool != DEFAULT_POOL:
                continue
            block = now.memory().find(address)
            if block is not None and block.state == "allocated":
                continue
            if any(note.address <= address < note.end for note in seen):
                continue
            if not is_sure(node, argument) and (node.index, argument.name) not in capture.confirmed:
                doubtful += 1
                continue
            told = f"{argument.name} of {node.name} holds 0x{address:x}, a block that was freed since capture."
            report.add(
                Finding(
                    FREED, "B", argument.name, address, told, capture.index, node.index, node.name, argument.offset,
                    owner=describe(block), since=None if block is None else block.since,
                )
            )  # fmt: skip
    if doubtful:
        report.miss(
            f"{doubtful} words in structs of graph {capture.index}",
            "they hold addresses of blocks that were freed since capture, but may be no pointers; give second= to tell",
            capture.index,
        )


# G
def _scalars(capture, now, report) -> None:
    for name, was in capture.scalars.items():
        if name not in now.scalars or now.scalars[name] == was:
            continue
        value = now.scalars[name]
        if isinstance(was, bool) or was in COMMON:
            report.miss(
                f"number {name} of graph {capture.index}",
                f"it was {was} at capture, which stands in many calls; capture with a rarer value, or give second=",
                capture.index,
            )
            continue
        found = _baked_number(capture, was)
        if found is None:
            continue
        op, argument, node = found
        told = f"{name} was {was} at capture and is {value} now; the graph still passes {was} to {op}."
        report.add(Finding(LIVE, "G", argument, 0, told, capture.index, node, op, field=name))


def _baked_number(capture, value) -> tuple[str, str, int | None] | None:
    for node in capture.nodes:
        for name, number in node.scalars:
            if type(number) is type(value) and number == value and name not in ("bytes", "shared_bytes"):
                return node.name, name, node.index
    if capture.sighting is not None:
        for scalar in sorted(capture.sighting.scalars, key=lambda one: one.view):
            if not isinstance(scalar.value, bool) and scalar.value == value:
                return scalar.op, scalar.argument, None
    return None


# H
def _work(capture, now, report) -> None:
    for name, bound in capture.work.items():
        amount = now.work.get(name)
        if amount is None or amount <= bound:
            continue
        op, argument, node = _bounded_by(capture, bound)
        told = f"{name} is {amount} at this replay; the graph was captured for {bound} and does no more."
        report.add(Finding(LIVE, "H", argument or name, 0, told, capture.index, node, op, field=name))


def _bounded_by(capture, bound) -> tuple[str | None, str | None, int | None]:
    for node in capture.nodes:
        for argument in node.arguments:
            if argument.shape is not None and bound in argument.shape:
                return node.name, argument.name, node.index
    for op, argument, shape in capture.sighting.shapes if capture.sighting else ():
        if bound in shape:
            return op, argument, None
    return None, None, None


# F for declared inputs
def _inputs(capture, now, report) -> None:
    if now.ledger is None:
        return
    for path in sorted(now.inputs):
        was, tensor = capture.fields.get(path), now.fields.get(path)
        if was is None or tensor is None or not capture.holds(was) or not was.note.is_of(tensor):
            continue
        content = bytes_of(tensor, now)
        before, capture.snapshots[path] = capture.snapshots.get(path), content
        if before is None or capture.replays < 1:
            continue
        touch = capture.touch(was.note)
        written = now.ledger.written_since(was.note, capture.index)
        stale = Extents()
        for low, high in was.ranges:
            reads = [(low, high)] if touch is None else _common(touch.all_reads, low, high)
            for first, last in reads:
                stale.update(written.missing(first, last))
        if not stale:
            continue
        if any(not torch.equal(before[low:high], content[low:high]) for low, high in stale):
            report.miss(
                f"writes to {path}", "its content changes through something that the dispatcher does not show", capture.index
            )
            continue
        low, high = next(iter(stale))
        start = was.ranges[0][0]
        done = _count(written, was.ranges)
        told = (
            f"{path} is where the graph reads it, but bytes {low - start} to {high - start} that it reads were not written "
            f"since the last replay ({done} bytes were)."
        )
        report.add(Finding(LIVE, "F", message=told, field=path, owner=path, **_place(capture, was.note, None, was)))


def _common(extents, low, high) -> list[tuple[int, int]]:
    return [(max(low, a), min(high, b)) for a, b in extents if a < high and low < b]


def _count(extents, within) -> int:
    return sum(b - a for low, high in within for a, b in _common(extents, low, high))


def bytes_of(tensor, now) -> torch.Tensor:
    from contextlib import nullcontext

    with now.paused() if now.paused is not None else nullcontext():
        storage = tensor.untyped_storage()
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        return flat.cpu().clone()


# F without a word from the caller
def _lost_writes(capture, now, report) -> None:
    if now.ledger is None or capture.sighting is None:
        return
    for note, touch in capture.sighting.touches.items():
        entry = now.ledger.entries.get(note)
        if entry is None or not entry.lost or not touch.reads or not note.intact():
            continue
        if any(entry.ever.overlaps(low, high) for low, high in touch.all_reads):
            continue
        readers = [other.sighting.touches[note] for other in now.captures if other.sighting and note in other.sighting.touches]
        if any(reader.all_reads.overlaps(low, high) for low, high in entry.lost for reader in readers):
            continue
        low, high = next(iter(touch.reads))
        first, last = next(iter(entry.lost))
        name = _name(capture, note)
        told = (
            f"each step writes bytes {first} to {last} of {name or touch.argument}'s buffer, which nobody reads, while the graph "
            f"reads bytes {low} to {high}, which nobody has written since capture."
        )
        report.add(Finding(LIVE, "F", message=told, field=name, owner=name, **_place(capture, note)))


# I1
def _reading_rules(capture, now, report) -> None:
    from contextlib import nullcontext

    with now.paused() if now.paused is not None else nullcontext():
        for op, tensors, numbers, node in _ruled_calls(capture):
            for out in rules.find(op)(tensors, numbers):
                table = tensors.get(out.argument)
                name = None
                for path, was in capture.fields.items():
                    if table is not None and was.note.address <= table.data_ptr() < was.note.end:
                        name = path
                report.add(Finding(LIVE, "I1", out.argument, out.address, out.message, capture.index, node, op, field=name))


def _ruled_calls(capture):
    known = rules.names()
    if capture.sighting is not None and capture.sighting.calls:
        for call in capture.sighting.calls:
            # Intermediates of the graph are gone by now; a formula that needs one of them has nothing to say.
            tensors = {name: tensor for name, what in call.tensors.items() if (tensor := revive(what)) is not None}
            node = next((node.index for node in capture.nodes if node.name == call.op), None)
            yield call.op, tensors, call.numbers, node
        return
    for node in capture.nodes:
        if node.name in known:
            views = {
                one.name: capture.backend.view(one.address, one.shape, one.strides, one.dtype)
                for one in node.arguments
                if one.shape is not None
            }
            if all(view is not None for view in views.values()):
                yield node.name, views, dict(node.scalars), node.index
