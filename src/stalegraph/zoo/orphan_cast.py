"""B: the graph captured a cast copy that only a local variable owned."""

from __future__ import annotations

import torch

from stalegraph.zoo.replica import ROWS, Expected, Replica, fresh


class Buggy(Replica):
    report = "pytorch #170646"
    expected = Expected("B", ("freed", "reused"), "scale")

    def prepare(self):
        self.values = self.full(ROWS, 1.0)
        self.scale_half = self.full(ROWS, 0.5, torch.float16)
        self.scale = self.scale_half.float()

    def body(self):
        return torch.mul(self.values, self.scale)

    def after_capture(self):
        self.scale = None

    def step(self, k):
        self.churn()
        self.values.fill_(fresh(k))

    def right(self, k):
        return self.host(ROWS, 0.5 * fresh(k))


class Fixed(Buggy):
    def after_capture(self):
        pass
