"""A table of vLLM releases, from simulated runs of their own sources: addresses stable or not, text right or wrong."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

import torch

from stalegraph.errors import StalegraphError
from stalegraph.vllm.sources import Outcome, drive
from stalegraph.vllm.wheels import sources

COMMAND = "python -m stalegraph.vllm.survey --record repro/recorded/sim/releases.json"
RELEASES = ("0.14.1", "0.15.0", "0.18.1", "0.19.0", "0.20.2", "0.33.0")
# What VLLM_COMPAT says of each release: is the schedule where the graph reads it, is the text right for one request,
# and
# for five padded to eight. 0.14.1 and 0.19 have the persistent buffers and the -1 rows, which is #33664.
EXPECTED = {
    "0.14.1": (True, True, False),
    "0.15.0": (False, False, False),
    "0.18.1": (False, False, False),
    "0.19.0": (True, True, False),
    "0.20.2": (True, True, True),
    "0.33.0": (True, True, True),
}


def table(releases=RELEASES, folder: Path | None = None, hotfix: str = "off") -> list[tuple[Outcome, Outcome]]:
    """For each release its outcome with one request and with five, padded to eight."""
    roots = {release: sources(release, folder) for release in releases}
    return [
        tuple(drive(release, root, hotfix=hotfix, batch=batch) for batch in (1, 5)) for release, root in roots.items()
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m stalegraph.vllm.survey`."""
    parser.add_argument("--hotfix", default="off", help="install this hot-fix mode first (default: off)")
    parser.add_argument("--release", action="append", choices=RELEASES, help="only this release (may be repeated)")
    parser.add_argument("--sources", type=Path, help="folder with extracted sources, or to extract wheels to")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--record", type=Path, help="write the JSON, with its provenance, to this file")


def main(arguments: argparse.Namespace) -> int:
    """Print the table of releases; 0 where it is as EXPECTED (with a hot-fix: all right), else 1."""
    releases = arguments.release or list(RELEASES)
    with tempfile.TemporaryDirectory() as temporary:
        rows = table(releases, arguments.sources or Path(temporary), arguments.hotfix)
    record = {
        "schema": 1,
        "provenance": provenance(releases, COMMAND),
        "data": [asdict(outcome) for row in rows for outcome in row],
    }
    if arguments.record:
        arguments.record.parent.mkdir(parents=True, exist_ok=True)
        arguments.record.write_text(json.dumps(record, indent=1) + "\n")
    if arguments.json:
        print(json.dumps(record))
    else:
        print("release  addresses  1 request   5 requests padded to 8")
        for one, five in rows:
            where = "stable" if one.stable and five.stable else "moved"
            print(f"{one.release:8} {where:10} {_said(one):11} {_said(five)}")
    found = {one.release: (one.stable and five.stable, one.right, five.right) for one, five in rows}
    wanted = EXPECTED if arguments.hotfix == "off" else dict.fromkeys(found, (True, True, True))
    return int(any(found[release] != wanted[release] for release in found))


def _said(outcome):
    return outcome.failure or f"{outcome.accuracy:.1%} right"


def provenance(releases, command: str) -> dict:
    """Where a record of simulated runs of real sources comes from; the date is read from the clock."""
    return {
        "device": "simulated GPU",
        "sm_count": 132,
        "driver": "none",
        "torch": torch.__version__,
        "vllm": f"sources of {', '.join(releases)}",
        "flashmla": "none: its kernels are simulated",
        "cuda": "none",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command,
    }


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(prog="python -m stalegraph.vllm.survey", description=__doc__.splitlines()[0])
    add_arguments(_parser)
    try:
        sys.exit(main(_parser.parse_args()))
    except StalegraphError as _error:
        print(_error, file=sys.stderr)
        sys.exit(2)
