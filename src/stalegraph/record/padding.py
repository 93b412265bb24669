"""Records what FP8 decode does with padded rows (seq_lens 0), each case in its own process since some fault."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from stalegraph import ops, schedule
from stalegraph.cuda import CudaDevice, load_flashmla
from stalegraph.isolate import run_isolated
from stalegraph.record.decode import prefill
from stalegraph.recorded import decode

PAGE_BYTES = 64 * 576
WIDTH = 4  # block-table entries per row


@dataclass(frozen=True)
class PaddedCase:
    """Rows of `seq_lens` tokens (0: padding) whose padded block-table rows hold `fill`.

    `schedule` is "fresh", "captured" (planned for one token per row) or "clamped" (fresh, padded rows given one token).
    `before_cache` says what lies before the cache: "tensor" (one of ours, in the same segment) or "segment" (its edge).
    """

    seq_lens: tuple[int, ...]
    fill: int
    schedule: str = "fresh"
    before_cache: str = "segment"

    def inputs(self) -> tuple[torch.Tensor, list[int], list[int]]:
        """block_table (rows, WIDTH) on the CPU, the rows' lengths, and the lengths that the schedule is planned for."""
        lengths = list(self.seq_lens)
        table = torch.full((len(lengths), WIDTH), self.fill, dtype=torch.int32)
        for row, length in enumerate(lengths):
            if length:
                table[row] = torch.arange(row * WIDTH, (row + 1) * WIDTH) % decode.PAGES
        if self.schedule == "clamped":
            lengths = [max(length, 1) for length in lengths]
        return table, lengths, [1] * len(lengths) if self.schedule == "captured" else lengths


CASES = (
    PaddedCase((204, 70, 0), 0),
    PaddedCase((204, 70, 0), -1),
    PaddedCase((204, 0, 0), 0),
    PaddedCase((204, 0, 0), -1),
    PaddedCase((204, 0, 0), -1, before_cache="tensor"),
    PaddedCase((204, 70, 100, 30, 90, 0, 0, 0), -1),
    PaddedCase((204, 70, 100, 30, 90, 0, 0, 0), -1, before_cache="tensor"),
    PaddedCase((204, 70, 100, 30, 90, 0, 0, 0), 0),
    PaddedCase((204, 0, 0), -1, "captured"),
    PaddedCase((204, 0, 0), 0, "clamped"),
)


def run(case: PaddedCase, library) -> dict:
    """One case on the GPU: what each row's output and lse hold afterwards, and what lies at the page that was read."""
    load_flashmla(library)
    with CudaDevice(history=False) as device:
        problem = decode.DecodeCase("padded", case.seq_lens, case.seq_lens, case.seq_lens)
        inputs = decode.tensors(problem)
        # Large enough for a segment of its own, so that the cache starts that segment or lies one page into it.
        big = torch.empty(PAGE_BYTES * 1024, dtype=torch.uint8, device=device.torch_device).fill_(0x38)  # e4m3 1.0
        skipped = PAGE_BYTES if case.before_cache == "tensor" else 0
        cache = big[skipped : skipped + decode.PAGES * PAGE_BYTES].view(torch.float8_e4m3fn)
        cache = cache.view(decode.PAGES, 64, 1, 576)
        cache.copy_(inputs["k_cache"])
        table, lengths, planned = case.inputs()
        parts = schedule.num_sm_parts(device.sm_count, problem.heads)
        metadata, num_splits = (tensor.to(device.torch_device) for tensor in schedule.plan(planned, parts))
        q = inputs["q"].to(device.torch_device)
        rest = [inputs[name].to(device.torch_device) for name in ("descale_q", "descale_k")]
        entries = table.flatten().tolist()
        table = table.to(device.torch_device)
        seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device.torch_device)
        page_before = device.memory_map().find(cache.data_ptr() - PAGE_BYTES)
        prefill(device, problem, parts)
        prefill(device, problem, parts)
        out, lse = ops.flash_mla_with_kvcache_fp8(
            q, cache, table, seq_lens, 512, metadata, num_splits, decode.SOFTMAX_SCALE, True, *rest
        )
        device.synchronize()
        out, lse = device.to_host(out).float(), device.to_host(lse)
        return {
            "page_before_cache": page_before.state if page_before else "in no segment of the allocator",
            "rows": [
                {
                    "seq_len": case.seq_lens[row],
                    "entry_read": entries[row * WIDTH - 1] if row and not case.seq_lens[row] else None,
                    "written": bool((out[row] != decode.OUT_BEFORE).any()),
                    "all_zero": bool((out[row] == 0).all()),
                    "finite": bool(out[row].isfinite().all()),
                    "lse": str(lse[row].flatten()[0].item()),
                }
                for row in range(len(lengths))
            ],
        }


def record_case(case: PaddedCase, library) -> dict:
    """One case in a child: what `run` saw, or how the child ended and CUDA's error."""
    result = run_isolated(run, case, library, timeout=120)
    found = {**asdict(case), "seq_lens": list(case.seq_lens), "faulted": not result.ok, "result": result.value}
    if not result.ok:
        found |= {"exit_code": result.exit_code, "signal": result.signal, "cuda_error": result.cuda_error}
        found |= {"asserts": [asdict(line) for line in result.asserts[:1]], "exception": (result.exception or "")[:300]}
    return found
