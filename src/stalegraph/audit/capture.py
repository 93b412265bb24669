"""One captured graph as an audit knows it: its nodes, the memory at capture, and what it reads and writes of whom."""

from __future__ import annotations

import weakref
from bisect import bisect_left
from dataclasses import dataclass, field

import torch

from stalegraph.audit.extents import ranges
from stalegraph.audit.storages import StorageNote
from stalegraph.audit.witness import SHAPE_ONLY, Sighting, Touch
from stalegraph.blocks import DEFAULT_POOL, MemoryMap
from stalegraph.nodes import Argument, Node


@dataclass(frozen=True)
class FieldNote:
    """A caller's tensor as it was at capture: whose storage, which bytes of it, and its shape."""

    note: StorageNote
    address: int
    ranges: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor, note: StorageNote) -> FieldNote:
        return cls(note, tensor.data_ptr(), tuple(ranges(tensor)), tuple(tensor.shape), tensor.dtype)


class BlockNote:
    """Stands in for a StorageNote where no watch saw the capture: a block, told apart by its generation if known."""

    pinned = False

    def __init__(self, address: int, nbytes: int, generation: int | None, now: MemoryMap):
        self.address, self.nbytes, self.generation, self.now = address, nbytes, generation, now
        self.made, self.stack, self.born, self.died, self.died_at, self.names = None, (), None, None, None, []
        self.variable, self.read = None, False

    @property
    def end(self) -> int:
        return self.address + self.nbytes

    def alive(self) -> bool:
        block = self.now.find(self.address)
        if block is None or block.state != "allocated":
            return False
        return self.generation is None or block.generation == self.generation

    def moved_to(self) -> None:
        return None

    def intact(self) -> bool:
        return self.alive()

    def is_of(self, tensor: torch.Tensor) -> bool:
        block = self.now.find(self.address)
        start = tensor.untyped_storage().data_ptr()
        inside = block is not None and block.address <= start < block.end
        return self.alive() and (inside or start == self.address)


@dataclass
class Capture:
    """All that is kept of one captured graph. The graph itself is held weakly: a watch must not prolong its life."""

    index: int
    graph: weakref.ref
    backend: object
    pool: tuple[int, int]
    memory: MemoryMap | None = None
    sighting: Sighting | None = None
    fields: dict[str, FieldNote] = field(default_factory=dict)
    scalars: dict[str, object] = field(default_factory=dict)
    work: dict[str, object] = field(default_factory=dict)
    nodes: tuple[Node, ...] = ()
    nodes_read: bool = False
    unread: str | None = None  # why the nodes could not be read
    replays: int = 0
    last_replay: int | None = None
    begun: int = 0
    confirmed: set[tuple[int, str]] = field(default_factory=set)  # words that a second capture shows to be pointers
    pointers: list = field(default_factory=list)
    snapshots: dict[str, torch.Tensor] = field(default_factory=dict)
    suspects: dict[object, object] = field(default_factory=dict)  # captured note -> note of the newcomer of its name
    _index: list[tuple[int, int, int]] | None = None

    def read_nodes(self, graph) -> None:
        if self.nodes_read:
            return
        self.nodes_read, self._index = True, None
        try:
            self.nodes = tuple(self.backend.nodes(graph, self.memory))
        except Exception as error:
            self.unread = str(error)

    @property
    def opaque(self) -> bool:
        """Whether some of its parameters could not be read."""
        return self.unread is not None or any(node.opaque for node in self.nodes if node.kind in ("kernel", "other"))

    def find(self, low: int, high: int, prefer: str | None = None) -> tuple[Node, Argument] | None:
        """The first node that holds an address in [low, high), with the argument; one named `prefer` before others."""
        if self._index is None:
            self._index = sorted(
                (argument.address, node.index, at)
                for node in self.nodes
                for at, argument in enumerate(node.arguments)
                if not (node.name in SHAPE_ONLY and argument.access == "read")
            )
            self._by_index = {node.index: node for node in self.nodes}
        first = bisect_left(self._index, (low, -1, -1))
        best = None
        for address, node, at in self._index[first:]:
            if address >= high:
                break
            found = self._by_index[node], self._by_index[node].arguments[at]
            if prefer is not None and found[1].name == prefer:
                return found
            if best is None or node < best[0].index:
                best = found
        return best

    def touch(self, note) -> Touch | None:
        return None if self.sighting is None else self.sighting.touches.get(note)

    def holds(self, fieldnote: FieldNote) -> bool:
        """Whether the graph has the field's storage baked in, as its nodes or the dispatcher show."""
        note = fieldnote.note
        if self.touch(note) is not None:
            return True
        return self.find(note.address, max(note.end, note.address + 1)) is not None


def from_nodes(graph, backend, nodes, now: MemoryMap, then: MemoryMap | None, pool) -> Sighting:
    """What can be told of a capture that no watch saw: touches by block, from the nodes' arguments alone."""
    generations = backend.generations(graph)
    sighting = Sighting()
    blocks: dict[tuple, BlockNote] = {}
    for node in nodes:
        for argument in node.arguments:
            if node.name in SHAPE_ONLY and argument.access == "read":
                continue
            block, generation = generations.get((node.index, argument.name), (None, None))
            if block is None:
                there = (then or now).find(argument.address)
                if there is not None and there.pool == pool and pool != DEFAULT_POOL:
                    continue
                if there is None and not backend.is_host(argument.address):
                    if node.kind != "memcpy":
                        continue
                if then is not None and there is not None and there.state != "allocated":
                    continue  # it was free at capture: a number that looks like a pointer
                if then is not None and not is_sure(node, argument):
                    continue
                block = argument.address if there is None or there.state != "allocated" else there.address
                same = blocks.get((block, None)) or next((one for key, one in blocks.items() if key[0] == block), None)
                generation = same.generation if same is not None else None
            key = (block, generation)
            if key not in blocks:
                nbytes = max(argument.address - block + (argument.nbytes or 1), 1)
                there = backend.host_map() if backend.is_host(argument.address) else now
                blocks[key] = BlockNote(block, nbytes, generation, there)
            note = blocks[key]
            note.nbytes = max(note.nbytes, argument.address - block + (argument.nbytes or 1))
            touch = sighting.touches.get(note)
            if touch is None:
                touch = Touch(note, node.name, argument.name, pinned=backend.is_host(argument.address))
                sighting.touches[note] = touch
            low = argument.address - block
            bytes_ = [(low, low + (argument.nbytes or 1))]
            if argument.access in ("read", "read-write", "unknown"):
                missing = [gap for a, b in bytes_ for gap in touch.writes.missing(a, b)]
                touch.reads.update(missing)
                touch.all_reads.update(bytes_)
            if argument.access in ("write", "read-write"):
                touch.writes.update(bytes_)
    return sighting


def is_sure(node: Node, argument: Argument) -> bool:
    """Whether `argument` is a pointer for certain: one of a copy or fill, or among those that a parameter begins with.

    Words deeper in a struct, behind something else, may hold what an earlier call left on the stack.
    """
    if node.kind != "kernel" or argument.offset is None:
        return True
    parameter, _, inside = argument.name.partition("+")
    if not inside.isdigit() or int(inside) == 0:
        return True
    names = {other.name for other in node.arguments}
    return all(f"{parameter}+{at}" in names for at in range(0, int(inside), 8))
