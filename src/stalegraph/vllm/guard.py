"""A guard for vLLM: it notes where attention metadata lies when a FULL graph is captured, and compares at each replay.

A `vllm.general_plugins` entry point, off unless STALEGRAPH_GUARD is "warn" or "raise". vLLM's own debug check looks at
positional arguments only, of which a full graph has none, and at attention metadata in no release. With the V1 runner
the metadata is read from the forward context around `CUDAGraphWrapper.__call__`; the V2 runner replays with no forward
context, so there the last metadata that each builder returned is compared (vLLM #52440 asks for such a guard).
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import logging
import operator
import os
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from stalegraph.errors import StaleReadError, UsageError
from stalegraph.vllm.arrivals import forget, on_arrival

logger = logging.getLogger("vllm.stalegraph.guard")

MODES = ("off", "warn", "raise")
V1_GRAPHS = "vllm.compilation.cuda_graph"
V1_MICROBATCHES = "vllm.v1.worker.gpu_ubatch_wrapper"
V2_GRAPHS = "vllm.v1.worker.gpu.cudagraph_utils"
BUILDERS = "vllm.v1.attention.backend"
# Read by prefill only, which no full decode graph contains; Mamba builders end such names in "_p".
IGNORED = ("prefill*", "*.prefill*", "*_p", "chunked_context*", "*.chunked_context*")
MAX_DEPTH = 4  # metadata.decode.scheduler_metadata.num_splits has 3 steps
# Objects of these packages are tensors, plain values or wrappers with buffers of their own, not metadata.
OPAQUE = ("torch", "numpy", "builtins", "flashinfer", "functools", "logging", "weakref", "threading", "enum")

_guard: Guard | None = None


def register() -> None:
    """Entry point of `vllm.general_plugins`: install the guard as STALEGRAPH_GUARD says. Never raises."""
    try:
        mode = os.environ.get("STALEGRAPH_GUARD", "").strip().lower() or "off"
        allow = [glob.strip() for glob in os.environ.get("STALEGRAPH_GUARD_ALLOW", "").split(",") if glob.strip()]
        if mode == "off":
            logger.debug("stalegraph guard is off (STALEGRAPH_GUARD=off|warn|raise)")
            return
        logger.info("stalegraph guard: %s", install(mode, allow=allow))
    except Exception as error:
        logger.warning("stalegraph guard is off: %s: %s", type(error).__name__, error)


def install(mode: str = "warn", *, allow: Iterable[str] = (), on_device: Callable | None = None) -> str:
    """Watch every FULL graph that is captured in this process from now on; says what it will do.

    `allow` holds globs over field names ("query_start_loc", "decode.*") whose tensors may move. `on_device(tensor)`
    says which tensors a graph can bake in (default: CUDA tensors). A second call replaces mode and allow list.
    """
    global _guard
    if mode not in MODES:
        raise UsageError(f"mode is {mode!r}; allowed: {', '.join(MODES)}")
    if mode == "off":
        uninstall()
        return "off"
    if _guard is None:
        _guard = Guard(mode, allow, on_device)
        for name, watch in _watches.items():
            on_arrival(name, watch)
    else:
        _guard.mode, _guard.allow = mode, (*IGNORED, *allow)
    return f"addresses of attention metadata are compared at each replay of a FULL graph, and a moved one {_does(mode)}"


def uninstall() -> None:
    """Take every hook out of vLLM again and forget all records."""
    global _guard
    guard, _guard = _guard, None
    for name, watch in (*_watches.items(), (BUILDERS, _watch_builders)):
        forget(name, watch)
    if guard is not None:
        guard.unhook()


def _does(mode):
    return "is logged once" if mode == "warn" else "fails the step"


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
            except (AttributeError, TypeError):  # a field is None or gone in this step
                return walked(metadata)

        return addresses


def _address(value, path) -> int | None:
    try:
        for step in path:
            value = value[step.key] if isinstance(step, Item) else getattr(value, step)
        return value.data_ptr()
    except (AttributeError, KeyError, IndexError, TypeError):
        return None


def tensors(metadata, on_device, path=(), seen=None):
    """Yield (path, tensor) for each device tensor in a tree of dataclasses, objects, dicts and sequences."""
    import torch

    if isinstance(metadata, torch.Tensor):
        if on_device(metadata) and metadata.data_ptr():
            yield path, metadata
        return
    seen = set() if seen is None else seen
    if len(path) >= MAX_DEPTH or id(metadata) in seen:
        return
    seen.add(id(metadata))
    if isinstance(metadata, dict):
        below = [(Item(key), value) for key, value in metadata.items()]
    elif isinstance(metadata, (list, tuple)):
        below = [(Item(index), value) for index, value in enumerate(metadata)]
    elif type(metadata).__module__.split(".")[0] in OPAQUE or not hasattr(metadata, "__dict__"):
        return
    else:
        below = [(name, value) for name, value in vars(metadata).items() if not name.startswith("_stalegraph")]
    for step, value in below:
        yield from tensors(value, on_device, (*path, step), seen)


class Group:
    """One metadata object that some layers share: where it is found, its fields, and their addresses at capture."""

    def __init__(self, layer, fields, captured):
        self.layer, self.fields, self.captured = layer, fields, captured


class Seen:
    """What one builder returned last, V2 only: addresses of the fields of all graphs, in the order of `fields.paths`."""

    def __init__(self):
        self.fields = Fields(())
        self.latest: list[int | None] | None = None

    def build(self, metadata) -> bool:
        self.latest = self.fields.addresses(metadata)
        return True

    def of(self, group: Group) -> list[int | None] | None:
        """The addresses of a group's fields, by which the graphs of one builder may differ."""
        if self.latest is None or self.fields.paths == group.fields.paths:
            return self.latest
        by_path = dict(zip(self.fields.paths, self.latest, strict=True))
        return [by_path.get(path) for path in group.fields.paths]


