"""What FlashMLA's FP8 decode metadata means: the reference tile scheduler and the checks on a schedule.

The scheduler deals the KV blocks of a batch out to `num_sm_parts` SM parts. `tile_scheduler_metadata` holds one row per
part, `num_splits` is the prefix sum of how many splits each request was cut into. Source: FlashMLA's FP8 dense decode
(vllm-project/FlashMLA, csrc/extension/sm90/dense_fp8), whose results `plan` reproduces bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stalegraph.errors import UsageError

BLOCK_SIZE = 64  # tokens per KV block
FIXED_OVERHEAD_BLOCKS = 5  # what starting a request costs a part, in blocks
METADATA_WIDTH = 8  # int32 columns per part; the last three are unused
MAX_BATCH = 4096  # the kernel's shared memory holds this many requests
BEGIN_IDX, BEGIN_SEQLEN, END_IDX, END_SEQLEN, BEGIN_N_SPLIT_IDX = range(5)


def num_sm_parts(sm_count: int, q_tokens_per_kv_head: int, num_kv_heads: int = 1) -> int:
    """How many SM parts FlashMLA schedules for: `sm_count // num_kv_heads // ceil(q_tokens_per_kv_head / 64)`.

    >>> num_sm_parts(132, 16), num_sm_parts(78, 128)
    (132, 39)
    """
    for name, value in (
        ("sm_count", sm_count),
        ("q_tokens_per_kv_head", q_tokens_per_kv_head),
        ("num_kv_heads", num_kv_heads),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"{name} is {value!r}; allowed: an integer of at least 1")
    parts = sm_count // num_kv_heads // -(-q_tokens_per_kv_head // 64)
    if parts < 1:
        raise UsageError(
            f"q_tokens_per_kv_head is {q_tokens_per_kv_head}; allowed: at most "
            f"{64 * (sm_count // num_kv_heads)} on {sm_count} SMs with num_kv_heads {num_kv_heads}"
        )
    return parts


def blocks_of(seq_len: int) -> int:
    """How many KV blocks `seq_len` tokens take."""
    return -(-seq_len // BLOCK_SIZE)


def _lengths(seq_lens) -> list[int]:
    if isinstance(seq_lens, torch.Tensor):
        if seq_lens.dtype != torch.int32 or seq_lens.dim() != 1:
            raise UsageError(
                f"seq_lens is {seq_lens.dtype} of shape {tuple(seq_lens.shape)}; allowed: torch.int32 of shape (batch,)"
            )
        lengths = seq_lens.tolist()
    else:
        lengths = list(seq_lens)
    if not 1 <= len(lengths) <= MAX_BATCH:
        raise UsageError(f"seq_lens has {len(lengths)} entries; allowed: 1 to {MAX_BATCH}")
    if min(lengths) < 0:
        raise UsageError(f"seq_lens holds {min(lengths)}; allowed: 0 or more")
    return lengths


def plan(seq_lens, num_sm_parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference schedule: `(tile_scheduler_metadata, num_splits)` for `seq_lens` tokens per request.

    Greedy over requests: each part may spend `ceil(sum(blocks + 5) / num_sm_parts) + 5` blocks; finishing a request costs
    its remaining blocks plus 5, and a request that does not fit is cut where the part's budget, less 5, ends.
    Shapes: (num_sm_parts, 8) and (batch + 1,), both int32. The three unused columns are 0.

    >>> plan([1], 2)[0].tolist()
    [[0, 0, 0, 1, 0, 0, 0, 0], [1, 0, 0, 1, 0, 0, 0, 0]]
    """
    lengths = _lengths(seq_lens)
    if not isinstance(num_sm_parts, int) or isinstance(num_sm_parts, bool) or num_sm_parts < 1:
        raise UsageError(f"num_sm_parts is {num_sm_parts!r}; allowed: an integer of at least 1")
    blocks = [blocks_of(length) for length in lengths]
    batch = len(blocks)
    budget = -(-(sum(blocks) + FIXED_OVERHEAD_BLOCKS * batch) // num_sm_parts) + FIXED_OVERHEAD_BLOCKS
    rows, num_splits = [], [0]
    request = block = split = 0  # where the next part starts
    for _ in range(num_sm_parts):
        row = [request, block * BLOCK_SIZE, 0, 0, split, 0, 0, 0]
        left = budget
        while request < batch and left >= blocks[request] - block + FIXED_OVERHEAD_BLOCKS:
            left -= blocks[request] - block + FIXED_OVERHEAD_BLOCKS
            num_splits.append(num_splits[-1] + split + 1)
            request, block, split = request + 1, 0, 0
        if request < batch and left > FIXED_OVERHEAD_BLOCKS:
            block += left - FIXED_OVERHEAD_BLOCKS
            split += 1
        # A part that ends inside a request says where; one that ends between two names the last one's whole length.
        row[END_IDX] = request if block else request - 1
        row[END_SEQLEN] = block * BLOCK_SIZE if block else lengths[request - 1]
        rows.append(row)
    return torch.tensor(rows, dtype=torch.int32), torch.tensor(num_splits, dtype=torch.int32)


@dataclass(frozen=True)
class WorkItem:
    """KV blocks [block_begin, block_end) of one request, done by one part.

    `split` is the partial's index within the request; `direct` items cover the whole request and write its output
    without a partial. `block_end` may be at most `block_begin`: the kernel still touches block `block_end - 1`.
    """

    part: int
    request: int
    block_begin: int
    block_end: int
    split: int
    direct: bool


def work_items(seq_lens, tile_scheduler_metadata: torch.Tensor) -> list[WorkItem]:
    """What each SM part does when the decode kernel obeys `tile_scheduler_metadata` for requests of `seq_lens` tokens.

    Obeys any rows, right or wrong: parts whose begin_idx lies outside [0, batch) do nothing, and requests strictly
    between a part's first and last are done whole.
    """
    lengths = _lengths(seq_lens)
    items = []
    for part, row in enumerate(tile_scheduler_metadata.tolist()):
        begin, end = row[BEGIN_IDX], row[END_IDX]
        if not 0 <= begin < len(lengths):
            continue
        for request in range(begin, min(end, len(lengths) - 1) + 1):
            whole = blocks_of(lengths[request])
            first = row[BEGIN_SEQLEN] // BLOCK_SIZE if request == begin else 0
            last = blocks_of(row[END_SEQLEN]) if request == end else whole
            split = row[BEGIN_N_SPLIT_IDX] if request == begin else 0
            items.append(WorkItem(part, request, first, last, split, first == 0 and last == whole))
    return items


@dataclass(frozen=True)
class Defect:
    """One thing wrong with a schedule: `kind` is "gap", "overlap", "out-of-range" or "splits"."""

    kind: str
    request: int
    message: str


def check(seq_lens, tile_scheduler_metadata: torch.Tensor, num_splits: torch.Tensor) -> list[Defect]:
    """Every way in which a schedule does not do the work of `seq_lens` exactly once; an empty list means a sound one."""
    lengths = _lengths(seq_lens)
    defects = []
    if list(num_splits.shape) != [len(lengths) + 1]:
        message = f"num_splits has shape {tuple(num_splits.shape)}; {len(lengths)} requests need ({len(lengths) + 1},)"
        return [Defect("splits", -1, message)]
    for part, row in enumerate(tile_scheduler_metadata.tolist()):
        if 0 <= row[BEGIN_IDX] < len(lengths) <= row[END_IDX]:
            message = f"part {part} ends at request {row[END_IDX]}; the batch has {len(lengths)}"
            defects.append(Defect("out-of-range", row[END_IDX], message))
    by_request: dict[int, list[WorkItem]] = {request: [] for request in range(len(lengths))}
    for item in work_items(lengths, tile_scheduler_metadata):
        by_request[item.request].append(item)
    prefix = num_splits.tolist()
    for request, length in enumerate(lengths):
        whole, reached = blocks_of(length), 0
        items = sorted(by_request[request], key=lambda item: (item.block_begin, item.block_end))
        for item in items:
            span = f"part {item.part} does blocks [{item.block_begin}, {item.block_end}) of request {request}"
            if item.block_begin < 0 or item.block_end > whole:
                defects.append(Defect("out-of-range", request, f"{span}, which has {whole}"))
            if item.block_begin > reached:
                message = f"blocks [{reached}, {item.block_begin}) of request {request} are done by no part"
                defects.append(Defect("gap", request, message))
            elif item.block_begin < reached:
                defects.append(Defect("overlap", request, f"{span}; blocks below {reached} are done already"))
            reached = max(reached, item.block_end)
        if reached < whole or not items:
            message = f"blocks [{reached}, {whole}) of request {request} are done by no part"
            defects.append(Defect("gap", request, message))
        if prefix[request + 1] - prefix[request] != len(items):
            message = f"num_splits gives request {request} {prefix[request + 1] - prefix[request]}; parts do {len(items)}"
            defects.append(Defect("splits", request, message))
        elif [item.split for item in items] != list(range(len(items))):
            message = f"request {request} has partials numbered {[item.split for item in items]}"
            defects.append(Defect("splits", request, message))
    return defects
