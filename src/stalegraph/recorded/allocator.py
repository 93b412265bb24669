"""Random traces of allocations and frees, with and without a graph's pool, run the same on any device."""

from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import dataclass

import torch

SEED = 35175
COUNT = 64
SMALLEST, LARGEST = 4, 30 << 20  # bytes, both inclusive
MOST_LIVE = 96 << 20  # bytes: a trace stays small enough for a simulated GPU


@dataclass(frozen=True)
class Trace:
    """`operations` are ("alloc", bytes), ("free", which one), ("capture",) and ("end",); captures share one pool."""

    index: int
    pooled: bool
    operations: tuple[tuple, ...]


def traces(seed: int = SEED, count: int = COUNT) -> list[Trace]:
    """`count` traces from `random.Random(seed)`, drawing only `random()`; every second one captures graphs in between.

    Sizes are log-uniform from 4 B to 30 MB, one in four repeats an earlier size; a trace has 40 to 80 operations.
    """
    draw = random.Random(seed).random
    found = []
    for index in range(count):
        pooled, operations, sizes, live, capturing = index % 2 == 1, [], [], [], False
        for _ in range(40 + int(41 * draw())):
            if pooled and draw() < 0.08:
                operations.append(("end",) if capturing else ("capture",))
                capturing = not capturing
            elif live and draw() < 0.45:
                operations.append(("free", live.pop(int(len(live) * draw()))))
            else:
                repeat = bool(sizes) and draw() < 0.25
                size = sizes[int(len(sizes) * draw())] if repeat else int(SMALLEST * (LARGEST / SMALLEST) ** draw())
                if sum(sizes[which] for which in live) + size > MOST_LIVE:
                    continue
                operations.append(("alloc", size))
                live.append(len(sizes))
                sizes.append(size)
        if capturing:
            operations.append(("end",))
        found.append(Trace(index, pooled, tuple(operations)))
    return found


def run(trace: Trace, device) -> dict:
    """Runs `trace` on `device` from an empty cache: where each allocation fell, and the segments that it took.

    An allocation is [segment, offset in bytes]; segments are numbered in order of first appearance, `order` lists them
    by address, since equal blocks of two segments are told apart by that.
    """
    device.synchronize()
    device.empty_cache()
    held: dict[int, torch.Tensor] = {}
    graphs, places, segments, count = [], [], {}, 0
    with ExitStack() as open_capture:
        for operation, *value in trace.operations:
            if operation == "alloc":
                held[count] = torch.empty(value[0], dtype=torch.uint8, device=device.torch_device)
                segment = _segment(device, held[count].data_ptr())
                number = segments.setdefault(segment, len(segments))
                places.append([number, held[count].data_ptr() - segment])
                count += 1
            elif operation == "free":
                del held[value[0]]
            elif operation == "capture":
                graphs.append(device.graph(pool=graphs[0].pool() if graphs else None))
                open_capture.enter_context(graphs[-1].capture())
            else:
                open_capture.close()
    snapshot = {segment["address"]: segment for segment in device.memory_snapshot()}
    result = {
        "places": places,
        "sizes": [snapshot[address]["total_size"] for address in segments],
        "pooled": [tuple(snapshot[address]["segment_pool_id"]) != (0, 0) for address in segments],
        "order": [segments[address] for address in sorted(segments)],
    }
    held.clear()
    for graph in graphs:
        graph.reset()
    device.empty_cache()
    return result


def _segment(device, address: int) -> int:
    """The address of the segment that `address` lies in."""
    for segment in device.memory_snapshot():
        if segment["address"] <= address < segment["address"] + segment["total_size"]:
            return segment["address"]
    raise LookupError(f"{address:#x} lies in no segment")
