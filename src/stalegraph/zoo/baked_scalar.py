"""G: the round's number goes to the kernel by value, so each replay waits for the round of the capture."""

from __future__ import annotations

from stalegraph.zoo.replica import ROWS, Expected, Replica

FIRST_ROUND = 7


class Buggy(Replica):
    report = "AITER #3928"
    expected = Expected("G", ("live",), "flag_color")

    def prepare(self):
        self.values = self.full(ROWS, 1.0)
        self.flag_color = FIRST_ROUND
        self.flag_on_device = self.full(ROWS, FIRST_ROUND)

    def flag(self):
        return self.flag_color

    def body(self):
        return self.values * self.flag()

    def step(self, k):
        self.churn()
        self.flag_color = FIRST_ROUND + k
        self.flag_on_device.fill_(self.flag_color)

    def right(self, k):
        return self.host(ROWS, FIRST_ROUND + k)

    def declare(self):
        return {"scalars": {"flag_color": lambda: getattr(self, "flag_color", None)}}


class Fixed(Buggy):
    def flag(self):
        return self.flag_on_device
