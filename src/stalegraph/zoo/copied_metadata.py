"""A: the builder deep-copies the runner's metadata, as vLLM's Whisper attention with block pooling did."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch

from stalegraph.zoo.replica import ROWS, Expected, Replica, fresh


@dataclass
class Common:
    """The runner's metadata, in buffers that stay."""

    seq_lens: torch.Tensor


class Buggy(Replica):
    report = "vLLM 0.15.0 to 0.20.2: repro/reports/whisper-block-pooling.md"
    expected = Expected("A", ("freed", "reused"), "seq_lens")

    def prepare(self):
        self.values = self.full(ROWS, 1.0)
        self.common = Common(self.full(ROWS, 1.0))
        self.metadata = self.build()

    def build(self):
        return copy.deepcopy(self.common)

    def body(self):
        return self.values * self.metadata.seq_lens

    def step(self, k):
        self.common.seq_lens.fill_(fresh(k))
        self.metadata = None
        self.churn()
        self.metadata = self.build()

    def right(self, k):
        return self.host(ROWS, fresh(k))

    def declare(self):
        return {"fields": lambda: getattr(self, "metadata", None)}


class Fixed(Buggy):
    def build(self):
        return copy.copy(self.common)
