"""The part of vLLM's V1 model runner that matters here: persistent buffers, and what it hands to a builder."""

from __future__ import annotations

import dataclasses

import torch

from stalegraph.vllm.suspects.release import MAX_BLOCKS, MAX_REQUESTS


class Runner:
    """The V1 model runner's persistent buffers, filled for one step at a time as it fills them."""

    def __init__(self, release, find, groups=1):
        self.metadata_class = find("attention.backend").CommonAttentionMetadata
        self.padding_block = -1 if tuple(map(int, release.split(".")[:2])) < (0, 20) else 0
        self.query_start_loc = torch.zeros(MAX_REQUESTS + 1, dtype=torch.int32)
        self.seq_lens = torch.zeros(MAX_REQUESTS, dtype=torch.int32)
        self.slot_mapping = torch.zeros(4 * MAX_REQUESTS, dtype=torch.int64)
        self.block_tables = [torch.zeros((MAX_REQUESTS, MAX_BLOCKS), dtype=torch.int32) for _ in range(groups)]

    def common(self, seq_lens, *, query_len=1, padded=None, group=0, max_seq_len=None):
        """Common metadata for requests of `seq_lens` tokens and `query_len` queries, padded to `padded` requests."""
        requests, padded = len(seq_lens), padded or len(seq_lens)
        starts = [min(at, requests) * query_len for at in range(padded + 1)]
        self.query_start_loc[: padded + 1] = torch.tensor(starts, dtype=torch.int32)
        self.seq_lens[:padded] = torch.tensor([*seq_lens, *[0] * (padded - requests)], dtype=torch.int32)
        table = self.block_tables[group]
        rows = torch.arange(1, 1 + requests * MAX_BLOCKS, dtype=torch.int32).reshape(requests, MAX_BLOCKS)
        table[:requests] = rows
        table[requests:padded] = self.padding_block
        lengths = torch.tensor([*seq_lens, *[0] * (padded - requests)], dtype=torch.int32)
        values = {
            "query_start_loc": self.query_start_loc[: padded + 1],
            "query_start_loc_cpu": torch.tensor(starts, dtype=torch.int32),
            "seq_lens": self.seq_lens[:padded],
            "num_reqs": padded,
            "num_actual_tokens": padded * query_len,
            "max_query_len": query_len,
            "max_seq_len": max_seq_len or max(seq_lens),
            "block_table_tensor": table[:padded],
            "slot_mapping": self.slot_mapping[: padded * query_len],
            "causal": True,
            "_seq_lens_cpu": lengths,
            "seq_lens_cpu_upper_bound": lengths,
            "_num_computed_tokens_cpu": lengths - query_len,
        }
        known = {item.name for item in dataclasses.fields(self.metadata_class)}
        return self.metadata_class(**{name: value for name, value in values.items() if name in known})