class Record:
    """What is known of one captured graph: its batch and its groups, V2's each with what its builder returned last.

    Of the two ways to compare, `holds` and `held` are the short ones, taken at each replay: they say whether all is
    where it was. Each graph also has its record as an attribute, which a step reads faster than a weak dictionary.
    """

    def __init__(self, batch, groups, seen=()):
        self.batch, self.groups, self.seen = batch, groups, seen
        # (microbatch, layer, how to read, captured) of each group, so that a step looks up no more than it must.
        self._short = [(*group.layer, group.fields.addresses, group.captured) for group in groups if not seen]

    def holds(self, attn_metadata) -> bool:
        """V1: whether all fields of this step's metadata lie where they were captured."""
        one = type(attn_metadata) is dict
        for at, layer, addresses, captured in self._short:
            if addresses((attn_metadata if one else attn_metadata[at])[layer]) != captured:
                return False
        return True

    def held(self) -> bool:
        """V2: the same for what the builders returned last."""
        for group, seen in zip(self.groups, self.seen):
            if seen.latest is not None and seen.latest != group.captured:
                return False
        return True


def _never_in_the_way(method):
    """A fault of the guard's own is logged once and ends the guard, never a step of vLLM's."""

    @functools.wraps(method)
    def guarded(self, *args):
        if self.broken:
            return None
        try:
            return method(self, *args)
        except StaleReadError:
            raise
        except Exception as error:
            self.broken = True
            logger.warning("stalegraph guard is off from here on: %s: %s", type(error).__name__, error)
            return None

    return guarded


