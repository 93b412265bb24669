"""The report of a reproduction for people: verdicts, the text with wrong bytes marked, addresses then and now."""

from __future__ import annotations

import os

from tabulate import tabulate

from stalegraph.vllm.verdict import CRASHED, WRONG, Run

WIDTH = 72  # bytes a line
LINES = 2
REQUESTS = 3
VERMILION, PLAIN = "\x1b[38;5;166m", "\x1b[0m"


def print_report(report: dict, runs: list[Run], out) -> None:
    """Everything that decides, in reading order; meaning does not hang on colour."""
    color = out.isatty() and "NO_COLOR" not in os.environ
    line = lambda text="": print(text, file=out)  # noqa: E731
    line(f"rung {report['rung']}, builder {report['builder']}, model {report['model']}")
    line(", ".join(f"{name} {value}" for name, value in report["versions"].items() if value))
    if runs:
        rows = [
            (run.mode, run.batch, run.verdict, _percent(run.accuracy), _first(run), _milliseconds(run), run.why[:60])
            for run in runs
        ]
        headers = ["graphs", "batch", "verdict", "right", "first wrong token", "ms a token", ""]
        line()
        line(tabulate(rows, headers=headers))
    for run in runs:
        if run.verdict in (WRONG, CRASHED) and run.said:
            line()
            line(f"{run.mode}, batch {run.batch}: what the first requests said")
            for said, want in list(zip(run.said, run.expected))[:REQUESTS]:
                line(marked(said, want, color))
    for run in runs:
        if run.addresses:
            line()
            line(f"{run.mode}, batch {run.batch}: where the graph reads, and where the last step's metadata was built")
            pairs = run.addresses.items()
            rows = [(field, hex(then), hex(now), "same" if then == now else "moved") for field, (then, now) in pairs]
            line(tabulate(rows, headers=["field", "at capture", "now", ""], disable_numparse=True))
    line()
    line(f"{report['verdict']} (exit {report['exit_code']})")


def _percent(accuracy) -> str:
    return "" if accuracy is None else f"{accuracy:.1%}"


def _first(run: Run) -> str:
    return " ".join("-" if at is None else str(at) for at in run.first_wrong[:8])


def _milliseconds(run: Run) -> str:
    value = run.facts.get("ms_per_token")
    return "" if value is None else f"{value:.2f}"


def letter(token: int) -> str:
    """One column for one byte; what cannot be printed, or is no byte, is a dot."""
    return chr(token) if 0x20 <= token < 0x7F else "·"


def marked(said: list[int], want: list[int], color: bool = False) -> str:
    """The first bytes of a text over lines of WIDTH; a caret under each wrong one, an underscore under a missing one.

    >>> print(marked(list(b"abxd"), list(b"abcd")))
      abxd
        ^
    """
    lines = []
    length = max(len(said), len(want))
    for begin in range(0, min(length, LINES * WIDTH), WIDTH):
        places = range(begin, min(begin + WIDTH, length))
        marks = ["_" if at >= len(said) else "^" if at >= len(want) or said[at] != want[at] else " " for at in places]
        letters = [letter(said[at]) if at < len(said) else " " for at in places]
        if color:
            letters = [f"{VERMILION}{one}{PLAIN}" if mark == "^" else one for one, mark in zip(letters, marks)]
        lines += ["  " + "".join(letters), ("  " + "".join(marks)).rstrip()]
    return "\n".join(one for one in lines if one)
