"""`stalegraph audit script.py`: run a program under the watch; exit 1 with findings, 0 without, 2 on bad usage.

A program that fails on its own account, with no finding until then, gives 125: cannot tell.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from contextlib import ExitStack, redirect_stdout
from pathlib import Path

import torch

from stalegraph.errors import UsageError

CANNOT_TELL = 125


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sim", action="store_true", help='run on a simulated GPU: device="cuda" then needs no GPU')
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    parser.add_argument("--pointers", action="store_true", help="list every baked address, not only what is wrong")
    parser.add_argument("--bench", type=int, metavar="NODES", help="time the audit of a simulated graph of NODES nodes")
    parser.add_argument("script", nargs="?", help="the program to run, as python would")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")


def main(args) -> int:
    if args.bench is not None:
        from stalegraph.audit.bench import bench

        result = bench(args.bench)
        print(json.dumps(result.to_json()) if args.json else result.line())
        return 0
    if not args.script:
        raise UsageError("script is missing; allowed: the path of a Python program, or --bench NODES")
    path = Path(args.script)
    if not path.is_file():
        raise UsageError(f"script is {args.script!r}, which is no file; allowed: the path of a Python program")
    report, failure = run_script(path, args.args, sim=args.sim)
    print(json.dumps(report.to_json()) if args.json else report.table())
    print(f"[stalegraph] {report.summary()}", file=sys.stderr)
    if args.pointers and not args.json:
        print(report.table(pointers=True))
    if failure is not None:
        print(
            f"stalegraph audit: {path.name} ended with {failure}; what it did until then was audited", file=sys.stderr
        )
    return 1 if report.findings else 0 if failure is None else CANNOT_TELL


def run_script(path: Path, arguments: list[str], *, sim: bool):
    """(report, how the script failed or None): `path` run as `__main__` under a watch, its stdout sent to stderr."""
    from stalegraph.audit.simulated_cuda import simulated_cuda
    from stalegraph.audit.watch import watch

    saved, failure = (sys.argv, sys.path[:]), None
    sys.argv, sys.path[0] = [str(path), *arguments], str(path.resolve().parent)
    try:
        with ExitStack() as stack:
            # The result alone goes to stdout.
            stack.enter_context(redirect_stdout(sys.stderr))
            # Quiet, since the report says it all: told at once as well, each finding would stand there twice.
            opened = stack.enter_context(watch(quiet=True))
            if sim:
                stack.enter_context(simulated_cuda())
            try:
                runpy.run_path(str(path), run_name="__main__")
            except SystemExit as leaving:
                if leaving.code not in (None, 0):
                    failure = f"exit code {leaving.code}"
            except KeyboardInterrupt:  # how a server ends: what it did is told
                failure = "an interrupt"
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
            report = opened.report(pointers_too=True)
            if not report.graphs:
                gpu = sim or (torch.version.cuda is not None and torch.cuda.is_available())
                hint = "" if gpu else "; there is no CUDA device here, and --sim was not given"
                report.miss(f"{path.name}", f"no graph was captured or replayed in it{hint}")
    finally:
        sys.argv, sys.path[:] = saved[0], saved[1]
    return report, failure
