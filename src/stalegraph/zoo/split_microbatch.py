"""A: a request cut by the split has its lengths cloned, as in vLLM's dual batch overlap; the capture's clone is kept."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stalegraph.zoo.replica import ROWS, Expected, Replica, fresh

CUT = ROWS // 2 + 1  # requests of the first microbatch; the last of them goes on in the second


@dataclass
class Microbatch:
    """What one half of the batch attends to: `seq_lens` of its requests."""

    seq_lens: torch.Tensor


class Buggy(Replica):
    report = "vLLM 0.15.0 to 0.33.0: repro/reports/microbatch-split.md"
    expected = Expected("A", ("moved",), "seq_lens")

    def prepare(self):
        self.values = self.full(ROWS, 1.0)
        self.seq_lens = self.full(ROWS, 1.0)
        self.first_lens = self.full(CUT, 0.0)
        self.kept = []
        self.split = self.microbatches()

    def microbatches(self):
        """The second half is a view of the runner's buffer; in the first one the cut request is a token shorter."""
        first = self.shortened(self.seq_lens[:CUT])
        return [Microbatch(first), Microbatch(self.seq_lens[CUT - 1 :])]

    def shortened(self, seq_lens):
        seq_lens = seq_lens.clone()
        seq_lens[-1:].sub_(1.0)
        return seq_lens

    def body(self):
        first, second = self.split
        return torch.cat([self.values[:CUT] * first.seq_lens, self.values[CUT - 1 :] * second.seq_lens])

    def step(self, k):
        self.seq_lens.fill_(fresh(k))
        self.kept.append(self.split)
        self.churn()
        self.split = self.microbatches()

    def right(self, k):
        right = self.host(ROWS + 1, fresh(k))
        right[CUT - 1] -= 1.0
        return right

    def declare(self):
        return {"fields": lambda: getattr(self, "split", None)}


class Fixed(Buggy):
    def shortened(self, seq_lens):
        self.first_lens.copy_(seq_lens)
        self.first_lens[-1:].sub_(1.0)
        return self.first_lens
