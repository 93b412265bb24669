"""E: a result in a shared graph pool is dropped while a later graph still reads it; the next capture gets its block."""

from __future__ import annotations

from stalegraph.zoo.replica import ROWS, Expected, Replica, fresh


class Buggy(Replica):
    report = "TensorRT-LLM #16290, AITER #5393"
    expected = Expected("E", ("reused",), "topk")

    def prepare(self):
        self.values = self.full(ROWS, 1.0)
        self.noise = self.full(ROWS, 9.0)

    def capture(self):
        indexer, attention, sampler = (self.device.graph() for _ in range(3))
        with indexer.capture():
            topk = self.values * 2.0
        pool = indexer.pool()
        with attention.capture(pool=pool):
            self.out = self.observe(topk + 1.0)
        self.keep(topk)
        del topk
        with sampler.capture(pool=pool):
            self.sample = self.noise * 3.0
        self.graphs = indexer, sampler, attention

    def keep(self, topk):
        """Nobody keeps what the indexer made: its block is free for the capture of the sampler."""

    def step(self, k):
        self.values.fill_(fresh(k))
        self.churn()

    def replay(self, k):
        for graph in self.graphs:
            graph.replay()

    def right(self, k):
        return self.host(ROWS, 2.0 * fresh(k) + 1.0)


class Fixed(Buggy):
    def keep(self, topk):
        self.topk = topk
