"""A: each step builds its metadata afresh and keeps the old one, as the FP8 builder of vLLM 0.15.0 did."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stalegraph.zoo.replica import ROWS, Expected, Replica, fresh


@dataclass
class Metadata:
    num_splits: torch.Tensor


class Buggy(Replica):
    report = "vLLM #33638"
    expected = Expected("A", ("moved",), "num_splits")

    def prepare(self):
        self.values = self.full(ROWS, 1.0)
        self.metadata = Metadata(self.full(ROWS, 1.0))
        self.kept = []

    def body(self):
        return self.values * self.metadata.num_splits

    def step(self, k):
        self.kept.append(self.metadata)
        self.metadata = Metadata(self.full(ROWS, fresh(k)))

    def right(self, k):
        return self.host(ROWS, fresh(k))

    def declare(self):
        return {"fields": lambda: getattr(self, "metadata", None)}


class Fixed(Buggy):
    def step(self, k):
        self.metadata.num_splits.copy_(self.full(ROWS, fresh(k)))
