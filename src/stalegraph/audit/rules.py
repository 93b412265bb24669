"""Reading formulas: what an op makes of its index tensors, and so which entries send it out of bounds (class I1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

BLOCK_SIZE = 64  # tokens a page: FlashMLA's block size

_RULES: dict[str, Callable] = {}


@dataclass(frozen=True)
class OutOfBounds:
    """One entry that an op would follow out of bounds: the argument it stands in, its address, and a sentence."""

    argument: str
    address: int
    message: str


def rule(*ops: str):
    """Registers a reading formula for `ops`: a function of (tensors by name, numbers by name) -> list of OutOfBounds.

    Tensors that are gone by then are missing from the first.
    """

    def keep(function):
        for op in ops:
            _RULES[op] = function
        return function

    return keep


def names() -> frozenset[str]:
    return frozenset(_RULES)


def find(op: str) -> Callable | None:
    return _RULES.get(op)


def entry_address(tensor: torch.Tensor, *index: int) -> int:
    """The address of one entry of `tensor`; an index may lie outside, as a kernel's may."""
    return tensor.data_ptr() + sum(at * stride for at, stride in zip(index, tensor.stride())) * tensor.itemsize


@rule("stalegraph::fwd_kvcache_mla_fp8", "_flashmla_extension_C::fwd_kvcache_mla_fp8")
def fp8_dense_decode(tensors, numbers) -> list[OutOfBounds]:
    """FlashMLA's FP8 dense decode: row i reads pages 0 to ceil(seq_len/64) - 1, and at seq_len 0 page index -1.

    That is the last entry of the row before (vLLM #33664), or memory before the table for row 0. Rows that no part of
    the schedule covers are not read.
    """
    lengths_name = next((name for name in ("seq_lens", "seqlens_k", "cache_seqlens") if name in tensors), None)
    cache_name = next((name for name in ("k_cache", "kcache") if name in tensors), None)
    if lengths_name is None or cache_name is None or not {"block_table", "tile_scheduler_metadata"} <= tensors.keys():
        return []
    table, lengths = tensors["block_table"], tensors[lengths_name].tolist()
    pages = tensors[cache_name].shape[0]
    rows, width = table.shape
    covered = _covered(tensors["tile_scheduler_metadata"], len(lengths))
    entries = table.cpu().tolist()
    found = []
    for row, length in enumerate(lengths[:rows]):
        if row not in covered:
            continue
        if length <= 0:
            where, at = (row - 1, width - 1), entry_address(table, row, -1)
            if row == 0:
                message = "row 0 is padding (seq_len 0): the kernel reads the page index before the block table."
                found.append(OutOfBounds("block_table", at, message))
                continue
            page = entries[where[0]][where[1]]
            what = (
                f"row {row} is padding (seq_len 0), so the kernel reads the entry before it, block_table{list(where)}"
            )
            if not 0 <= page < pages:
                found.append(OutOfBounds("block_table", at, f"{what} = {page}, outside the cache's {pages} pages."))
            continue
        for at in range(min(-(-length // BLOCK_SIZE), width)):
            page = entries[row][at]
            if not 0 <= page < pages:
                message = (
                    f"row {row} of {length} tokens reads block_table[{row}, {at}] = {page}, outside {pages} pages."
                )
                found.append(OutOfBounds("block_table", entry_address(table, row, at), message))
                break
    return found


def _covered(metadata, batch: int) -> set[int]:
    """The rows that some part of the tile schedule runs."""
    rows: set[int] = set()
    for begin, _, end, *_ in metadata.cpu().tolist():
        if 0 <= begin < batch:
            rows.update(range(begin, min(end, batch - 1) + 1))
    return rows