class Guard:
    """The records of all graphs, keyed weakly by graph object, and what is done about a field that moved."""

    def __init__(self, mode, allow=(), on_device=None):
        self.mode = mode
        self.allow = (*IGNORED, *allow)
        self.on_device = on_device or (lambda tensor: tensor.is_cuda)
        self.records = weakref.WeakKeyDictionary()  # graph -> Record
        self.reported = set()
        self.messages = []
        self.broken = False
        self._undo = []
        # V2 only.
        self.managed = False  # whether there is a manager of graphs
        self.watch_builds: Callable = lambda: None  # hooks the builders' steps
        self.capturing = 0
        self.pending = {}  # builder -> Group, built since the capture of the graph before
        self.seen = weakref.WeakKeyDictionary()  # builder -> Seen
        self.layers = weakref.WeakKeyDictionary()  # builder -> names of its layers

    # -- hooks

    def hook(self, owner, name, wrap):
        """Replace `owner.name` by `wrap(original)`, to be undone by `unhook`."""
        original = owner.__dict__[name]
        replacement = functools.wraps(original)(wrap(original))
        self._undo.append((owner, name, original))
        setattr(owner, name, replacement)

    def unhook(self):
        for owner, name, original in reversed(self._undo):
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._undo.clear()

    # -- capture and replay

    def group(self, layer, metadata) -> Group:
        """What there is to watch in one metadata object, now."""
        found = {path: tensor.data_ptr() for path, tensor in tensors(metadata, self.on_device)}
        fields = Fields(path for path in found if not self.allowed(spell(path)))
        return Group(layer, fields, [found[path] for path in fields.paths])

    def allowed(self, path):
        return any(fnmatch.fnmatchcase(path, glob) for glob in self.allow)

    @_never_in_the_way
    def groups(self, attn_metadata) -> list[Group]:
        """One group for each distinct metadata object in V1's dict by layer name, or list of such, one a microbatch."""
        groups, seen = [], set()
        for at, by_layer in enumerate(attn_metadata if isinstance(attn_metadata, list) else [attn_metadata]):
            for layer, metadata in (by_layer or {}).items():
                if id(metadata) not in seen:
                    seen.add(id(metadata))
                    groups.append(self.group((at, layer), metadata))
        return groups

    def step(self, graph, key, attn_metadata, call):
        """V1: run a step, `call()`, that replays `graph()`, or captures it where there is none yet."""
        known = graph()
        if known is not None:
            self.replayed(known, attn_metadata)
            return call()
        # Before the call: what appears on the metadata during it was planned inside the graph.
        groups = self.groups(attn_metadata)
        output = call()
        if graph() is not None:
            self.note(graph(), Record(_batch(key), groups or []))
        return output

    def note(self, graph, record) -> None:
        self.records[graph] = record
        with contextlib.suppress(AttributeError):  # then each replay goes the long way
            graph._stalegraph_record = record

    @_never_in_the_way
    def replayed(self, graph, attn_metadata) -> None:
        """V1: compare the metadata of this step with what `graph` captured."""
        record = self.records.get(graph)
        if record is None:
            return
        by_layer = attn_metadata if isinstance(attn_metadata, list) else (attn_metadata,)
        moved = []
        for group in record.groups:
            at, layer = group.layer
            metadata = by_layer[at].get(layer) if at < len(by_layer) else None
            if metadata is None:
                continue
            now = group.fields.addresses(metadata)
            if now != group.captured:
                moved += self.moved(record.batch, layer, group, now)
        self.act(moved)

    def moved(self, batch, layer, group, now) -> list[tuple[str, str, str]]:
        """(layer, field, message) for each field of `group` that lies elsewhere now, if it is a tensor now."""
        moved = []
        for path, captured, address in zip(group.fields.paths, group.captured, now, strict=True):
            field = spell(path)
            if address not in (None, captured) and not self.allowed(field):
                where = f"captured {captured:#x}, now {address:#x}"
                message = f"{field} of layer {layer} moved since capture of batch {batch}: {where}"
                moved.append((layer, field, message))
        return moved

    def act(self, moved) -> None:
        """Report each field once; in raise mode fail every step that would replay on a moved field."""
        if not moved:
            return
        for layer, path, message in moved:
            if (layer, path) not in self.reported:
                self.reported.add((layer, path))
                self.messages.append(message)
                logger.error("stalegraph guard: %s", message)
        if self.mode == "raise":
            raise StaleReadError("; ".join(message for _, _, message in moved))

    # -- V2

    @_never_in_the_way
    def made(self, builder, args, kwargs) -> None:
        """V2: a builder is made with these arguments, the second the names of its layers, which not all builders keep."""
        names = kwargs.get("layer_names") or (args[1] if len(args) > 1 else None)
        if names:
            self.layers[builder] = names

    @_never_in_the_way
    def built(self, builder, metadata) -> None:
        """V2: a builder returned metadata; only addresses are kept, so that no tensor lives longer than it would."""
        if self.capturing:
            known = self.layers.get(builder) or getattr(builder, "layer_names", None) or [type(builder).__name__]
            self.pending[builder] = self.group(known[0], metadata)
            return
        seen = self.seen.get(builder)
        if seen is not None:
            seen.build(metadata)

    @_never_in_the_way
    def captured(self, key, graph) -> None:
        """V2: `graph` has just been captured under `key`, an int or a batch descriptor."""
        groups, all_seen = [], []
        for builder, group in self.pending.items():
            seen = self.seen.get(builder)
            if seen is None:
                seen = self.seen[builder] = Seen()
                with contextlib.suppress(AttributeError):
                    builder._stalegraph_seen = seen
            new = [path for path in group.fields.paths if path not in seen.fields.paths]
            if new:
                seen.fields = Fields([*seen.fields.paths, *new])
                seen.latest = None
            groups.append(group)
            all_seen.append(seen)
        self.pending.clear()
        self.note(graph, Record(_batch(key), groups, all_seen))

    @_never_in_the_way
    def run(self, graph) -> None:
        """V2: compare what the builders returned last with what `graph` captured."""
        record = self.records.get(graph)
        if record is None:
            return
        moved = []
        for group, seen in zip(record.groups, record.seen):
            latest = seen.of(group)
            if latest is not None and latest != group.captured:
                moved += self.moved(record.batch, group.layer, group, latest)
        self.act(moved)


