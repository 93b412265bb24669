"""The decode path of real vLLM releases on the simulated GPU: their own files, executed unchanged, the rest stubbed.

From a release's wheel come the FlashMLA backend, the MLA metadata builder above it and the attention interfaces. What
they plan and launch goes to `stalegraph.ops`. `drive` captures and replays the reciter's decode with one release and
says whether the addresses that it hands to a captured graph stay, and whether the text that comes out is right.
"""

from __future__ import annotations

import importlib
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch

from stalegraph import decode, ops
from stalegraph.reciter import SOFTMAX_SCALE, Reciter
from stalegraph.schedule import num_sm_parts
from stalegraph.simulator import Device, current_device
from stalegraph.vllm.hotfix import install, uninstall
from stalegraph.vllm.stubs import stub, stubbed

PROMPT = b"Frost settled on the wires at dawn, and the last tram had not yet left; nobody on the platform spoke."
BACKEND = "vllm.v1.attention.backends.mla.flashmla"
# Executed from the release's own source where the release has them; MLA's builder moved in 0.15.0.
REAL = (
    BACKEND,
    "vllm.model_executor.layers.attention.mla_attention",
    "vllm.v1.attention.backends.mla.common",
    "vllm.v1.attention.backend",
    "vllm.v1.attention.backends.utils",
    "vllm.v1.worker.ubatch_utils",
)


@dataclass
class SchedulerMetadata:
    """Stands in for FlashMLASchedMeta, which carries the planner's two tensors from 0.15.0 on."""

    have_initialized: bool = False
    config: object = None
    tile_scheduler_metadata: torch.Tensor | None = None
    num_splits: torch.Tensor | None = None


@dataclass(frozen=True)
class AttentionSpec:
    """Stands in for vLLM's KV cache spec of an attention layer: what builders read of it."""

    block_size: int = 64
    num_kv_heads: int = 1
    head_size: int = 576
    dtype: torch.dtype = torch.float8_e4m3fn


def settings(**values):
    """A configuration object: `values` as given, every other attribute a stand-in that is false."""
    config = stub("settings")()
    vars(config).update(values)
    return config


def _no_group():
    """Decode context parallelism is not initialised: vLLM's builders ask, and catch this."""
    raise AssertionError("decode context model parallel group is not initialized")


def _plan_fp8(cache_seqlens, num_q_tokens_per_head_k, num_heads_k, **_):
    """FlashMLA's planner under 0.14.1's one name for all cache types."""
    return ops.get_mla_metadata_dense_fp8(cache_seqlens, num_q_tokens_per_head_k, num_heads_k)


def _decode_fp8(**arguments):
    """FlashMLA's FP8 decode under 0.14.1's one name for all cache types."""
    arguments.pop("is_fp8_kvcache", None)
    return ops.flash_mla_with_kvcache_fp8(**arguments)


