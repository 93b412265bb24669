"""FP8 split-KV MLA decode that obeys a tile schedule as FlashMLA's kernel does, right or wrong: the oracle.

Two kernels are modelled. The first runs one block per SM part and does what its row of `tile_scheduler_metadata` says;
the second combines the partials that `num_splits` announces. Neither checks the schedule, so a stale one gives rows
that are never written, partials read from memory as it lies, or an address outside the cache. Source: FlashMLA's FP8
dense decode for sm_90 (vllm-project/FlashMLA, csrc/extension/sm90/dense_fp8), tested against outputs recorded on an H200.
"""

from __future__ import annotations

import math

import torch

from stalegraph.errors import DeviceAssertError, IllegalAddressError, UsageError
from stalegraph.schedule import BLOCK_SIZE, METADATA_WIDTH

HEAD_DIM_QK = 576  # 512 latent dims, then 64 rotary ones
HEAD_DIM_V = 512  # the latent dims serve as values too
MAX_SPLITS_STEP = 32  # the combine kernel is built for 32, 64, 96, 128 and 160 splits
MAX_SPLITS = 160
_CHUNK_TOKENS = 1 << 13  # KV tokens gathered at a time: 19 MB as float32; above 32 MB malloc maps fresh pages each time
_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()  # float32 of each of the 256 bytes


