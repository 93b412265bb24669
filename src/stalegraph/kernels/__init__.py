"""Our own scheduling kernel: FlashMLA's schedule in one launch, written into the caller's buffers.

CUDA C++ compiled by NVRTC, launched through cuda-bindings. Chosen over Triton by measuring both in one run on an H200,
at 8 k tokens and batch 1 to 1,024: 3.4 to 5.4 us in a graph and 9.5 us of the host a launch, against 13.7 to 77.6 us
and 17.3 us for the same chain as a Triton kernel, which reduces over the whole batch at each step. Since then the
kernel has become shorter: `repro/recorded/h200/bench.json` has it at 0.05 to 0.28 of FlashMLA's time at every batch measured
from 1 to 1,024, 1.8 to 6.8 us; above that up to 8.9 us, at batch 4,095 of 1 k tokens.
"""

from stalegraph.kernels.compiler import cache_folder
from stalegraph.kernels.launch import MAX_PARTS, ensure_compiled, schedule_into

__all__ = ["ensure_compiled", "schedule_into", "cache_folder", "MAX_PARTS"]
