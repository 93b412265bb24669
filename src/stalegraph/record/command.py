"""The `stalegraph record` command: every item in a process of its own, written as it comes in."""

from __future__ import annotations

import argparse
import importlib
import sys
from concurrent.futures import ThreadPoolExecutor

from stalegraph.cuda import CudaDevice, load_flashmla
from stalegraph.errors import UsageError
from stalegraph.isolate import run_isolated
from stalegraph.recorded.store import write

# The items whose record(device) runs in one child each. The last two run many children and are put together here.
SIMPLE = ("metadata", "decode", "allocator", "pointers", "leak")
ITEMS = (*SIMPLE[:-1], "padding", "text", SIMPLE[-1])
LARGEST = 8 << 20  # bytes of all records together


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", required=True, metavar="DIR", help="where the records go, such as repro/recorded/h200")
    parser.add_argument("--only", metavar="ITEMS", help=f"comma list of {', '.join(ITEMS)}; default: all")
    parser.add_argument("--flashmla-lib", metavar="PATH", help="FlashMLA's library; default: the installed vLLM's")
    parser.add_argument("--jobs", type=int, default=4, metavar="N", help="child processes at a time, 1 or more")


def provenance_of(library, command: str):
    """Runs in a child: the parent never touches the GPU, so that no context of its own is there to be lost."""
    from stalegraph.record.provenance import provenance

    load_flashmla(library)
    with CudaDevice(history=False) as device:
        return provenance(device, library, command)


def record_simple(item: str, library):
    """Runs in a child: one item's (data, tensors)."""
    load_flashmla(library)
    module = importlib.import_module(f"stalegraph.record.{item}")
    with CudaDevice(history=False) as device:
        return module.record(device)


def _simple(item: str, library, jobs: int):
    result = run_isolated(record_simple, item, library, timeout=300)
    if not result.ok:
        print(result.stderr[-3000:], file=sys.stderr)
        raise RuntimeError(result.summary())
    return result.value


def _padding(library, jobs: int):
    from stalegraph.record.padding import CASES, record_case

    with ThreadPoolExecutor(jobs) as pool:
        return {"cases": list(pool.map(lambda case: record_case(case, library), CASES))}, None


def _text(library, jobs: int):
    from stalegraph.record.text import PROMPT, TOKENS, children, record_runs

    with ThreadPoolExecutor(jobs) as pool:
        found = list(pool.map(lambda runs: record_runs(runs, library), children()))
    runs = [run for group in found for run in group]
    return {"prompt": PROMPT.decode(), "tokens": TOKENS, "texts_are": "hex of bytes", "runs": runs}, None


def main(args: argparse.Namespace) -> int:
    wanted = args.only.split(",") if args.only else list(ITEMS)
    for item in wanted:
        if item not in ITEMS:
            raise UsageError(f"--only names {item!r}; allowed: {', '.join(ITEMS)}")
    if args.jobs < 1:
        raise UsageError(f"--jobs is {args.jobs}; allowed: 1 or more")
    command = "stalegraph record --out repro/recorded/h200" + (f" --only {args.only}" if args.only else "")
    first = run_isolated(provenance_of, args.flashmla_lib, command)
    if not first.ok:
        raise UsageError(f"recording needs the flashmla rung: {first.exception or first.summary()}")
    failed, total = [], 0
    for item in (item for item in ITEMS if item in wanted):
        take = {"padding": _padding, "text": _text}.get(item)
        try:
            data, tensors = take(args.flashmla_lib, args.jobs) if take else _simple(item, args.flashmla_lib, args.jobs)
        except RuntimeError as error:
            failed.append(item)
            print(f"{item}: not recorded: {error}", file=sys.stderr)
            continue
        path = write(args.out, item, data, first.value, tensors)
        nbytes = sum(file.stat().st_size for file in (path, path.with_suffix(".safetensors")) if file.is_file())
        total += nbytes
        print(f"{item}: {nbytes} bytes in {path}")
    if total > LARGEST:
        raise UsageError(f"the records take {total} bytes; allowed: {LARGEST}")
    return 1 if failed else 0
