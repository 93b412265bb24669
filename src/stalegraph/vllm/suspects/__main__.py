"""`python -m stalegraph.vllm.suspects`: examine every suspect of every release, print or record the verdicts."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from stalegraph.errors import StalegraphError
from stalegraph.vllm.suspects.lineup import SUSPECTS, examine_release
from stalegraph.vllm.survey import provenance
from stalegraph.vllm.suspects.report import report
from stalegraph.vllm.wheels import sources

COMMAND = "python -m stalegraph.vllm.suspects --record repro/recorded/sim/suspects.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m stalegraph.vllm.suspects`."""
    releases = sorted({release for suspect in SUSPECTS for release in suspect.expected})
    parser.add_argument("--release", action="append", choices=releases, help="only this release (may be repeated)")
    parser.add_argument("--sources", type=Path, help="folder with extracted sources, or to extract wheels to")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--record", type=Path, help="write the JSON, with its provenance, to this file")
    parser.add_argument("--reports", type=Path, help="write an issue text for each confirmed suspect to this folder")


def main(arguments: argparse.Namespace) -> int:
    """Examine every suspect; 0 where each verdict is the one expected, else 1."""
    chosen = arguments.release or sorted({release for suspect in SUSPECTS for release in suspect.expected})
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.sources or Path(temporary)
        found = [
            (suspect, examine_release(suspect, release, sources(release, folder)))
            for release in chosen
            for suspect in SUSPECTS
            if release in suspect.expected
        ]
    data = [examination.to_json() for _, examination in found]
    record = {"schema": 1, "provenance": provenance(chosen, COMMAND), "data": data}
    if arguments.record:
        arguments.record.parent.mkdir(parents=True, exist_ok=True)
        arguments.record.write_text(json.dumps(record, indent=1) + "\n")
    if arguments.reports:
        arguments.reports.mkdir(parents=True, exist_ok=True)
        for name, text in reports(record).items():
            (arguments.reports / f"{name}.md").write_text(text)
    if arguments.json:
        print(json.dumps(record))
    else:
        for _, examination in found:
            moved = [item["field"] for item in examination.fields if item["moved"] and item["read_by"]]
            wrong = f"{examination.wrong_steps} of {examination.steps} steps wrong"
            said = f"{examination.suspect}: {wrong}; {', '.join(moved) or '-'}"
            print(f"{examination.release}  {examination.verdict:9}  {said}")
    return int(any(examination.verdict != suspect.expected[examination.release] for suspect, examination in found))


def reports(record: dict) -> dict[str, str]:
    """The issue texts of a record, by file name without ".md"."""
    texts = {}
    for suspect in SUSPECTS:
        found = [item for item in record["data"] if item["suspect"] == suspect.name]
        if suspect.report and any(item["verdict"] == "confirmed" for item in found):
            texts[suspect.report] = report(suspect.report, found, record["provenance"])
    return texts


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(prog="python -m stalegraph.vllm.suspects", description=__doc__.splitlines()[0])
    add_arguments(_parser)
    try:
        sys.exit(main(_parser.parse_args()))
    except StalegraphError as _error:
        print(_error, file=sys.stderr)
        sys.exit(2)
