"""The hot-fix for vLLM 0.15.0 to 0.18.1: FP8 FlashMLA decode metadata back in persistent buffers, padded rows safe.

A `vllm.general_plugins` entry point. It waits until vLLM imports its FlashMLA backend, then wraps three names there:
the builder's `_build_decode`, the planner that this method calls, and the decode method of the implementation. Whatever
surprises it, it logs, and vLLM stays as it was. Sources: vLLM #33638 (the bug, from #32810), #35175 (what 0.19.0
ships), #33664 and #35431 (padded rows), #36611 (the schedule inside the graph).
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from dataclasses import dataclass

from stalegraph.errors import StalegraphError, UsageError
from stalegraph.vllm.affected import diagnose
from stalegraph.vllm.arrivals import forget, on_arrival

# Below "vllm", so that vLLM's own logging configuration shows it.
logger = logging.getLogger("vllm.stalegraph.hotfix")

BACKEND = "vllm.v1.attention.backends.mla.flashmla"
MODES = ("off", "auto", "copying", "inplace", "ingraph")
FORCED_MODES = (*MODES, "regressed")

WHAT = {
    "auto": "the decode schedule goes into persistent buffers",
    "copying": "the decode schedule is copied into persistent buffers",
    "inplace": "the decode schedule is written straight into persistent buffers",
    "ingraph": "the decode schedule is computed inside the captured graph, into persistent buffers",
    "regressed": "the decode schedule is handed on in fresh tensors: bug #33638, put back on purpose",
}


class Surprise(StalegraphError):
    """This vLLM is not built as the release map says; the hot-fix leaves it alone."""


@dataclass(frozen=True)
class Settings:
    """What `install` was asked for: one of FORCED_MODES, and whether padded block-table rows are made safe."""

    mode: str
    sanitize_padding: bool = True
    reason: str = ""


_settings: Settings | None = None  # None: every wrapper calls straight through
_patch: Patch | None = None
_told: set[str] = set()
_planning = threading.local()  # .call is the PlannerCall of the `_build_decode` that runs in this thread, if any


def register() -> None:
    """Entry point of `vllm.general_plugins`: install what STALEGRAPH_HOTFIX asks for, if it is needed. Never raises."""
    try:
        _register(os.environ)
    except Exception as error:
        logger.warning("stalegraph hot-fix left vLLM as it was: %s: %s", type(error).__name__, error)


def _register(environment) -> None:
    force = environment.get("STALEGRAPH_HOTFIX_FORCE", "0") == "1"
    allowed = FORCED_MODES if force else MODES
    mode = environment.get("STALEGRAPH_HOTFIX", "").strip().lower() or "auto"
    if mode not in allowed:
        raise UsageError(f"STALEGRAPH_HOTFIX is {mode!r}; allowed: {', '.join(allowed)}")
    if mode == "off":
        logger.debug("stalegraph hot-fix is off")
        return
    needed, reason = diagnose()
    if needed or force:
        padding = environment.get("STALEGRAPH_HOTFIX_PADDING", "1") != "0"
        logger.debug("stalegraph hot-fix: %s", install(mode, sanitize_padding=padding, force=True))
    elif needed is None:
        logger.warning("stalegraph hot-fix left vLLM as it was: %s", reason)
    else:
        logger.debug("stalegraph hot-fix is not needed: %s", reason)


def install(mode: str = "auto", *, sanitize_padding: bool = True, force: bool = False) -> str:
    """Install the hot-fix in this process and say in one sentence what it will do, or why nothing was done.

    `force` installs on any release, also one that needs nothing, and allows the mode "regressed": so each builder can
    be measured on one release. `sanitize_padding=False` leaves padded rows as vLLM fills them, which brings #33664 on.
    A second call replaces the mode. Raises UsageError for an unknown mode.
    """
    global _settings
    allowed = FORCED_MODES if force else MODES
    if mode not in allowed:
        raise UsageError(f"mode is {mode!r}; allowed: {', '.join(allowed)}")
    if mode == "off":
        uninstall()
        return "off: vLLM is as it was"
    needed, reason = diagnose()
    if not needed and not force:
        return f"nothing done: {reason}"
    settings = _settings = Settings(mode, sanitize_padding, reason if needed else f"forced ({reason})")
    if _patch is None:
        forget(BACKEND, _patch_quietly)
        on_arrival(BACKEND, _patch_quietly)
    if _settings is None:
        return f"nothing done: {BACKEND} is not built as expected"
    return f"{settings.reason}; {describe(settings)}"


def regress() -> str:
    """Put bug #33638 back on a fixed release (`reproduce --builder regressed`): fresh decode metadata at each build."""
    return install("regressed", sanitize_padding=False, force=True)


