"""What was written to and read from the storages that captures read, since each graph's last replay."""

from __future__ import annotations

from dataclasses import dataclass, field

from stalegraph.audit.extents import Extents

MOST_RANGES = 100_000


@dataclass
class Entry:
    """One storage's bytes. `written` maps a graph to what the host or other graphs wrote since its last replay.

    `unread` are host writes that nobody has read yet; `lost` those written over unread with a replay in between.
    `ever` is all that was written since the storage was first captured.
    """

    written: dict[int, Extents] = field(default_factory=dict)
    unread: Extents = field(default_factory=Extents)
    unread_before: Extents = field(default_factory=Extents)  # unread when the last replay of any reader began
    lost: Extents = field(default_factory=Extents)
    ever: Extents = field(default_factory=Extents)
    ops: set[str] = field(default_factory=set)


class Ledger:
    """Entries by storage note; only storages that a capture has touched have one."""

    def __init__(self, clock=lambda: 0):
        self.clock = clock
        self.entries: dict[object, Entry] = {}
        self._by_address: dict[tuple[int, int], int] = {}  # bytes that the host wrote, as addresses -> when last

    def host_wrote_at(self, low: int, high: int) -> None:
        """The host wrote [low, high) through some tensor: one that is made from an address has a storage of its own."""
        if len(self._by_address) >= MOST_RANGES:
            self._by_address.clear()
        self._by_address[low, high] = self.clock()

    def written_at_since(self, low: int, high: int, moment: int) -> bool:
        """Whether the host wrote into [low, high) at `moment` or later."""
        return any(low < b and a < high and when >= moment for (a, b), when in self._by_address.items())

    def open(self, note, graph: int) -> None:
        """From now on writes to `note`'s storage are kept for `graph`."""
        self.entries.setdefault(note, Entry()).written.setdefault(graph, Extents())

    def host_writes(self, note, ranges, op: str) -> None:
        entry = self.entries.get(note)
        if entry is None:
            return
        for written in entry.written.values():
            written.update(ranges)
        for low, high in ranges:
            for at, until in list(entry.unread_before):
                entry.lost.add(max(at, low), min(until, high))
            entry.unread.add(low, high)
            entry.ever.add(low, high)
        entry.ops.add(op)

    def host_reads(self, note, ranges) -> None:
        entry = self.entries.get(note)
        if entry is not None:
            _take(entry, ranges)

    def graph_ran(self, graph: int, touches) -> None:
        """`graph` was replayed: its reads and writes, and a clean page for it."""
        for note, touch in touches.items():
            entry = self.entries.get(note)
            if entry is None:
                continue
            _take(entry, list(touch.all_reads))
            entry.unread_before = Extents(entry.unread)
            writes = list(touch.writes)
            for other, written in entry.written.items():
                written.update(writes)
            entry.ever.update(writes)
            own = Extents()
            own.update(writes)  # a graph that writes its own input refreshes it for its next replay
            entry.written[graph] = own

    def written_since(self, note, graph: int) -> Extents:
        entry = self.entries.get(note)
        return Extents() if entry is None else entry.written.get(graph, Extents())


def _take(entry: Entry, ranges) -> None:
    for name in ("unread", "unread_before"):
        left = Extents()
        for low, high in getattr(entry, name):
            pieces = [(low, high)]
            for at, until in ranges:
                pieces = (
                    [
                        (a, b)
                        for begin, end in pieces
                        for a, b in ((begin, min(end, at)), (max(begin, until), end))
                        if a < b
                    ]
                    if any(begin < until and at < end for begin, end in pieces)
                    else pieces
                )
            left.update(pieces)
        setattr(entry, name, left)
