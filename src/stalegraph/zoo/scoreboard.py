"""`stalegraph scoreboard`: which detector finds which class of bug with its cause, from runs."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass

import torch

from stalegraph import recorded, zoo
from stalegraph.audit.hazards import HAZARDS
from stalegraph.errors import RungUnavailable
from stalegraph.simulator import Device
from stalegraph.zoo import detectors

SCHEMA = 1
RECORDS = ("h200/zoo", "h200/zoo_probes")  # the first that holds a job's results is read
OURS_SIM, OURS_CUDA = "stalegraph (sim)", "stalegraph (CUDA)"
POINTERS = "data_ptr comparison"
LIVENESS = "torch input liveness"
# Detectors that need a GPU: title -> (job of the recording, why it cannot run without one or None, the look).
ON_GPU = {
    LIVENESS: ("liveness", detectors.missing_liveness, detectors.liveness),
    "compute-sanitizer memcheck": (
        "memcheck",
        detectors.missing_memcheck,
        lambda name, form, _: detectors.memcheck(name, form),
    ),
    "torch-cudagraph-debug 0.2.0": ("value_probes", detectors.missing_value_probes, detectors.value_probes),
}
NOT_RUN = "not run"
CONTROL = "M"  # the class of the replica in which no address is stale
# What the table's words mean, in the order in which they are told.
MEANINGS = {
    "CAUSE": "names the tensor or number at fault in the buggy form",
    "symptom": "says that something is wrong, not what",
    "-": "says nothing: it does not see this bug",
    "clear": "says nothing of the control, and rightly",
    NOT_RUN: "it was not put before this replica",
    "fixed twin": "what all of them said of the replica with its bug mended",
}


@dataclass(frozen=True)
class Cell:
    """One detector on one replica: `found` in the buggy form and what it said.

    `found`: "cause" (the right tensor or number by name), "symptom", "nothing", "clear" (silent on the control) or
    "not run".
    `fixed` is what it made of the fixed twin; `source` is "run here", a recording's caption, or why it was not run.
    """

    detector: str
    replica: str
    hazard: str
    found: str
    said: str
    fixed: str
    source: str

    def short(self) -> str:
        mark = {"cause": "CAUSE", "symptom": "symptom", "nothing": "-"}.get(self.found, self.found)
        return f"{mark} (false alarm)" if self.fixed == detectors.FALSE_ALARM else mark


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--rung",
        choices=("sim", "cuda"),
        help="run on this and nothing else (default: sim, and cuda where there is a GPU)",
    )


def main(args) -> int:
    gpu = torch.cuda.is_available()
    if args.rung == "cuda" and not gpu:
        raise RungUnavailable("rung is 'cuda' and there is no CUDA device; allowed: sim, beside the recorded rows")
    cells = scoreboard(run_sim=args.rung != "cuda", run_cuda=gpu and args.rung != "sim")
    if args.json:
        print(json.dumps({"schema": SCHEMA, "cells": [asdict(cell) for cell in cells], "missed": missed(cells)}))
    else:
        print(table(cells), legend(cells), sep="\n\n")
        for source in dict.fromkeys(f"{cell.detector}: {cell.source}" for cell in cells):
            print(source, file=sys.stderr)
    return 1 if missed(cells) else 0


def missed(cells: list[Cell]) -> list[str]:
    """What our own detector got wrong, on any device: "detector: replica"."""
    return [
        f"{cell.detector}: {cell.replica}"
        for cell in cells
        if cell.detector in (OURS_SIM, OURS_CUDA) and cell.found != NOT_RUN
        and (cell.found not in (detectors.CAUSE, detectors.CLEAR) or cell.fixed == detectors.FALSE_ALARM)
    ]  # fmt: skip


def scoreboard(*, run_sim: bool = True, run_cuda: bool = False) -> list[Cell]:
    """All cells: ours and the pointer comparison run here; what needs a GPU runs here or is read from the recording."""
    cells = []
    for title, look in ((OURS_SIM, lambda *what: detectors.ours(*what)[0]), (POINTERS, detectors.data_ptr_comparison)):
        if run_sim:
            cells += _on_sim(title, look, "run here on the simulated GPU")
        else:
            cells += [_not_run(title, name, "--rung cuda") for name in zoo.REPLICAS]
    cuda = {OURS_CUDA: ("ours", lambda: None, lambda *what: detectors.ours(*what)[0]), **ON_GPU}
    for title, (job, missing, look) in cuda.items():
        if run_cuda and missing() is None:
            cells += _on_gpu(title, look)
        elif title == LIVENESS and run_sim and detectors.missing_simulated_liveness() is None:
            cells += _on_sim(
                title,
                detectors.liveness_simulated,
                f"torch {torch.__version__}'s own tracker, run here on the simulated GPU",
            )
        else:
            cells += _recorded(title, job, missing() if run_cuda else None)
    return cells


def _on_sim(title, look, source) -> list[Cell]:
    cells = []
    for name in zoo.REPLICAS:
        sights = []
        for form in zoo.FORMS:
            with Device(memory_bytes=1 << 26) as device:
                sights.append(look(name, form, device))
        cells.append(_cell(title, name, *sights, source))
    return cells


def _on_gpu(title, look) -> list[Cell]:
    cells = []
    with detectors.cuda_device() as device:
        for name in zoo.REPLICAS:
            cells.append(
                _cell(title, name, *(look(name, form, device) for form in zoo.FORMS), f"run here on {device.name}")
            )
    return cells


def _recorded(title, job, missing) -> list[Cell]:
    records = [recorded.load(name) for name in RECORDS if recorded.available(name)]
    record = next((one for one in records if "sights" in one.data.get(job, {})), None)
    if record is None:
        reasons = [one.data[job]["missing"] for one in records if job in one.data]
        why = missing or (reasons[0] if reasons else f"no GPU here and no recording {RECORDS[0]}")
        return [_not_run(title, name, why) for name in zoo.REPLICAS]
    sights = record.data[job]["sights"]
    cells = []
    for name in zoo.REPLICAS:
        found = [sights.get(f"{name}/{form}") for form in zoo.FORMS]
        if not any(found):
            cells.append(_not_run(title, name, f"not in what was {_caption(record.provenance)}"))
            continue
        pair = [detectors.Sight(**one) if one else detectors.Sight(NOT_RUN) for one in found]
        cells.append(_cell(title, name, *pair, _caption(record.provenance)))
    return cells


def _caption(made) -> str:
    return (
        f"recorded on {made.device} ({made.sm_count} SMs), driver {made.driver}, torch {made.torch}, {made.date[:10]}"
    )


def _cell(title, name, buggy, fixed, source) -> Cell:
    return Cell(title, name, zoo.REPLICAS[name], buggy.kind, buggy.said, fixed.kind, source)


def _not_run(title, name, why) -> Cell:
    return Cell(title, name, zoo.REPLICAS[name], NOT_RUN, "", NOT_RUN, why)


def rows(cells: list[Cell]) -> tuple[list[list[str]], list[str]]:
    """(rows, headers): a row a replica and one of counts, a column a detector and one for the fixed twins."""
    titles = list(dict.fromkeys(cell.detector for cell in cells))
    by = {(cell.detector, cell.replica): cell for cell in cells}
    found, counts = [], []
    for name, hazard in zoo.REPLICAS.items():
        mine = [by[title, name] for title in titles]
        found.append([hazard, name, *(cell.short() for cell in mine), _twin(mine)])
    for title in titles:
        ran = [by[title, name] for name in _put_before(cells, title)]
        counts.append(f"{sum(cell.found == detectors.CAUSE for cell in ran)} of {len(ran)}" if ran else NOT_RUN)
    return [*found, ["", "found with its cause", *counts, ""]], ["class", "replica", *titles, "fixed twin"]


def _twin(cells: list[Cell]) -> str:
    """What all detectors that ran said of one replica's fixed twin."""
    alarmed = [cell.detector for cell in cells if cell.fixed == detectors.FALSE_ALARM]
    ran = any(cell.fixed != NOT_RUN for cell in cells)
    return f"false alarm: {', '.join(alarmed)}" if alarmed else "no finding" if ran else NOT_RUN


