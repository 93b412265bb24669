"""The three kernels of an FP8 FlashMLA decode step under one name each: an oracle on CPU tensors, FlashMLA on CUDA.

The first and third have the names, arguments and results of `vllm.v1.attention.ops.flashmla` (vLLM 0.15.0 to 0.33.0), so a
builder written against vLLM runs on either rung. On the simulated GPU each is one graph node that shows every buffer
the real kernel is given, accumulators included.
"""

from __future__ import annotations

import torch

from stalegraph import kernels, schedule
from stalegraph.attention import HEAD_DIM_V, accumulator_shapes, mla_decode_fp8_into
from stalegraph.errors import UsageError
from stalegraph.simulator import current_device

DEFAULT_SM_COUNT = 132  # H100 and H200, used on CPU tensors outside a simulated device

_library = torch.library.Library("stalegraph", "DEF")
_library.define("get_mla_metadata_dense_fp8(Tensor seq_lens, int num_sm_parts) -> (Tensor, Tensor)")
_library.define(
    "schedule_into(Tensor seq_lens, Tensor(a!) tile_scheduler_metadata, Tensor(b!) num_splits, int num_sm_parts, "
    "Tensor(c!)? block_table=None) -> ()"
)
_library.define(
    "fwd_kvcache_mla_fp8(Tensor q, Tensor k_cache, Tensor block_table, Tensor seq_lens, Tensor tile_scheduler_metadata, "
    "Tensor num_splits, float softmax_scale, bool causal, Tensor descale_q, Tensor descale_k, Tensor(a!) out, "
    "Tensor(b!) lse, Tensor(c!) lse_accum, Tensor(d!) out_accum) -> ()"
)


@torch.library.impl(_library, "get_mla_metadata_dense_fp8", "CPU")
def _metadata_cpu(seq_lens, num_sm_parts):
    return schedule.plan(seq_lens, num_sm_parts)


@torch.library.impl(_library, "schedule_into", "CPU")
def _schedule_into_cpu(seq_lens, tile_scheduler_metadata, num_splits, num_sm_parts, block_table=None):
    metadata, splits = schedule.plan(seq_lens, num_sm_parts)
    tile_scheduler_metadata[:num_sm_parts] = metadata
    num_splits[: len(splits)] = splits
    num_splits[len(splits) :] = splits[-1]
    if block_table is not None:
        # The entry that lies before the row of an empty request is what the attention kernel loads a page by.
        empty = (seq_lens[1:] == 0).nonzero()[:, 0]
        block_table[empty, -1] = block_table[empty, -1].clamp(min=0)


@torch.library.impl(_library, "fwd_kvcache_mla_fp8", "CPU")
def _decode_cpu(
    q, k_cache, block_table, seq_lens, tile_scheduler_metadata, num_splits, softmax_scale, causal, descale_q, descale_k,
    out, lse, lse_accum, out_accum,
):  # fmt: skip
    device = current_device()
    mla_decode_fp8_into(
        q, k_cache, block_table, seq_lens, tile_scheduler_metadata, num_splits, softmax_scale, descale_q, descale_k,
        causal, out, lse, out_accum, lse_accum, memory=device.memory if device else None,
    )  # fmt: skip


def sm_count(tensor: torch.Tensor) -> int:
    """How many SMs the device of `tensor` has: the GPU's own, the simulated device's, or 132 without either."""
    if tensor.is_cuda:
        return torch.cuda.get_device_properties(tensor.device).multi_processor_count
    device = current_device()
    return device.sm_count if device else DEFAULT_SM_COUNT


