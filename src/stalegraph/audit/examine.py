"""`audit(graph)`: one captured graph, looked at now."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from stalegraph.audit import tree
from stalegraph.audit.backend import backend_of, state_of
from stalegraph.audit.capture import Capture, FieldNote, from_nodes
from stalegraph.audit.compare import compare
from stalegraph.audit.extents import ranges
from stalegraph.audit.judge import judge
from stalegraph.audit.ledger import Ledger
from stalegraph.audit.now import Now, bytes_of
from stalegraph.audit.pointers import pointers
from stalegraph.audit.report import Report
from stalegraph.audit.storages import StorageBook
from stalegraph.errors import StalegraphError, UsageError


class Notes:
    """The tensors of a caller's tree as they are now, not kept alive: taken at capture, given to `audit` later."""

    def __init__(self, fields, memory=None):
        self.book = StorageBook()
        self.fields = {
            path: FieldNote.of(tensor, self.book.note(tensor))
            for path, tensor in named(fields).items()
            if tensor.numel()
        }


def note(fields) -> Notes:
    """Notes the tensors in `fields` (any tree of dataclasses, dicts, sequences, objects), weakly, by storage."""
    return Notes(fields)


def named(fields) -> dict[str, torch.Tensor]:
    """Name -> tensor of a tree, or of what a function without arguments returns."""
    if fields is None:
        return {}
    if isinstance(fields, Callable) and not isinstance(fields, (torch.Tensor, torch.nn.Module)):
        fields = fields()
    return dict((path or "tensor", tensor) for path, tensor in tree.walk(fields))


def audit(
    graph, *, device=None, fields=None, captured=None, inputs=None, caches=None, ledger=None, scalars=None, work=None,
    second=None,
) -> Report:  # fmt: skip
    """Judges every address that `graph` has baked in, as if it were replayed now; a Report.

    `fields`: the caller's metadata as it is now, any tree of tensors or a function that returns one. `captured`: the
    same as it was at capture, from `note()`; without it, fields are matched by the nodes' argument names. `ledger`: the
    tensors (views) that the step has written; then every field must be covered, or those in `inputs` if given.
    `caches`: a tree of workspaces. `scalars` and `work`: name -> (value at capture, value now). `second`: another
    capture of the same step. Under `watch()` what was seen at capture is used too.
    """
    from stalegraph.audit.watch import current_watch

    return examine(
        graph, current_watch(), device=device, fields=fields, captured=captured, inputs=inputs, caches=caches,
        ledger=ledger, scalars=scalars, work=work, second=second,
    )  # fmt: skip


def examine(
    graph, watch, *, device=None, fields=None, captured=None, inputs=None, caches=None, ledger=None, scalars=None,
    work=None, second=None,
) -> Report:  # fmt: skip
    """`audit` with the watch, if any, that may have seen the capture."""
    graph = getattr(graph, "simulated", graph)
    backend = backend_of(graph, device)
    known = watch.capture_of(graph) if watch is not None else None
    report = Report()
    reason = state_of(graph)
    if reason is not None:
        report.graphs = 0
        report.miss("this graph", reason)
        return report
    if known is None:
        capture, book = _capture(graph, backend, report), None
    else:
        capture, book = known, watch.book
        capture.read_nodes(graph)
    report.nodes = len(capture.nodes)
    note_gaps(capture, report)
    now_map = backend.memory_map()
    tensors, cached, declared = named(fields), named(caches), named(inputs)
    now = Now(
        memory=lambda: now_map, fields={**tensors, **cached, **declared}, caches=set(cached), inputs=set(declared),
        book=book, captures=[capture], paused=backend.paused, ledger=None if known is None else watch.ledger,
    )  # fmt: skip
    if known is not None:
        now = watch.now(now)
    else:
        _given_fields(capture, now, captured, report)
    for name, pair in _pairs("scalars", scalars).items():
        capture.scalars[name], now.scalars[name] = pair
    for name, pair in _pairs("work", work).items():
        capture.work[name], now.work[name] = pair
    if ledger is not None:
        _given_ledger(capture, now, ledger, declared)
    if second is not None:
        _second(capture, second, device, now_map, report)
    judge(capture, now, report)
    report.pointers = pointers(capture, now_map)
    return report


