"""Records device memory before and after many captures and releases."""

from __future__ import annotations

import gc

import torch

from stalegraph import ops
from stalegraph.recorded.decode import DecodeCase, SOFTMAX_SCALE, tensors

CAPTURES = 1000
SEGMENT = 20 << 20  # bytes: the caching allocator's usual segment


def record(device, captures: int = CAPTURES) -> tuple[dict, None]:
    case = DecodeCase("leak", (204, 70), (204, 70), (204, 70))
    inputs = {name: tensor.to(device.torch_device) for name, tensor in tensors(case).items()}

    def step():
        metadata, num_splits = ops.get_mla_metadata_dense_fp8(inputs["seq_lens"], case.heads, 1)
        return ops.flash_mla_with_kvcache_fp8(
            inputs["q"], inputs["k_cache"], inputs["block_table"], inputs["seq_lens"], 512, metadata, num_splits,
            SOFTMAX_SCALE, True, inputs["descale_q"], inputs["descale_k"],
        )  # fmt: skip

    def capture(count: int) -> None:
        for _ in range(count):
            graph = device.graph()
            with graph.capture():
                step()
            graph.replay()
            device.synchronize()
            graph.reset()

    def memory() -> dict:
        device.synchronize()
        gc.collect()
        device.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return {
            "allocated": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "used_on_device": total - free,
        }

    step()
    capture(10)  # the driver sets up its own pools for graphs once
    before = memory()
    capture(captures)
    after = memory()
    return {"captures": captures, "segment": SEGMENT, "before": before, "after": after}, None
