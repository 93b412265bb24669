#!/usr/bin/env python3
"""Reproduces vLLM #33638 on the simulator, on one Hopper GPU, or in a real vLLM; usable by `git bisect run`.

    python repro/reproduce.py                                    the bug, on a simulated GPU
    python repro/reproduce.py --builder copying                  its fix
    python repro/reproduce.py --rung vllm                        the vLLM that is installed, as it is
    git bisect run python repro/reproduce.py --bisect --rung vllm

Exit 0 right, 1 wrong, 125 cannot tell, 2 usage; with --bisect usage, too, is 125.
"""

import sys
from pathlib import Path

CANNOT_TELL = 125


def main(argv: list[str]) -> int:
    source = Path(__file__).resolve().parents[1] / "src"
    if source.is_dir():  # this checkout's own package, installed or not
        sys.path.insert(0, str(source))
    try:
        import argparse

        from stalegraph.vllm import reproduce
    except Exception as error:
        print(f"cannot tell: {type(error).__name__}: {error}", file=sys.stderr)
        return CANNOT_TELL
    parser = argparse.ArgumentParser(
        prog="reproduce.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    reproduce.add_arguments(parser)
    return reproduce.main(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