def get_mla_metadata_dense_fp8(
    cache_seqlens: torch.Tensor, num_q_tokens_per_head_k: int, num_heads_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Schedule `cache_seqlens` (batch,) int32 into fresh tensors: `(tile_scheduler_metadata (parts, 8), num_splits (batch + 1,))`.

    Each call allocates both results, which is what #32810 overlooked. Same call as in vLLM since 0.15.0.
    """
    if cache_seqlens.is_cuda:
        return tuple(
            torch.ops._flashmla_extension_C.get_mla_decoding_metadata_dense_fp8(
                cache_seqlens, num_q_tokens_per_head_k, num_heads_k
            )
        )
    parts = schedule.num_sm_parts(sm_count(cache_seqlens), num_q_tokens_per_head_k, num_heads_k)
    return torch.ops.stalegraph.get_mla_metadata_dense_fp8(cache_seqlens, parts)


def schedule_into(
    seq_lens: torch.Tensor,
    tile_scheduler_metadata: torch.Tensor,
    num_splits: torch.Tensor,
    *,
    num_q_tokens_per_head_k: int | None = None,
    num_heads_k: int = 1,
    num_sm_parts: int | None = None,
    block_table: torch.Tensor | None = None,
) -> None:
    """Schedule `seq_lens` (batch,) int32 into the caller's buffers: one launch, no allocation, no copy.

    tile_scheduler_metadata (at least parts, 8) and num_splits (at least batch + 1,), both int32 and contiguous; entries of
    num_splits behind batch + 1 get its last value, so that a graph captured for a larger batch sees empty requests.
    The parts follow from `num_q_tokens_per_head_k` and the device, unless `num_sm_parts` is given. With `block_table`
    (batch, width) int32, the entry before the row of each empty request becomes 0 where it is negative (vLLM #33664).
    """
    if num_sm_parts is None:
        if num_q_tokens_per_head_k is None:
            raise UsageError("num_sm_parts and num_q_tokens_per_head_k are both None; allowed: one of them given")
        num_sm_parts = schedule.num_sm_parts(sm_count(seq_lens), num_q_tokens_per_head_k, num_heads_k)
    if seq_lens.is_cuda:
        kernels.schedule_into(seq_lens, tile_scheduler_metadata, num_splits, num_sm_parts, block_table=block_table)
        return
    for name, tensor, rows, what in (
        ("tile_scheduler_metadata", tile_scheduler_metadata, num_sm_parts, "rows, one a part"),
        ("num_splits", num_splits, seq_lens.shape[0] + 1, "entries, the batch and one"),
    ):
        if tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise UsageError(f"{name} is {tensor.dtype} with strides {tensor.stride()}; allowed: contiguous torch.int32")
        if tensor.shape[0] < rows:
            raise UsageError(f"{name} has {tensor.shape[0]} rows; allowed: at least {rows} {what}")
    torch.ops.stalegraph.schedule_into(seq_lens, tile_scheduler_metadata, num_splits, num_sm_parts, block_table)


def flash_mla_with_kvcache_fp8(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: torch.Tensor,
    num_splits: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    descale_q: torch.Tensor | None = None,
    descale_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 MLA decode over a paged cache: `(out (batch, s_q, heads, 512) bfloat16, lse (batch, heads, s_q) float32)`.

    Shapes of the inputs as in `stalegraph.attention.mla_decode_fp8_into`. Same call as in vLLM since 0.15.0.
    """
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5
    if q.is_cuda:
        return tuple(
            torch.ops._flashmla_extension_C.fwd_kvcache_mla_fp8(
                q, k_cache, head_dim_v, cache_seqlens, block_table, softmax_scale, causal,
                tile_scheduler_metadata, num_splits, descale_q, descale_k,
            )
        )  # fmt: skip
    if head_dim_v != HEAD_DIM_V:
        raise UsageError(f"head_dim_v is {head_dim_v}; allowed: {HEAD_DIM_V}")
    batch, queries, heads, _ = q.shape
    kv_heads = k_cache.shape[2]
    partials, partials_lse = accumulator_shapes(
        batch, tile_scheduler_metadata.shape[0], queries * heads // kv_heads, kv_heads
    )
    # The extension's own order of allocation, so that blocks come and go as they do on the GPU.
    out = torch.empty((batch, queries, heads, HEAD_DIM_V), dtype=torch.bfloat16, device=q.device)
    lse = torch.empty((batch, heads, queries), dtype=torch.float32, device=q.device)
    lse_accum = torch.empty(partials_lse, dtype=torch.float32, device=q.device)
    out_accum = torch.empty(partials, dtype=torch.float32, device=q.device)
    torch.ops.stalegraph.fwd_kvcache_mla_fp8(
        q, k_cache, block_table, cache_seqlens, tile_scheduler_metadata, num_splits, softmax_scale, causal,
        descale_q, descale_k, out, lse, lse_accum, out_accum,
    )  # fmt: skip
    return out, lse
