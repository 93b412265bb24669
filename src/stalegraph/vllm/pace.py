"""Time per output token of engines that live side by side, each asked only while all others are idle."""

from __future__ import annotations

import os
import select
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import wraps
from pathlib import Path

SKIPPED = 8  # first steps of a round, with the prefill and its wake in them


class Stamps:
    """Notes when each step's decode metadata has been built: one step of decoding lies between two of them."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.clock = clock
        self.at: list[float] = []
        self._stamped: Callable[[], object] | None = None  # called after each stamp

    def attach(self, backend) -> None:
        """Wrap the builder class of `backend` (vLLM's FlashMLA module), on the outside of what is wrapped already."""
        original = backend.FlashMLAMetadataBuilder._build_decode

        @wraps(original)
        def _build_decode(builder, *args, **kwargs):
            decode = original(builder, *args, **kwargs)
            self.at.append(self.clock())
            if self._stamped is not None:
                self._stamped()
            return decode

        backend.FlashMLAMetadataBuilder._build_decode = _build_decode

    def round(self, ask: Callable[[], object]) -> dict:
        """Milliseconds a step while `ask()` decodes: mean and median; None where there were too few steps."""
        self.at.clear()
        ask()
        at = self.at[SKIPPED:]
        gaps = [1e3 * (later - sooner) for sooner, later in zip(at, at[1:])]
        if not gaps:
            return {"steps": len(self.at), "mean_ms": None, "median_ms": None}
        return {"steps": len(self.at), "mean_ms": statistics.fmean(gaps), "median_ms": statistics.median(gaps)}

    def turns(self, ask: Callable[[], object], ways: dict[str, Callable[[], object]], each: int) -> list[dict]:
        """Milliseconds a step while `ask()` decodes and two `ways` take turns of `each` steps; one dict a pair of turns.

        So both meet the same drift of the machine, which is far slower than a turn. The order within a pair alternates.
        A turn's first step, in which the way changed, is left out; of the others the median counts.
        """
        names, begun = list(ways), []  # begun: (way, stamps so far) of each turn

        def stamped():
            turn, steps = divmod(len(self.at) - SKIPPED, each)
            if turn >= 0 and steps == 0:
                name = names[(turn + turn // 2) % 2]
                begun.append((name, len(self.at)))
                ways[name]()

        self.at.clear()
        self._stamped = stamped
        try:
            ask()
        finally:
            self._stamped = None
        found = {}
        for turn, (name, first) in enumerate(begun):
            at = self.at[first : first + each]
            if len(at) == each:
                gaps = [1e3 * (later - sooner) for sooner, later in zip(at, at[1:])]
                found.setdefault(turn // 2, {})[name] = statistics.median(gaps)
        return [pair for pair in found.values() if len(pair) == 2]


def spread(values: Iterable[float]) -> dict | None:
    """Median, quartiles, least and greatest of some values; None where there is none.

    >>> spread([3.0, 1.0, 2.0])
    {'median': 2.0, 'quartiles': [1.0, 3.0], 'range': [1.0, 3.0], 'count': 3}
    """
    values = sorted(value for value in values if value is not None)
    if not values:
        return None
    quartiles = statistics.quantiles(values, n=4)[::2] if len(values) > 1 else [values[0], values[0]]
    return {
        "median": statistics.median(values),
        "quartiles": quartiles,
        "range": [values[0], values[-1]],
        "count": len(values),
    }


class Lane:
    """Two pipes between an engine's process and its parent: the engine waits for a word and spends no processor time.

    `folder` and `name` are all that the child needs to know. Words are single bytes.
    """

    def __init__(self, folder: str, name: str):
        self.down, self.up = (str(Path(folder, f"{name}.{way}")) for way in ("down", "up"))

    # -- the child

    def arrive(self) -> None:
        """Say that all is ready, or that what was asked for is done."""
        self._write(self.up, b"r")

    def wait(self) -> bool:
        """Sleep until the parent says go (True) or end (False)."""
        file = os.open(self.down, os.O_RDONLY)  # a parent that is gone reads as "end"
        try:
            return os.read(file, 1) == b"g"
        finally:
            os.close(file)

    # -- the parent

    def lay(self) -> Lane:
        """Make both pipes, and hold them open so that no word is lost; before the child starts."""
        for path in (self.down, self.up):
            os.mkfifo(path)
        self.files = [os.open(path, os.O_RDWR | os.O_NONBLOCK) for path in (self.down, self.up)]
        return self

    def arrived(self, child: Future) -> bool:
        """Wait for the child's word; False where it ended instead."""
        while True:
            if select.select([self.files[1]], [], [], 0.05)[0]:
                os.read(self.files[1], 1)
                return True
            if child.done():
                return False

    def go(self, child: Future) -> bool:
        """Let the child do one thing, and wait until it is done; False where the child ended."""
        os.write(self.files[0], b"g")
        return self.arrived(child)

    def end(self) -> None:
        os.write(self.files[0], b"e")

    def close(self) -> None:
        for file in self.files:
            os.close(file)

    @staticmethod
    def _write(path, word):
        file = os.open(path, os.O_RDWR)
        try:
            os.write(file, word)
        finally:
            os.close(file)
