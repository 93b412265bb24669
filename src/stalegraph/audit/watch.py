"""`with watch() as w:` around any PyTorch program that captures and replays graphs, on CUDA or on the simulated GPU."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensor

from stalegraph.audit import hooks, rules
from stalegraph.audit.backend import Cuda, Simulated
from stalegraph.audit.capture import Capture, FieldNote
from stalegraph.audit.examine import examine, named, note_gaps
from stalegraph.audit.judge import judge
from stalegraph.audit.ledger import Ledger
from stalegraph.audit.now import Now
from stalegraph.audit.pointers import pointers
from stalegraph.audit.report import Finding, Report
from stalegraph.audit.storages import StorageBook, variables
from stalegraph.audit.witness import Sight, Sighting, Witness
from stalegraph.errors import StaleReadError, UsageError
from stalegraph.simulator import current_device

UNREPLAYED = "never replayed under the watch, and what a graph needs is judged at its replay"
_watch: Watch | None = None


def current_watch() -> Watch | None:
    """The watch that is open now, or None."""
    return _watch


def watch(
    *, fields=None, inputs=None, caches=None, scalars=None, work=None, raises: bool = False, quiet: bool = False
) -> Watch:
    """A context manager that audits each graph captured in it at each replay; `Watch.declare` says what to tell it.

    With `raises` a finding stops the program with StaleReadError before the replay; with `quiet` nothing is printed.
    """
    opened = Watch(raises=raises, quiet=quiet)
    opened.declare(fields=fields, inputs=inputs, caches=caches, scalars=scalars, work=work)
    return opened


def declare(**what) -> None:
    """`Watch.declare` of the watch that is open; does nothing where none is, so a program may keep the call."""
    if _watch is not None:
        _watch.declare(**what)


class Watch:
    """Sees captures, replays, and what is written between them; `report()` tells at any time."""

    def __init__(self, *, raises: bool = False, quiet: bool = False, stream=None):
        self.raises, self.quiet, self.stream = raises, quiet, stream
        self.tick = 0  # replays so far: the watch's clock
        self.book = StorageBook(lambda: self.tick)
        self.ledger = Ledger(lambda: self.tick)
        self.captures: list[Capture] = []
        self._report = Report(graphs=0)
        self._sight = Sight(self.book, self.ledger, self._on_device, self._on_host, rules.names())
        self._trees: list[tuple[str, object]] = []
        self._scalars: dict[str, object] = {}
        self._work: dict[str, object] = {}
        self._open: list[tuple[object, Capture]] = []  # captures that run now
        self._by_graph: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self._strangers: weakref.WeakSet = weakref.WeakSet()
        self._modes: list[Witness] = []

    # told by the caller
    def declare(self, *, fields=None, inputs=None, caches=None, scalars=None, work=None) -> None:
        """Names what the program cannot show. Trees may be functions that return them, asked again at each replay.

        `fields`: the metadata that the step hands to the graph. `inputs`: fields of which every captured byte must be
        written before each replay. `caches`: workspaces, which must not move. `scalars`: name -> function that gives a
        host number. `work`: name -> function that gives how much a step has to do, never more than at capture.
        """
        for kind, value in (("fields", fields), ("inputs", inputs), ("caches", caches)):
            if value is not None:
                self._trees.append((kind, value))
        for name, given, kept in (("scalars", scalars, self._scalars), ("work", work, self._work)):
            for key, value in (given or {}).items():
                if not isinstance(value, Callable):
                    raise UsageError(
                        f"{name}[{key!r}] is {value!r}; allowed: a function that gives the number as it is now"
                    )
                kept[key] = value

    # life
    def __enter__(self) -> Watch:
        global _watch
        if _watch is not None:
            raise UsageError("a watch is open already; allowed: one at a time (`stalegraph audit` opens one itself)")
        _watch = self
        hooks.install(self)
        self.push()
        return self

    def __exit__(self, kind, *exception) -> None:
        global _watch
        self.pop()
        hooks.uninstall()
        _watch = None
        report = self.report()
        for unseen in report.not_seen:
            self._say(unseen.line())
        self._say(f"[stalegraph] {report.summary()}")

    def push(self) -> None:
        """Put a witness on top of the dispatch modes; the one below it sleeps."""
        witness = Witness(self._sight)
        witness.__enter__()
        self._modes.append(witness)
        self._sight.top = witness

    def pop(self) -> None:
        self._modes.pop().__exit__(None, None, None)
        self._sight.top = self._modes[-1] if self._modes else None

    def _say(self, line: str) -> None:
        if not self.quiet:
            print(line, file=self.stream or sys.stderr)

    def _on_device(self, tensor, capturing: bool) -> bool:
        return self._backend().on_device(tensor, capturing)

    def _on_host(self, tensor) -> bool:
        return self._backend().is_host_tensor(tensor)

    @contextmanager
    def _paused(self):
        """The watch's own reading of tensors is none of the program's."""
        self._sight.paused += 1
        try:
            with self._backend().paused():
                yield
        finally:
            self._sight.paused -= 1

    def _backend(self):
        device = current_device()
        if device is None:
            return Cuda()
        if getattr(self, "_simulated", None) is None or self._simulated.device is not device:
            self._simulated = Simulated(device)
        return self._simulated

    # the present
    def now(self, more: Now | None = None) -> Now:
        """What the caller's trees, numbers and the device are now."""
        backend = self._backend()
        memory: list = []

        def memory_map():
            if not memory:
                memory.append(backend.memory_map())
            return memory[0]

        named_now: list = []

        def by_variable():
            if not named_now:
                named_now.append(self._variables())
            return named_now[0]

        now = Now(
            memory_map, book=self.book, ledger=self.ledger, captures=self.captures, paused=self._paused,
            variables=by_variable,
        )  # fmt: skip
        self._sight.paused += 1
        try:
            for kind, value in self._trees:
                tensors = self._ask(kind, lambda value=value: named(value)) or {}
                now.fields.update(tensors)
                if kind == "inputs":
                    now.inputs.update(tensors)
                elif kind == "caches":
                    now.caches.update(tensors)
            for kind, given, kept in (("scalar", self._scalars, now.scalars), ("work", self._work, now.work)):
                for name, ask in given.items():
                    value = self._ask(f"{kind} {name}", ask)
                    if value is not None:
                        kept[name] = value.item() if isinstance(value, torch.Tensor) else value
        finally:
            self._sight.paused -= 1
        if more is not None:
            now.fields.update(more.fields)
            now.caches |= more.caches
            now.inputs |= more.inputs
        return now

    def _ask(self, what: str, function):
        try:
            return function()
        except Exception as error:
            self._report.miss(f"the declared {what}", f"asking for it raised {type(error).__name__}: {error}")
            return None

    # told by the hooks
    def capture_begins(self, graph) -> None:
        """Called before `graph` starts to capture."""
        backend = self._backend()
        capture = Capture(len(self.captures) + 1, weakref.ref(graph), backend, (0, 0), begun=self.tick)
        self._note_fields(capture)
        capture.sighting = Sighting()
        self._open.append((graph, capture))

    def capture_runs(self, graph) -> None:
        """Called once it captures: from here on ops are the graph's."""
        capture = self._opened(graph)
        if capture is not None:
            self._sight.sighting = capture.sighting

    def capture_ended(self, graph, failed: bool = False) -> None:
        """Called after the capture; a failed one is forgotten."""
        capture = self._opened(graph)
        self._sight.sighting = None
        self._open = [pair for pair in self._open if pair[0] is not graph]
        if capture is None:
            return
        if failed:
            self._report.miss("a capture that failed", "it left no graph")
            return
        try:
            capture.pool = capture.backend.pool(graph)
            capture.memory = capture.backend.memory_map()
        except Exception as error:
            self._report.miss(f"the memory of graph {capture.index}", str(error).splitlines()[0], capture.index)
        self._note_fields(capture)
        self._note_variables(capture)
        self.captures.append(capture)
        self._by_graph[graph] = capture
        for note in capture.sighting.touches:
            self.ledger.open(note, capture.index)
        for note, touch in capture.sighting.inner.items():
            if not touch.writes and note.alive():
                self.ledger.open(note, capture.index)

    def _opened(self, graph) -> Capture | None:
        return next((capture for one, capture in self._open if one is graph), None)

    def _note_fields(self, capture: Capture) -> None:
        now = self.now()
        for path, tensor in now.fields.items():
            if path in capture.fields and capture.holds(capture.fields[path]):
                continue
            if tensor.numel() and capture.backend.on_device(tensor, True):
                note = self.book.note(tensor)
                if path not in note.names:
                    note.names.append(path)
                capture.fields[path] = FieldNote.of(tensor, note)
        for name, value in now.scalars.items():
            capture.scalars.setdefault(name, value)
        for name, value in now.work.items():
            capture.work.setdefault(name, value)

    def _note_variables(self, capture: Capture) -> None:
        for name, tensor in self._variables().items():
            note = self.book.find(tensor) if tensor.numel() else None
            if note is not None and note.variable is None:
                note.variable = name

    def _variables(self) -> dict[str, torch.Tensor]:
        """Name -> tensor of the program's own variables, the innermost frame's first."""
        self._sight.paused += 1
        try:
            found = {}
            for name, tensor in variables():
                if type(tensor) is not FakeTensor:
                    found.setdefault(name, tensor)
            return found
        except Exception:  # names are a courtesy: a program's own attribute may raise
            return {}
        finally:
            self._sight.paused -= 1

    def replay_begins(self, graph) -> None:
        """Called before each replay: the moment at which everything must be right."""
        capture = self.capture_of(graph)
        if capture is None:
            self._stranger(graph)
            return
        capture.read_nodes(graph)
        now = self.now()
        new = judge(capture, now, self._report)
        if new and not capture.pointers:
            capture.pointers = pointers(capture, now.memory())  # as it stood when the first finding was made
        self._tell(new)

    def replay_ended(self, graph) -> None:
        capture = self.capture_of(graph)
        self.tick += 1
        if capture is None:
            return
        capture.replays += 1
        capture.last_replay = self.tick
        self.ledger.graph_ran(capture.index, capture.sighting.touches)
        if self._calls_inner(capture):
            self.ledger.graph_ran(capture.index, capture.sighting.inner)

    @staticmethod
    def _calls_inner(capture) -> bool:
        return any(not touch.writes for touch in capture.sighting.inner.values())

    def graph_reset(self, graph) -> None:
        self._by_graph.pop(graph, None)

    def _stranger(self, graph) -> None:
        """A graph that was captured before the watch began: audited by its nodes alone, once."""
        if graph in self._strangers:
            return
        self._strangers.add(graph)
        self._report.miss(
            "a graph captured before the watch began",
            "whose tensors it holds is known only by block; open the watch before the capture",
        )
        try:
            once = examine(graph, None)
        except Exception as error:
            self._report.miss("the nodes of a graph captured before the watch began", str(error).splitlines()[0])
            return
        new = [finding for finding in once.findings if self._report.add(finding)]
        self._tell(new)
        for unseen in once.not_seen:
            self._report.miss(unseen.what, unseen.why, unseen.graph)

    def _tell(self, findings: list[Finding]) -> None:
        for finding in findings:
            self._say(finding.line())
        if findings and self.raises:
            raise StaleReadError(findings[0].line())

    # answers
    def capture_of(self, graph) -> Capture | None:
        """What is known of `graph`, if it was captured under this watch."""
        for one in (graph, getattr(graph, "_graph", None)):
            try:
                if one is not None and one in self._by_graph:
                    return self._by_graph[one]
            except TypeError:
                continue
        return None

    def report(self, pointers_too: bool = False) -> Report:
        """All findings so far, each once; with `pointers_too` also every pointer with its verdict.

        The pointers of a graph with findings are as they were at the first of them, those of others as they are now.
        """
        report = self._report
        report.graphs = len(self.captures) + len(self._strangers)
        report.replays = self.tick
        if pointers_too:
            report.pointers = []
        for capture in self.captures:
            graph = capture.graph()
            if graph is not None and graph in self._by_graph:
                capture.read_nodes(graph)
            if capture.nodes_read:
                note_gaps(capture, report)
            if pointers_too and capture.nodes:
                report.pointers += capture.pointers or pointers(capture, capture.backend.memory_map())
        waiting = [str(capture.index) for capture in self.captures if not capture.replays]
        report.not_seen = [unseen for unseen in report.not_seen if unseen.why != UNREPLAYED]
        if waiting:
            report.miss(f"graph{'s' * (len(waiting) > 1)} {', '.join(waiting)}", UNREPLAYED)
        for graph, capture in self._open:
            report.miss("a graph", "it is still capturing")
        report.nodes = sum(len(capture.nodes) for capture in self.captures)
        if self._sight.failure is not None:
            report.miss("some ops", f"the watch could not read one: {self._sight.failure}")
        return report
