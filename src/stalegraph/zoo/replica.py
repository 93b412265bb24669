"""What every replica has: a step that is captured, what the host does before each replay, and the right answer."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch

HOLES = 256  # more than torch and a device leave behind
ROWS = 256  # float32 elements of most tensors here: 1 KiB, so that blocks are of one small size


@dataclass(frozen=True)
class Expected:
    """What an audit must say of the buggy form: class, fitting verdicts, the caller's name or the op's argument."""

    hazard: str
    verdicts: tuple[str, ...]
    named: str


class Replica:
    """One bug on one device, simulated or CUDA: `prepare`, then `body` under capture, then `step(k)` and a replay each.

    The buggy form and its fixed twin are subclasses in one file and differ in one method. `declare()` is what a user
    would tell the audit; `right(k)` is the output of step k computed eagerly from the host's truth.
    """

    report: str = ""
    expected: Expected | None = None
    steps = 4

    def __init__(self, device):
        self.device = device
        self.held: list[torch.Tensor] = []
        self.out: torch.Tensor | None = None

    # to be written by each replica
    def prepare(self) -> None:
        """Allocates what the step needs before capture."""

    def body(self) -> torch.Tensor:
        """The captured step; returns its output."""
        raise NotImplementedError

    def step(self, k: int) -> None:
        """The host's part of step `k` (from 0), before its replay."""

    def right(self, k: int) -> torch.Tensor:
        """The output that step `k` must have, as a host tensor."""
        raise NotImplementedError

    def declare(self) -> dict:
        """What the audit is told: keywords of `Watch.declare`."""
        return {}

    # the same for all, unless a bug lies here
    def capture(self) -> None:
        self.graph = self.device.graph()
        with self.graph.capture():
            self.out = self.observe(self.body())
        self.after_capture()

    def observe(self, tensor: torch.Tensor) -> torch.Tensor:
        """The place in the captured step for another tool's probe; gives `tensor` back."""
        return tensor

    def after_capture(self) -> None:
        """What the host lets go of once the graph is captured."""

    def replay(self, k: int) -> None:
        self.graph.replay()

    def result(self) -> torch.Tensor:
        return self.device.to_host(self.out)

    def settle(self) -> None:
        """Fills the holes that earlier work has left in the allocator: a block freed here is the next one taken."""
        if self.device.torch_device.type == "cuda":  # a simulated device starts without any
            gc.collect()
            self.device.empty_cache()
        self.held += [self.full(ROWS, 0.0) for _ in range(HOLES)]

    def churn(self) -> None:
        """Allocates and holds tensors of the usual and of odd sizes, so that a freed block does not stay as it was."""
        for count in (ROWS, ROWS, 77, 90, 1031, ROWS):
            self.held.append(self.full(count, 9.0))

    def full(self, count: int, value: float, dtype=torch.float32) -> torch.Tensor:
        return torch.full((count,), value, dtype=dtype, device=self.device.torch_device)

    def host(self, count: int, value: float, dtype=torch.float32) -> torch.Tensor:
        """A host tensor, for right answers."""
        with self.device.host():
            return torch.full((count,), value, dtype=dtype)


def fresh(k: int) -> float:
    """The value that varies with step `k`."""
    return 2.0 + k
