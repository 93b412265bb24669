"""The modules of a vLLM release that the suspects execute, and the stubbed names that these need to have values."""

from __future__ import annotations

import importlib
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch

from stalegraph.errors import UsageError
from stalegraph.vllm import kernels
from stalegraph.vllm.sources import ARITHMETIC, settings
from stalegraph.vllm.stubs import stubbed

BACKENDS = "vllm.v1.attention.backends"
REAL = (
    "vllm.v1.attention.backend",
    f"{BACKENDS}.utils",
    f"{BACKENDS}.flash_attn",
    f"{BACKENDS}.linear_attn",
    f"{BACKENDS}.mla.flashmla",
    "vllm.model_executor.layers.attention.mla_attention",
    "vllm.third_party.flashmla.flash_mla_interface",
    "vllm.v1.worker.ubatch_utils",
    "vllm.model_executor.models.whisper_causal",
    "vllm.model_executor.layers.mamba.linear_attn",
    "vllm.model_executor.layers.mamba.linear.minimax_linear_attn",
)
SM_COUNT = 132
BLOCK_SIZE = 16  # tokens per KV block
HEADS, HEAD_DIM = 2, 8
MAX_REQUESTS, MAX_BLOCKS = 8, 8  # of a batch, and of KV blocks per request


@dataclass(frozen=True)
class KVSpec:
    """What the builders read of a KV cache spec."""

    block_size: int = BLOCK_SIZE
    num_kv_heads: int = HEADS
    head_size: int = HEAD_DIM
    dtype: torch.dtype = torch.float32
    num_speculative_blocks: int = 0
    dcp_sharded: bool = False
    tokens_per_state: int = 1
    sliding_window: int | None = None


class MambaSpec(KVSpec):
    """A spec of linear attention state; builders tell it apart by type."""


class SlidingWindowSpec(KVSpec):
    """Asked for by type only; no suspect uses one."""


def _names():
    """The stubbed names whose values the builders and forward methods below need."""

    def no_group(*_):
        raise AssertionError("decode context parallel group is not initialized")

    flash = {
        "get_flash_attn_version": lambda *_, **__: 3,
        "is_flash_attn_varlen_func_available": lambda: True,
        "flash_attn_varlen_func": kernels.flash_attn_varlen_func,
        "get_scheduler_metadata": kernels.get_scheduler_metadata,
        "uses_fa4_hd256_kernel": lambda *_: False,
    }
    specs = {
        "AttentionSpec": KVSpec,
        "KVCacheSpec": KVSpec,
        "MambaSpec": MambaSpec,
        "SlidingWindowSpec": SlidingWindowSpec,
        "is_quantized_kv_cache": lambda dtype: dtype.startswith("fp8"),
    }
    return {
        f"{BACKENDS}.fa_utils": flash,
        "vllm.v1.kv_cache_interface": specs,
        "vllm.utils.torch_utils": {
            "is_quantized_kv_cache": specs["is_quantized_kv_cache"],
            "canonicalize_singleton_dim_strides": lambda tensor: tensor,
        },
        "vllm.utils.math_utils": ARITHMETIC,
        "vllm.distributed.parallel_state": {
            "get_dcp_group": no_group,
            "get_dcp_world_size_and_rank": lambda *_: (1, 0),
        },
        "vllm.utils.platform_utils": {"num_compute_units": lambda *_: SM_COUNT},
        "vllm.distributed": {"get_tensor_model_parallel_world_size": lambda: 1},
        "vllm.model_executor.layers.batch_invariant": {"vllm_is_batch_invariant": lambda: False},
        "vllm.model_executor.layers.lightning_attn": {
            "linear_decode_forward_triton": kernels.linear_decode_forward_triton
        },
        # No layers to look up: one sliding window configuration, none.
        "vllm.config": {"get_layers_from_vllm_config": lambda *_: {}},
    }


@contextmanager
def release_modules(release: str, root: Path):
    """Within this context, `find("whisper_causal")` executes and returns that module of `release`."""
    real = [name for name in REAL if (root / (name.replace(".", "/") + ".py")).is_file()]

    def find(*ends):
        found = [name for name in real for end in ends if name.endswith(f".{end}")]
        if not found:
            raise UsageError(f"vLLM {release} has no module {' or '.join(ends)}")
        return importlib.import_module(found[0])

    # A deep copy of a tensor copies its storage below torch's dispatcher, where the simulated device does not see it.
    deep_copy = patch.object(torch.Tensor, "__deepcopy__", lambda tensor, memo: tensor.clone())
    properties = patch("torch.cuda.get_device_properties", lambda *_: settings(multi_processor_count=SM_COUNT))
    with stubbed(root, real, _names()), deep_copy, properties:
        yield find


def config(**cache):
    """What the builders read of a VllmConfig with full graphs on."""
    model = settings(
        get_num_attention_heads=lambda _: HEADS,
        get_num_kv_heads=lambda _: HEADS,
        get_head_size=lambda: HEAD_DIM,
        dtype=torch.float32,
        rswa_window=None,
    )
    return settings(
        model_config=model,
        parallel_config=settings(decode_context_parallel_size=1, cp_kv_cache_interleave_size=1),
        scheduler_config=settings(max_num_seqs=MAX_REQUESTS, max_num_batched_tokens=64),
        cache_config=settings(cache_dtype="auto", **cache),
        compilation_config=settings(
            cudagraph_mode=settings(has_full_cudagraphs=lambda: True), max_cudagraph_capture_size=64
        ),
        attention_config=settings(flash_attn_max_num_splits_for_cuda_graph=4),
        speculative_config=None,
        num_speculative_tokens=0,
    )
