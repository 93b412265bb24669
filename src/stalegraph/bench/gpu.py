"""`stalegraph bench --gpu`: what each builder costs on this GPU, for the host and for the GPU, all in one run.

Per heads, batch and context: host time of a plan and of a whole build, GPU time of scheduling inside a graph with an
empty kernel as the floor, one whole decode step (build, replay, wait), allocations and bytes per build. The ways to
build take turns within each round, so that a drifting clock hits all alike; shown are medians, kept are deciles too.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tabulate import tabulate

from stalegraph import kernels, ops, schedule
from stalegraph.builders import BUILDERS, Builder, CopyingBuilder
from stalegraph.cuda import CudaDevice, load_flashmla
from stalegraph.kernels.compiler import load
from stalegraph.recorded import Provenance
from stalegraph.recorded.store import write

BATCHES, CONTEXTS, HEADS = (1, 4, 32, 128, 256, 512, 1024), (1024, 8192, 65536), (16, 128)
QUICK_BATCHES, QUICK_CONTEXTS, QUICK_HEADS = (1, 32, 512), (8192,), (16,)
MAX_BATCH = 1024
BETWEEN = (2, 8, 16, 20, 24, 64, 768)  # scheduling only
LARGEST_BATCHES = (2048, 4095)  # scheduling only; FlashMLA asserts that the batch is below 4096
POOL_PAGES = 16384  # 604 MB of KV cache, ten times the L2, shared by all requests: 1,024 of 64 k tokens take 38 GB
LAUNCHES = 32  # scheduling launches a graph
ROUNDS = 15
HOST_ROUNDS = 4  # times as many: a host's clock goes up and down within a second
BUILDS = 20  # builds timed together, few enough for the launch queue
STEP_SECONDS = 1.5  # for all steps of one heads, batch and context
EMPTY = 'extern "C" __global__ void empty() {}'


class OldCopyingBuilder(CopyingBuilder):
    """vLLM 0.14.1 and before, ahead of the refactoring: as #35175, and num_splits' tail filled with its last value."""

    name = "copying_0_14"

    def plan(self, seq_lens):
        metadata, num_splits = super().plan(seq_lens)
        self.num_splits[num_splits.shape[0] :].fill_(num_splits[-1])
        return metadata, num_splits


WAYS = {**BUILDERS, OldCopyingBuilder.name: OldCopyingBuilder}
PLANNERS = tuple(name for name in WAYS if name != "ingraph")  # on the host, in-graph plans nothing


@dataclass(frozen=True)
class Sizes:
    """What is measured: every combination, and batches `between` and the `largest` for scheduling alone."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    heads: tuple[int, ...]
    between: tuple[int, ...]
    largest: tuple[int, ...]
    rounds: int


FULL = Sizes(BATCHES, CONTEXTS, HEADS, BETWEEN, LARGEST_BATCHES, ROUNDS)
QUICK = Sizes(QUICK_BATCHES, QUICK_CONTEXTS, QUICK_HEADS, (), (), 7)


def spread(samples: list[float]) -> dict[str, float]:
    """Median and first and ninth decile of microseconds, and how many samples they rest on.

    >>> spread([3.0, 1.0, 2.0])
    {'median': 2.0, 'low': 1.0, 'high': 3.0, 'samples': 3}
    """
    ordered = sorted(samples)
    last = len(ordered) - 1
    return {
        "median": round(statistics.median(ordered), 3),
        "low": round(ordered[math.floor(last * 0.1)], 3),
        "high": round(ordered[math.ceil(last * 0.9)], 3),
        "samples": len(ordered),
    }


def take_turns(ways: dict[str, Callable[[], float]], rounds: int, over: tuple[str, ...] = ()) -> dict[str, dict]:
    """`spread` of each way's microseconds over `rounds` rounds in which all take their turn, forwards and backwards.

    Each way has also its time over that of each of `over`: the median of the quotients within a round, where both have
    met the same clock.
    """
    samples: dict[str, list[float]] = {name: [] for name in ways}
    order = list(ways)
    for _ in range(rounds):
        for name in order:
            samples[name].append(ways[name]())
        order.reverse()
    found: dict[str, dict] = {name: spread(own) for name, own in samples.items()}
    for name, own in samples.items():
        for other in over:
            quotients = [a / b for a, b in zip(own, samples[other])]
            found[name].setdefault("over", {})[other] = round(statistics.median(quotients), 4)
    return found


def lengths(batch: int, context: int, device) -> torch.Tensor:
    """seq_lens (batch,) int32 between 3/4 of `context` and `context` tokens, the same in every run, longest first."""
    draw = torch.Generator().manual_seed(batch * 131 + context)
    drawn = context - torch.randint(0, max(context // 4, 1), (batch,), generator=draw, dtype=torch.int32)
    drawn[0] = context
    return drawn.to(device)


def captured(work: Callable[[], object], times: int = 1) -> tuple[torch.cuda.CUDAGraph, list]:
    """A graph of `times` calls of `work`, run once outside it first, and what the calls returned, which stays alive."""
    work()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    graph, results = torch.cuda.CUDAGraph(), []
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        results += [work() for _ in range(times)]
        graph.capture_end()
    torch.cuda.synchronize()
    return graph, results


def gpu_time(graph: torch.cuda.CUDAGraph, launches: int) -> Callable[[], float]:
    """Microseconds of one of a graph's `launches` equal launches, between events, the replay before it warm."""

    def measure() -> float:
        graph.replay()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1000 / launches

    return measure


