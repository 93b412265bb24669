"""Runs a replica step by step beside its right answers, under the audit or without it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from stalegraph.audit import Report, watch


@dataclass
class Outcome:
    """What became of one form of a replica: per step whether its output was right, and what the audit reports."""

    name: str
    form: str
    right: list[bool] = field(default_factory=list)
    report: Report | None = None
    failure: str | None = None

    @property
    def all_right(self) -> bool:
        return self.failure is None and all(self.right)

    @property
    def first_wrong(self) -> int | None:
        return next((k for k, right in enumerate(self.right) if not right), None)


def run(replica, device, *, before_replay=None) -> Outcome:
    """`replica` (a class from the zoo) on an entered `device` for its number of steps, without an audit.

    `before_replay(instance, k)` is another detector's look, after the host's part of step `k`; -1 is before capture.
    """
    outcome = Outcome(replica.__module__.rsplit(".", 1)[-1], replica.__name__.lower())
    _steps(replica(device), device, outcome, before_replay)
    return outcome


def run_watched(replica, device) -> Outcome:
    """The same under `watch()`, told what the replica declares and nothing else."""
    outcome = Outcome(replica.__module__.rsplit(".", 1)[-1], replica.__name__.lower())
    instance = replica(device)
    with watch(quiet=True, **instance.declare()) as w:
        _steps(instance, device, outcome, None)
        outcome.report = w.report()
    return outcome


def _steps(instance, device, outcome, before_replay) -> None:
    instance.settle()
    instance.prepare()
    if before_replay is not None:
        before_replay(instance, -1)
    instance.capture()
    for k in range(instance.steps):
        instance.step(k)
        if before_replay is not None:
            before_replay(instance, k)
        instance.replay(k)
        device.synchronize()
        result, right = instance.result(), instance.right(k)
        with device.host():
            outcome.right.append(torch.equal(result.double(), right.double()))
