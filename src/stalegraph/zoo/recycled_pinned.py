"""J2: a captured copy re-reads pinned host memory whose tensor is gone, and whose block another one has."""

from __future__ import annotations

from stalegraph.zoo.replica import ROWS, Expected, Replica, fresh


class Buggy(Replica):
    report = "the host's side of pytorch #170646"
    expected = Expected("J2", ("freed", "reused"), "pinned")

    def prepare(self):
        self.values = self.full(ROWS, 1.0)
        self.scale = self.full(ROWS, 1.0)
        self.pinned = self.device.pin(self.host(ROWS, 0.5))
        self.others = []

    def body(self):
        self.scale.copy_(self.pinned, non_blocking=True)
        return self.values * self.scale

    def after_capture(self):
        self.pinned = None

    def step(self, k):
        self.churn()
        self.others.append(self.device.pin(self.host(ROWS, 9.0)))
        self.values.fill_(fresh(k))

    def right(self, k):
        return self.host(ROWS, 0.5 * fresh(k))


class Fixed(Buggy):
    def after_capture(self):
        pass
