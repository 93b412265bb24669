"""A dispatch mode that sees each op's tensors: what a capture reads and writes, and which bytes the host writes."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stalegraph.audit.extents import Extents, ranges
from stalegraph.audit.storages import StorageBook, StorageNote

# They read the shape of their tensor and none of its bytes.
SHAPE_ONLY = frozenset(
    f"aten::{name}"
    for name in (
        "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "new_empty",
        "new_empty_strided", "new_zeros", "new_ones", "new_full", "sym_size", "sym_stride", "is_pinned",
        "record_stream",
    )
)  # fmt: skip
UNWRITTEN = frozenset(
    f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)
# In-place ops whose result does not depend on what was there.
OVERWRITES = frozenset(
    f"aten::{name}_"
    for name in (
        "copy",
        "fill",
        "zero",
        "normal",
        "uniform",
        "random",
        "exponential",
        "bernoulli",
        "_foreach_copy",
        "_foreach_zero",
    )
)
RESIZE = "aten::resize_"
SET = "aten::set_"  # how copy.deepcopy hands a tensor the storage that it has copied
NOT_VALUES = frozenset(
    ("dim", "dims", "dim0", "dim1", "size",
     "sizes", "shape", "stride", "storage_offset", "layout", "dtype", "pin_memory",
     "non_blocking", "memory_format", "keepdim", "implicit", "copy", "device", "generator")
)  # fmt: skip
VIEW_VALUES = frozenset(("index", "start", "end", "length"))


@dataclass(frozen=True)
class Scalar:
    """A number that an op was given by value during capture; `view` where it chose a slice, not a kernel's argument."""

    op: str
    argument: str
    value: int | float | bool
    view: bool = False


@dataclass
class Touch:
    """What a capture does with one storage: the first op and argument that name it, and which of its bytes.

    `reads` are bytes read before the capture itself wrote them; `all_reads` any; ranges count from the storage's start.
    """

    note: StorageNote
    op: str
    argument: str
    reads: Extents = field(default_factory=Extents)
    all_reads: Extents = field(default_factory=Extents)
    writes: Extents = field(default_factory=Extents)
    read_by: tuple[str, str] | None = None
    pinned: bool = False

    @property
    def access(self) -> str:
        return "read-write" if self.all_reads and self.writes else "write" if self.writes else "read"


@dataclass(frozen=True)
class Written:
    """Bytes [low, high), as addresses, that one op of a capture wrote, and into which storage."""

    low: int
    high: int
    note: StorageNote
    op: str


@dataclass
class Sighting:
    """What the dispatcher showed of one capture."""

    touches: dict[StorageNote, Touch] = field(default_factory=dict)  # storages that were there before the capture
    inner: dict[StorageNote, Touch] = field(default_factory=dict)  # storages that the capture made
    writes: list[Written] = field(default_factory=list)  # in order
    scalars: list[Scalar] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)  # of ops whose reading formula is known
    shapes: list[tuple[str, str, tuple[int, ...]]] = field(default_factory=list)
    ops: int = 0


@dataclass(frozen=True)
class Call:
    """One call of an op whose reading formula is known: its tensors, described and not kept alive, and its numbers."""

    op: str
    tensors: dict[str, tuple]
    numbers: dict[str, object]


@lru_cache(maxsize=None)
def _schema(func):
    """(op's name, [(argument's name, written)], by name, whether it only reshapes)."""
    schema = func._schema
    slots = [
        (argument.name, argument.alias_info is not None and argument.alias_info.is_write)
        for argument in schema.arguments
    ]
    returns = schema.returns
    aliases = bool(returns) and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)
    view = aliases and not any(write for _, write in slots)
    # unsqueeze_ and its like turn a tensor into another view of the same bytes, of which they touch none.
    view = view or (torch.Tag.inplace_view in func.tags and schema.name not in (RESIZE, SET))
    return schema.name, slots, dict(slots), view


@dataclass
class Sight:
    """What all witnesses of one watch share. `sighting` is the capture that runs now; `top` the witness that looks."""

    book: StorageBook
    ledger: object
    on_device: object  # a function of (tensor, capturing)
    on_host: object  # a function of (tensor): whether a capture can read it, but it lies in host memory
    rules: frozenset = frozenset()
    sighting: Sighting | None = None
    paused: int = 0
    failure: str | None = None
    top: object = None