ARITHMETIC = {
    "cdiv": lambda x, y: -(-x // y),
    "round_down": lambda x, y: x // y * y,
    "round_up": lambda x, y: -(-x // y) * y,
}


def kernel_names(release: str) -> dict:
    """The names of `vllm.v1.attention.ops.flashmla` in `release`, ending in our ops."""
    if release.startswith("0.14."):
        return {
            "is_flashmla_dense_supported": lambda: (True, None),
            "get_mla_metadata": _plan_fp8,
            "flash_mla_with_kvcache": _decode_fp8,
        }
    return {
        "is_flashmla_dense_supported": lambda: (True, None),
        "FlashMLASchedMeta": SchedulerMetadata,
        "get_mla_metadata": lambda *_, **__: (SchedulerMetadata(), None),
        # Looked up at each call, so that a test may put something between.
        "get_mla_metadata_dense_fp8": lambda *arguments: ops.get_mla_metadata_dense_fp8(*arguments),
        "flash_mla_with_kvcache_fp8": lambda **arguments: ops.flash_mla_with_kvcache_fp8(**arguments),
    }


def names(release: str, sm_count: int) -> dict:
    """The stubbed names whose values matter to the decode path of `release`."""
    is_quantized = {"is_quantized_kv_cache": lambda dtype: dtype.startswith("fp8")}
    return {
        "vllm.v1.attention.ops.flashmla": kernel_names(release),
        "vllm.utils.platform_utils": {"num_compute_units": lambda *_: sm_count},
        "vllm.utils.math_utils": ARITHMETIC,
        "vllm.utils.torch_utils": is_quantized,
        "vllm.v1.kv_cache_interface": {**is_quantized, "AttentionSpec": AttentionSpec},
        "vllm.distributed.parallel_state": {"get_dcp_group": _no_group},
        "vllm.model_executor.layers.batch_invariant": {"vllm_is_batch_invariant": lambda: False},
    }


@contextmanager
def backend(release: str, root: Path, sm_count: int):
    """The module `flashmla.py` of `release`, executed from `root`; to be used inside the context."""
    real = [name for name in REAL if (root / (name.replace(".", "/") + ".py")).is_file()]
    properties = settings(multi_processor_count=sm_count)
    with (
        stubbed(root, real, names(release, sm_count)),
        patch("torch.cuda.get_device_properties", lambda *_: properties),
    ):
        yield importlib.import_module(BACKEND)


def vllm_config(*, num_heads=16, max_num_seqs=8, max_model_len=1024, full_graphs=True, cache_dtype="fp8"):
    """What the builders read of a VllmConfig, for a DeepSeek-V2-shaped model."""
    ranks = dict(q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    layer = settings(num_heads=num_heads, **ranks)
    return settings(
        model_config=settings(
            get_num_attention_heads=lambda _: num_heads,
            get_head_size=lambda: 576,
            hf_text_config=SimpleNamespace(**ranks),
            max_model_len=max_model_len,
            dtype=torch.bfloat16,
        ),
        parallel_config=settings(
            decode_context_parallel_size=1, prefill_context_parallel_size=1, cp_kv_cache_interleave_size=1
        ),
        scheduler_config=settings(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_model_len),
        cache_config=settings(cache_dtype=cache_dtype, block_size=64),
        compilation_config=settings(
            cudagraph_mode=settings(has_full_cudagraphs=lambda: full_graphs),
            static_forward_context={"layer": layer},
        ),
        speculative_config=None,
        num_speculative_tokens=0,
    )


class HostTensor(torch.Tensor):
    """A host tensor beside the simulated device: what is computed from it stays on the host too."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with current_device().host():
            return super().__torch_function__(func, types, args, kwargs or {})


class ReleaseBuilder:
    """The builder of an executed release behind the interface of `stalegraph.builders.Builder`.

    It does what vLLM's V1 runner does around a build: query starts in a persistent buffer, padded block-table rows
    filled with `pad_block` at each step, CommonAttentionMetadata passed to `build`.
    """

    def __init__(self, module, batch, pad_block, *, num_heads, max_batch, max_blocks, sm_count, device, **_):
        config = vllm_config(num_heads=num_heads, max_num_seqs=max_batch, max_model_len=64 * max_blocks)
        self.builder = module.FlashMLAMetadataBuilder(AttentionSpec(), ["layer"], config, device)
        self.metadata_class = importlib.import_module("vllm.v1.attention.backend").CommonAttentionMetadata
        self.batch, self.pad_block = batch, pad_block
        self.num_sm_parts = num_sm_parts(sm_count, num_heads)
        self.query_start_loc = torch.zeros(max_batch + 1, dtype=torch.int32, device=device)
        self.slot_mapping = torch.zeros(max_batch, dtype=torch.int64, device=device)

    def build(self, seq_lens, block_table, longest):
        """The decode metadata that the release hands to its kernels; `longest` is 1 at capture."""
        rows = seq_lens.shape[0]
        real = rows if longest == 1 else min(self.batch, rows)
        if real < rows:
            block_table[real:].fill_(self.pad_block)
        with current_device().host():
            starts = torch.arange(rows + 1, dtype=torch.int32).clamp(max=real)
            lengths = torch.tensor([longest] * real + [0] * (rows - real), dtype=torch.int32)
        self.query_start_loc[: rows + 1].copy_(starts)
        lengths = lengths.as_subclass(HostTensor)
        values = {
            "query_start_loc": self.query_start_loc[: rows + 1],
            "query_start_loc_cpu": starts.as_subclass(HostTensor),
            "seq_lens": seq_lens,
            "num_reqs": rows,
            "num_actual_tokens": rows,
            "max_query_len": 1,
            "max_seq_len": longest,
            "block_table_tensor": block_table,
            "slot_mapping": self.slot_mapping[:rows],
            "_seq_lens_cpu": lengths,
            "seq_lens_cpu_upper_bound": lengths,
        }
        known = {item.name for item in fields(self.metadata_class)}
        common = self.metadata_class(**{name: value for name, value in values.items() if name in known})
        return BuiltMetadata(self.builder.build(0, common))

    def head(self, metadata):
        """Nothing: whatever runs at the head of a step is launched by the release's own forward method."""


class BuiltMetadata:
    """vLLM's metadata of a step, with the four decode tensors under the names that `stalegraph.decode` records."""

    def __init__(self, metadata):
        self.vllm = metadata
        decode = metadata.decode
        planned = getattr(decode, "scheduler_metadata", decode)  # two fields of the decode metadata itself in 0.14.1
        self.seq_lens, self.block_table = decode.seq_lens, decode.block_table
        self.tile_scheduler_metadata, self.num_splits = planned.tile_scheduler_metadata, planned.num_splits


def decode_method(module, num_heads=16, cache_dtype="fp8"):
    """The decode method of a release's FlashMLAImpl, made without its constructor, which asks the platform."""
    implementation = object.__new__(module.FlashMLAImpl)
    vars(implementation).update(
        kv_cache_dtype=cache_dtype,
        kv_lora_rank=512,
        scale=SOFTMAX_SCALE,
        num_heads=num_heads,
        need_to_return_lse_for_decode=False,
    )
    # `forward_mqa`, or `_forward_decode` to 0.15.1.
    name = "forward_mqa" if hasattr(module.FlashMLAImpl, "forward_mqa") else "_forward_decode"
    return getattr(implementation, name)


def release_attention(module):
    """The reciter's attention step through the release's own decode method."""
    decode_step = decode_method(module)

    def attention(model, q, cache, metadata):
        layer = settings(_q_scale=model.one, _k_scale=model.one)
        return decode_step(q[:, 0], cache[:, :, 0], metadata.vllm, layer)[0]

    return attention


@dataclass(frozen=True)
class Outcome:
    """What one release's decode did: `stable` when no field was built elsewhere than captured, `accuracy` 0 to 1."""

    release: str
    hotfix: str
    batch: int
    padded_batch: int
    stable: bool
    accuracy: float
    failure: str | None
    message: str

    @property
    def right(self) -> bool:
        return self.failure is None and self.accuracy == 1.0


def drive(
    release: str,
    root: Path,
    *,
    hotfix: str = "off",
    sanitize_padding: bool = True,
    batch: int = 1,
    prompt: bytes = PROMPT,
    tokens: int = 24,
    life: str = "taken",
    mode: str = "graph",
    pad_block: int | None = None,
    sm_count: int = 132,
) -> Outcome:
    """Capture and replay the reciter's decode with the builder and decode method of `release` on a simulated GPU.

    `hotfix` is a mode of `stalegraph.vllm.hotfix.install` ("off": none). `pad_block` is what padded block-table rows
    are filled with, by default as the release's V1 runner does: -1, or 0 from 0.20.0 on.
    """
    pad_block = default_pad_block(release) if pad_block is None else pad_block
    with Device(sm_count=sm_count, memory_bytes=1 << 28) as device, backend(release, root, sm_count) as module:
        message = install(hotfix, sanitize_padding=sanitize_padding, force=True) if hotfix != "off" else "off"
        make = partial(ReleaseBuilder, module, batch, pad_block)
        make.name = f"vllm {release}"
        try:
            with patch.object(Reciter, "attention", release_attention(module)):
                run = decode.run(
                    device,
                    builder=make,
                    prompt=prompt,
                    batch=batch,
                    tokens=tokens,
                    life=life,
                    mode=mode,
                    pad_block=pad_block,
                )
        finally:
            uninstall()
    failure = run.failure["kind"] if run.failure else None
    return Outcome(release, hotfix, batch, run.padded_batch, not run.stale_fields, run.accuracy, failure, message)


def default_pad_block(release: str) -> int:
    """What V1 fills padded block-table rows with: -1 through 0.19.1, page 0 from 0.20.0 on (vLLM #35431)."""
    return -1 if tuple(int(part) for part in release.split(".")[:2]) < (0, 20) else 0
