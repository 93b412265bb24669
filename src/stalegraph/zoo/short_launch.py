"""H: the number of rows that the step works on was fixed by the batch at capture, and later batches are larger."""

from __future__ import annotations

from stalegraph.zoo.replica import ROWS, Expected, Replica, fresh

LARGEST = 4
COLUMNS = ROWS // LARGEST


class Buggy(Replica):
    report = "vLLM #27121"
    expected = Expected("H", ("live",), "rows")
    at_capture = 2

    def prepare(self):
        self.values = self.full(ROWS, 1.0).view(LARGEST, COLUMNS)
        self.sums = self.full(LARGEST, 0.0)
        self.rows = self.at_capture

    def body(self):
        self.sums[: self.rows].copy_(self.values[: self.rows].sum(1))
        return self.sums

    def step(self, k):
        self.churn()
        self.rows = min(k + 1, LARGEST)
        self.values.fill_(fresh(k))

    def right(self, k):
        right = self.host(LARGEST, COLUMNS * fresh(k))
        return right[: min(k + 1, LARGEST)]

    def result(self):
        return super().result()[: self.rows]

    def declare(self):
        return {"work": {"rows": lambda: getattr(self, "rows", None)}}


class Fixed(Buggy):
    at_capture = LARGEST