def _batch(key):
    """The size a graph was captured for: requests where the key says so, else tokens."""
    return getattr(key, "num_reqs", None) or getattr(key, "num_tokens", key)


def _watch_v1(module):
    """Hook `CUDAGraphWrapper.__call__`, which captures and replays; its PIECEWISE instances are let be."""
    guard = _guard
    if guard is None:
        return
    full = module.CUDAGraphMode.FULL

    def wrap(original):
        def __call__(wrapper, *args, **kwargs):
            if wrapper.runtime_mode is not full or _guard is not guard or guard.broken:
                return original(wrapper, *args, **kwargs)
            try:  # the short way, which every step goes as long as nothing has moved
                context = module.get_forward_context()
                graph = wrapper.concrete_cudagraph_entries[context.batch_descriptor].cudagraph
                held = graph._stalegraph_record.holds(context.attn_metadata)
            except Exception:  # whatever it is, the long way tells it
                held = False
            if held:
                return original(wrapper, *args, **kwargs)
            return watched(wrapper, args, kwargs)

        def watched(wrapper, args, kwargs):
            try:
                context = module.get_forward_context()
            except AssertionError:  # outside of inference, where the wrapper just calls the model
                return original(wrapper, *args, **kwargs)
            metadata, key = context.attn_metadata, context.batch_descriptor
            if context.cudagraph_runtime_mode is not full or not metadata:
                return original(wrapper, *args, **kwargs)

            def graph():
                return getattr(wrapper.concrete_cudagraph_entries.get(key), "cudagraph", None)

            return guard.step(graph, key, metadata, lambda: original(wrapper, *args, **kwargs))

        return __call__

    _quietly(lambda: guard.hook(module.CUDAGraphWrapper, "__call__", wrap))


def _watch_microbatches(module):
    """Hook the V1 runner's dual batch overlap, whose FULL graphs lie in a wrapper of their own, by total tokens."""
    guard = _guard
    if guard is None:
        return
    full = module.CUDAGraphMode.FULL

    def wrap(original):
        def __call__(wrapper, *args, **kwargs):
            context = module.get_forward_context()
            slices, metadata = context.ubatch_slices, context.attn_metadata
            if slices is None or not metadata or context.cudagraph_runtime_mode != full or _guard is not guard:
                return original(wrapper, *args, **kwargs)
            key = sum(piece.token_slice.stop - piece.token_slice.start for piece in slices)

            def graph():
                return getattr(wrapper.cudagraphs.get(key), "cudagraph", None)

            return guard.step(graph, key, metadata, lambda: original(wrapper, *args, **kwargs))

        return __call__

    _quietly(lambda: guard.hook(module.UBatchWrapper, "__call__", wrap))


