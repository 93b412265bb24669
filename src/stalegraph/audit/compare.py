"""Two captures of one step side by side: what differs was passed by value, is no pointer, or is other work."""

from __future__ import annotations

from stalegraph.audit.capture import Capture
from stalegraph.audit.hazards import LIVE
from stalegraph.audit.report import Finding, Report
from stalegraph.blocks import MemoryMap

LAUNCH = ("grid", "block", "shared_bytes")
NAMES = ("symbol",)


def compare(capture: Capture, second: Capture, now: MemoryMap, report: Report) -> None:
    """Findings of class G for numbers that differ and H for work that differs; confirms the words that are pointers."""
    if len(capture.nodes) != len(second.nodes):
        told = f"two captures have {len(capture.nodes)} and {len(second.nodes)} nodes: the host took another path."
        report.add(Finding(LIVE, "H", "nodes", 0, told, capture.index))
        return
    for one, other in zip(capture.nodes, second.nodes):
        if one.name != other.name:
            told = (
                f"node {one.index} is {one.name} in one capture, {other.name} in the other: the host took another path."
            )
            report.add(Finding(LIVE, "H", "nodes", 0, told, capture.index, one.index, one.name))
            return
        _numbers(capture, one, other, report)
        _shapes(capture, one, other, report)
        _confirm(capture, one, other, now)
    if capture.sighting is not None and second.sighting is not None and capture.backend.name == "cuda":
        for one, other in zip(capture.sighting.scalars, second.sighting.scalars):
            if (one.op, one.argument) == (other.op, other.argument) and one.value != other.value:
                _differs(capture, report, one.op, one.argument, one.value, other.value, None)


def _numbers(capture, one, other, report) -> None:
    values = dict(other.scalars)
    for name, value in one.scalars:
        if name in NAMES or name not in values or values[name] == value:
            continue
        if name in LAUNCH:
            told = f"{one.name} was launched with {name} {value} in one capture and {values[name]} in the other."
            report.add(Finding(LIVE, "H", name, 0, told, capture.index, one.index, one.name))
        else:
            _differs(capture, report, one.name, name, value, values[name], one.index)


def _differs(capture, report, op, argument, value, other, node) -> None:
    told = f"{argument} of {op} is {value} in one capture and {other} in the other: it is passed by value and varies."
    report.add(Finding(LIVE, "G", argument, 0, told, capture.index, node, op))


def _shapes(capture, one, other, report) -> None:
    for left, right in zip(one.arguments, other.arguments):
        if left.shape is not None and right.shape is not None and left.shape != right.shape:
            told = f"{left.name} of {one.name} has shape {left.shape} in one capture and {right.shape} in the other."
            report.add(Finding(LIVE, "H", left.name, 0, told, capture.index, one.index, one.name))
            return


def _confirm(capture, one, other, now) -> None:
    words = {argument.name: argument.address for argument in other.arguments}
    for argument in one.arguments:
        if argument.name not in words:
            continue
        here, there = now.find(argument.address), now.find(words[argument.name])
        if argument.address == words[argument.name]:
            continue  # a persistent tensor's address, or a word left over: it proves nothing
        if (
            here
            and there
            and here.size == there.size
            and argument.address - here.address == words[argument.name] - there.address
        ):
            capture.confirmed.add((one.index, argument.name))
