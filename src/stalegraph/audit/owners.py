"""Whose memory the graph has baked in: tensors that were re-bound, freed, moved, re-carved or never the graph's own."""

from __future__ import annotations

from stalegraph.audit.capture import is_sure
from stalegraph.audit.extents import Extents, ranges
from stalegraph.audit.hazards import FOREIGN_POOL, FREED, MOVED, REUSED
from stalegraph.audit.now import Owner, dead_verdict, name_of, owner_of, place_of
from stalegraph.audit.pointers import describe
from stalegraph.audit.report import Finding
from stalegraph.audit.witness import RESIZE
from stalegraph.blocks import DEFAULT_POOL

MOST_REPLAYS = 64  # after so many replays of a graph the program's variables are not looked at any more
# Their operands go into tensor maps or library structs, where no plain pointer needs to stand.
DESCRIBED = frozenset(f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "convolution"))


# A, C, and F where the caller hands over another slice
def fields(capture, now, report, explained) -> None:
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
        place = place_of(capture, note, None, was)
        touch = capture.touch(note)
        nbytes = tensor.untyped_storage().nbytes()
        grown, written = nbytes > note.nbytes, touch is not None and bool(touch.writes)
        hazard = "C" if path in now.caches or (grown and written) or note.moved_to() is not None else "A"
        if note.intact():
            verdict, owner = MOVED, Owner("the tensor that was captured, still held")
        else:
            verdict, owner = dead_verdict(place["address"], now), owner_of(place["address"], now)
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
    told = (
        f"{path} is another slice of its buffer than at capture: 0x{was.address:x} then, 0x{tensor.data_ptr():x} now."
    )
    report.add(Finding(MOVED, "F", message=told, field=path, owner=path, **place_of(capture, was.note, None, was)))


# B, C by resize_, D, E, J2
def owners(capture, now, report, explained) -> None:
    touches = capture.sighting.touches if capture.sighting else {}
    for note, touch in touches.items():
        if note in explained or note.intact():
            continue
        place = place_of(capture, note)
        baked = "node" in place
        if not baked and (touch.pinned or capture.backend.is_host(note.address) or not capture.opaque):
            # Read the parameters and not found: passed to the op, not to a kernel. Matrix products are told by
            # the dispatcher alone, since their operands can sit in descriptors.
            if touch.pinned or touch.op not in DESCRIBED:
                continue
        name = name_of(capture, note)
        what, at = name or touch.argument, f"0x{place['address']:x}"
        moved = note.moved_to()
        if moved is not None:
            told = f"the storage of {what} was at 0x{note.address:x}; resize_ has moved it to 0x{moved:x}."
            owner = owner_of(note.address, now)
            report.add(
                Finding(
                    MOVED, "C", message=told, field=name, owner=owner.text, since=owner.since, stack=owner.stack,
                    moved_to=moved, **place
                )
            )  # fmt: skip
            continue
        if touch.pinned or capture.backend.is_host(note.address):
            owner = _host_owner(capture, note, now)
            told = f"a captured copy reads {what} at host address {at}, whose tensor is gone."
            report.add(
                Finding(
                    REUSED if owner else FREED, "J2", message=told, field=name,
                    owner=owner or "nobody: the host tensor is gone",
                    since=note.died_at, dropped=note.died or (), **place,
                )
            )  # fmt: skip
            continue
        pool = _pool_of(capture, note)
        if pool != DEFAULT_POOL:
            _pooled(capture, now, report, note, touch, place, pool, name)
            continue
        verdict, owner = dead_verdict(place["address"], now), owner_of(place["address"], now)
        does = {"read": "reads", "write": "writes", "read-write": "reads and writes"}[touch.access]
        told = f"the graph {does} {what} at {at}, whose tensor is gone."
        since = owner.since if verdict == REUSED else note.died_at if note.died_at is not None else owner.since
        newcomer = _newcomer(capture, now, note)
        if newcomer is not None:
            told = f"{name} was captured at {at} and is a new tensor at 0x{newcomer.address:x} now."
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
    """The note of a tensor made since capture that has the name that `note`'s had then, and is no smaller; or None."""
    if note.variable is None or note.names or now.book is None:
        return None
    tensor = now.variables().get(note.variable)
    other = now.book.find(tensor) if tensor is not None and tensor.numel() else None
    if other is None or other is note or other.nbytes < note.nbytes or other.born is None or other.born < capture.begun:
        return None
    return other if capture.touch(other) is None else None


def newcomers(capture, now, report, explained) -> None:
    """A tensor made anew for each replay that no op reads, named as one that the graph reads and nobody writes."""
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
            f"each step makes a new {note.variable}, now at 0x{after.address:x}, that no op reads; the graph reads "
            f"the one of the capture at 0x{note.address:x}, which nobody has written since."
        )
        owner = "the tensor that was captured, still held"
        place = place_of(capture, note)
        report.add(Finding(MOVED, "A", message=told, field=note.variable, owner=owner, moved_to=after.address, **place))


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
    what, at = name or touch.argument, f"0x{place['address']:x}"
    writer, write, watched = _last_writer(now.captures, note)
    if writer is not None and now.ledger is not None:
        if now.ledger.written_at_since(note.address, note.end, writer.last_replay):
            return  # the host has put new bytes there since, as cudagraph trees do with their inputs
    if writer is not None and write.note is not note:
        told = (
            f"the graph reads {what} at {at}; its tensor is gone and its block in pool {pool} "
            f"was handed on: graph {writer.index} ({write.op}) wrote there last."
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
        owner = owner_of(place["address"], now)
        told = (
            f"the graph reads {name or touch.argument} at 0x{place['address']:x} in pool {pool}, whose tensor is gone."
        )
        verdict = FREED if block is None else REUSED
        report.add(
            Finding(
                verdict, hazard, message=told, field=name, owner=owner.text, since=owner.since, stack=owner.stack,
                dropped=note.died or (), **place,
            )
        )  # fmt: skip
    elif pool != capture.pool:
        told = f"the graph reads {what} at {at}, a freed block in another graph's pool."
        report.add(
            Finding(
                FOREIGN_POOL, hazard, message=told, field=name, owner="nobody: free", since=note.died_at,
                dropped=note.died or (), **place,
            )
        )  # fmt: skip
    else:
        report.miss(
            f"{name or touch.argument} of graph {capture.index}",
            "a freed tensor of the graph's pool; the graph that makes it was captured before the watch began",
            capture.index,
        )


def _last_writer(captures, note):
    """(capture, its last write, whether any watched graph writes there) of the latest replay over `note`'s bytes."""
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
def clobbered(capture, now, report) -> None:
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
                place = place_of(capture, note)
                place["argument"] = place["argument"] if touch.read_by is None else touch.read_by[1]
                place["address"] = note.address
                name = name_of(capture, note)
                told = (
                    f"{name or 'a tensor'} was made during capture in a block that the graph has another use for: "
                    f"each replay lets {one.op} write over it."
                )
                where = note.stack[0] if note.stack else "during capture"
                report.add(
                    Finding(
                        REUSED, "E", message=told, field=name,
                        owner=f"a tensor made by {note.made} at {where}, and {one.op}",
                        since=note.born, stack=note.stack, **place,
                    )
                )  # fmt: skip
                break


# B for launches that no dispatcher shows
def raw_pointers(capture, now, report) -> None:
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
