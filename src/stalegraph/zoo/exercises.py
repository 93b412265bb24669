"""Three programs for the reader, each with one bug of a class from the map; what it is stands in `answers.py`."""

from __future__ import annotations

import torch

from stalegraph.errors import UsageError
from stalegraph.zoo.answers import ANSWERS
from stalegraph.zoo.detectors import is_expected
from stalegraph.zoo.replica import ROWS, Replica, fresh
from stalegraph.zoo.run import Outcome, run, run_watched


class First(Replica):
    """Wrong from the first request on."""

    def prepare(self):
        self.values, self.workspace = self.full(ROWS, 1.0), None

    def body(self):
        doubled = self.values * 2.0
        total = doubled.sum()
        del doubled
        if self.workspace is None:
            self.workspace = torch.empty(ROWS, device=self.device.torch_device)
        return self.workspace + total

    def step(self, k):
        self.churn()
        self.values.fill_(fresh(k))
        if k == 0:
            self.workspace.fill_(1.0)

    def right(self, k):
        return self.host(ROWS, 2.0 * ROWS * fresh(k) + 1.0)


class Second(Replica):
    """Wrong when somebody sends a long prompt, and right again after it."""

    def prepare(self):
        self.values, self.scratch = self.full(ROWS, 1.0), self.full(ROWS, 0.0)

    def body(self):
        self.scratch.add_(self.values)
        out = self.scratch * 1.0
        self.scratch.zero_()
        return out

    def step(self, k):
        self.values.fill_(fresh(k))
        if k == 2:
            self.scratch.resize_(4 * ROWS).zero_()
        self.churn()

    def right(self, k):
        return self.host(ROWS, fresh(k))


class Third(Replica):
    """Each part is right when it is tested alone."""

    def prepare(self):
        self.values, self.noise = self.full(ROWS, 1.0), self.full(ROWS, 9.0)

    def capture(self):
        self.encoder, self.decoder, self.sampler = (self.device.graph() for _ in range(3))
        with self.encoder.capture():
            hidden = self.values * 2.0
        with self.decoder.capture():
            self.out = self.observe(hidden + 1.0)
        del hidden
        with self.sampler.capture(pool=self.encoder.pool()):
            self.sample = self.noise * 3.0

    def step(self, k):
        self.churn()
        self.values.fill_(fresh(k))

    def replay(self, k):
        for graph in (self.encoder, self.sampler, self.decoder):
            graph.replay()

    def right(self, k):
        return self.host(ROWS, 2.0 * fresh(k) + 1.0)


EXERCISES = {1: First, 2: Second, 3: Third}


def _pick(number: int, among: dict = EXERCISES):
    if number not in EXERCISES:
        raise UsageError(f"number is {number!r}; allowed: {', '.join(map(str, EXERCISES))}")
    return among[number]


def symptoms(number: int, device) -> Outcome:
    """Runs exercise `number` on an entered device without an audit: which steps come out right is all it tells."""
    return run(_pick(number), device)


def audited(number: int, device) -> Outcome:
    """The same under a watch that is told nothing."""
    return run_watched(_pick(number), device)


def check(number: int, hazard: str, tensor: str) -> bool:
    """Whether the class and the tensor are those of exercise `number`."""
    expected = _pick(number, ANSWERS).expected
    return (hazard, tensor) == (expected.hazard, expected.named)


def answer(number: int) -> str:
    """Class, tensor and the report that exercise `number` is modelled on."""
    one = _pick(number, ANSWERS)
    return f"{one.expected.hazard}: {one.expected.named} ({one.report})"


def solved(number: int, findings: list) -> bool:
    """Whether these findings are the answer and nothing else."""
    return len(findings) == 1 and is_expected(findings[0], _pick(number, ANSWERS).expected)
