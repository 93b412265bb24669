"""B: the warm-up leaves its plan on the metadata, so the capture plans nothing, as vLLM's V2 runner did to 0.21.0."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stalegraph.zoo.replica import ROWS, Expected, Replica, fresh


@dataclass
class Metadata:
    seq_lens: torch.Tensor
    plan: torch.Tensor | None = None


class Buggy(Replica):
    report = "vLLM 0.15.0 to 0.21.0: repro/reports/v2-flashmla-bf16-plan.md"
    expected = Expected("B", ("freed", "reused"), "plan")

    def prepare(self):
        self.values = self.full(ROWS, 1.0)
        self.seq_lens = self.full(ROWS, 1.0)
        self.metadata = Metadata(self.seq_lens)
        self.body()  # the warm-up
        self.metadata = self.for_capture()

    def for_capture(self):
        return self.metadata

    def body(self):
        """The first call with a metadata object plans and keeps the plan; later ones obey it."""
        if self.metadata.plan is None:
            self.metadata.plan = self.metadata.seq_lens * 2.0
        return self.values * self.metadata.plan

    def after_capture(self):
        self.metadata = None

    def step(self, k):
        self.churn()
        self.seq_lens.fill_(fresh(k))

    def right(self, k):
        return self.host(ROWS, 2.0 * fresh(k))

    def declare(self):
        return {"fields": lambda: getattr(self, "metadata", None)}


class Fixed(Buggy):
    def for_capture(self):
        return Metadata(self.seq_lens)
