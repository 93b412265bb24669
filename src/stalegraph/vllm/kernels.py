"""What some of vLLM's attention kernels compute, slowly and in the open, so that a captured graph of them can be read.

Each is one graph node on the simulated GPU, with the argument names of the kernel it stands for. They read lengths,
tables and plans from memory at each launch, as the real kernels do; that is all that matters to a stale address.
"""

from __future__ import annotations

import torch

from stalegraph import ops
from stalegraph.errors import IllegalAddressError

_library = torch.library.Library("stalegraph", "FRAGMENT")
_library.define(
    "flash_attn_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor seqused_k, Tensor block_table, "
    "Tensor? scheduler_metadata, float softmax_scale, bool causal, Tensor(a!) out) -> ()"
)
_library.define("flash_attn_schedule(Tensor cache_seqlens, int max_num_splits) -> Tensor")
_library.define(
    "linear_decode(Tensor q, Tensor k, Tensor v, Tensor(a!) kv_cache, Tensor slope_rate, Tensor slot_id, Tensor(b!) "
    "out) -> ()"
)


@torch.library.impl(_library, "flash_attn_varlen", "CPU")
def _flash_attn_varlen(q, k, v, cu_seqlens_q, seqused_k, block_table, scheduler_metadata, softmax_scale, causal, out):
    """Paged attention: q (tokens, heads, dim), k and v (blocks, block size, KV heads, dim)."""
    starts, lengths = cu_seqlens_q.tolist(), seqused_k.tolist()
    block_size, groups = k.shape[1], q.shape[1] // k.shape[2]
    for request, length in enumerate(lengths):
        begin, end = starts[request], starts[request + 1]
        if length <= 0 or end <= begin:
            continue
        pages = block_table[request, : -(-length // block_size)].long()
        _check("page", pages.tolist(), k.shape[0])
        keys = k[pages].flatten(0, 1)[:length].float().repeat_interleave(groups, 1)
        values = v[pages].flatten(0, 1)[:length].float().repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].float(), keys) * softmax_scale
        if causal:
            at = torch.arange(length - (end - begin), length)
            scores = scores.masked_fill(torch.arange(length)[None, None, :] > at[None, :, None], float("-inf"))
        out[begin:end] = _combine(scores, values, _splits(scheduler_metadata, request)).to(out.dtype)


def _check(what, indices, count):
    if any(not 0 <= index < count for index in indices):
        raise IllegalAddressError(f"an illegal memory access was encountered: {what} {indices} of {count}")


def _splits(scheduler_metadata, request) -> int:
    """The number of splits of a request, which lies behind one counter in `_flash_attn_schedule`'s plan."""
    if scheduler_metadata is None:
        return 1
    return max(1, int(scheduler_metadata[1 + request]))


def _combine(scores, values, splits):
    """Softmax over keys in `splits` pieces: partial outputs weighted by their share of the whole sum."""
    pieces = []
    for part, part_values in zip(scores.chunk(splits, -1), values.chunk(splits, 0), strict=True):
        weights = torch.nan_to_num(part.softmax(-1))  # a piece that is masked whole has no softmax
        pieces.append((part.logsumexp(-1), torch.einsum("hqk,khd->hqd", weights, part_values)))
    shares = torch.stack([lse for lse, _ in pieces]).softmax(0)
    return sum(share[..., None] * output for share, (_, output) in zip(shares, pieces, strict=True)).transpose(0, 1)


@torch.library.impl(_library, "flash_attn_schedule", "CPU")
def _flash_attn_schedule(cache_seqlens, max_num_splits):
    """A counter, then the number of splits of each request: one for each 32 keys, at most `max_num_splits`."""
    plan = torch.zeros(cache_seqlens.shape[0] + 1, dtype=torch.int32)
    plan[1:] = (cache_seqlens // 32).clamp(1, max(1, max_num_splits))
    return plan


@torch.library.impl(_library, "linear_decode", "CPU")
def _linear_decode(q, k, v, kv_cache, slope_rate, slot_id, out):
    """One token of linear attention: each request's state (heads, dim, dim) decays, takes in k v', and is asked by q.

    q, k, v are (batch, heads, 1, dim); a request with slot -1 is padding.
    """
    for request, slot in enumerate(slot_id.tolist()):
        if slot < 0:
            continue
        _check("slot", [slot], kv_cache.shape[0])
        state = kv_cache[slot].float() * torch.exp(-slope_rate.reshape(-1, 1, 1).float())
        state = state + k[request].transpose(1, 2).float() @ v[request].float()
        kv_cache[slot] = state.to(kv_cache.dtype)
        out[request] = (q[request].float() @ state).flatten().to(out.dtype)


def flash_attn_varlen_func(
    q, k, v, *, out, cu_seqlens_q, seqused_k, block_table, softmax_scale, causal, scheduler_metadata=None, **_
):
    """The call that vLLM's FlashAttention backend makes; what it passes beside these does not change the addresses."""
    torch.ops.stalegraph.flash_attn_varlen(
        q, k, v, cu_seqlens_q, seqused_k, block_table, scheduler_metadata, softmax_scale, causal, out
    )
    return out


def get_scheduler_metadata(*, cache_seqlens, num_splits=0, **_):
    """FlashAttention 3's ahead-of-time plan, in a fresh tensor."""
    return torch.ops.stalegraph.flash_attn_schedule(cache_seqlens, num_splits)


def linear_decode_forward_triton(q, k, v, kv_cache, slope_rate, slot_id, block_size=32):
    """The call that vLLM's linear attention layer makes: (batch, heads * dim)."""
    out = torch.zeros((q.shape[0], q.shape[1] * q.shape[3]), dtype=q.dtype, device=q.device)
    torch.ops.stalegraph.linear_decode(q, k, v, kv_cache, slope_rate, slot_id, out)
    return out


def dense_decode_fwd(
    q, k_cache, head_dim_v, cache_seqlens, block_table, softmax_scale, causal, tile_scheduler_metadata, num_splits, *_
):
    """FlashMLA's decode as its Python interface calls it: plans first where no plan is given, and hands the plan back.

    From 0.20.0 on the interface also passes an output, which vLLM's dense decode leaves None.
    """
    if tile_scheduler_metadata is None:
        heads = q.shape[1] * q.shape[2]
        tile_scheduler_metadata, num_splits = ops.get_mla_metadata_dense_fp8(cache_seqlens, heads, 1)
    one = torch.ones(1, device=q.device)
    out, lse = ops.flash_mla_with_kvcache_fp8(
        q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits, softmax_scale, causal,
        one, one,
    )  # fmt: skip
    return out, lse, tile_scheduler_metadata, num_splits