def uninstall() -> None:
    """Give vLLM its own functions back."""
    global _settings, _patch
    _settings = None
    forget(BACKEND, _patch_quietly)
    if _patch is not None:
        _patch.undo()
        _patch = None


def describe(settings: Settings) -> str:
    """What these settings do to vLLM, as one clause."""
    if settings.mode == "regressed":
        return WHAT["regressed"]
    padding = "padded block-table rows point at page 0" if settings.sanitize_padding else "padded rows are left unsafe"
    return f"{WHAT[settings.mode]}, the tail of num_splits is filled, {padding}"


# --------------------------------------------------------------------------------------------------- inside vLLM


class PlannerCall:
    """Stands in for the planner while `_build_decode` runs: it notes the arguments and launches nothing."""

    def __init__(self, nothing):
        self.nothing = nothing  # two empty tensors: a release that copies them into its buffers copies no bytes
        self.arguments = None

    def __call__(self, cache_seqlens, num_q_tokens_per_head_k, num_heads_k):
        self.arguments = (cache_seqlens, num_q_tokens_per_head_k, num_heads_k)
        return self.nothing


class Patch:
    """The wrapped names of vLLM's FlashMLA backend module and the originals; raises Surprise where one is missing."""

    def __init__(self, module):
        self.module = module
        try:
            self.builder_class, implementation = module.FlashMLAMetadataBuilder, module.FlashMLAImpl
            self.planner = module.get_mla_metadata_dense_fp8
            self.build_decode = self.builder_class.__dict__["_build_decode"]
        except (AttributeError, KeyError) as error:
            raise Surprise(f"{BACKEND} has no {error.args[0] if error.args else error}") from error
        # `_forward_decode` to 0.15.1, `forward_mqa` from 0.16.0.
        names = [name for name in ("forward_mqa", "_forward_decode") if name in implementation.__dict__]
        if len(names) != 1:
            raise Surprise(f"{BACKEND}.FlashMLAImpl has {' and '.join(names) or 'no decode method'}")
        self._undo = [
            (self.builder_class, "_build_decode", self.build_decode),
            (module, "get_mla_metadata_dense_fp8", self.planner),
            (implementation, names[0], implementation.__dict__[names[0]]),
        ]
        self.builder_class._build_decode = self._wrap_build_decode(self.build_decode)
        module.get_mla_metadata_dense_fp8 = self._wrap_planner(self.planner)
        setattr(implementation, names[0], self._wrap_forward(implementation.__dict__[names[0]]))

    def undo(self):
        for owner, name, original in self._undo:
            setattr(owner, name, original)

    def _wrap_planner(self, original):
        @functools.wraps(original)
        def planner(*args, **kwargs):
            call = getattr(_planning, "call", None)
            return original(*args, **kwargs) if call is None else call(*args, **kwargs)

        return planner

    def _wrap_build_decode(self, original):
        @functools.wraps(original)
        def _build_decode(builder, *args, **kwargs):
            buffers = self._buffers(builder)
            if buffers is None:
                return original(builder, *args, **kwargs)
            call = _planning.call = PlannerCall(buffers.nothing)
            try:
                metadata = original(builder, *args, **kwargs)
            finally:
                _planning.call = None
            if call.arguments is None:
                _give_up(f"{type(builder).__name__}._build_decode did not call the planner")
            else:
                self._fill(buffers, metadata, call.arguments)
            return metadata

        return _build_decode

    def _buffers(self, builder):
        try:
            return None if _settings is None else PersistentBuffers.of(builder, _settings, self.planner)
        except Exception as error:
            _give_up(f"{type(error).__name__}: {error}")
            return None

    def _fill(self, buffers, metadata, arguments):
        """Fill the buffers; should that fail, copy (graphs may have them baked in by now), then do as vLLM did."""
        try:
            buffers.fill(metadata, *arguments)
            return
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        if buffers.mode not in ("copying", "regressed"):
            logger.warning("stalegraph hot-fix copies the schedule from here on: %s", failure)
            buffers.mode = "copying"
            self._fill(buffers, metadata, arguments)
            return
        _give_up(failure)
        buffers.hand_on(metadata, *self.planner(*arguments))

    def _wrap_forward(self, original):
        @functools.wraps(original)
        def forward(implementation, *args, **kwargs):
            # Called as (q, kv_cache, attn_metadata, layer) in every release of the map.
            metadata = kwargs.get("attn_metadata", args[2] if len(args) > 2 else None)
            head = getattr(getattr(metadata, "decode", None), "_stalegraph_head", None)
            if head is not None:
                head.before(implementation)
            return original(implementation, *args, **kwargs)

        return forward


