"""A paged op with the reading formula of FlashMLA's FP8 decode kernel, small enough for any device."""

from __future__ import annotations

import torch

from stalegraph.audit.rules import OutOfBounds, entry_address, rule

PAGE = 4  # tokens a page

_library = torch.library.Library("stalegraph_zoo", "DEF")
_library.define("last_page(Tensor cache, Tensor block_table, Tensor seq_lens) -> Tensor")


@torch.library.impl(_library, "last_page", "CompositeExplicitAutograd")
def _last_page(cache, block_table, seq_lens):
    """The values of each row's last page. A row of no tokens looks at the entry before its own, as the kernel does."""
    rows, width = block_table.shape
    last = torch.div(seq_lens + (PAGE - 1), PAGE, rounding_mode="floor") - 1
    entry = torch.arange(rows, device=cache.device) * width + last
    page = block_table.reshape(-1)[entry.clamp(min=0)]
    # The cache starts on page 1 of its buffer: page -1 is an address before it, mapped here so that all goes on.
    return cache.index_select(0, page.long() + 1)


def last_page(cache, block_table, seq_lens):
    """cache (1 + pages, width), row 0 what lies before it; block_table (rows, pages) and seq_lens (rows,) int32."""
    return torch.ops.stalegraph_zoo.last_page(cache, block_table, seq_lens)


@rule("stalegraph_zoo::last_page")
def _reads(tensors, numbers):
    if len(tensors) < 3:
        return []
    table, lengths = tensors["block_table"], tensors["seq_lens"].tolist()
    pages = tensors["cache"].shape[0] - 1
    entries = table.cpu().reshape(-1).tolist()
    width = table.shape[1]
    found = []
    for row, length in enumerate(lengths):
        at = max(row * width + -(-length // PAGE) - 1, 0)
        if not 0 <= entries[at] < pages:
            why = (
                "padding (seq_len 0), so the op reads the entry before the row"
                if length == 0
                else f"{length} tokens long"
            )
            told = (
                f"row {row} is {why}: block_table[{at // width}, {at % width}] = {entries[at]}, outside {pages} pages."
            )
            found.append(OutOfBounds("block_table", entry_address(table, at // width, at % width), told))
    return found
