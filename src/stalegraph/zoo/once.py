"""`python -m stalegraph.zoo.once NAME FORM`: one form of a replica on CUDA, alone in its process, for outside tools."""

from __future__ import annotations

import sys

from stalegraph import zoo
from stalegraph.zoo.detectors import cuda_device
from stalegraph.zoo.run import run


def main(name: str, form: str) -> int:
    with cuda_device() as device:
        outcome = run(zoo.load(name, form), device)
    print(f"{name} {form}: {sum(outcome.right)} of {len(outcome.right)} steps right")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
