"""How long the audit of a large graph takes, and how much memory it holds."""

from __future__ import annotations

import time
import tracemalloc
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Benchmark:
    """Seconds of `audit(graph)` for a graph of `nodes` nodes, best of three, and the bytes it allocates at its peak."""

    nodes: int
    pointers: int
    seconds: float
    watched_seconds: float
    peak_bytes: int

    def line(self) -> str:
        return (
            f"{self.nodes} nodes, {self.pointers} pointers: audit {self.seconds:.2f} s, "
            f"one replay's check under a watch {self.watched_seconds * 1000:.1f} ms, "
            f"peak {self.peak_bytes / 2**20:.1f} MiB ({self.peak_bytes / self.nodes:.0f} bytes a node)"
        )

    def to_json(self) -> dict:
        return {"schema": 1, **asdict(self)}


def bench(nodes: int) -> Benchmark:
    """Captures `nodes` additions on the simulated GPU, over 64 tensors of which one in eight dies, and audits them."""
    import torch

    from stalegraph.audit import audit, watch
    from stalegraph.errors import UsageError
    from stalegraph.simulator import Device

    if nodes < 1:
        raise UsageError(f"nodes is {nodes}; allowed: 1 or more")
    with watch(quiet=True) as w, Device() as device:
        inputs = [torch.full((64,), float(k)) for k in range(64)]
        graph = device.graph()
        with graph.capture():
            out = torch.zeros(64)
            for k in range(nodes - 1):
                out.add_(inputs[k % 64])
        graph.replay()
        started = time.perf_counter()
        w.replay_begins(graph)
        watched = time.perf_counter() - started
    with Device() as device:
        inputs = [torch.full((64,), float(k)) for k in range(64)]
        graph = device.graph()
        with graph.capture():
            out = torch.zeros(64)
            for k in range(nodes - 1):
                out.add_(inputs[k % 64])
        del inputs[::8]
        seconds = []
        for _ in range(3):
            started = time.perf_counter()
            report = audit(graph)
            seconds.append(time.perf_counter() - started)
        tracemalloc.start()
        audit(graph)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return Benchmark(nodes, len(report.pointers), min(seconds), watched, peak)
