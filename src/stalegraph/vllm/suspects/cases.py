"""The suspects' builders and layers, made ready to be driven: each function executes one release's own classes."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from stalegraph.vllm import kernels
from stalegraph.vllm.sources import decode_method, settings, vllm_config
from stalegraph.vllm.suspects.examination import Case
from stalegraph.vllm.suspects.release import (
    BLOCK_SIZE,
    HEAD_DIM,
    HEADS,
    MAX_BLOCKS,
    MAX_REQUESTS,
    KVSpec,
    MambaSpec,
    config,
)
from stalegraph.vllm.suspects.runner import Runner


def _numbers(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class FlashLayer:
    """One FlashAttention layer of the release: queries, a KV cache, and its own FlashAttentionImpl."""

    def __init__(self, flash, tokens, seed=0):
        self.flash = flash
        implementation = object.__new__(flash.FlashAttentionImpl)
        vars(implementation).update(
            num_heads=HEADS,
            head_size=HEAD_DIM,
            num_kv_heads=HEADS,
            scale=HEAD_DIM**-0.5,
            attn_type="decoder",
            kv_cache_dtype="auto",
            sliding_window=(-1, -1),
            alibi_slopes=None,
            logits_soft_cap=0,
            sinks=None,
            dcp_world_size=1,
            vllm_flash_attn_version=3,
            supports_quant_query_input=True,
            batch_invariant_enabled=False,
            fa4_hd256=False,
        )
        self.implementation = implementation
        # From 0.33.0 the call goes through an object that may compile a kernel first.
        if hasattr(flash, "_FA4_DENSE_ATTENTION_KERNEL"):
            flash._FA4_DENSE_ATTENTION_KERNEL = kernels.flash_attn_varlen_func
        self.layer = settings(**{f"_{name}_scale": torch.ones(1) for name in "qkv"})
        blocks = 1 + MAX_REQUESTS * MAX_BLOCKS
        self.query = _numbers(tokens, HEADS, HEAD_DIM, seed=seed)
        self.keys_and_values = _numbers(2, blocks, BLOCK_SIZE, HEADS, HEAD_DIM, seed=seed + 1)
        self.output = torch.zeros_like(self.query)

    def forward(self, metadata):
        # 0.33.0 keeps K and V side by side: (blocks, heads, block size, 2 * dim).
        cache = self.keys_and_values
        if hasattr(self.flash, "_FA4_DENSE_ATTENTION_KERNEL"):
            cache = torch.cat((cache[0], cache[1]), dim=-1).transpose(1, 2)
        self.implementation.forward(self.layer, self.query, None, None, cache, metadata, self.output)


def linear_attention(release, find, cache_mode) -> Case:
    """Linear attention (MiniMax-Text-01): in mode "align" the state indices are gathered afresh at each step."""
    module = find("backends.linear_attn")
    builder = module.LinearAttentionMetadataBuilder(MambaSpec(), ["layer"], config(mamba_cache_mode=cache_mode), "cpu")
    layers = vars(find("mamba.linear_attn", "minimax_linear_attn")).values()
    layer_class = next(value for value in layers if "_decode_infer" in getattr(value, "__dict__", {}))
    layer = SimpleNamespace(tp_slope=torch.full((HEADS, 1, 1), 0.1))
    runner, requests = Runner(release, find), 3
    q, k, v = (_numbers(requests, HEADS, HEAD_DIM, seed=seed) for seed in range(3))
    states = torch.zeros((1 + MAX_REQUESTS * MAX_BLOCKS, HEADS, HEAD_DIM, HEAD_DIM))
    output = torch.zeros((requests, HEADS * HEAD_DIM))

    def build(step):
        # The state is kept in block (length - 1) // 16 of each request: the first at capture, later ones as it grows.
        lengths = [1] * requests if step is None else [12 + 3 * step + at for at in range(requests)]
        common = runner.common(lengths)
        return builder.build_for_cudagraph_capture(common) if step is None else builder.build(0, common)

    def forward(metadata):
        indices = metadata.state_indices_tensor
        output.copy_(layer_class._decode_infer(layer, q, k, v, states, indices, metadata))

    return Case(type(builder).__name__, build, forward, output, (states,))


def block_pooling(release, find) -> Case:
    """Whisper's causal encoder with block pooling (Voxtral): all metadata is a deep copy, made anew at each step."""
    flash, pool = find("flash_attn"), 2
    whisper = find("whisper_causal")
    backend = whisper.create_whisper_attention_backend_with_block_pooling(flash.FlashAttentionBackend, pool)
    spec = KVSpec(block_size=BLOCK_SIZE // pool, num_kv_heads=HEADS if release == "0.33.0" else HEADS * pool)
    builder = backend.get_builder_cls()(spec, ["layer"], config(), "cpu")
    runner, requests = Runner(release, find), 3
    layer = FlashLayer(flash, requests * pool)

    def build(step):
        lengths = [1] * requests if step is None else [5 + 3 * step + at for at in range(requests)]
        common = runner.common(lengths, max_seq_len=MAX_BLOCKS * BLOCK_SIZE // pool)
        return builder.build_for_cudagraph_capture(common) if step is None else builder.build(0, common)

    return Case(type(builder).__name__, build, layer.forward, layer.output)


def shared_update(release, find) -> Case:
    """FlashAttention with two KV cache groups of one spec: the second's own plan is filled at capture only (V1)."""
    flash = find("flash_attn")
    builders = [flash.FlashAttentionMetadataBuilder(KVSpec(), ["layer"], config(), "cpu") for _ in range(2)]
    runner, requests = Runner(release, find, groups=2), 3
    layer = FlashLayer(flash, requests)  # a layer of the second group

    def build(step):
        if step is None:
            return builders[1].build_for_cudagraph_capture(runner.common([1] * requests, group=1, max_seq_len=128))
        lengths = [35 + 7 * step + at for at in range(requests)]
        first = builders[0].build(0, runner.common(lengths, group=0))
        second = runner.common(lengths, group=1)
        return builders[1].update_block_table(first, second.block_table_tensor, second.slot_mapping)

    return Case(f"{type(builders[0]).__name__}.update_block_table", build, layer.forward, layer.output)


def microbatches(release, find, query_len, padded=None, requests=4) -> Case:
    """The V1 runner's split into two microbatches (dual batch overlap), each with its own FlashAttention metadata."""
    flash, ubatch = find("flash_attn"), find("ubatch_utils")
    builders = [flash.FlashAttentionMetadataBuilder(KVSpec(), ["layer"], config(), "cpu") for _ in range(2)]
    runner, padded = Runner(release, find), padded or requests
    layers = [FlashLayer(flash, padded * query_len // 2, seed=seed) for seed in (0, 5)]
    output = torch.zeros((2, *layers[0].output.shape))
    half = padded * query_len // 2

    def build(step):
        real = padded if step is None else requests
        lengths = [query_len] * real if step is None else [30 + 7 * step + at for at in range(real)]
        common = runner.common(lengths, query_len=query_len, padded=padded, max_seq_len=128)
        # Requests that have a token in the slice, as maybe_create_ubatch_slices finds them.
        first = slice(0, -(-half // query_len))
        slices = [
            ubatch.UBatchSlice(first, slice(0, half)),
            ubatch.UBatchSlice(slice(half // query_len, padded), slice(half, 2 * half)),
        ]
        return [
            builder.build_for_cudagraph_capture(part) if step is None else builder.build(0, part)
            for builder, part in zip(builders, ubatch.split_attn_metadata(slices, common), strict=True)
        ]

    def forward(metadata):
        for at, (layer, part) in enumerate(zip(layers, metadata, strict=True)):
            layer.forward(part)
            output[at] = layer.output

    # UBatchWrapper keeps the forward contexts of the capture beside its graph.
    return Case("split_attn_metadata", build, forward, output, kept=True)


def reused_plan(release, find) -> Case:
    """FlashMLA's bf16 decode under the V2 runner, which to 0.21.0 captures with the metadata object of the warm-up.

    The first decode plans and stores the plan on that object. Captured with an object that has a plan, the graph has no
    planner in it. The FP8 kernel stands in for the bf16 one, whose schedule means the same.
    """
    flash, interface = find("mla.flashmla"), find("flash_mla_interface")
    interface.flash_mla_cuda = SimpleNamespace(dense_decode_fwd=kernels.dense_decode_fwd)
    flash.get_mla_metadata, flash.flash_mla_with_kvcache = interface.get_mla_metadata, interface.flash_mla_with_kvcache
    config = vllm_config(max_num_seqs=MAX_REQUESTS, max_model_len=64 * MAX_BLOCKS, cache_dtype="auto")
    builder = flash.FlashMLAMetadataBuilder(KVSpec(block_size=64, num_kv_heads=1), ["layer"], config, "cpu")
    decode = decode_method(flash, cache_dtype="auto")
    runner, requests = Runner(release, find), 2
    query = _numbers(requests, 16, 576, seed=1).to(torch.float8_e4m3fn)
    cache = _numbers(1 + requests * MAX_BLOCKS, 64, 576, seed=2).to(torch.float8_e4m3fn)
    layer = settings(_q_scale=torch.ones(1), _k_scale=torch.ones(1))
    output = torch.zeros((requests, 16, 512), dtype=torch.bfloat16)

    def forward(metadata):
        output.copy_(decode(query, cache, metadata, layer)[0])

    def build(step, fresh_for_capture=tuple(map(int, release.split(".")[:2])) >= (0, 22)):
        lengths = [1] * requests if step is None else [60 + 30 * step + at for at in range(requests)]
        metadata = builder.build(0, runner.common(lengths))
        if step is not None:
            return metadata
        forward(metadata)  # warm-up
        return builder.build(0, runner.common(lengths)) if fresh_for_capture else metadata

    name = f"{type(builder).__name__} (bf16)"
    return Case(name, build, forward, output, sound_build=lambda step: build(step, fresh_for_capture=True))
