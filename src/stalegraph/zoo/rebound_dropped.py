"""A: each step builds its metadata afresh and drops the old one, whose block goes to whoever asks next."""

from __future__ import annotations

from stalegraph.zoo import rebound_kept
from stalegraph.zoo.rebound_kept import Metadata
from stalegraph.zoo.replica import ROWS, Expected, fresh


class Buggy(rebound_kept.Buggy):
    report = "vLLM #33638, SGLang #27664"
    expected = Expected("A", ("freed", "reused"), "num_splits")

    def step(self, k):
        self.metadata = None
        self.churn()
        self.metadata = Metadata(self.full(ROWS, fresh(k)))


class Fixed(Buggy):
    def step(self, k):
        self.churn()
        self.metadata.num_splits.copy_(self.full(ROWS, fresh(k)))
