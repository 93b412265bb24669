"""Where the tensors of attention metadata lie: found once at a capture, read again at each step."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

MAX_DEPTH = 4  # metadata.decode.scheduler_metadata.num_splits has 3 steps
# Objects of these packages are tensors, plain values or wrappers with buffers of their own, not metadata.
OPAQUE = ("torch", "numpy", "builtins", "flashinfer", "functools", "logging", "weakref", "threading", "enum")


@dataclass(frozen=True)
class Item:
    """A step of a path into a dict or a sequence; a step that is a plain string is an attribute."""

    key: object


def spell(path) -> str:
    """The name of a path, e.g. "decode.scheduler_metadata.num_splits" or "by_size[4].indices"."""
    return "".join(f"[{step.key}]" if isinstance(step, Item) else f".{step}" for step in path).lstrip(".")


class Fields:
    """Some tensors below a metadata object, each by its path, whose addresses are read as fast as Python allows.

    `addresses(metadata)` gives the address of each path's tensor, in the order of `paths`; None where there is no
    tensor now. Attribute paths are fetched by one `operator.attrgetter` call; items of dicts and sequences are rare.
    """

    def __init__(self, paths):
        self.paths = tuple(paths)
        names = [".".join(path) for path in self.paths if not any(isinstance(step, Item) for step in path)]
        self.addresses = self._fetched(names) if 1 < len(names) == len(self.paths) else self._walked

    def _walked(self, metadata) -> list[int | None]:
        return [_address(metadata, path) for path in self.paths]

    def _fetched(self, names) -> Callable[[object], list[int | None]]:
        import torch

        fetch, address, walked = operator.attrgetter(*names), torch.Tensor.data_ptr, self._walked

        def addresses(metadata):
            try:
                return list(map(address, fetch(metadata)))
            except (AttributeError, TypeError):  # a field is None, gone or no tensor in this step
                return walked(metadata)

        return addresses


def _address(value, path) -> int | None:
    try:
        for step in path:
            value = value[step.key] if isinstance(step, Item) else getattr(value, step)
        return value.data_ptr()
    except (AttributeError, KeyError, IndexError, TypeError):
        return None


def tensors(metadata, on_device, path=(), above=()):
    """Yield (path, tensor) for each device tensor in a tree of dataclasses, objects, dicts and sequences.

    An object that hangs in two places is yielded under both, since it can be replaced in either.
    """
    import torch

    if isinstance(metadata, torch.Tensor):
        if on_device(metadata) and metadata.data_ptr():
            yield path, metadata
        return
    if len(path) >= MAX_DEPTH or any(metadata is one for one in above):
        return
    for step, value in _below(metadata):
        yield from tensors(value, on_device, (*path, step), (*above, metadata))


def _below(metadata):
    """(step, value) for what lies directly below an object, __slots__ included."""
    if isinstance(metadata, dict):
        return [(Item(key), value) for key, value in metadata.items()]
    if isinstance(metadata, (list, tuple, deque)):
        return [(Item(index), value) for index, value in enumerate(metadata)]
    if isinstance(metadata, type) or type(metadata).__module__.split(".")[0] in OPAQUE:
        return []
    slots = (getattr(cls, "__slots__", ()) for cls in type(metadata).__mro__)
    names = (name for some in slots for name in ([some] if isinstance(some, str) else some))
    values = {name: getattr(metadata, name, None) for name in names if not name.startswith("__")}
    values.update(getattr(metadata, "__dict__", {}))
    return [(name, value) for name, value in values.items() if not name.startswith("_stalegraph")]


class Group:
    """One metadata object and the layers of one microbatch that share it, with the addresses below it at capture.

    `fields` are those to watch of what was `found`, as the allow list has it now, and `captured` their addresses.
    `planned` are those that a warm-up put there between build and capture (V2 only): no step writes them.
    """

    def __init__(self, at, layer, found):
        self.at, self.layers = at, [layer]
        self.found, self.planned = found, set()
        self.metadata = None  # the object itself, V2 only, until the graph is captured
        self.fields, self.captured = Fields(()), []

    def watch(self, watched: Callable[[str, str], bool]) -> None:
        self.fields = Fields(path for path in self.found if watched(self.layers[0], spell(path)))
        self.captured = [self.found[path] for path in self.fields.paths]


class Seen:
    """What one builder returned last, V2 only: addresses of the fields of all graphs, ordered as `fields.paths`."""

    def __init__(self, builder):
        self.builder = id(builder)  # a copy of a builder carries its attributes along, but is not meant
        self.fields = Fields(())
        self.latest: list[int | None] | None = None

    def extend(self, paths) -> None:
        new = [path for path in paths if path not in self.fields.paths]
        if new:
            self.fields = Fields([*self.fields.paths, *new])
        self.latest = None

    def build(self, builder, metadata) -> bool:
        if self.builder != id(builder):
            return False
        self.latest = self.fields.addresses(metadata)
        return True


class Record:
    """What is known of one captured graph: its batch and its groups, V2's each with what its builder returned last.

    Of the two ways to compare, `holds` and `held` are the short ones, taken at each replay: they say whether all is
    where it was.
    """

    def __init__(self, batch, groups, seen=()):
        self.batch, self.groups, self.seen = batch, groups, seen
        self.shorten()

    def shorten(self) -> None:
        """Lay out for the short way what each group watches, so that a step looks up no more than it must."""
        if self.seen:
            # [what its builder returned, how to pick, captured, what was compared last] of each group.
            self._short = [
                [seen, _picker(seen, group), group.captured, None] for seen, group in zip(self.seen, self.groups)
            ]
        else:
            self._short = [
                (group.at, group.layers[0], group.layers[1:], group.fields.addresses, group.captured)
                for group in self.groups
            ]

    def holds(self, attn_metadata) -> bool:
        """V1: whether all fields of this step's metadata lie where they were captured."""
        several = isinstance(attn_metadata, (list, tuple))
        for at, layer, others, addresses, captured in self._short:
            by_layer = attn_metadata[at] if several else attn_metadata
            metadata = by_layer[layer]
            if addresses(metadata) != captured:
                return False
            for other in others:
                own = by_layer[other]
                if own is not metadata and addresses(own) != captured:
                    return False
        return True

    def held(self) -> bool:
        """V2: the same for what the builders returned since the last replay; not where they returned nothing."""
        for seen, pick, captured, last in self._short:
            latest = seen.latest
            if latest is last or (latest if pick is None else pick(latest)) != captured:
                return False
        for entry in self._short:  # as `passed` does, without a call
            entry[3] = entry[0].latest
        return True

    def differing(self):
        """V2: (group, addresses now) of each group whose builder returned other addresses, None where nothing."""
        for entry, group in zip(self._short, self.groups):
            seen, pick, captured, last = entry
            if seen.latest is last:
                yield group, None
            else:
                now = seen.latest if pick is None else pick(seen.latest)
                if now != captured:
                    yield group, now

    def passed(self) -> None:
        """V2: the graph is replayed with what was built last, by which no later replay is to be judged."""
        for entry in self._short:
            entry[3] = entry[0].latest


def _picker(seen: Seen, group: Group) -> Callable[[list], list] | None:
    """What takes a group's addresses out of its builder's, by which the graphs of one builder may differ."""
    if seen.fields.paths == group.fields.paths:
        return None
    at = [seen.fields.paths.index(path) for path in group.fields.paths]
    return lambda latest: [latest[index] for index in at]