def host_time(work: Callable[[], object], calls: int = BUILDS) -> Callable[[], float]:
    """Microseconds of the host for one of `calls` calls in a row; the GPU's own time is waited for outside."""

    def measure() -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        for _ in range(calls):
            work()
        elapsed = time.perf_counter_ns() - begin
        torch.cuda.synchronize()
        return elapsed / 1000 / calls

    return measure


def step_time(build: Callable[[], object], graph: torch.cuda.CUDAGraph) -> Callable[[], float]:
    """Microseconds from the start of a build to the end of the replay on the GPU: a step whose token is awaited."""

    def measure() -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        build()
        graph.replay()
        torch.cuda.synchronize()
        return (time.perf_counter_ns() - begin) / 1000

    return measure


def allocated_by(work: Callable[[], object], calls: int = 10) -> dict[str, float]:
    """Allocations and bytes, as the caching allocator counts them, of one call."""
    work()
    before = torch.cuda.memory_stats()
    for _ in range(calls):
        work()
    after = torch.cuda.memory_stats()
    names = {"allocations": "allocation.all.allocated", "bytes": "allocated_bytes.all.allocated"}
    return {name: (after[key] - before[key]) / calls for name, key in names.items()}


def empty_kernel() -> Callable[[], None]:
    """Launches a kernel of one thread that does nothing: the floor of what any scheduling can cost in a graph."""
    capability = torch.cuda.get_device_capability()
    (function,) = load(EMPTY, f"sm_{capability[0]}{capability[1]}", ("empty",))
    from cuda.bindings import driver

    return lambda: driver.cuLaunchKernel(
        function, 1, 1, 1, 1, 1, 1, 0, torch.cuda.current_stream().cuda_stream, 0, 0
    )  # fmt: skip