class PersistentBuffers:
    """The two persistent buffers of one builder, and the way its schedule gets into them.

    The affected releases still allocate both (`cg_buf_*`, (SMs, 8) and (max_num_seqs + 1,) int32) where full graphs are
    on, and no longer use them. All graphs of all batch sizes bake in the same two addresses.
    """

    def __init__(self, builder, settings, planner):
        self.tile_scheduler_metadata = builder.cg_buf_tile_scheduler_metadata
        self.num_splits = builder.cg_buf_num_splits
        self.nothing = (self.tile_scheduler_metadata[:0], self.num_splits[:0])
        self.planner = planner
        self.settings = settings
        self.mode = settings.mode  # "auto" until the first schedule shows what runs here
        self.settled = False
        self._views = {}

    @classmethod
    def of(cls, builder, settings, planner) -> PersistentBuffers | None:
        """The buffers of `builder`; None for bf16 caches and without full graphs, which have no such bug."""
        if not builder.is_fp8_kvcache or builder.cg_buf_tile_scheduler_metadata is None:
            return None
        buffers = builder.__dict__.get("_stalegraph_buffers")
        if buffers is None or buffers.settings is not settings:
            buffers = builder._stalegraph_buffers = cls(builder, settings, planner)
        return buffers

    def fill(self, metadata, seq_lens, num_q_tokens_per_head_k, num_heads_k):
        """Schedule `seq_lens` (batch,) by this builder's mode and point `metadata` at the result."""
        arguments = (seq_lens, num_q_tokens_per_head_k, num_heads_k)
        entries = seq_lens.shape[0] + 1
        if self.mode == "regressed":
            self.hand_on(metadata, *self.planner(*arguments))
            _tell(self.settings, self.mode)
            return
        if entries > self.num_splits.shape[0]:
            # More requests than max_num_seqs: no graph is captured for such a batch, so fresh tensors do no harm.
            self.hand_on(metadata, *self.planner(*arguments))
            return
        if self.mode != "copying" and not self.settled:
            self.mode = self._settle(*arguments)
        if self.mode == "copying":
            planned = self.planner(*arguments)
            views = self._view(planned[0].shape[0], entries)
            copy_into(*planned, views[0], self.num_splits)
        else:
            views = self._view(self._parts(num_q_tokens_per_head_k, num_heads_k), entries)
            if self.mode == "ingraph":
                metadata._stalegraph_head = Head(self, metadata.block_table, arguments)
            else:
                self.schedule(*arguments)
        self.hand_on(metadata, *views)
        if self.settings.sanitize_padding and self.mode != "ingraph":
            make_padding_safe(metadata.block_table)
        _tell(self.settings, self.mode)

    def hand_on(self, metadata, tile_scheduler_metadata, num_splits):
        """Let the decode metadata carry these two tensors (`scheduler_metadata`, 0.15.0 and later)."""
        metadata.scheduler_metadata.tile_scheduler_metadata = tile_scheduler_metadata
        metadata.scheduler_metadata.num_splits = num_splits

    def schedule(self, seq_lens, num_q_tokens_per_head_k, num_heads_k):
        """One launch of our own kernel: the plan into both buffers, the tail of num_splits filled."""
        from stalegraph.ops import schedule_into

        schedule_into(
            seq_lens,
            self.tile_scheduler_metadata,
            self.num_splits,
            num_q_tokens_per_head_k=num_q_tokens_per_head_k,
            num_heads_k=num_heads_k,
        )

    def _view(self, parts, entries):
        views = self._views.get((parts, entries))
        if views is None:
            views = (self.tile_scheduler_metadata[:parts], self.num_splits[:entries])
            self._views[parts, entries] = views
        return views

    def _parts(self, num_q_tokens_per_head_k, num_heads_k):
        from stalegraph.schedule import num_sm_parts

        return num_sm_parts(self.tile_scheduler_metadata.shape[0], num_q_tokens_per_head_k, num_heads_k)

    def _settle(self, seq_lens, num_q_tokens_per_head_k, num_heads_k) -> str:
        """The mode to use: our kernel must run here and agree with FlashMLA's planner, else "copying". Asked once."""
        self.settled = True
        try:
            _agree(self.planner, self.tile_scheduler_metadata, num_q_tokens_per_head_k, num_heads_k)
        except Exception as error:
            level = logging.DEBUG if self.mode == "auto" else logging.WARNING
            message = "stalegraph hot-fix copies the schedule, since its own kernel does not run here: %s: %s"
            logger.log(level, message, type(error).__name__, error)
            return "copying"
        return "inplace" if self.mode == "auto" else self.mode


