"""Builders of decode metadata, side by side: the bug, its fix, and two that cost less.

A builder is asked before each replay for the metadata of a step. A captured graph keeps the addresses that the builder
returned at capture, so a builder is right only if it returns the same tensors for ever, with this step's content.

    RegressedBuilder   fresh tensors on each call                        vLLM #32810, issue #33638
    CopyingBuilder     fresh tensors, copied into persistent buffers     vLLM #35175
    InPlaceBuilder     one kernel writes the persistent buffers          proposed here
    InGraphBuilder     the graph itself plans, the host does nothing     after the idea of vLLM #36611
"""

from __future__ import annotations

import difflib
import inspect
from dataclasses import dataclass

import torch

from stalegraph import ops, schedule
from stalegraph.errors import UsageError

FIELDS = ("seq_lens", "block_table", "tile_scheduler_metadata", "num_splits")


@dataclass
class DecodeMetadata:
    """What a decode step's attention is given, int32: seq_lens (batch,), block_table (batch, width), the schedule."""

    seq_lens: torch.Tensor
    block_table: torch.Tensor
    tile_scheduler_metadata: torch.Tensor
    num_splits: torch.Tensor


class Builder:
    """What the builders share: sizes, checks, and padded rows made safe.

    `sanitize_padding` clamps block-table entries to 0 or more, in place: a padded row (seq_len 0) makes the kernel load
    the last entry of the row before, and -1 there is a page before the cache (vLLM #33664). A builder is asked for the
    metadata of the padded batch, as by vLLM's V1 runner, so that num_splits covers padded rows too.
    """

    name = "builder"
    safe_padding = True

    def __init__(self, *, num_heads, max_batch, max_blocks, sm_count, device, sanitize_padding=None):
        for what, value in (("num_heads", num_heads), ("max_batch", max_batch), ("max_blocks", max_blocks)):
            if not isinstance(value, int) or value < 1:
                raise UsageError(f"{what} is {value!r}; allowed: an integer of at least 1")
        if max_batch > schedule.MAX_BATCH:
            raise UsageError(f"max_batch is {max_batch}; allowed: 1 to {schedule.MAX_BATCH}")
        self.num_heads = num_heads
        self.max_batch = max_batch
        self.max_blocks = max_blocks
        self.num_sm_parts = schedule.num_sm_parts(sm_count, num_heads)
        self.device = device
        self.sanitize_padding = self.safe_padding if sanitize_padding is None else sanitize_padding
        self.checked: tuple = (None, None, 0)  # the tensors last found sound, and how many tokens their rows hold
        self.allocate_buffers()

    def allocate_buffers(self) -> None:
        """Persistent buffers, where the builder has any."""

    def build(
        self, seq_lens: torch.Tensor, block_table: torch.Tensor, max_seq_len: int | None = None
    ) -> DecodeMetadata:
        """The metadata of a step for seq_lens (batch,) and block_table (batch, width), int32, both persistent.

        `max_seq_len` is the host's own bound on seq_lens, in tokens; nothing is read back from the device.
        """
        self.check(seq_lens, block_table, max_seq_len)
        if self.sanitize_padding:
            block_table.clamp_(min=0)
        return DecodeMetadata(seq_lens, block_table, *self.plan(seq_lens))

    def plan(self, seq_lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(tile_scheduler_metadata, num_splits) of a step."""
        raise NotImplementedError

    def head(self, metadata: DecodeMetadata) -> None:
        """Runs inside the captured step, before attention."""

    def check(self, seq_lens, block_table, max_seq_len) -> None:
        """Refuse tensors that do not fit; the very tensors of the step before have been looked at already."""
        if seq_lens is not self.checked[0] or block_table is not self.checked[1]:
            self.checked = seq_lens, block_table, self.check_tensors(seq_lens, block_table)
        tokens = self.checked[2]
        if max_seq_len is not None and max_seq_len > tokens:
            raise UsageError(f"max_seq_len is {max_seq_len}; allowed: at most {tokens}, what block_table's rows hold")

    def check_tensors(self, seq_lens, block_table) -> int:
        for name, tensor, dim in (("seq_lens", seq_lens, 1), ("block_table", block_table, 2)):
            if tensor.dtype != torch.int32 or tensor.dim() != dim:
                raise UsageError(f"{name} is {tensor.dtype} of {tensor.dim()} dims; allowed: torch.int32 of {dim}")
        batch = seq_lens.shape[0]
        if not 1 <= batch <= self.max_batch:
            raise UsageError(f"seq_lens has batch {batch}; allowed: 1 to max_batch {self.max_batch}")
        if block_table.shape[0] != batch:
            raise UsageError(f"block_table has {block_table.shape[0]} rows; allowed: {batch}, one a request")
        if block_table.shape[1] > self.max_blocks:
            raise UsageError(f"block_table is {block_table.shape[1]} wide; allowed: max_blocks {self.max_blocks}")
        return block_table.shape[1] * schedule.BLOCK_SIZE


class RegressedBuilder(Builder):
    """Returns the planner's own tensors, new on each call: what #32810 shipped in vLLM 0.15.0 to 0.18.1."""

    name = "regressed"
    safe_padding = False

    def plan(self, seq_lens):
        metadata, num_splits = ops.get_mla_metadata_dense_fp8(seq_lens, self.num_heads, 1)
        return metadata, num_splits


class CopyingBuilder(Builder):
    """Copies the planner's tensors into buffers that stay: #35175. Padded rows are made safe as well (#33664)."""

    name = "copying"

    def allocate_buffers(self):
        self.metadata = torch.zeros((self.num_sm_parts, 8), dtype=torch.int32, device=self.device)
        self.num_splits = torch.zeros((self.max_batch + 1,), dtype=torch.int32, device=self.device)

    def plan(self, seq_lens):
        metadata, num_splits = ops.get_mla_metadata_dense_fp8(seq_lens, self.num_heads, 1)
        self.metadata.copy_(metadata)
        self.num_splits[: seq_lens.shape[0] + 1].copy_(num_splits)
        return self.metadata, self.num_splits[: seq_lens.shape[0] + 1]


class InPlaceBuilder(CopyingBuilder):
    """One kernel writes the schedule straight into the persistent buffers and makes padded rows safe: no copy."""

    name = "inplace"

    def build(self, seq_lens, block_table, max_seq_len=None):
        self.check(seq_lens, block_table, max_seq_len)
        return DecodeMetadata(seq_lens, block_table, *self.plan(seq_lens, block_table))

    def plan(self, seq_lens, block_table=None):
        table = block_table if self.sanitize_padding else None
        ops.schedule_into(
            seq_lens, self.metadata, self.num_splits, num_sm_parts=self.num_sm_parts, block_table=table
        )  # fmt: skip
        return self.metadata, self.splits_of(seq_lens.shape[0])

    def splits_of(self, batch: int) -> torch.Tensor:
        """The head of num_splits that a batch reads, one view a batch size for good."""
        if batch not in self.views:
            self.views[batch] = self.num_splits[: batch + 1]
        return self.views[batch]

    def allocate_buffers(self):
        super().allocate_buffers()
        self.views: dict[int, torch.Tensor] = {}


class InGraphBuilder(InPlaceBuilder):
    """The same kernel captured at the head of the graph, so each replay plans anew and the host does nothing."""

    name = "ingraph"

    def build(self, seq_lens, block_table, max_seq_len=None):
        self.check(seq_lens, block_table, max_seq_len)
        if seq_lens is not self.last.seq_lens or block_table is not self.last.block_table:
            self.last = DecodeMetadata(seq_lens, block_table, self.metadata, self.splits_of(seq_lens.shape[0]))
        return self.last

    def allocate_buffers(self):
        super().allocate_buffers()
        self.last = DecodeMetadata(None, None, None, None)

    def head(self, metadata):
        self.plan(metadata.seq_lens, metadata.block_table)


BUILDERS = {kind.name: kind for kind in (RegressedBuilder, CopyingBuilder, InPlaceBuilder, InGraphBuilder)}


def make_builder(name: str, **sizes) -> Builder:
    """The builder called `name`, with the sizes that `Builder` takes."""
    if name not in BUILDERS:
        raise UsageError(f"builder is {name!r}; allowed: {', '.join(BUILDERS)}")
    return BUILDERS[name](**sizes)


def builder_diff(before: str = "regressed", after: str = "copying") -> str:
    """A unified diff of what two builders do on each step: the few lines that the bug is about."""
    sources = []
    for name in (before, after):
        source = inspect.getsource(BUILDERS[name].plan)
        sources.append(inspect.cleandoc("\n" + source).splitlines(keepends=True))
    lines = [[line.rstrip("\n") + "\n" for line in one] for one in sources]
    return "".join(difflib.unified_diff(*lines, before, after, n=3))
