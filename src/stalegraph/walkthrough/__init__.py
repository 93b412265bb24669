"""Runs the notebooks as tests: strictly, through papermill, with a report that works offline."""

from stalegraph.walkthrough.command import add_arguments, main, run_walkthrough
from stalegraph.walkthrough.notebook import choose
from stalegraph.walkthrough.runner import RESULT, Outcome, Trouble, execute

__all__ = ["add_arguments", "main", "run_walkthrough", "choose", "execute", "Outcome", "Trouble", "RESULT"]