class Head:
    """The schedule of one decode metadata object, to be launched at the head of a step (mode "ingraph")."""

    def __init__(self, buffers, block_table, arguments):
        self.buffers = buffers
        self.block_table = block_table
        self.arguments = arguments
        self.leader = None

    def before(self, implementation):
        """Launch before the first layer of each step that uses this metadata, be it warm-up, capture or eager.

        All layers of a KV cache group share one metadata object; whichever layer comes first leads for good.
        """
        if self.leader is None:
            self.leader = implementation
        if self.leader is implementation:
            self.buffers.schedule(*self.arguments)
            if self.buffers.settings.sanitize_padding:
                make_padding_safe(self.block_table)


def copy_into(planned_metadata, planned_splits, tile_scheduler_metadata, num_splits):
    """Copy a plan into persistent buffers and fill the rest of `num_splits` with its last value.

    The tail matters where a graph was captured for more requests than the plan covers: they must look empty.
    """
    tile_scheduler_metadata.copy_(planned_metadata)
    entries = planned_splits.shape[0]
    num_splits[:entries].copy_(planned_splits)
    if entries < num_splits.shape[0]:
        num_splits[entries:].copy_(planned_splits[-1:])


def make_padding_safe(block_table):
    """Point the -1 entries of padded rows at page 0, in place, so that the captured address stays.

    With a sequence length of 0 the kernel loads page `block_table[row, -1]`, the last entry of the row before; a -1
    there is an address before the cache (#33664). vLLM fills padded rows with page 0 itself from 0.20.0 on (#35431).
    """
    block_table.clamp_(min=0)


def _agree(planner, tile_scheduler_metadata, num_q_tokens_per_head_k, num_heads_k):
    """Raise unless our kernel and FlashMLA's planner give one schedule for short, long and empty requests."""
    import torch

    from stalegraph.ops import schedule_into

    device = tile_scheduler_metadata.device
    seq_lens = torch.tensor([1, 20_000, 64, 65, 4_095, 0, 0], dtype=torch.int32, device=device)
    expected_metadata, expected_splits = planner(seq_lens, num_q_tokens_per_head_k, num_heads_k)
    metadata = torch.zeros_like(tile_scheduler_metadata)
    splits = torch.zeros(seq_lens.shape[0] + 3, dtype=torch.int32, device=device)
    schedule_into(
        seq_lens, metadata, splits, num_q_tokens_per_head_k=num_q_tokens_per_head_k, num_heads_k=num_heads_k
    )
    parts, entries = expected_metadata.shape[0], expected_splits.shape[0]
    # Columns 5 to 7 are unused, and FlashMLA leaves them as it found them.
    same_rows = torch.equal(metadata[:parts, :5], expected_metadata[:, :5])
    tail = splits[entries:]
    same_splits = torch.equal(splits[:entries], expected_splits)
    if not same_rows or not same_splits or not torch.equal(tail, splits[entries - 1].expand_as(tail)):
        raise Surprise("its schedule differs from FlashMLA's")


def _patch_quietly(module):
    global _patch
    if _settings is None:
        return
    try:
        _patch = Patch(module)
    except Exception as error:
        _give_up(f"{type(error).__name__}: {error}")


def _give_up(reason):
    """Log once that vLLM goes on without the hot-fix, and make every wrapper call straight through."""
    global _settings
    _settings = None
    logger.warning("stalegraph hot-fix is off from here on, vLLM goes on as it was: %s", reason)


def _tell(settings, mode):
    """The one log line of this process, when the first schedule has gone the new way."""
    if mode not in _told:
        _told.add(mode)
        what = describe(Settings(mode, settings.sanitize_padding))
        logger.info("stalegraph hot-fix: %s; %s", settings.reason, what)