def _put_before(cells: list[Cell], title: str) -> list[str]:
    """The replicas of a bug, the control not among them, on which detector `title` ran."""
    mine = [cell for cell in cells if cell.detector == title and cell.hazard != CONTROL]
    return [cell.replica for cell in mine if cell.found != NOT_RUN]


def table(cells: list[Cell]) -> str:
    """A row a replica, a column a detector."""
    from tabulate import tabulate

    return tabulate(*rows(cells), tablefmt="simple", disable_numparse=True)


def legend(cells: list[Cell]) -> str:
    """What the table's words, classes and counts mean."""
    from tabulate import tabulate

    classes = {hazard: HAZARDS[hazard].title for hazard in sorted(set(zoo.REPLICAS.values()) & set(HAZARDS))}
    classes[CONTROL] = "the control: its text turns wrong, and no address is stale"
    bugs = [name for name, hazard in zoo.REPLICAS.items() if hazard != CONTROL]
    lines = [tabulate([*MEANINGS.items(), *classes.items()], tablefmt="plain", disable_numparse=True)]
    lines.append(f"The last row counts the {len(bugs)} replicas of a bug, without the control, as far as each was run.")
    for title in dict.fromkeys(cell.detector for cell in cells):
        ran = _put_before(cells, title)
        if 0 < len(ran) < len(bugs):
            rest = ", ".join(name for name in bugs if name not in ran)
            lines.append(f"{title} was run on {len(ran)} of them: its recording lacks {rest}.")
    return "\n".join(lines)
