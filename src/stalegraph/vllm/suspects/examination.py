"""Capture one step of a case, replay others: which metadata moved, which node reads it, which steps came out wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from stalegraph.audit import audit, note
from stalegraph.errors import StalegraphError
from stalegraph.vllm.fields import Item, spell, tensors


@dataclass
class Case:
    """One suspect to be driven: `build(step)` makes metadata (None: for capture), `forward(metadata)` runs a step.

    `output` is where the layer writes; `state` what it changes besides. `kept` where the engine keeps the metadata of
    the capture for as long as the graph: then the graph reads frozen values instead of freed memory.
    """

    builder: str
    build: Callable
    forward: Callable
    output: torch.Tensor
    state: tuple = ()
    kept: bool = False
    sound_build: Callable | None = None  # instead of keeping fields in place, where the builder has nothing to copy


@dataclass
class Examination:
    """What came out: one entry of `fields` for each metadata tensor, and how many replayed steps were wrong."""

    suspect: str
    release: str
    builder: str
    question: str
    steps: int
    wrong_steps: int
    wrong_steps_persistent: int  # of the same run with the moved fields in persistent tensors
    first_wrong: int | None
    fields: list = field(default_factory=list)
    findings: list = field(default_factory=list)  # of the audit, before the first replay
    failure: str | None = None

    @property
    def verdict(self) -> str:
        stale = any(item["moved"] and item["read_by"] for item in self.fields)
        if not stale:
            return "cleared"
        # Wrong output proves the moved fields guilty only if keeping these in place makes it right.
        return "confirmed" if self.wrong_steps and not self.wrong_steps_persistent else "latent"

    def to_json(self):
        return {**dataclasses.asdict(self), "verdict": self.verdict}


def examine(device, case: Case, steps: int, persistent: bool = False) -> tuple[list, list, list]:
    """Capture `case`, replay `steps` further steps: (fields, (step, failure) of wrong steps, the audit's findings).

    With `persistent`, each step's metadata is copied into the tensors of the capture, as a sound builder would. Between
    steps odd-sized tensors are allocated and held, so that no fresh tensor lands on a freed address. Each replay is
    compared with the same step run without a graph, from the same state. The audit looks before the first replay.
    """
    build = case.sound_build if persistent and case.sound_build else case.build
    metadata = build(None)
    own = {path: tensor for path, tensor in _fields(device, metadata)} if persistent else {}
    captured = {spell(path): (tensor.data_ptr(), tensor.nbytes) for path, tensor in _fields(device, metadata)}
    notes = note(metadata)
    graph = device.graph()
    with graph.capture():
        case.forward(metadata)
    kept = metadata if case.kept else None  # noqa: F841
    del metadata
    seen = {path: set() for path in captured}
    wrong, held, findings = [], [], []
    for step in range(steps):
        # Small numbers are valid as lengths, slots and pages: a stale read stays silent, as it mostly does on hardware.
        held += [torch.full((size,), 2, dtype=torch.int32) for size in (3, 5, 9, 17, 33, 120, 130)]
        metadata = build(step)
        for path, tensor in list(_fields(device, metadata)):
            if path in own and tensor.data_ptr() != own[path].data_ptr():
                tensor = _put(metadata, path, own[path].copy_(tensor))
            if spell(path) in seen:
                seen[spell(path)].add(tensor.data_ptr())
        if step == 0:
            report = audit(graph, device=device, fields=metadata, captured=notes)
            findings = [_brief(finding) for finding in report.findings]
        before = [tensor.clone() for tensor in case.state]
        case.output.fill_(-1)
        try:
            graph.replay()
        except StalegraphError as error:
            wrong.append((step, f"{type(error).__name__}: {error}"))  # it is sticky: no further step runs
            break
        replayed = [tensor.clone() for tensor in (case.output, *case.state)]
        for tensor, value in zip(case.state, before, strict=True):
            tensor.copy_(value)
        case.output.fill_(-1)
        case.forward(metadata)
        if not all(map(_same, replayed, (case.output, *case.state))):
            wrong.append((step, None))
    fields = [
        {
            "field": path,
            # Offsets in the simulated device's memory: the same in every run.
            "captured": hex(address - device.memory.base),
            "replayed": [hex(found - device.memory.base) for found in sorted(seen[path])],
            # A field that no step brings again is as stale as one that lies elsewhere.
            "moved": seen[path] != {address},
            "read_by": _readers(graph, address, nbytes),
        }
        for path, (address, nbytes) in sorted(captured.items())
    ]
    return fields, wrong, findings


def _brief(finding):
    """What of an audit's finding is the same in every run."""
    return {name: getattr(finding, name) for name in ("hazard", "verdict", "field", "argument", "owner")}


def _same(replayed, eager):
    return torch.allclose(replayed, eager, atol=1e-5, equal_nan=True)


def _fields(device, metadata):
    """(path, tensor) of each device tensor in the metadata; vLLM's host copies carry "cpu" in their names."""
    for path, tensor in tensors(metadata, lambda tensor: device.in_arena(tensor.data_ptr())):
        if "cpu" not in spell(path):
            yield path, tensor


def _put(metadata, path, tensor):
    """Set the field at `path` of the metadata to `tensor`, and return it."""
    *way, last = path
    for step in way:
        metadata = metadata[step.key] if isinstance(step, Item) else getattr(metadata, step)
    setattr(metadata, last, tensor)
    return tensor


def _readers(graph, address, nbytes):
    """Which captured nodes have a pointer argument inside [address, address + nbytes)."""
    return [
        f"{node.name}.{argument.name}"
        for node in graph.nodes
        for argument in node.arguments
        if address <= argument.address < address + nbytes
    ]