def _capture(graph, backend, report) -> Capture:
    own = getattr(graph, "_memory", None)  # CudaGraph keeps the memory map of its capture
    try:
        pool = backend.pool(graph)
    except (RuntimeError, StalegraphError) as error:
        pool = (0, 0)
        report.miss("the graph's pool", str(error).splitlines()[0])
    capture = Capture(1, weakref.ref(graph), backend, pool, memory=own)
    capture.read_nodes(graph)
    now = backend.memory_map()
    if backend.name == "sim":
        capture.memory = None
    capture.sighting = from_nodes(graph, backend, capture.nodes, now, own, pool)
    capture.memory = own or now
    if backend.name == "cuda":
        report.miss(
            "blocks handed to another tensor since capture",
            "without watch() around the capture, CUDA does not tell a block's owner then from its owner now",
        )
    return capture


def note_gaps(capture: Capture, report: Report) -> None:
    """Puts what could not be read of `capture` into the report."""
    if capture.unread is not None:
        report.miss(f"the nodes of graph {capture.index}", capture.unread, capture.index)
    reasons: dict[str, list[str]] = {}
    for node in capture.nodes:
        if node.opaque:
            reasons.setdefault(node.opaque, []).append(f"{node.index} {node.name}")
    for reason, nodes in reasons.items():
        more = f" and {len(nodes) - 3} more" if len(nodes) > 3 else ""
        report.miss(f"parameters of node {', '.join(nodes[:3])}{more} of graph {capture.index}", reason, capture.index)


def _pairs(argument: str, given) -> dict[str, tuple]:
    for name, pair in (given or {}).items():
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise UsageError(f"{argument}[{name!r}] is {pair!r}; allowed: a pair (value at capture, value now)")
    return dict(given or {})


def _given_fields(capture, now, captured, report) -> None:
    """Which storage each of the caller's fields had at capture: from notes, or from the nodes' argument names."""
    if captured is not None:
        notes = captured if isinstance(captured, Notes) else note(captured)
        capture.fields.update(notes.fields)
        touches = capture.sighting.touches
        for was in notes.fields.values():  # a storage's own note knows more than the block that it lay in
            for block in [one for one in touches if one.address <= was.note.address < one.end]:
                touch = touches.pop(block)
                touch.note = was.note
                touches[was.note] = touch
        return
    missed = []
    for path, tensor in now.fields.items():
        leaf = path.rsplit(".", 1)[-1].split("[", 1)[0]
        named_nodes = [(a.address, a) for node in capture.nodes for a in node.arguments if a.name == leaf]
        at = tensor.untyped_storage().data_ptr()
        end = at + tensor.untyped_storage().nbytes()
        inside = [a for address, a in named_nodes if at <= address < end] or [
            a for node in capture.nodes for a in node.arguments if at <= a.address < end
        ]
        other = [a for address, a in named_nodes if not at <= address < end]
        argument = inside[0] if inside else other[0] if other else None
        if argument is None:
            missed.append(path)
            continue
        block = next((one for one in capture.sighting.touches if one.address <= argument.address < one.end), None)
        if block is not None:
            size = argument.nbytes or 1
            low = argument.address - block.address
            capture.fields[path] = FieldNote(
                block, argument.address, ((low, low + size),), argument.shape or (), tensor.dtype
            )
    if missed:
        report.miss(
            f"field{'s' * (len(missed) > 1)} {', '.join(missed)}",
            "no node holds it now and no argument has its name; note() the fields at capture, or capture under watch()",
        )


def _given_ledger(capture, now, ledger, declared) -> None:
    """The caller's own list of written tensors, in the place of what a watch would have seen."""
    now.ledger = Ledger()
    now.inputs = set(declared) or set(now.fields)
    for path in now.inputs:
        was = capture.fields.get(path)
        if was is None:
            continue
        now.ledger.open(was.note, capture.index)
        for written in named(list(ledger) if not isinstance(ledger, dict) else ledger).values():
            start = written.untyped_storage().data_ptr()
            if was.note.address <= start < max(was.note.end, was.note.address + 1):
                shift = start - was.note.address
                now.ledger.host_writes(
                    was.note, [(shift + low, shift + high) for low, high in ranges(written)], "ledger"
                )
        if path in now.fields:
            capture.snapshots[path] = bytes_of(now.fields[path], now)
    capture.replays = max(capture.replays, 1)


def _second(capture, second, device, now_map, report) -> None:
    if not isinstance(second, Capture):
        backend = backend_of(second, device)
        reason = state_of(second)
        if reason is not None:
            report.miss("the second capture", reason)
            return
        other = Capture(0, weakref.ref(second), backend, backend.pool(second))
        other.read_nodes(second)
        second = other
    if second.unread is not None:
        report.miss("the nodes of the second capture", second.unread)
        return
    compare(capture, second, now_map, report)
