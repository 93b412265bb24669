"""`stalegraph walkthrough`: choose notebooks, run them two at a time, write the report in one piece."""

from __future__ import annotations

import argparse
import ast
import json
import multiprocessing
import os
import platform
import shutil
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from datetime import datetime, timezone
from pathlib import Path

from tabulate import tabulate

from stalegraph.errors import RungUnavailable, UsageError
from stalegraph.reciter import check_prompt
from stalegraph.rungs import RUNGS, available
from stalegraph.walkthrough import notebook as notebooks
from stalegraph.walkthrough.page import write_index, write_page
from stalegraph.walkthrough.runner import Outcome, Trouble, execute

SCHEMA = 1
AT_ONCE = 2
MAX_SMS = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rung", default="sim", help=f"what runs the kernels: {', '.join(RUNGS)} (default: sim)")
    parser.add_argument("--prompt-file", help="text to recite, any 1 to 4,096 bytes (default: the notebooks' own)")
    parser.add_argument("--only", help="notebooks to run, by number or name: 01 or 01,03")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a parameter of the notebooks run")
    parser.add_argument("--sm-count", help="SMs of the simulated GPU: 132 an H100 or H200, 78 an H20")
    parser.add_argument("--flashmla-lib", help="FlashMLA's library, where no vLLM is installed (rung flashmla)")
    parser.add_argument("--out", default="build/walkthrough", help="where the report goes (default: build/walkthrough)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def main(args) -> int:
    chosen = notebooks.choose(args.only)
    parameters = _parameters(args, chosen)
    _require_rung(args.rung, args.flashmla_lib)
    outcomes = run_walkthrough(chosen, parameters, Path(args.out), say=lambda line: print(line, file=sys.stderr, flush=True))
    if args.json:
        record = {"schema": SCHEMA, "rung": args.rung, "held": all(one.held for one in outcomes),
                  "notebooks": [one.to_json() for one in outcomes]}  # fmt: skip
        print(json.dumps(record))
    else:
        rows = [(one.notebook, one.claim, one.verdict, f"{one.seconds:.1f}") for one in outcomes]
        print(tabulate(rows, headers=["notebook", "claim", "verdict", "seconds"], maxcolwidths=[24, 72, 14, None]))
        print(f"rung {args.rung}; report in {args.out}/index.html")
    return 0 if all(one.held for one in outcomes) else 1


def _value(text: str):
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def _parameters(args, chosen) -> dict:
    """What is passed to the notebooks, each name checked against what they declare."""
    given: dict = {"rung": args.rung}
    if args.rung not in RUNGS:
        raise UsageError(f"rung is {args.rung!r}; allowed: {', '.join(RUNGS)}")
    if args.sm_count is not None:
        if not args.sm_count.isdigit() or not 1 <= int(args.sm_count) <= MAX_SMS:
            raise UsageError(f"sm-count is {args.sm_count!r}; allowed: an integer from 1 to {MAX_SMS}")
        given["sm_count"] = int(args.sm_count)
    if args.flashmla_lib is not None:
        given["flashmla_lib"] = str(_file(args.flashmla_lib, "flashmla-lib"))
    if args.prompt_file is not None:
        path = _file(args.prompt_file, "prompt-file")
        check_prompt(path.read_bytes())
        given["prompt_file"] = str(path)
    for assignment in args.set:
        name, equals, text = assignment.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"set is {assignment!r}; allowed: NAME=VALUE")
        given[name] = _value(text)
    declared = {name for one in chosen for name in one.parameters}
    for name in given:
        if name not in declared and name != "rung":
            allowed = ", ".join(sorted(declared)) or "none"
            raise UsageError(f"no notebook chosen has a parameter {name!r}; allowed: {allowed}")
    return given


def _file(name: str, argument: str) -> Path:
    path = Path(name)
    if not path.is_file():
        raise UsageError(f"{argument} is {name!r}, which is no file; allowed: the path of an existing file")
    return path.resolve()


def _require_rung(rung: str, flashmla_lib) -> None:
    reason = available(flashmla_lib)[rung]
    if reason is not None:
        raise RungUnavailable(f"rung {rung} cannot run on this machine: {reason}")


def run_walkthrough(chosen, parameters: dict, out: Path, say=print, timeout: int | None = None) -> list[Outcome]:
    """Run the notebooks, write their report to `out` (replaced as a whole), and return one outcome each, in order.

    Each notebook gets those of `parameters` that it declares.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        outcomes = _run_all(chosen, parameters, scratch, say, timeout)
        for one in outcomes:
            executed = scratch / f"{one.notebook}.ipynb"
            if executed.is_file():
                write_page(executed, scratch / f"{one.notebook}.html", one.title)
        write_index(scratch / "index.html", outcomes, provenance(parameters))
        scratch.chmod(0o755)
        if out.exists():
            shutil.rmtree(out)
        os.replace(scratch, out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return outcomes


def _run_all(chosen, parameters, scratch, say, timeout) -> list[Outcome]:
    outcomes: dict[str, Outcome] = {}
    # Fresh processes, so that a notebook's peak memory is its own kernel's and no state leaks from one into the next.
    with ThreadPoolExecutor(AT_ONCE) as pool:
        jobs = {}
        for one in reversed(chosen):  # the later ones take longer, so they begin first
            if one.problem is not None:
                outcomes[one.name] = Outcome(one.name, one.title, one.claim, trouble=Trouble(1, "", "", one.problem))
                say(f"{one.name}: broken: {one.problem}")
                continue
            own = {name: value for name, value in parameters.items() if name in one.parameters}
            limit = {} if timeout is None else {"timeout": timeout}
            job = pool.submit(_in_fresh_process, one.path, scratch / one.path.name, one.title, one.claim, own, **limit)
            jobs[job] = one
        for job in as_completed(jobs):
            outcome = outcomes[jobs[job].name] = job.result()
            tail = "" if outcome.trouble is None else f": {outcome.trouble}"
            say(f"{outcome.notebook}: {outcome.verdict} ({outcome.seconds:.1f} s){tail}")
    return [outcomes[one.name] for one in chosen]


def _in_fresh_process(*arguments, **limit) -> Outcome:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(execute, *arguments, **limit).result()


def provenance(parameters: dict) -> dict:
    """What ran the notebooks, and when."""
    import torch

    return {
        "rung": parameters.get("rung", "sim"),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
