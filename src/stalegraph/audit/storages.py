"""Notes on storages: who they are, where they lie, and whether they still live there. Equal addresses prove nothing."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import weakref
from dataclasses import dataclass, field
from types import ModuleType

import torch

from stalegraph.audit import tree

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
INSIDE = (
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    os.path.join(_PACKAGE, "audit") + os.sep,
    os.path.join(_PACKAGE, "simulator") + os.sep,
    os.path.join(_PACKAGE, "cuda") + os.sep,
    contextlib.__file__,
    "<",
)


def _frames(depth: int) -> list:
    frames, frame = [], sys._getframe(2)
    while frame is not None and len(frames) < depth:
        if not frame.f_code.co_filename.startswith(INSIDE):
            frames.append(frame)
        frame = frame.f_back
    return frames


def user_frames(depth: int = 3) -> tuple[str, ...]:
    """The innermost frames outside of torch and of this package, "file:line function", innermost first."""
    return tuple(f"{one.f_code.co_filename}:{one.f_lineno} {one.f_code.co_name}" for one in _frames(depth))


def variables(depth: int = 6) -> list[tuple[str, torch.Tensor]]:
    """(name, tensor) of what the program's innermost frames hold in variables."""
    found = []
    for frame in _frames(depth):
        for name, value in _locals(frame):
            if name.startswith("__") or isinstance(value, (type, ModuleType)):
                continue
            path = "" if name == "self" else name
            found += tree.walk(value, path, most_depth=3, budget=500)
    return found


def _locals(frame) -> list[tuple[str, object]]:
    """The variables of `frame`, which it must not keep alive afterwards."""
    mapping = frame.f_locals
    items = list(mapping.items())
    # Before Python 3.13 the frame holds on to the dict that it made for this question, and so to every value in it.
    # Three references: the frame's, ours and the call's; one more, and the program itself has asked for locals().
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED and type(mapping) is dict and sys.getrefcount(mapping) <= 3:
        mapping.clear()
    return items


@dataclass(eq=False)
class StorageNote:
    """One storage: a weak reference, the address and bytes that it had when noted, and how it died if it did.

    `made` is the op that made it and `stack` where, if it was made under a watch; `died` where its last owner let go.
    """

    ref: weakref.ref
    address: int
    nbytes: int
    made: str | None = None
    stack: tuple[str, ...] = ()
    born: int | None = None
    died: tuple[str, ...] | None = None
    died_at: int | None = None
    names: list[str] = field(default_factory=list)  # the caller's, as declared
    variable: str | None = None  # what the program called it at capture
    read: bool = False  # whether an op other than one that writes it has read it

    @property
    def end(self) -> int:
        return self.address + self.nbytes

    def alive(self) -> bool:
        return self.ref() is not None

    def moved_to(self) -> int | None:
        """Where the storage lies now, if it lives but not where it was noted: `resize_` moves a storage."""
        storage = self.ref()
        if storage is None or storage.data_ptr() == self.address:
            return None
        return storage.data_ptr()

    def intact(self) -> bool:
        return self.alive() and self.moved_to() is None

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lives in this very storage, and at the noted place."""
        storage = self.ref()
        return storage is not None and storage._cdata == tensor.untyped_storage()._cdata and self.intact()


class StorageBook:
    """The notes of all storages seen, by identity; the note of one that died lives where something else holds it."""

    def __init__(self, clock=lambda: None):
        self.clock = clock
        self._notes: dict[int, StorageNote] = {}

    def __len__(self) -> int:
        return len(self._notes)

    def find(self, tensor: torch.Tensor) -> StorageNote | None:
        """The note of `tensor`'s storage, if there is one and it is not of a storage that died or moved."""
        storage = tensor.untyped_storage()
        note = self._notes.get(storage._cdata)
        if note is not None and note.ref() is storage and note.address == storage.data_ptr():
            return note
        return None

    def note(self, tensor: torch.Tensor, made: str | None = None) -> StorageNote:
        """The note of `tensor`'s storage, made now if there is none; `made` names the op whose result it is."""
        note = self.find(tensor)
        if note is not None:
            return note
        storage = tensor.untyped_storage()
        key = storage._cdata
        note = StorageNote(None, storage.data_ptr(), storage.nbytes(), made)
        if made is not None:
            note.stack, note.born = user_frames(), self.clock()

        def gone(_ref, note=note, key=key, book=weakref.ref(self)):
            note.died = user_frames()
            owner = book()
            if owner is not None:
                note.died_at = owner.clock()
                if owner._notes.get(key) is note:
                    del owner._notes[key]

        note.ref = weakref.ref(storage, gone)
        self._notes[key] = note
        return note

    def owner(self, address: int) -> StorageNote | None:
        """The note of a living storage that covers `address` now."""
        for note in list(self._notes.values()):
            if note.address <= address < note.end and note.intact():
                return note
        return None