class Witness(TorchDispatchMode):
    """Must sit on top of a simulated device's mode, so a device entered under a watch gets a second one over it."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else torch.compile would fall back to eager under the mode

    def __init__(self, sight: Sight):
        super().__init__()
        self.sight = sight
        self.book, self.ledger, self.rules = sight.book, sight.ledger, sight.rules

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        sight = self.sight
        if sight.top is self and not sight.paused and isinstance(func, torch._ops.OpOverload):
            try:
                self._see(func, args, kwargs, result)
            except Exception as error:  # a fault of the witness is no reason to end the program, but it must be told
                sight.failure = sight.failure or f"{func}: {type(error).__name__}: {error}"
        return result

    def _see(self, func, args, kwargs, result) -> None:
        name, slots, by_name, view = _schema(func)
        capture = self.sight.sighting
        if view:
            if capture is not None:
                self._numbers(capture, name, slots, args, kwargs, view=True)
            return
        inputs = []
        for at, value in enumerate(args):
            if at < len(slots):
                self._leaves(inputs, slots[at], value)
        for key, value in kwargs.items():
            self._leaves(inputs, (key, by_name.get(key, False)), value)
        known = {tensor.untyped_storage()._cdata for _, _, tensor in inputs}
        fresh = []
        for value in tree_leaves(result):
            if self._usable(value) and value.untyped_storage()._cdata not in known:
                fresh.append(value)
        if capture is not None:
            self._captured(capture, name, slots, args, kwargs, inputs, fresh)
        else:
            for value in fresh:
                self.book.note(value, made=name)
            if name in (RESIZE, SET) and inputs:
                if self.book.find(inputs[0][2]) is not None:
                    return  # it gives a tensor other bounds or bytes and writes none
                self.book.note(inputs[0][2], made=name)
            self._hosted(name, inputs)

    def _usable(self, value) -> bool:
        if not isinstance(value, torch.Tensor) or value.numel() == 0 or isinstance(value, FakeTensor):
            return False
        return self.sight.on_device(value, self.sight.sighting is not None)

    def _leaves(self, inputs, slot, value) -> None:
        name, write = slot
        if isinstance(value, torch.Tensor):
            if self._usable(value):
                inputs.append((name, write, value))
        elif isinstance(value, (list, tuple)):
            for at, one in enumerate(value):
                if self._usable(one):
                    inputs.append((f"{name}[{at}]", write, one))

    def _numbers(self, capture, op, slots, args, kwargs, view=False) -> None:
        pairs = [(slots[at][0], value) for at, value in enumerate(args) if at < len(slots)] + list(kwargs.items())
        for name, value in pairs:
            if isinstance(value, (int, float)) and name not in NOT_VALUES and (not view or name in VIEW_VALUES):
                capture.scalars.append(Scalar(op, name, value, view))

    # while capturing
    def _captured(self, capture, op, slots, args, kwargs, inputs, fresh) -> None:
        capture.ops += 1
        self._numbers(capture, op, slots, args, kwargs)
        if op in (RESIZE, SET):
            if inputs and self.book.find(inputs[0][2]) is None:  # it has grown, into memory of the capture's
                fresh = [inputs[0][2]]
            inputs = []
        if op not in SHAPE_ONLY:
            for name, write, tensor in inputs:
                self._touch(capture, op, name, write, tensor)
        for name, write, tensor in inputs:
            if write:
                note = self.book.note(tensor)
                self._wrote(capture, op, note, tensor)
        for tensor in fresh:
            note = self.book.note(tensor, made=op)
            touch = capture.inner.setdefault(note, Touch(note, op, "result"))
            if op not in UNWRITTEN:
                touch.writes.update(ranges(tensor))
                self._wrote(capture, op, note, tensor)
        capture.shapes += [(op, name, tuple(tensor.shape)) for name, _, tensor in inputs]
        if op in self.rules:
            capture.calls.append(_call(op, slots, args, kwargs))

    def _touch(self, capture, op, name, write, tensor) -> None:
        note = self.book.note(tensor)
        touch = capture.inner.get(note)
        if touch is None:
            touch = capture.touches.get(note)
        if touch is None:
            touch = capture.touches[note] = Touch(note, op, name, pinned=self.sight.on_host(tensor))
        bytes_ = ranges(tensor)
        note.read = note.read or not write
        if not write or (op.endswith("_") and op not in OVERWRITES):
            for low, high in bytes_:
                missing = touch.writes.missing(low, high)
                if missing and touch.read_by is None:
                    touch.read_by = (op, name)
                touch.reads.update(missing)
                touch.all_reads.add(low, high)
        if write:
            touch.writes.update(bytes_)

    def _wrote(self, capture, op, note, tensor) -> None:
        for low, high in ranges(tensor):
            capture.writes.append(Written(note.address + low, note.address + high, note, op))

    # between captures
    def _hosted(self, op, inputs) -> None:
        for _, write, tensor in inputs:
            note = self.book.find(tensor)
            if write:
                start = tensor.untyped_storage().data_ptr()
                for low, high in ranges(tensor):
                    self.ledger.host_wrote_at(start + low, start + high)
            if note is None:
                continue
            if not write or (op.endswith("_") and op not in OVERWRITES):
                if op not in SHAPE_ONLY:
                    note.read = note.read or not write
                    self.ledger.host_reads(note, ranges(tensor))
            if write:
                self.ledger.host_writes(note, ranges(tensor), op)


def _call(op, slots, args, kwargs) -> Call:
    tensors, numbers = {}, {}
    for name, value in [(slots[at][0], value) for at, value in enumerate(args) if at < len(slots)] + list(
        kwargs.items()
    ):
        if isinstance(value, torch.Tensor):
            tensors[name] = describe(value)
        elif isinstance(value, (int, float, bool)):
            numbers[name] = value
    return Call(op, tensors, numbers)


def describe(tensor: torch.Tensor) -> tuple:
    """What is needed to look at `tensor` again later without keeping it alive."""
    import weakref

    return (
        weakref.ref(tensor.untyped_storage()), tensor.dtype, tuple(tensor.shape), tensor.stride(),
        tensor.storage_offset(),
        tensor.device,
    )  # fmt: skip


def revive(description: tuple) -> torch.Tensor | None:
    """The tensor that `describe` described, or None if its storage died."""
    ref, dtype, shape, strides, offset, device = description
    storage = ref()
    if storage is None:
        return None
    return torch.empty(0, dtype=dtype, device=device).set_(storage, offset, shape, strides)
