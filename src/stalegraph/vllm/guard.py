"""A guard for vLLM: it notes where attention metadata lies when a FULL graph is captured, and compares at each replay.

A `vllm.general_plugins` entry point, off unless STALEGRAPH_GUARD is "warn" or "raise". vLLM's own debug check looks at
positional arguments only, of which a full graph has none, and at attention metadata in no release. With the V1 runner
the metadata is read from the forward context around `CUDAGraphWrapper.__call__`; the V2 runner replays with no forward
context, so there the last metadata that each builder returned is compared (vLLM #52440 asks for such a guard).
"""

from __future__ import annotations

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

    Attribute paths are fetched by one `operator.attrgetter` call; items of dicts and sequences are rare in metadata.
    """

    def __init__(self, paths):
        self.paths = tuple(paths)
        names = [".".join(path) for path in self.paths if not any(isinstance(step, Item) for step in path)]
        self._fetch = operator.attrgetter(*names) if 1 < len(names) == len(self.paths) else None

    def addresses(self, metadata) -> list[int | None]:
        """The address of each path's tensor, in the order of `paths`; None where there is no tensor now."""
        if self._fetch is not None:
            try:
                return [tensor.data_ptr() for tensor in self._fetch(metadata)]
            except AttributeError:  # a field is None or gone in this step
                pass
        return [_address(metadata, path) for path in self.paths]


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
        self.records = weakref.WeakKeyDictionary()  # graph -> (batch, [Group])
        self.reported = set()
        self.messages = []
        self.broken = False
        self._undo = []
        # V2 only: what each builder returned last.
        self.capturing = 0
        self.pending = {}  # builder -> Group, built since the capture of the graph before
        self.readers = weakref.WeakKeyDictionary()  # builder -> Fields over all graphs' paths
        self.latest = weakref.WeakKeyDictionary()  # builder -> {path: address} as of its last build
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
            self.records[graph()] = (_batch(key), groups or [])
        return output

    @_never_in_the_way
    def replayed(self, graph, attn_metadata) -> None:
        """V1: compare the metadata of this step with what `graph` captured."""
        record = self.records.get(graph)
        if record is None:
            return
        batch, groups = record
        by_layer = attn_metadata if isinstance(attn_metadata, list) else (attn_metadata,)
        moved = []
        for group in groups:
            at, layer = group.layer
            metadata = by_layer[at].get(layer) if at < len(by_layer) else None
            if metadata is None:
                continue
            now = group.fields.addresses(metadata)
            if now != group.captured:
                moved += self.moved(batch, layer, group, now)
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
        reader = self.readers.get(builder)
        if reader is not None:
            self.latest[builder] = reader.addresses(metadata)

    @_never_in_the_way
    def captured(self, key, graph) -> None:
        """V2: `graph` has just been captured under `key`, an int or a batch descriptor."""
        groups = []
        for builder, group in self.pending.items():
            reader = self.readers.get(builder)
            paths = list(reader.paths) if reader else []
            new = [path for path in group.fields.paths if path not in paths]
            if new or reader is None:
                self.readers[builder] = Fields(paths + new)
            groups.append((weakref.ref(builder), group))
        self.pending.clear()
        self.records[graph] = (_batch(key), groups)

    @_never_in_the_way
    def run(self, graph) -> None:
        """V2: compare what the builders returned last with what `graph` captured."""
        record = self.records.get(graph)
        if record is None:
            return
        batch, groups = record
        moved = []
        for reference, group in groups:
            builder = reference()
            latest = self.latest.get(builder) if builder is not None else None
            if latest is None:
                continue
            paths = self.readers[builder].paths
            if paths != group.fields.paths:  # graphs of this builder differ in their fields
                by_path = dict(zip(paths, latest, strict=True))
                latest = [by_path.get(path) for path in group.fields.paths]
            if latest != group.captured:
                moved += self.moved(batch, group.layer, group, latest)
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
            if wrapper.runtime_mode != full or _guard is not guard:
                return original(wrapper, *args, **kwargs)
            try:
                context = module.get_forward_context()
            except AssertionError:  # outside of inference, where the wrapper just calls the model
                return original(wrapper, *args, **kwargs)
            if context.cudagraph_runtime_mode != full or not context.attn_metadata:
                return original(wrapper, *args, **kwargs)
            key = context.batch_descriptor

            def graph():
                return getattr(wrapper.concrete_cudagraph_entries.get(key), "cudagraph", None)

            return guard.step(graph, key, context.attn_metadata, lambda: original(wrapper, *args, **kwargs))

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
            graph = manager.graphs.get(key)
            if graph is not None and _guard is guard:
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
            if _guard is guard:
                guard.built(builder, metadata)
            return metadata

        return build

    def wrap_init(original):
        def __init__(builder, *args, **kwargs):
            if _guard is guard:
                guard.made(builder, args, kwargs)
            original(builder, *args, **kwargs)

        return __init__

    def hook_class(cls):
        wraps = {"__init__": wrap_init, "build": wrap, "build_for_cudagraph_capture": wrap}
        for name in wraps.keys() & cls.__dict__.keys():
            guard.hook(cls, name, wraps[name])

    base = module.AttentionMetadataBuilder
    original = base.__dict__.get("__init_subclass__")

    def __init_subclass__(cls, **kwargs):
        super(base, cls).__init_subclass__(**kwargs)
        _quietly(lambda: hook_class(cls))

    def hook():
        waiting, seen = [base], set()
        while waiting:
            cls = waiting.pop()
            if cls not in seen:
                seen.add(cls)
                hook_class(cls)
                waiting += cls.__subclasses__()
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