def make_builders(heads: int, context: int, sm_count: int, device, max_batch: int = MAX_BATCH) -> dict[str, Builder]:
    sizes = dict(num_heads=heads, max_batch=max_batch, max_blocks=-(-context // schedule.BLOCK_SIZE))
    return {name: kind(**sizes, sm_count=sm_count, device=device) for name, kind in WAYS.items()}


def scheduling(builders: dict[str, Builder], seq_lens: torch.Tensor, empty, rounds: int) -> dict:
    """GPU microseconds of planning inside a graph, a launch: by each planner, and by an empty kernel."""
    graphs = {"empty": captured(empty, LAUNCHES)}
    graphs |= {name: captured(lambda name=name: builders[name].plan(seq_lens), LAUNCHES) for name in PLANNERS}
    return take_turns({n: gpu_time(graph, LAUNCHES) for n, (graph, _) in graphs.items()}, rounds, ("regressed",))


class Attention:
    """FlashMLA's decode attention of `heads` heads over a cache of POOL_PAGES pages that all requests share."""

    def __init__(self, device):
        self.device = device
        draw = torch.Generator(device=device).manual_seed(1)
        shape = (POOL_PAGES, schedule.BLOCK_SIZE, 1, 576)
        bits = torch.randint(0, 64, shape, generator=draw, device=device, dtype=torch.uint8)  # e4m3 from 0 to 1.9
        self.k_cache = bits.view(torch.float8_e4m3fn)
        self.one = torch.ones(1, device=device)
        self.draw = draw

    def query(self, batch: int, heads: int) -> torch.Tensor:
        bits = torch.randint(0, 64, (batch, 1, heads, 576), generator=self.draw, device=self.device, dtype=torch.uint8)
        return bits.view(torch.float8_e4m3fn)

    def pages(self, batch: int, context: int) -> torch.Tensor:
        shape = (batch, -(-context // schedule.BLOCK_SIZE))
        return torch.randint(0, POOL_PAGES, shape, generator=self.draw, device=self.device, dtype=torch.int32)

    def __call__(self, q, metadata):
        return ops.flash_mla_with_kvcache_fp8(
            q, self.k_cache, metadata.block_table, metadata.seq_lens, 512, metadata.tile_scheduler_metadata,
            metadata.num_splits, 192**-0.5, True, self.one, self.one,
        )  # fmt: skip


def steps(builders: dict[str, Builder], seq_lens, attention: Attention, heads: int, context: int, rounds: int) -> dict:
    """Microseconds of a whole step per builder, and of the attention alone on the GPU.

    Capture-time metadata stay alive and lengths stay as they are, so that the regressed builder's step is as long as
    the others' and reads nothing stale: this measures cost, not the bug.
    """
    q, block_table = attention.query(seq_lens.shape[0], heads), attention.pages(seq_lens.shape[0], context)
    graphs, builds, held = {}, {}, []
    for name, builder in builders.items():
        metadata = builder.build(seq_lens, block_table)

        def step(builder=builder, metadata=metadata):
            builder.head(metadata)
            return attention(q, metadata)

        graphs[name], results = captured(step)
        builds[name] = lambda builder=builder: builder.build(seq_lens, block_table)
        held += [metadata, results]
    alone, results = captured(lambda metadata=held[0]: attention(q, metadata))
    held.append(results)
    attention_us = spread([gpu_time(alone, 1)() for _ in range(5)])
    affordable = int(STEP_SECONDS * 1e6 / (len(builders) * (attention_us["median"] + 100)))
    whole, over = {n: step_time(builds[n], graphs[n]) for n in builders}, ("regressed", "copying")
    host = {name: host_time(build) for name, build in builds.items()}
    return {
        "step_us": take_turns(whole, max(5, min(affordable, 2 * rounds)), over),
        "attention_us": attention_us,
        "host_build_us": take_turns(host, HOST_ROUNDS * rounds, over),
        "build_allocates": {name: allocated_by(build) for name, build in builds.items()},
    }


def measure(device, sizes: Sizes) -> dict:
    """All measurements of `sizes` on the open CudaDevice `device`."""
    kernels.ensure_compiled(device.torch_device)
    empty, attention, rows = empty_kernel(), Attention(device.torch_device), []
    for heads in sizes.heads:
        for context in sizes.contexts:
            builders = make_builders(heads, context, device.sm_count, device.torch_device)
            for batch in sizes.batches:
                seq_lens = lengths(batch, context, device.torch_device)
                row = {"heads": heads, "batch": batch, "context": context}
                row["num_sm_parts"] = schedule.num_sm_parts(device.sm_count, heads)
                row["gpu_schedule_us"] = scheduling(builders, seq_lens, empty, sizes.rounds)
                plans = {n: host_time(lambda n=n: builders[n].plan(seq_lens)) for n in PLANNERS}
                row["host_plan_us"] = take_turns(plans, HOST_ROUNDS * sizes.rounds, ("regressed", "copying"))
                row |= steps(builders, seq_lens, attention, heads, context, sizes.rounds)
                rows.append(row)
    return {
        "launches_a_graph": LAUNCHES,
        "rounds": sizes.rounds,
        "rows": rows,
        "between": scheduling_alone(device, sizes, sizes.heads, sizes.between, empty),
        "largest": scheduling_alone(device, sizes, sizes.heads[:1], sizes.largest, empty),
    }


def scheduling_alone(device, sizes: Sizes, heads: tuple[int, ...], batches: tuple[int, ...], empty) -> list[dict]:
    """A row for each combination, with the GPU time of scheduling and no more."""
    rows = []
    for count in heads:
        for context in sizes.contexts:
            for batch in batches:
                most = max(batch, MAX_BATCH)
                builders = make_builders(count, context, device.sm_count, device.torch_device, most)
                seq_lens = lengths(batch, context, device.torch_device)
                found = scheduling(builders, seq_lens, empty, sizes.rounds)
                rows.append({"heads": count, "batch": batch, "context": context, "gpu_schedule_us": found})
    return rows


def _median(row: dict, what: str, name: str) -> float:
    return row[what][name]["median"]


def _over(row: dict, what: str, name: str, other: str = "regressed") -> float:
    return row[what][name]["over"][other]


def summary(data: dict) -> list[dict]:
    """The worst case of every claim over all rows: what, worst value, its limit, whether it holds, and where."""
    rows, compared = data["rows"], data["rows"] + data["between"]
    claims = [
        ("GPU time of scheduling, ours over FlashMLA's", 0.3, compared,
         lambda r: _over(r, "gpu_schedule_us", "inplace")),
        ("GPU time of our scheduling, us", 8.0, compared + data["largest"],
         lambda r: _median(r, "gpu_schedule_us", "inplace")),
        ("host time of a build, in place over regressed", 1.0, rows,
         lambda r: _over(r, "host_build_us", "inplace")),
        ("host time of a plan, in place over regressed", 1.0, rows,
         lambda r: _over(r, "host_plan_us", "inplace")),
        ("host time of a plan, in place over #35175's", 0.35, rows,
         lambda r: _over(r, "host_plan_us", "inplace", "copying")),
        ("host time of a build, in graph, us", 1.0, rows, lambda r: _median(r, "host_build_us", "ingraph")),
        ("whole step, in graph over regressed", 1.0, rows,
         lambda r: _over(r, "step_us", "ingraph")),
        ("allocations a build, in place and in graph", 0, rows,
         lambda r: max(r["build_allocates"][name]["allocations"] for name in ("inplace", "ingraph"))),
    ]  # fmt: skip
    found = []
    for what, limit, over, value in claims:
        worst = max(over, key=value)
        where = f"batch {worst['batch']}, context {worst['context']}, {worst['heads']} heads"
        holds = value(worst) <= limit
        found.append({"claim": what, "worst": round(value(worst), 3), "limit": limit, "holds": holds, "where": where})
    return found


def table(data: dict) -> str:
    """The rows for people: medians in microseconds; then the claims."""
    shown = []
    for row in data["rows"]:
        gpu, host, step = row["gpu_schedule_us"], row["host_build_us"], row["step_us"]
        line = {"heads": row["heads"], "batch": row["batch"], "context": row["context"]}
        line |= {f"gpu {name}": gpu[name]["median"] for name in ("empty", "regressed", "copying", "inplace")}
        line |= {f"host {name}": host[name]["median"] for name in WAYS}
        line |= {"attention": row["attention_us"]["median"]}
        line |= {f"step {name}": step[name]["median"] for name in WAYS}
        line["allocations"] = "/".join(f"{row['build_allocates'][name]['allocations']:g}" for name in WAYS)
        shown.append(line)
    lines = ["microseconds, medians; allocations a build in the order " + ", ".join(WAYS)]
    lines.append(tabulate(shown, headers="keys", floatfmt=".1f"))
    for row in data["between"] + data["largest"]:
        found = {name: row["gpu_schedule_us"][name]["median"] for name in ("regressed", "inplace")}
        where = f"batch {row['batch']}, context {row['context']}, {row['heads']} heads"
        lines.append(f"{where}: scheduling on the GPU {found}")
    lines.append(tabulate(summary(data), headers="keys"))
    return "\n".join(lines)


def run(flashmla_lib: str | None = None, sizes: Sizes = QUICK, command: str = "a live run") -> tuple[Provenance, dict]:
    """Where and what: `sizes` measured on this machine's GPU, with the claims' worst cases under "summary"."""
    from stalegraph.record.provenance import provenance

    load_flashmla(flashmla_lib)
    with CudaDevice(history=False) as device:
        where = provenance(device, flashmla_lib, command)
        data = measure(device, sizes)
    return where, data | {"summary": summary(data)}


def main(args: argparse.Namespace) -> int:
    """Measures, prints the table, and returns 0 where every claim holds and 1 where one does not."""
    path = Path(args.json) if args.json else None
    command = "stalegraph bench --gpu" + (" --quick" if args.quick else "")
    where, data = run(args.flashmla_lib, QUICK if args.quick else FULL, command)
    if path is not None:
        write(path.parent, path.stem, data, where)
    print(where.caption())
    print(table(data))
    return 0 if all(claim["holds"] for claim in data["summary"]) else 1
