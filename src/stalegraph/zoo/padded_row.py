"""I1: padded rows of the block table hold -1, and a row of no tokens makes the op read the row before."""

from __future__ import annotations

import torch

from stalegraph.zoo.paged import last_page
from stalegraph.zoo.replica import Expected, Replica, fresh

PAGES, WIDTH, BATCH = 6, 64, 4


class Buggy(Replica):
    report = "vLLM #33664, #35431"
    expected = Expected("I1", ("live",), "block_table")
    sentinel = -1

    def prepare(self):
        device = self.device.torch_device
        self.cache = self.full((1 + PAGES) * WIDTH, 1.0).view(1 + PAGES, WIDTH)
        self.cache[0].fill_(1000.0)  # whatever lies before the cache
        self.seq_lens = torch.full((BATCH,), 5, dtype=torch.int32, device=device)
        self.block_table = torch.zeros((BATCH, 2), dtype=torch.int32, device=device)

    def body(self):
        pages = last_page(self.cache, self.block_table, self.seq_lens)
        return pages / pages.amax()  # one scale for the batch, as a quantised step has

    def step(self, k):
        """Batches of 4, 3, 2, 2 requests: from the third on a padded row stands behind a padded row."""
        self.churn()
        requests = max(BATCH - k, 2)
        self.cache[1:].fill_(fresh(k))
        self.seq_lens.fill_(0)
        self.seq_lens[:requests].fill_(5)
        self.block_table.fill_(self.sentinel)
        self.block_table[:requests].fill_(1)

    def right(self, k):
        return self.host(BATCH * WIDTH, 1.0).view(BATCH, WIDTH)

    def declare(self):
        return {"fields": lambda: {"block_table": self.block_table} if hasattr(self, "block_table") else {}}


class Fixed(Buggy):
    sentinel = 0