def max_splits(num_sm_parts: int) -> int:
    """The most splits per request that the combine kernel built for `num_sm_parts` parts asserts."""
    return min(MAX_SPLITS, -(-num_sm_parts // MAX_SPLITS_STEP) * MAX_SPLITS_STEP)


def _check_inputs(q, k_cache, block_table, seq_lens, tile_scheduler_metadata, num_splits):
    for name, tensor, dim, dtype in (
        ("q", q, 4, torch.float8_e4m3fn),
        ("k_cache", k_cache, 4, torch.float8_e4m3fn),
        ("block_table", block_table, 2, torch.int32),
        ("seq_lens", seq_lens, 1, torch.int32),
        ("tile_scheduler_metadata", tile_scheduler_metadata, 2, torch.int32),
        ("num_splits", num_splits, 1, torch.int32),
    ):
        if tensor.dtype != dtype or tensor.dim() != dim:
            raise UsageError(f"{name} is {tensor.dtype} of {tensor.dim()} dims; allowed: {dtype} of {dim} dims")
    batch, _, num_heads, width = q.shape
    for name, got, allowed in (
        ("q.shape[3]", width, HEAD_DIM_QK),
        ("k_cache.shape[1]", k_cache.shape[1], BLOCK_SIZE),
        ("k_cache.shape[3]", k_cache.shape[3], HEAD_DIM_QK),
        ("block_table.shape[0]", block_table.shape[0], batch),
        ("seq_lens.shape[0]", seq_lens.shape[0], batch),
        ("tile_scheduler_metadata.shape[1]", tile_scheduler_metadata.shape[1], METADATA_WIDTH),
        ("num_splits.shape[0]", num_splits.shape[0], batch + 1),
    ):
        if got != allowed:
            raise UsageError(f"{name} is {got}; allowed: {allowed}")
    if num_heads % k_cache.shape[2]:
        raise UsageError(f"q.shape[2] is {num_heads}; allowed: a multiple of k_cache.shape[2] = {k_cache.shape[2]}")
    if k_cache[0].is_contiguous() is False or block_table.stride(1) != 1:
        raise UsageError("k_cache and block_table need contiguous pages and rows")


def accumulator_shapes(batch: int, num_sm_parts: int, q_rows: int, num_kv_heads: int = 1):
    """Shapes of the float32 partials: `(out_accum, lse_accum)`, one row for each split that can arise."""
    rows = batch + num_sm_parts
    return (rows, num_kv_heads, q_rows, HEAD_DIM_V), (rows, num_kv_heads, q_rows)


def _div(value: int, by: int) -> int:
    """Integer division as C does it, towards zero."""
    return -(-value // by) if value < 0 else value // by


class _Pages:
    """Block-table entries and KV pages by raw index, as the kernel addresses them: nothing is checked but the mapping."""

    def __init__(self, k_cache, block_table, memory):
        self.k_cache, self.block_table, self.memory = k_cache, block_table, memory
        self.rows, self.width = block_table.shape
        self.stride = block_table.stride(0)
        self.entries = block_table.tolist()

    def page(self, request: int, block: int) -> int:
        if 0 <= block < self.width:
            return self.entries[request][block]
        # Outside its row the kernel reads whatever int32 lies there: the row before, the row behind, or foreign memory.
        flat = request * self.stride + block
        row, column = divmod(flat, self.stride)
        if 0 <= row < self.rows and column < self.width:
            return self.entries[row][column]
        address = self.block_table.data_ptr() + 4 * flat
        return int(self._foreign(address, 4, f"block_table[{request}, {block}]").view(torch.int32))

    def _foreign(self, address: int, nbytes: int, what: str) -> torch.Tensor:
        if self.memory is None:
            raise IllegalAddressError(f"{what} lies at 0x{address:x}, outside the tensor")
        return self.memory.read(address, nbytes)

    def touch(self, request: int, block: int) -> None:
        """Load the page of `block` and drop it, as the kernel does before it looks at the range; faults if not mapped."""
        if self.memory is None and request == 0 and block < 0:
            return  # the int32 before the table is nobody's here: what page it names cannot be known
        page = self.page(request, block)
        if not 0 <= page < self.k_cache.shape[0]:
            self._outside(page, request, block)

    def _outside(self, page: int, request: int, block: int) -> torch.Tensor:
        nbytes = self.k_cache[0].numel()
        address = self.k_cache.data_ptr() + page * self.k_cache.stride(0)
        what = f"page {page} of k_cache, named by block_table[{request}, {block}],"
        return self._foreign(address, nbytes, what)

    def keys(self, pages: torch.Tensor, head: int, where) -> torch.Tensor:
        """float32 keys (items, blocks * 64, 576) of `pages` (items, blocks)."""
        inside = (pages >= 0) & (pages < self.k_cache.shape[0])
        wanted = pages.clamp(0, self.k_cache.shape[0] - 1).view(-1)
        taken = self.k_cache.view(torch.uint8)[:, :, head].index_select(0, wanted).view(*pages.shape, BLOCK_SIZE, -1)
        if not bool(inside.all()):
            for item, block in (~inside).nonzero().tolist():
                request, first = where[item]
                raw = self._outside(int(pages[item, block]), request, first + block)
                taken[item, block] = raw.view(self.k_cache.shape[1:])[:, head]
        items, blocks = pages.shape
        # A look-up is several times faster than PyTorch's own cast on the CPU, and equal to it.
        return _E4M3.index_select(0, taken.view(-1).int()).view(items, blocks * BLOCK_SIZE, HEAD_DIM_QK)


def _items(metadata, lengths):
    """(request, block_begin, block_end, split, direct) of every request that some part visits, part by part."""
    batch = len(lengths)
    for begin, begin_seqlen, end, end_seqlen, begin_split, *_ in metadata:
        if not 0 <= begin < batch:
            continue
        for request in range(begin, end + 1):
            if request >= batch:
                raise IllegalAddressError(f"a part runs on to request {request} of a batch of {batch}, past seq_lens")
            whole = _div(lengths[request] + BLOCK_SIZE - 1, BLOCK_SIZE)
            first = _div(begin_seqlen, BLOCK_SIZE) if request == begin else 0
            last = _div(end_seqlen + BLOCK_SIZE - 1, BLOCK_SIZE) if request == end else whole
            yield request, first, last, begin_split if request == begin else 0, first == 0 and last == whole


def _attend(q, pages: _Pages, group, lengths, scale, value_scale, causal, head, queries_per_head):
    """Partials of items with equally many blocks: (out (items, rows, 512), natural-log lse (items, rows)), float32."""
    blocks = group[0][2] - group[0][1]
    where = [(request, first) for request, first, *_ in group]
    left = torch.tensor([lengths[r] for r, _ in where]) - BLOCK_SIZE * torch.tensor([first + blocks - 1 for _, first in where])
    table = torch.tensor([[pages.page(r, first + b) for b in range(blocks)] for r, first in where])
    table[left <= 0, -1] = 0  # no row of that page is loaded
    keys = pages.keys(table, head, where)
    # Rows that the last block's load leaves out are zeros, whatever the page holds there.
    for item, rows_left in enumerate(left.tolist()):
        if rows_left < BLOCK_SIZE:
            keys[item, keys.shape[1] - BLOCK_SIZE + max(rows_left, 0) :] = 0
    rows = q.shape[1]
    scores = torch.bmm(q[[request for request, _ in where]], keys.transpose(1, 2)) * scale
    # Only the last block is compared with seq_len (the last two where later queries see more), so positions that an
    # earlier block of a too long stale range holds are attended to, as on the hardware.
    masked = min(blocks, 2 if causal else 1) * BLOCK_SIZE
    first_masked = torch.tensor([first for _, first in where]) * BLOCK_SIZE + blocks * BLOCK_SIZE - masked
    position = first_masked[:, None] + torch.arange(masked)
    limit = torch.tensor([lengths[request] for request, _ in where])[:, None, None].expand(-1, rows, 1)
    if causal:
        query = torch.arange(rows) // queries_per_head
        limit = limit - (query[-1] - query)[None, :, None]
    scores[:, :, -masked:].masked_fill_(position[:, None, :] >= limit, -math.inf)
    largest = scores.amax(2, keepdim=True)
    largest = torch.where(largest == -math.inf, 0.0, largest)
    weights = (scores - largest).exp_()
    total = weights.sum(2, keepdim=True)
    nothing = (total == 0) | total.isnan()
    out = torch.bmm(weights, keys[:, :, :HEAD_DIM_V]) / torch.where(nothing, 1.0, total) * value_scale
    lse = torch.where(nothing, math.inf, total.log() + largest)[:, :, 0]
    return out, lse


def mla_decode_fp8_into(
    q, k_cache, block_table, seq_lens, tile_scheduler_metadata, num_splits, softmax_scale, descale_q, descale_k,
    causal, out, lse, out_accum, lse_accum, memory=None,
) -> None:  # fmt: skip
    """Run both kernels into the caller's buffers; whatever the schedule leaves out keeps the content it had.

    q (batch, s_q, heads, 576) and k_cache (pages, 64, kv_heads, 576) are float8_e4m3fn; block_table (batch, width),
    seq_lens (batch,), tile_scheduler_metadata (parts, 8) and num_splits (batch + 1,) int32; descale_q and descale_k float32
    (1,). out (batch, s_q, heads, 512) and lse (batch, heads, s_q) receive results, out_accum and lse_accum (see
    `accumulator_shapes`) the partials, both float32. `memory` answers `read(address, nbytes)` for loads outside the tensors;
    without it such a load is an IllegalAddressError. A request with more splits than `max_splits` is a DeviceAssertError.
    """
    _check_inputs(q, k_cache, block_table, seq_lens, tile_scheduler_metadata, num_splits)
    batch, queries, num_heads, _ = q.shape
    num_kv_heads = k_cache.shape[2]
    per_head = num_heads // num_kv_heads
    rows = queries * per_head
    causal = causal and queries > 1
    lengths, prefix = seq_lens.tolist(), num_splits.tolist()
    key_scale = float(descale_q) * float(descale_k) * softmax_scale
    pages = _Pages(k_cache, block_table, memory)

    groups: dict[int, list] = {}
    for request, first, last, split, direct in _items(tile_scheduler_metadata.tolist(), lengths):
        # The last block's page is loaded before the range is looked at, so an empty range still reads one page; but only
        # as many of its rows as seq_len leaves, so a range that lies behind the request's end reads nothing there.
        if lengths[request] > BLOCK_SIZE * (last - 1):
            pages.touch(request, last - 1)
        groups.setdefault(max(last - first, 0), []).append((request, first, last, split, direct))

    grouped = q.view(batch, queries, num_kv_heads, per_head, HEAD_DIM_QK).float()
    for head in range(num_kv_heads):
        q_rows = grouped[:, :, head].reshape(batch, rows, HEAD_DIM_QK)
        head_out = out[:, :, head * per_head : (head + 1) * per_head]
        head_lse = lse[:, head * per_head : (head + 1) * per_head]
        for blocks, group in groups.items():
            chunk = max(1, _CHUNK_TOKENS // (BLOCK_SIZE * max(blocks, 1)))
            for at in range(0, len(group), chunk):
                part = group[at : at + chunk]
                if blocks:
                    got, got_lse = _attend(
                        q_rows, pages, part, lengths, key_scale, float(descale_k), causal, head, per_head
                    )
                else:
                    got = torch.zeros(len(part), rows, HEAD_DIM_V)
                    got_lse = torch.full((len(part), rows), math.inf)
                _store(part, got, got_lse, prefix, head, head_out, head_lse, out_accum, lse_accum)
        _combine(prefix, tile_scheduler_metadata.shape[0], head, head_out, head_lse, out_accum, lse_accum, memory)


def _store(items, got, got_lse, prefix, head, out, lse, out_accum, lse_accum) -> None:
    queries, per_head = out.shape[1], out.shape[2]
    direct = [at for at, item in enumerate(items) if item[4]]
    if direct:
        requests = [items[at][0] for at in direct]
        out[requests] = got[direct].view(len(direct), queries, per_head, HEAD_DIM_V).to(out.dtype)
        lse[requests] = got_lse[direct].view(len(direct), queries, per_head).transpose(1, 2)
    split = [at for at, item in enumerate(items) if not item[4]]
    if split:
        target = [prefix[items[at][0]] + items[at][3] for at in split]
        for row in target:
            if not 0 <= row < out_accum.shape[0]:
                raise IllegalAddressError(f"a partial is written to row {row} of {out_accum.shape[0]} partials")
        out_accum[target, head] = got[split]
        # An empty partial weighs nothing in the combination; an empty whole request reports +inf.
        lse_accum[target, head] = torch.where(got_lse[split] == math.inf, -math.inf, got_lse[split])


def _partials(first, count, head, out_accum, lse_accum, memory):
    if first >= 0 and first + count <= out_accum.shape[0]:
        return out_accum[first : first + count, head], lse_accum[first : first + count, head]
    if memory is None:
        raise IllegalAddressError(f"partials {first} to {first + count - 1} are read; there are {out_accum.shape[0]}")
    found = []
    for accum in (out_accum, lse_accum):
        row = accum[0, head]
        at = accum.data_ptr() + 4 * (first * accum.stride(0) + head * accum.stride(1))
        raw = [memory.read(at + 4 * split * accum.stride(0), 4 * row.numel()) for split in range(count)]
        found.append(torch.stack([one.view(torch.float32).view(row.shape) for one in raw]))
    return found


def _combine(prefix, parts, head, out, lse, out_accum, lse_accum, memory) -> None:
    """The second kernel: requests with two splits or more get the weighted sum of their partials."""
    queries, per_head = out.shape[1], out.shape[2]
    for request in range(len(prefix) - 1):
        count = prefix[request + 1] - prefix[request]
        if count > max_splits(parts):
            raise DeviceAssertError(
                f"request {request} has {count} splits by num_splits; the combine kernel asserts at most {max_splits(parts)}"
            )
        if count <= 1:
            continue
        partial, partial_lse = _partials(prefix[request], count, head, out_accum, lse_accum, memory)
        largest = partial_lse.amax(0)
        largest = torch.where(largest == -math.inf, 0.0, largest)
        total = (partial_lse - largest).exp().sum(0)
        whole = torch.where((total == 0) | total.isnan(), math.inf, total.log() + largest)
        weights = (partial_lse - whole).exp()
        mixed = torch.einsum("sr,srv->rv", weights, partial)
        out[request] = mixed.view(queries, per_head, HEAD_DIM_V).to(out.dtype)
        lse[request] = whole.view(queries, per_head).transpose(0, 1)


def mla_decode_fp8(
    q, k_cache, block_table, seq_lens, tile_scheduler_metadata, num_splits, softmax_scale, descale_q, descale_k,
    causal=True,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`(out, lse)` of FP8 MLA decode under a schedule, shapes as in `mla_decode_fp8_into`; rows never written are NaN.

    out is float32, before the kernel's rounding to bfloat16, so that it can be compared with a plain softmax to 1e-3;
    `mla_decode_fp8_into` rounds to whatever its out buffer holds, as the kernel does.
    """
    _check_inputs(q, k_cache, block_table, seq_lens, tile_scheduler_metadata, num_splits)
    batch, queries, num_heads, _ = q.shape
    num_kv_heads = k_cache.shape[2]
    rows = queries * num_heads // num_kv_heads
    out = torch.full((batch, queries, num_heads, HEAD_DIM_V), math.nan)
    lse = torch.full((batch, num_heads, queries), math.nan)
    shapes = accumulator_shapes(batch, tile_scheduler_metadata.shape[0], rows, num_kv_heads)
    out_accum, lse_accum = (torch.full(shape, math.nan) for shape in shapes)
    mla_decode_fp8_into(
        q, k_cache, block_table, seq_lens, tile_scheduler_metadata, num_splits, softmax_scale, descale_q, descale_k,
        causal, out, lse, out_accum, lse_accum,
    )  # fmt: skip
    return out, lse


def mla_reference(
    q, k_cache, block_table, seq_lens, softmax_scale, descale_q, descale_k, causal=True
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same attention as one plain float64 softmax per request, with no schedule: what right means.

    Shapes as in `mla_decode_fp8_into`; a request of length 0 gives zeros and an lse of +inf, as the kernel does.
    """
    batch, queries, num_heads, _ = q.shape
    per_head = num_heads // k_cache.shape[2]
    out = torch.zeros(batch, queries, num_heads, HEAD_DIM_V, dtype=torch.float64)
    lse = torch.full((batch, num_heads, queries), math.inf, dtype=torch.float64)
    for request, length in enumerate(seq_lens.tolist()):
        if length == 0:
            continue
        pages = block_table[request, : -(-length // BLOCK_SIZE)].long()
        keys = k_cache.view(torch.uint8)[pages].view(torch.float8_e4m3fn).double().flatten(0, 1)[:length] * descale_k.double()
        for head in range(num_heads):
            for query in range(queries):
                visible = length - (queries - 1 - query if causal else 0)
                seen = keys[:visible, head // per_head]
                scores = seen @ (q[request, query, head].double() * descale_q.double()) * softmax_scale
                out[request, query, head] = scores.softmax(0) @ seen[:, :HEAD_DIM_V]
                lse[request, head, query] = scores.logsumexp(0)
    return out, lse
