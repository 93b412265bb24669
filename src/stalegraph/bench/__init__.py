"""`stalegraph bench`: `--sim` for the simulator on this CPU, `--gpu` for the builders on this machine's GPU."""

from __future__ import annotations

import argparse
from pathlib import Path

from stalegraph.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sim", action="store_true", help="the simulator's decode loop and the reference scheduler, on this CPU")
    parser.add_argument("--gpu", action="store_true", help="every builder on this machine's GPU (Hopper)")
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    parser.add_argument("--json", metavar="FILE", nargs="?", const="-", help="write the measurements to FILE, or print them")
    parser.add_argument("--flashmla-lib", metavar="PATH", help="with --gpu: FlashMLA's library; default: the installed vLLM's")


def main(args: argparse.Namespace) -> int:
    if args.sim == args.gpu:
        raise UsageError("bench needs one of --sim and --gpu; allowed: exactly one")
    if args.json == "-" and args.gpu:
        raise UsageError("json is '-' with --gpu; allowed: --json FILE")
    if args.json not in (None, "-"):
        path = Path(args.json)
        if not path.name or path.is_dir() or not path.parent.is_dir() or (args.gpu and path.suffix != ".json"):
            ending = " ending in .json" if args.gpu else ""
            raise UsageError(f"json is {args.json!r}; allowed: a file{ending} in a folder that exists")
    if args.flashmla_lib is not None and args.sim:
        raise UsageError(f"flashmla-lib is {args.flashmla_lib!r} with --sim, which loads none; allowed: with --gpu")
    if args.gpu:
        from stalegraph.bench import gpu

        return gpu.main(args)
    from stalegraph.bench import sim

    return sim.main(args)
