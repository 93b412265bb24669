"""Where a watch listens while it is open: captures, replays and resets of torch's CUDA graphs and the simulator's."""

from __future__ import annotations

import gc
from contextlib import contextmanager

import torch

from stalegraph.simulator import CUDAGraph as SimulatedGraph
from stalegraph.simulator import Device

_undo: list[tuple[object, str, object]] = []
_ABSENT = object()


def install(watch) -> None:
    """Wrap the verbs of both kinds of graphs; `uninstall` puts everything back."""
    _simulator(watch)
    if torch.version.cuda is not None:
        _cuda(watch)


def uninstall() -> None:
    while _undo:
        owner, name, original = _undo.pop()
        if original is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


def _replace(owner, name, new) -> None:
    _undo.append((owner, name, owner.__dict__.get(name, _ABSENT)))
    setattr(owner, name, new)


def _simulator(watch) -> None:
    capture, replay, reset = SimulatedGraph.capture, SimulatedGraph.replay, SimulatedGraph.reset
    enter, leave = Device.__enter__, Device.__exit__

    @contextmanager
    def watched_capture(self, pool=None):
        watch.capture_begins(self)
        done = False
        try:
            with capture(self, pool) as graph:
                watch.capture_runs(self)
                yield graph
            done = True
        finally:
            watch.capture_ended(self, failed=not done)

    def watched_replay(self):
        watch.replay_begins(self)
        replay(self)
        watch.replay_ended(self)

    def watched_reset(self):
        watch.graph_reset(self)
        reset(self)

    def watched_enter(self):
        entered = enter(self)
        watch.push()  # the device's mode is on top now, and hides what it runs
        self._watched = True
        return entered

    def watched_leave(self, *exception):
        if getattr(self, "_watched", False):
            self._watched = False
            watch.pop()
        return leave(self, *exception)

    for name, new in (("capture", watched_capture), ("replay", watched_replay), ("reset", watched_reset)):
        _replace(SimulatedGraph, name, new)
    _replace(Device, "__enter__", watched_enter)
    _replace(Device, "__exit__", watched_leave)


def _cuda(watch) -> None:
    kind = torch.cuda.CUDAGraph
    begin, end, replay, reset = kind.capture_begin, kind.capture_end, kind.replay, kind.reset
    base = kind.__mro__[1]

    def watched_new(cls, keep_graph=False):
        graph = base.__new__(cls, True)
        graph._tracker = None  # torch 2.13 sets it in its own __new__
        return graph

    def watched_init(self, keep_graph=False):
        base.__init__(self, True)  # else the nodes are thrown away once the graph is instantiated
        self._stalegraph_kept = keep_graph

    def watched_begin(self, *args, **kwargs):
        gc.collect()  # a graph that is garbage and dies while another captures would make that capture invalid
        watch.capture_begins(self)
        try:
            begin(self, *args, **kwargs)
        except BaseException:
            watch.capture_ended(self, failed=True)
            raise
        watch.capture_runs(self)

    def watched_end(self):
        try:
            end(self)
        except BaseException:
            watch.capture_ended(self, failed=True)
            raise
        watch.capture_ended(self)
        if getattr(self, "_stalegraph_kept", True) is False:
            self.instantiate()  # as torch does at this point where no one asked to keep the graph

    def watched_replay(self):
        watch.replay_begins(self)
        replay(self)
        watch.replay_ended(self)

    def watched_reset(self):
        watch.graph_reset(self)
        reset(self)

    for name, new in (
        ("__new__", staticmethod(watched_new)), ("__init__", watched_init), ("capture_begin", watched_begin),
        ("capture_end", watched_end), ("replay", watched_replay), ("reset", watched_reset),
    ):  # fmt: skip
        _replace(kind, name, new)
