"""From what a capture holds and what is there now to findings, one function a question."""

from __future__ import annotations

from stalegraph.audit import owners, values
from stalegraph.audit.capture import Capture
from stalegraph.audit.now import Now
from stalegraph.audit.report import Finding, Report


def judge(capture: Capture, now: Now, report: Report) -> list[Finding]:
    """Adds what is wrong with `capture` at a replay that starts now to `report`; returns what is new."""
    before = len(report.findings)
    explained: set = set()  # storages that a caller's field accounts for
    owners.fields(capture, now, report, explained)
    owners.owners(capture, now, report, explained)
    owners.newcomers(capture, now, report, explained)
    owners.clobbered(capture, now, report)
    owners.raw_pointers(capture, now, report)
    values.scalars(capture, now, report)
    values.work(capture, now, report)
    values.inputs(capture, now, report)
    values.lost_writes(capture, now, report)
    values.reading_rules(capture, now, report)
    return report.findings[before:]