def _watch_v2(module):
    """Hook the V2 runner's graph manager and, since only that runner needs it, the builders."""
    guard = _guard
    if guard is None:
        return

    class WatchedGraphs(dict):
        """The manager's graphs by batch: every release stores a graph here right after its capture."""

        def __setitem__(self, key, graph):
            super().__setitem__(key, graph)
            guard.captured(key, graph)

    def wrap_init(original):
        def __init__(manager, *args, **kwargs):
            original(manager, *args, **kwargs)
            if type(getattr(manager, "graphs", None)) is dict:
                manager.graphs = WatchedGraphs(manager.graphs)
            guard.managed = True
            _quietly(guard.watch_builds)

        return __init__

    def wrap_capture(original):
        def capture(manager, *args, **kwargs):
            guard.capturing += 1
            try:
                return original(manager, *args, **kwargs)
            finally:
                guard.capturing -= 1
                guard.pending.clear()

        return capture

    def wrap_run(original):
        def run(manager, key, *args, **kwargs):
            if _guard is guard and not guard.broken:
                graph = manager.graphs.get(key)
                try:
                    held = graph._stalegraph_record.held()
                except Exception:
                    held = graph is None
                if not held:
                    guard.run(graph)
            return original(manager, key, *args, **kwargs)

        return run

    def hook():
        manager = module.CudaGraphManager
        guard.hook(manager, "__init__", wrap_init)
        guard.hook(manager, "capture", wrap_capture)
        # `run` to 0.16.0, `run_fullgraph` from 0.17.1.
        guard.hook(manager, "run_fullgraph" if "run_fullgraph" in manager.__dict__ else "run", wrap_run)
        on_arrival(BUILDERS, _watch_builders)

    _quietly(hook)


def _watch_builders(module):
    """Hook `build` and `build_for_cudagraph_capture` of every builder class, those to come included."""
    guard = _guard
    if guard is None:
        return

    def wrap(original):
        def build(builder, *args, **kwargs):
            metadata = original(builder, *args, **kwargs)
            if _guard is guard and not guard.broken:
                try:
                    seen = None if guard.capturing else builder._stalegraph_seen.build(metadata)
                except Exception:
                    seen = None
                if not seen:
                    guard.built(builder, metadata)
            return metadata

        return build

    def wrap_init(original):
        def __init__(builder, *args, **kwargs):
            if _guard is guard:
                guard.made(builder, args, kwargs)
            original(builder, *args, **kwargs)

        return __init__

    hooks = {"__init__": wrap_init}  # the rest once there is a manager: V1's steps need none of it

    def hook_class(cls, hooks):
        for name in hooks.keys() & cls.__dict__.keys():
            guard.hook(cls, name, hooks[name])

    base = module.AttentionMetadataBuilder
    original = base.__dict__.get("__init_subclass__")

    def __init_subclass__(cls, **kwargs):
        super(base, cls).__init_subclass__(**kwargs)
        _quietly(lambda: hook_class(cls, hooks))

    def hook_all(hooks):
        waiting, seen = [base], set()
        while waiting:
            cls = waiting.pop()
            if cls not in seen:
                seen.add(cls)
                hook_class(cls, hooks)
                waiting += cls.__subclasses__()

    def watch_builds():
        if "build" not in hooks:
            more = dict.fromkeys(("build", "build_for_cudagraph_capture"), wrap)
            hooks.update(more)
            hook_all(more)

    def hook():
        hook_all(hooks)
        guard.watch_builds = watch_builds
        if guard.managed:
            watch_builds()
        if original is None:
            base.__init_subclass__ = classmethod(__init_subclass__)
            guard._undo.append((base, "__init_subclass__", None))

    _quietly(hook)


_watches = {V1_GRAPHS: _watch_v1, V1_MICROBATCHES: _watch_microbatches, V2_GRAPHS: _watch_v2}


def _quietly(hook):
    """Run `hook`; where this vLLM is built differently say so and go on without that hook."""
    try:
        hook()
    except Exception as error:
        logger.warning("stalegraph guard does not see all graphs here: %s: %s", type(error).__name__, error)
