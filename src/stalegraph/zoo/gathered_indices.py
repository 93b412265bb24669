"""A: a step gathers its state slots into a fresh tensor, as vLLM's linear attention does in align mode."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stalegraph.zoo.replica import ROWS, Expected, Replica

BLOCKS = Replica.steps + 1  # blocks a request fills: one more at each step


@dataclass
class Metadata:
    state_indices: torch.Tensor


class Buggy(Replica):
    report = "vLLM 0.15.0 to 0.33.0: repro/reports/linear-attention-align.md"
    expected = Expected("A", ("freed", "reused"), "state_indices")

    def prepare(self):
        self.states = self.full(ROWS, 1.0).cumsum(0)  # slot s holds s + 1
        self.block_table = self.table()
        self.last_block = self.full(ROWS, 0, torch.int64).view(ROWS, 1)
        self.metadata = Metadata(self.gathered())

    def table(self):
        """A request's blocks lie one slot apart, so that no request has the slot of its last step again."""
        slots = self.full(ROWS * BLOCKS, 1, torch.int32).view(ROWS, BLOCKS).cumsum(1) - 1
        return (slots + self.full(ROWS, 7, torch.int32).cumsum(0).view(ROWS, 1)) % ROWS

    def gathered(self):
        return self.block_table.gather(1, self.last_block).view(ROWS).int()

    def body(self):
        slots = self.metadata.state_indices.clamp(0, ROWS - 1)  # whatever lies there, the step stays in bounds
        return self.states.index_select(0, slots)

    def update(self):
        self.metadata = None
        self.churn()
        self.metadata = Metadata(self.gathered())

    def step(self, k):
        self.last_block.fill_(k + 1)
        self.update()

    def right(self, k):
        with self.device.host():
            return (7.0 * torch.arange(1, ROWS + 1) + k + 1) % ROWS + 1.0

    def declare(self):
        return {"fields": lambda: getattr(self, "metadata", None)}


class Fixed(Buggy):
    def update(self):
        self.churn()
        self.metadata.state_indices.copy_(self.gathered())
