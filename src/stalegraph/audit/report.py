"""What an audit hands back: findings, every pointer with its verdict, and what could not be seen."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, replace

from stalegraph.audit.hazards import FREED, HAZARDS, REUSED, VERDICTS

SCHEMA = 1
NO_BROKEN_INVARIANT = "no broken invariant"


@dataclass(frozen=True)
class Pointer:
    """One pointer argument of a node and what its address is now; `offset` in bytes of the kernel's parameters."""

    node: int
    node_name: str
    argument: str
    address: int
    verdict: str
    offset: int | None = None
    nbytes: int | None = None
    access: str = "unknown"
    owner: str | None = None
    sure: bool = True  # False: a word of a struct that only may be a pointer


@dataclass(frozen=True)
class Finding:
    """One broken invariant. `hazard` is an id of `HAZARDS`, `field` the caller's name for the tensor or number.

    `argument` is the op's or kernel's name for it, `owner` who has the address now and `since` when (the step of the
    device or the watch); `stack` where the present owner was allocated, `dropped` where the captured one lost its last
    reference, where those are known. `address` is 0 for what is no address: a number passed by value, a bound.
    """

    verdict: str
    hazard: str
    argument: str | None
    address: int
    message: str
    graph: int = 1
    node: int | None = None
    node_name: str | None = None
    offset: int | None = None
    field: str | None = None
    owner: str | None = None
    since: int | None = None
    moved_to: int | None = None  # where the caller's tensor of that name is now, if that is another one
    advice: str = ""
    stack: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What a reader would call it: the caller's name, else the argument's."""
        return self.field or self.argument or (f"0x{self.address:x}" if self.address else "?")

    @property
    def key(self) -> tuple:
        """Two findings of one key are one finding seen twice."""
        return (self.graph, self.hazard, self.field, self.argument if self.field is None else None, self.address)

    def line(self) -> str:
        """One line for a log: where, what, and what to do."""
        where = "" if self.node is None else f" node {self.node} {self.node_name or ''}".rstrip()
        parts = [f"[{self.hazard} {self.verdict}] graph {self.graph}{where}: {self.message}"]
        if self.verdict in (FREED, REUSED) and self.owner:
            since = "" if self.since is None else f" since step {self.since}"
            parts.append(f"The address belongs to {self.owner}{since}.")
        if self.dropped:
            parts.append(f"It was let go at {self.dropped[0]}.")
        return " ".join([*parts, self.advice]).rstrip()

    def to_json(self) -> dict:
        record = asdict(self)
        record["stack"], record["dropped"] = list(self.stack), list(self.dropped)
        return record


@dataclass(frozen=True)
class Unseen:
    """Something that the audit could not look at, and why; the rest was audited."""

    what: str
    why: str
    graph: int | None = None

    def line(self) -> str:
        return f"[not seen] {self.what}: {self.why}"


@dataclass
class Report:
    """`findings`: what is broken and nothing else; `pointers`: all that a graph has baked in; `not_seen`: the gaps."""

    findings: list[Finding] = field(default_factory=list)
    not_seen: list[Unseen] = field(default_factory=list)
    pointers: list[Pointer] = field(default_factory=list)
    graphs: int = 1
    nodes: int = 0
    replays: int = 0

    def __bool__(self) -> bool:
        return bool(self.findings)

    def add(self, finding: Finding) -> bool:
        """Keeps `finding` unless it is there already; says whether it is new."""
        if any(known.key == finding.key for known in self.findings):
            return False
        advice = finding.advice or (HAZARDS[finding.hazard].advice if finding.hazard in HAZARDS else "")
        self.findings.append(replace(finding, advice=advice))
        return True

    def miss(self, what: str, why: str, graph: int | None = None) -> bool:
        unseen = Unseen(what, why, graph)
        if unseen in self.not_seen:
            return False
        self.not_seen.append(unseen)
        return True

    def summary(self) -> str:
        """One line: how much was looked at, what was found, what was not seen."""
        found = Counter(finding.hazard for finding in self.findings)
        what = ", ".join(f"{count} of class {hazard}" for hazard, count in sorted(found.items())) or NO_BROKEN_INVARIANT
        seen = f"{self.graphs} graph{'s' * (self.graphs != 1)}, {self.nodes} nodes"
        replays = f", {self.replays} replays" if self.replays else ""
        gaps = f"; {len(self.not_seen)} not seen" if self.not_seen else ""
        return f"{what} ({seen}{replays}{gaps})"

    def table(self, pointers: bool = False) -> str:
        """The findings as a plain table, or with `pointers` every pointer with its verdict; then what was not seen."""
        from tabulate import tabulate

        if pointers:
            order = list(VERDICTS)
            rows = [
                [p.node, p.node_name, p.argument, "" if p.offset is None else p.offset, f"0x{p.address:x}",
                 p.verdict if p.sure else f"{p.verdict}?", p.owner or ""]
                for p in sorted(self.pointers, key=lambda p: (order.index(p.verdict), p.node))
            ]  # fmt: skip
            head = ["node", "op", "argument", "byte", "address", "verdict", "owner now"]
        else:
            rows = [
                [f.hazard, f.verdict, f.name, f.graph, "" if f.node is None else f.node, f.node_name or "",
                 f.argument or "", "" if f.offset is None else f.offset, f"0x{f.address:x}" if f.address else "",
                 f.owner or "", "" if f.since is None else f.since]
                for f in self.findings
            ]  # fmt: skip
            head = [
                "class",
                "verdict",
                "field",
                "graph",
                "node",
                "op",
                "argument",
                "byte",
                "address",
                "owner now",
                "since",
            ]
        lines = [tabulate(rows, head, tablefmt="simple", disable_numparse=True) if rows else self.summary()]
        if not pointers:
            lines += ["", *(finding.line() for finding in self.findings)] if self.findings else []
        lines += [unseen.line() for unseen in self.not_seen]
        return "\n".join(lines)

    def address_map(self) -> list[dict]:
        """Records for `stalegraph.plots.Place`: where the graph reads each tensor at fault, and where it is now.

        The roles are those of every address map: "right" is an address that the graph has, "wrong" another one.
        """
        places = []
        for finding in self.findings:
            place = {"field": finding.name, "nbytes": 0}
            if finding.address:
                places.append({"row": "the graph reads", "address": finding.address, "role": "right", **place})
            if finding.moved_to:
                places.append({"row": "the step writes", "address": finding.moved_to, "role": "wrong", **place})
        return sorted(places, key=lambda place: place["row"])

    def to_json(self) -> dict:
        """One JSON-able object with a schema number."""
        return {
            "schema": SCHEMA,
            "summary": self.summary(),
            "graphs": self.graphs,
            "nodes": self.nodes,
            "replays": self.replays,
            "findings": [finding.to_json() for finding in self.findings],
            "not_seen": [asdict(unseen) for unseen in self.not_seen],
            "verdicts": dict(Counter(pointer.verdict for pointer in self.pointers)),
        }
