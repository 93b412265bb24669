"""Records where PyTorch's caching allocator puts the allocations of random traces."""

from __future__ import annotations

import warnings

from stalegraph.recorded import allocator


def record(device) -> tuple[dict, None]:
    warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # a trace allocates and launches nothing
    found = []
    for trace in allocator.traces():
        result = allocator.run(trace, device)
        found.append({"index": trace.index, "capturing": trace.pooled, "operations": trace.operations, **result})
    return {
        "generator": "stalegraph.recorded.allocator.traces(seed, count), Python's random.Random(seed).random() only",
        "seed": allocator.SEED,
        "count": len(found),
        "traces": found,
    }, None
