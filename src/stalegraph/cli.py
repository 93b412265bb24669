"""The command line: `stalegraph COMMAND`; each command has a module, imported only when it is asked for.

Results go to stdout, everything else to stderr. Exit codes: 0 right, 1 wrong, 2 usage, 130 interrupted;
`reproduce` adds 125, cannot tell.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys

from stalegraph import __version__
from stalegraph.errors import StalegraphError

COMMANDS = {
    "walkthrough": ("stalegraph.walkthrough", "run the notebooks through papermill and check every claim"),
    "reproduce": ("stalegraph.vllm.reproduce", "reproduce vLLM #33638; exit 0 right, 1 wrong, 125 cannot tell"),
    "doctor": ("stalegraph.vllm.doctor", "say what this machine has and whether its vLLM is affected"),
    "audit": ("stalegraph.audit.cli", "run a script and report stale addresses in the graphs it captures"),
    "scoreboard": ("stalegraph.zoo.scoreboard", "which detector finds which class of bug, from runs"),
    "bench": ("stalegraph.bench", "benchmarks: the simulator's, and a GPU's"),
    "export": ("stalegraph.vllm.export", "save the reciter as a Hugging Face checkpoint"),
    "record": ("stalegraph.record", "record what a Hopper GPU does, for the tests to compare with"),
}


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    about = "CUDA graphs that replay stale addresses in LLM decode."
    parser = argparse.ArgumentParser(prog="stalegraph", description=about)
    parser.add_argument("--version", action="version", version=f"stalegraph {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    named = next((word for word in argv if not word.startswith("-")), None)
    modules = {}
    for name, (module, summary) in COMMANDS.items():
        if not _exists(module):
            continue
        sub = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if name == named:
            try:
                modules[name] = importlib.import_module(module)
            except ModuleNotFoundError as error:
                needed = "notebooks" if name == "walkthrough" else "notebooks,test"
                print(f"stalegraph {name}: {error}; pip install 'stalegraph[{needed}]' brings it", file=sys.stderr)
                return 2
            modules[name].add_arguments(sub)
    args = parser.parse_args(argv)
    try:
        return modules[args.command].main(args)
    except StalegraphError as error:
        print(f"stalegraph {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"stalegraph {args.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 0


if __name__ == "__main__":
    sys.exit(main())
