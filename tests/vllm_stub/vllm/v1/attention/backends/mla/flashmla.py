"""The names of vLLM's FlashMLA backend that builders and plugins meet."""

from types import SimpleNamespace

import torch

PADS_WITH_MINUS_ONE = True


def get_mla_metadata_dense_fp8(cache_seqlens, num_q_tokens_per_head_k, num_heads_k):
    try:
        from stalegraph.ops import get_mla_metadata_dense_fp8 as plan
    except ImportError:
        return torch.zeros((132, 8), dtype=torch.int32), torch.zeros(len(cache_seqlens) + 1, dtype=torch.int32)
    return plan(cache_seqlens, num_q_tokens_per_head_k, num_heads_k)


class FlashMLAMetadataBuilder:
    def __init__(self, max_num_seqs, full_graphs):
        self.is_fp8_kvcache = True
        self.cg_buf_tile_scheduler_metadata = torch.zeros((132, 8), dtype=torch.int32) if full_graphs else None
        self.cg_buf_num_splits = torch.zeros(max_num_seqs + 1, dtype=torch.int32) if full_graphs else None

    def _build_decode(self, block_table_tensor, seq_lens_device, num_decode_tokens):
        planned, splits = get_mla_metadata_dense_fp8(seq_lens_device, 16, 1)
        if self.cg_buf_tile_scheduler_metadata is not None:  # FIXED
            rows = planned.shape[0]  # FIXED
            self.cg_buf_tile_scheduler_metadata[:rows].copy_(planned)  # FIXED
            planned = self.cg_buf_tile_scheduler_metadata[:rows]  # FIXED
            entries = splits.shape[0]  # FIXED
            self.cg_buf_num_splits[:entries].copy_(splits)  # FIXED
            splits = self.cg_buf_num_splits[:entries]  # FIXED
        carrier = SimpleNamespace(tile_scheduler_metadata=planned, num_splits=splits)
        return SimpleNamespace(block_table=block_table_tensor, seq_lens=seq_lens_device, scheduler_metadata=carrier)


class FlashMLAImpl:
    def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer):
        return None
