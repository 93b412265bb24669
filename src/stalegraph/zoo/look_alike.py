"""M: starts right, then degenerates, and no graph is to blame: a counter in half precision stops at 2048."""

from __future__ import annotations

import torch

from stalegraph.zoo.replica import ROWS, Replica

START = 2046


class Buggy(Replica):
    report = "a control of our own: the symptom of vLLM #33638 without its cause"
    expected = None
    dtype = torch.float16

    def prepare(self):
        self.position = self.full(ROWS, START, self.dtype)

    def body(self):
        self.position.add_(1)
        return self.position.float()

    def step(self, k):
        self.churn()

    def right(self, k):
        return self.host(ROWS, START + k + 1)

    def declare(self):
        return {"fields": lambda: {"position": self.position} if hasattr(self, "position") else {}}


class Fixed(Buggy):
    dtype = torch.int32
