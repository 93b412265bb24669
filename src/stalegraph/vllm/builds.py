"""What vLLM's builder returns at each step, beside the addresses that the replayed graph had baked in at capture."""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable
from functools import wraps

FIELDS = ("seq_lens", "block_table", "tile_scheduler_metadata", "num_splits")
BACKEND = "vllm.v1.attention.backends.mla.flashmla"
MOST_MOVES = 48  # kept per run: enough to see a pattern


def addresses(decode) -> dict[str, int]:
    """The addresses of one FlashMLADecodeMetadata's tensors, those that it has."""
    carrier = getattr(decode, "scheduler_metadata", decode)  # two fields of the decode metadata itself to 0.14.1
    found = {}
    for name in FIELDS:
        tensor = getattr(carrier if name in FIELDS[2:] else decode, name, None)
        if tensor is not None:
            found[name] = tensor.data_ptr()
    return found


class Builds:
    """Watches one process: wraps the builder's `_build_decode`, and capture and replay of `torch.cuda.CUDAGraph`.

    A graph belongs to the build right before its capture; graphs captured without one (piecewise) are left out.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.clock = clock
        self.last: dict | None = None  # the newest build, until a capture or a replay takes it
        self.captured: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # graph -> its build
        self.order: list[dict] = []  # captured builds, in the order of capture
        self.begin()

    def begin(self) -> None:
        """Forget what was seen of steps; captured graphs stay known."""
        self.started: list[float] = []
        self.took: list[float] = []
        self.steps: list[tuple[dict, dict]] = []  # (captured, built) of each replay

    def attach(self, backend, graph_class) -> None:
        """Wrap the builder class of `backend` (vLLM's FlashMLA module) and `graph_class` (torch.cuda.CUDAGraph)."""
        kind = backend.FlashMLAMetadataBuilder
        kind._build_decode = self._wrap_build(kind._build_decode)
        graph_class.capture_begin = self._wrap_capture(graph_class.capture_begin)
        graph_class.replay = self._wrap_replay(graph_class.replay)

    def _wrap_build(self, original):
        @wraps(original)
        def _build_decode(builder, *args, **kwargs):
            began = self.clock()
            decode = original(builder, *args, **kwargs)
            self.started.append(began)
            self.took.append(self.clock() - began)
            found = addresses(decode)
            self.last = {"rows": decode.seq_lens.shape[0], "addresses": found}
            return decode

        return _build_decode

    def _wrap_capture(self, original):
        @wraps(original)
        def capture_begin(graph, *args, **kwargs):
            if self.last is not None:
                self.captured[graph] = self.last
                self.order.append(self.last)
                self.last = None
            return original(graph, *args, **kwargs)

        return capture_begin

    def _wrap_replay(self, original):
        @wraps(original)
        def replay(graph, *args, **kwargs):
            captured = self.captured.get(graph)
            if captured is not None and self.last is not None:
                self.steps.append((captured["addresses"], self.last["addresses"]))
                self.last = None
            return original(graph, *args, **kwargs)

        return replay

    def summary(self) -> dict:
        """What was seen since `begin`: steps, and the fields that some step built elsewhere than captured.

        `moves` are (step, field, address), one for each step whose field lies elsewhere than in the step before. Times
        are medians over steps: milliseconds between two builds, microseconds of host time in one.
        """
        moves, before = [], {}
        stale = {field for captured, built in self.steps for field in built if built[field] != captured.get(field)}
        for step, (_, built) in enumerate(self.steps):
            moves += [[step, field, address] for field, address in built.items() if before.get(field) != address]
            before = built
        gaps = [later - sooner for sooner, later in zip(self.started, self.started[1:])]
        return {
            "builds": len(self.started),
            "replays": len(self.steps),
            "captured": self.steps[-1][0] if self.steps else None,
            "last": self.steps[-1][1] if self.steps else None,
            "stale_fields": [field for field in FIELDS if field in stale],
            "moves": moves[:MOST_MOVES],
            "moves_left_out": max(0, len(moves) - MOST_MOVES),
            "ms_per_token": 1e3 * statistics.median(gaps) if gaps else None,
            "us_per_build": 1e6 * statistics.median(self.took) if self.took else None,
        }
