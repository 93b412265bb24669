"""Finds the stale address in a captured graph, simulated or CUDA, and says which invariant is broken and what to do."""

from stalegraph.audit.examine import Notes, audit, note
from stalegraph.audit.hazards import HAZARDS, VERDICTS, Hazard
from stalegraph.audit.report import NO_BROKEN_INVARIANT, Finding, Pointer, Report, Unseen
from stalegraph.audit.rules import OutOfBounds, rule
from stalegraph.audit.watch import Watch, current_watch, declare, watch

__all__ = [
    "audit", "watch", "declare", "note", "rule", "Report", "Finding", "Pointer", "Unseen", "Hazard", "HAZARDS",
    "VERDICTS",
    "NO_BROKEN_INVARIANT", "Watch", "Notes", "OutOfBounds", "current_watch",
]  # fmt: skip
