"""C: a shared workspace, zero between uses, is replaced by a larger one while a graph holds the old one."""

from __future__ import annotations

from stalegraph.zoo.replica import ROWS, Expected, Replica, fresh


class Buggy(Replica):
    report = "FlashInfer #4398, vLLM #52540"
    expected = Expected("C", ("freed", "reused"), "gemm_workspace")

    def prepare(self):
        self.values = self.full(ROWS, 1.0)
        self.cache = {"gemm_workspace": self.full(ROWS, 0.0)}

    def body(self):
        semaphores = self.cache["gemm_workspace"][:ROWS]
        semaphores.add_(self.values)
        out = semaphores * 1.0
        semaphores.zero_()
        return out

    def reserve(self, count):
        if self.cache["gemm_workspace"].numel() < count:
            self.cache["gemm_workspace"] = self.full(count, 0.0)

    def step(self, k):
        self.values.fill_(fresh(k))
        self.reserve(ROWS * (k + 1))  # another op's plan asks for more from the second step on
        self.churn()

    def right(self, k):
        return self.host(ROWS, fresh(k))

    def declare(self):
        return {"caches": lambda: getattr(self, "cache", None)}


class Fixed(Buggy):
    def reserve(self, count):
        """Reserved once, before capture, for the largest plan; a larger one would get a buffer of its own."""
        if self.cache["gemm_workspace"].numel() < count:
            self.own = self.full(count, 0.0)
