"""Right, wrong, crashed or cannot tell: what one run in one graph mode showed, and the exit code of several."""

from __future__ import annotations

from dataclasses import dataclass, field

from stalegraph.reciter import Said

RIGHT, WRONG, CRASHED, UNKNOWN = "right", "wrong", "crashed", "cannot tell"
EXIT_RIGHT, EXIT_WRONG, EXIT_USAGE, EXIT_UNKNOWN = 0, 1, 2, 125


@dataclass(frozen=True)
class Run:
    """One batch in one graph mode. `said` and `expected` are token ids a request; `addresses` field -> (captured, now).

    `mode` is "eager", "full" or "default" ("graph" on the rungs below vllm); `facts` is what else was measured.
    """

    mode: str
    batch: int
    verdict: str
    why: str = ""
    said: list[list[int]] = field(default_factory=list)
    expected: list[list[int]] = field(default_factory=list)
    addresses: dict[str, tuple[int, int]] = field(default_factory=dict)
    stale_fields: list[str] = field(default_factory=list)
    facts: dict = field(default_factory=dict)

    @property
    def control(self) -> bool:
        """Eager runs have no graph: what is wrong there is not the bug."""
        return self.mode == "eager"

    @property
    def first_wrong(self) -> list[int | None]:
        """For each request the first token that is wrong or missing, or None."""
        found = []
        for got, want in zip(self.said, self.expected):
            at = Said(tuple(got), tuple(want)).first_wrong
            found.append(len(got) if at is None and len(got) < len(want) else at)
        return found

    @property
    def accuracy(self) -> float | None:
        """Fraction of right tokens over all requests, missing ones counted as wrong."""
        pairs = list(zip(self.said, self.expected))
        return sum(Said(tuple(got), tuple(want)).accuracy for got, want in pairs) / len(pairs) if pairs else None

    def to_json(self) -> dict:
        return {
            "mode": self.mode,
            "batch": self.batch,
            "verdict": self.verdict,
            "why": self.why,
            "accuracy": self.accuracy,
            "first_wrong": self.first_wrong,
            "said": self.said,
            "addresses": {name: list(pair) for name, pair in self.addresses.items()},
            "stale_fields": self.stale_fields,
            **self.facts,
        }


def judge(said, expected) -> str:
    """RIGHT if every token of every request is the expected one, else WRONG."""
    return RIGHT if [list(one) for one in said] == [list(one) for one in expected] else WRONG


def exit_code(runs: list[Run]) -> int:
    """0 right, 1 wrong, 125 cannot tell: where a control is not right, or no run, or one that could not be judged.

    A crash that the GPU reported in a graph run (an illegal access, a device assert) counts as wrong: stale metadata
    does that too.
    """
    graphs = [run for run in runs if not run.control]
    if not graphs or any(run.verdict != RIGHT for run in runs if run.control):
        return EXIT_UNKNOWN
    if any(run.verdict in (WRONG, CRASHED) for run in graphs):
        return EXIT_WRONG
    return EXIT_UNKNOWN if any(run.verdict == UNKNOWN for run in graphs) else EXIT_RIGHT


def say(code: int) -> str:
    """The exit code in words."""
    return {
        EXIT_RIGHT: "right: the graph says what it should",
        EXIT_WRONG: "wrong: the bug is reproduced",
        EXIT_UNKNOWN: "cannot tell",
        EXIT_USAGE: "usage",
    }[code]
