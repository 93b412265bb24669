"""F: each step refreshes the front of a buffer of which the graph captured the tail."""

from __future__ import annotations

from stalegraph.zoo.replica import ROWS, Expected, Replica, fresh


class Buggy(Replica):
    report = "SGLang #32555"
    expected = Expected("F", ("live",), "track_indices")

    def prepare(self):
        self.values = self.full(ROWS, 1.0)
        self.buffer = self.full(4 * ROWS, 0.0)

    def track_indices(self):
        return self.buffer[-ROWS:]

    def body(self):
        return self.values * self.track_indices()

    def refreshed(self):
        return self.buffer[:ROWS]

    def step(self, k):
        self.churn()
        self.refreshed().copy_(self.full(ROWS, fresh(k)))

    def right(self, k):
        return self.host(ROWS, fresh(k))

    def declare(self):
        return {"inputs": lambda: {"track_indices": self.track_indices()} if hasattr(self, "buffer") else {}}


class Fixed(Buggy):
    def refreshed(self):
        return self.track_indices()
