"""`stalegraph bench --sim`: how fast the simulated GPU decodes on this CPU, and how its cost grows."""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import time
from datetime import datetime, timezone
from pathlib import Path
from statistics import median

import torch
from tabulate import tabulate

from stalegraph import schedule
from stalegraph.builders import BUILDERS
from stalegraph.runs import PROMPT, recite

SCHEMA = 1
WANTED_STEPS_PER_SECOND = 100  # at batch 4, context 512, captured
WANTED_SCHEDULER_MS = 20  # for 4,096 requests


def _prompt(length: int) -> bytes:
    return (PROMPT * (length // len(PROMPT) + 1))[:length]


def decode_rate(quick: bool) -> dict:
    """Captured decode steps a second at batch 4 around context 512, from the median step."""
    run = recite(prompt=_prompt(480), builder="copying", batch=4, tokens=20 if quick else 64)
    return {"batch": 4, "context": 512, "steps_per_second": 1 / median(run.step_seconds), "accuracy": run.accuracy}


def scheduler_time(rounds: int = 15) -> dict:
    """Milliseconds for the reference scheduler to plan 4,096 random requests over 132 parts."""
    draw = random.Random(0)
    lens = torch.tensor([draw.randrange(200_001) for _ in range(4096)], dtype=torch.int32)
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        schedule.plan(lens, 132)
        times.append((time.perf_counter() - started) * 1e3)
    return {"requests": 4096, "parts": 132, "ms": median(times)}


def growth(quick: bool) -> dict:
    """How cost grows: whole runs over new bytes (around context 1,024), steps over batch, steps over context."""
    over_tokens, over_batch, over_context = [], [], []
    for tokens in (16, 32, 64) if quick else (32, 64, 128, 256):
        run = recite(prompt=_prompt(1024), builder="copying", batch=1, tokens=tokens)
        over_tokens.append({"tokens": tokens, "seconds": sum(run.step_seconds)})
    for batch in (1, 4, 16) if quick else (1, 2, 4, 8, 16, 32, 64):
        run = recite(prompt=_prompt(256), builder="copying", batch=batch, tokens=12, capture_sizes=(batch,))
        over_batch.append({"batch": batch, "ms_per_step": median(run.step_seconds) * 1e3})
    for context in (256, 1024) if quick else (256, 512, 1024, 2048, 4096):
        run = recite(prompt=_prompt(context), builder="copying", batch=1, tokens=12)
        over_context.append({"context": context, "ms_per_step": median(run.step_seconds) * 1e3})
    return {"over_tokens": over_tokens, "over_batch": over_batch, "over_context": over_context}


def builder_costs(quick: bool) -> list[dict]:
    """What each builder has the simulated device do per step, and its host time as a ratio to the regressed builder's."""
    runs = {name: recite(builder=name, batch=4, tokens=20 if quick else 100, life="kept") for name in BUILDERS}
    base = median(runs["regressed"].build_seconds)
    keep = ("allocations", "copies", "launches", "bytes_copied")
    return [
        {"builder": name, "host_time_ratio_on_sim": median(run.build_seconds) / base}
        | {key: run.build_counters[-1][key] for key in keep}
        for name, run in runs.items()
    ]


def measure(quick: bool = False) -> dict:
    return {
        "schema": SCHEMA,
        "rung": "sim",
        "provenance": {
            "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores",
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        },
        "decode": decode_rate(quick),
        "scheduler": scheduler_time(),
        "growth": growth(quick),
        "builders": builder_costs(quick),
    }


def main(args: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    found = measure(args.quick)
    if args.json == "-":
        print(json.dumps(found))
        return 0
    print(f"rung sim on {found['provenance']['machine']}: figures of the simulator, not of a GPU\n")
    decode, scheduler = found["decode"], found["scheduler"]
    rows = [
        ("decode steps a second, batch 4, context 512, captured", f"{decode['steps_per_second']:.0f}", f">= {WANTED_STEPS_PER_SECOND}"),
        ("reference scheduler, 4,096 requests", f"{scheduler['ms']:.2f} ms", f"< {WANTED_SCHEDULER_MS} ms"),
    ]
    print(tabulate(rows, headers=["what", "measured", "wanted"]), "\n")
    over = found["growth"]
    rows = [(one["tokens"], f"{one['seconds']:.2f}", f"{1e3 * one['seconds'] / one['tokens']:.2f}") for one in over["over_tokens"]]
    print(tabulate(rows, headers=["new bytes", "seconds", "ms a byte"]), "\n")
    rows = [(one["batch"], f"{one['ms_per_step']:.1f}", f"{one['ms_per_step'] / one['batch']:.2f}") for one in over["over_batch"]]
    print(tabulate(rows, headers=["batch", "ms a step", "ms a step and request"]), "\n")
    rows = [(one["context"], f"{one['ms_per_step']:.1f}", f"{1e3 * one['ms_per_step'] / one['context']:.1f}") for one in over["over_context"]]
    print(tabulate(rows, headers=["context", "ms a step", "us a step and token"]), "\n")
    print(tabulate([tuple(one.values()) for one in found["builders"]], headers=list(found["builders"][0]), floatfmt=".2f"))
    if args.json is not None:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0
