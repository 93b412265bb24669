"""What the graph's kernels are given: old values, numbers by value, bounds, indices out of bounds."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from stalegraph.audit import rules
from stalegraph.audit.extents import Extents
from stalegraph.audit.hazards import LIVE
from stalegraph.audit.now import bytes_of, name_of, place_of
from stalegraph.audit.report import Finding
from stalegraph.audit.witness import revive

COMMON = (0, 1, -1)  # numbers that stand in so many calls that finding one proves nothing


# G
def scalars(capture, now, report) -> None:
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
def work(capture, now, report) -> None:
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
def inputs(capture, now, report) -> None:
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
                f"writes to {path}",
                "its content changes through something that the dispatcher does not show",
                capture.index,
            )
            continue
        low, high = next(iter(stale))
        start = was.ranges[0][0]
        done = _count(written, was.ranges)
        told = (
            f"{path} is where the graph reads it, but bytes {low - start} to {high - start} that it reads were not "
            f"written since the last replay ({done} bytes were)."
        )
        report.add(Finding(LIVE, "F", message=told, field=path, owner=path, **place_of(capture, was.note, None, was)))


def _common(extents, low, high) -> list[tuple[int, int]]:
    return [(max(low, a), min(high, b)) for a, b in extents if a < high and low < b]


def _count(extents, within) -> int:
    return sum(b - a for low, high in within for a, b in _common(extents, low, high))


# F without a word from the caller
def lost_writes(capture, now, report) -> None:
    if now.ledger is None or capture.sighting is None:
        return
    for note, touch in capture.sighting.touches.items():
        entry = now.ledger.entries.get(note)
        if entry is None or not entry.lost or not touch.reads or not note.intact():
            continue
        if any(entry.ever.overlaps(low, high) for low, high in touch.all_reads):
            continue
        readers = [
            other.sighting.touches[note] for other in now.captures if other.sighting and note in other.sighting.touches
        ]
        if any(reader.all_reads.overlaps(low, high) for low, high in entry.lost for reader in readers):
            continue
        low, high = next(iter(touch.reads))
        first, last = next(iter(entry.lost))
        name = name_of(capture, note)
        told = (
            f"each step writes bytes {first} to {last} of {name or touch.argument}'s buffer, which nobody reads, while "
            f"the graph reads bytes {low} to {high}, which nobody has written since capture."
        )
        report.add(Finding(LIVE, "F", message=told, field=name, owner=name, **place_of(capture, note)))


# I1
def reading_rules(capture, now, report) -> None:
    with now.paused() if now.paused is not None else nullcontext():
        for op, tensors, numbers, node in _ruled_calls(capture):
            for out in rules.find(op)(tensors, numbers):
                table = tensors.get(out.argument)
                name = None
                for path, was in capture.fields.items():
                    if table is not None and was.note.address <= table.data_ptr() < was.note.end:
                        name = path
                report.add(
                    Finding(LIVE, "I1", out.argument, out.address, out.message, capture.index, node, op, field=name)
                )


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
