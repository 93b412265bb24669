"""Records what FlashMLA's decode kernels write under fresh and stale schedules, into buffers whose content is known."""

from __future__ import annotations

import torch

from stalegraph import ops
from stalegraph.attention import accumulator_shapes
from stalegraph.recorded import decode


def prefill(device, case, parts: int) -> int:
    """Fills the four buffers that the op will allocate, frees them again, and returns where its `out` will fall.

    The op allocates out, lse, lse_accum and out_accum in this order; from one state of the allocator, equal requests in
    equal order get equal blocks.
    """
    batch, rows = len(case.seq_lens), case.heads * case.queries
    partials, partials_lse = accumulator_shapes(batch, parts, rows)
    held = []
    for shape, dtype, value in (
        ((batch, rows, 1, 512), torch.bfloat16, decode.OUT_BEFORE),
        ((batch, 1, rows), torch.float32, decode.LSE_BEFORE),
        (partials_lse, torch.float32, decode.LSE_ACCUM_BEFORE),
        (partials, torch.float32, decode.OUT_ACCUM_BEFORE),
    ):
        held.append(torch.empty(shape, dtype=dtype, device=device.torch_device).fill_(value))
    device.synchronize()
    return held[0].data_ptr()


def run(device, case) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """`(out, lse, known)` of one call; `known` says whether the op's buffers were the prefilled ones."""
    inputs = {name: tensor.to(device.torch_device) for name, tensor in decode.tensors(case).items()}
    metadata, num_splits = (tensor.to(device.torch_device) for tensor in decode.planned(case, device.sm_count))
    if case.queries > 1:  # the op copies q into the layout it wants: done here, it allocates nothing more
        inputs["q"] = inputs["q"].contiguous()
    prefill(device, case, len(metadata))  # the first round may take new segments
    expected = prefill(device, case, len(metadata))
    out, lse = ops.flash_mla_with_kvcache_fp8(
        inputs["q"], inputs["k_cache"], inputs["block_table"], inputs["seq_lens"], 512, metadata, num_splits,
        decode.SOFTMAX_SCALE, True, inputs["descale_q"], inputs["descale_k"],
    )  # fmt: skip
    device.synchronize()
    return device.to_host(out).contiguous(), device.to_host(lse).contiguous(), out.data_ptr() == expected


def record(device) -> tuple[dict, dict]:
    done, tensors, failure = [], {}, None
    for case in decode.cases():
        try:
            out, lse, known = run(device, case)
        except RuntimeError as error:  # sticky: no later case can run in this process
            failure = {"case": case.name, "error": str(error).splitlines()[0]}
            break
        tensors[f"{case.name}.out"], tensors[f"{case.name}.lse"] = out, lse
        done.append({**case.to_json(), "buffers_known": known})
    return {
        "inputs": "stalegraph.recorded.decode.tensors(case): a 32-bit integer hash of each element's index",
        "softmax_scale": decode.SOFTMAX_SCALE,
        "descale_q": decode.DESCALE_Q,
        "descale_k": decode.DESCALE_K,
        "before": {
            "out": decode.OUT_BEFORE,
            "lse": decode.LSE_BEFORE,
            "out_accum": decode.OUT_ACCUM_BEFORE,
            "lse_accum": decode.LSE_ACCUM_BEFORE,
        },
        "cases": done,
        "failure": failure,
    }, tensors
