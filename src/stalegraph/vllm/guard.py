"""A guard for vLLM: it notes where attention metadata lies when a FULL graph is captured, and compares at each replay.

A `vllm.general_plugins` entry point, off unless STALEGRAPH_GUARD is "warn" or "raise". vLLM's own debug check looks at
positional arguments only, of which a full graph has none, and at attention metadata in no release. Addresses are noted
as `CUDAGraph.capture_begin` is called, and each noted graph gets a `replay` of its own, which compares first. With the
V1 runner the metadata is in the forward context; the V2 runner replays with none, so there the last metadata that each
builder returned is compared (vLLM #52440 asks for such a guard).
PIECEWISE graphs run attention outside of them and are let be, also where a model has an op bake metadata into one.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import gc
import inspect
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterable

from stalegraph.errors import StaleReadError, UsageError
from stalegraph.vllm.arrivals import forget, on_arrival
from stalegraph.vllm.fields import Fields, Group, Record, Seen, spell, tensors

logger = logging.getLogger("vllm.stalegraph.guard")

MODES = ("off", "warn", "raise")
V1_GRAPHS = "vllm.compilation.cuda_graph"
V1_MICROBATCHES = "vllm.v1.worker.gpu_ubatch_wrapper"
V2_GRAPHS = "vllm.v1.worker.gpu.cudagraph_utils"
V2_DRAFTS = "vllm.v1.worker.gpu.spec_decode.eagle_cudagraph"
BUILDERS = "vllm.v1.attention.backend"
# Read by prefill only, which no full decode graph contains; Mamba builders end such names in "_p".
# An encoder's keys are written in the first step of a request only, so no decode graph reads where they go.
IGNORED = (
    "prefill*", "*.prefill*", "*_p", "chunked_context*", "*.chunked_context*",
    "*.encoder_attn*:slot_mapping", "*.cross_attn*:slot_mapping",
)  # fmt: skip

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

    `allow` holds globs over field names whose tensors may move ("query_start_loc", "decode.*", "by_size[*].indices";
    brackets stand for themselves), those of some layers only with a glob over layers before it ("*.mixer:state*").
    `on_device(tensor)` says which tensors a graph can bake in (default: CUDA tensors). A second call replaces mode and
    allow list, for the graphs captured until then as well.
    """
    global _guard
    if mode not in MODES:
        raise UsageError(f"mode is {mode!r}; allowed: {', '.join(MODES)}")
    allow = allow if isinstance(allow, str) else list(allow)
    if isinstance(allow, str) or not all(isinstance(glob, str) for glob in allow):
        raise UsageError(f"allow is {allow!r}; allowed: a list of globs over field names")
    if mode == "off":
        uninstall()
        return "off"
    if _guard is None:
        _guard = Guard(mode, allow, on_device)
        _guard.tell_of_strangers()
        for name, watch in _watches.items():
            on_arrival(name, watch)
    else:
        _guard.mode, _guard.broken = mode, False
        _guard.permit(allow)
    return f"addresses of attention metadata are compared at each replay of a FULL graph, and a moved one {_does(mode)}"


def uninstall() -> None:
    """Take every hook out of vLLM again and forget all records.

    A hook that someone else has patched over since then stays where it is and does nothing.
    """
    global _guard
    guard, _guard = _guard, None
    for name, watch in (*_watches.items(), (BUILDERS, _watch_builders)):
        forget(name, watch)
    if guard is not None:
        guard.unhook()
        guard.forget()


def _does(mode):
    return "is logged once" if mode == "warn" else "fails the step"


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
            self.fail(error)
            return None

    return guarded


class Guard:
    """The records of all graphs, keyed weakly by graph object, and what is done about a field that moved."""

    def __init__(self, mode, allow=(), on_device=None):
        from torch.utils.weak import WeakIdKeyDictionary

        self.mode = mode
        self.on_device = on_device or (lambda tensor: tensor.is_cuda)
        self.records = WeakIdKeyDictionary()  # graph -> Record
        self.reported = set()
        self.told = set()  # what has been said once
        self.messages = []
        self.broken = False
        self.hooks = []
        self.sees_captures = False
        # V1 only: how to get the forward context, and its modes.
        self.context: Callable | None = None
        self.full = self.piecewise = None
        # V2 only.
        self.managed = False  # whether there is a manager of graphs
        self.awaits_builders = False
        self.watch_builds: Callable = lambda: None  # hooks the builders' steps
        self.capturing = 0
        self.pending = WeakIdKeyDictionary()  # builder -> Group, built since the capture of the graph before
        self.seen = WeakIdKeyDictionary()  # builder -> Seen
        self.layers = WeakIdKeyDictionary()  # builder -> names of its layers
        self.permit(allow)

    # -- hooks

    def hook(self, owner, name, wrap):
        """Replace `owner.name` by `wrap(original)`, to be undone by `unhook`."""
        original = owner.__dict__[name]
        replacement = functools.wraps(original)(wrap(original))
        self.put(owner, name, original, replacement)

    def put(self, owner, name, original, replacement):
        self.hooks.append((owner, name, original, replacement))
        setattr(owner, name, replacement)

    def unhook(self):
        for owner, name, original, replacement in reversed(self.hooks):
            if owner.__dict__.get(name) is not replacement:
                continue
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self.hooks.clear()

    def forget(self):
        """Take off the graphs and builders what they carry."""
        for carriers, name in ((self.records, "replay"), (self.seen, "_stalegraph_seen")):
            for carrier in carriers:
                with contextlib.suppress(AttributeError):
                    delattr(carrier, name)
        for table in (self.records, self.seen, self.layers, self.pending):
            table.clear()

    def fail(self, error) -> None:
        """End the guard, and say so."""
        self.broken = True
        logger.warning("stalegraph guard is off from here on: %s: %s", type(error).__name__, error)

    # -- what is watched

    def permit(self, allow: Iterable[str]) -> None:
        """Replace the allow list: what is watched of the graphs captured so far follows it."""
        self.allow = (*IGNORED, *allow)
        self._globs = []
        for glob in self.allow:
            layer, colon, field = glob.partition(":")
            # A bracket is part of a field's name, not of a glob's set of characters.
            self._globs.append((layer if colon else "*", (field if colon else glob).replace("[", "[[]")))
        for seen in self.seen.values():
            seen.fields = Fields(())
        for record in self.records.values():
            for group in record.groups:
                group.watch(self.watches)
            for group, seen in zip(record.groups, record.seen):
                seen.extend(group.fields.paths)
        self.shorten()

    def shorten(self) -> None:
        for record in self.records.values():
            record.shorten()

    def watches(self, layer: str, field: str) -> bool:
        match = fnmatch.fnmatchcase
        return not any(match(field, fields) and match(layer, layers) for layers, fields in self._globs)

    # -- capture and replay

    def addresses(self, metadata) -> dict[tuple, int]:
        """The address of each device tensor below `metadata`, by its path."""
        return {path: tensor.data_ptr() for path, tensor in tensors(metadata, self.on_device)}

    def group(self, at, layer, metadata) -> Group:
        """What there is to watch in one metadata object, now."""
        group = Group(at, layer, self.addresses(metadata))
        group.watch(self.watches)
        return group

    @_never_in_the_way
    def groups(self, attn_metadata) -> list[Group]:
        """One group for each distinct metadata object in V1's dict by layer name, or list of such, one a microbatch."""
        groups = {}
        for at, by_layer in enumerate(_by_microbatch(attn_metadata)):
            for layer, metadata in (by_layer or {}).items():
                group = groups.get((at, id(metadata)))
                if group is None:
                    groups[at, id(metadata)] = self.group(at, layer, metadata)
                else:
                    group.layers.append(layer)
        return list(groups.values())

    def note(self, graph, record, differs) -> None:
        """From now on `graph` is replayed where `differs()` is false or has told what moved."""
        if not any(group.found for group in record.groups):
            self.unrecorded(record.batch)
        guard, kind, alive = self, type(graph), weakref.ref(graph)  # a graph that held itself would live on as garbage

        def replay():
            if _guard is guard and not guard.broken:
                differs()
            return kind.replay(alive())

        try:
            graph.replay = replay
        except AttributeError:
            self.unrecorded(record.batch)
            return
        self.records[graph] = record

    @_never_in_the_way
    def begins(self, graph) -> None:
        """The capture of `graph` begins: V1's forward context has its metadata, V2 builds it before."""
        if self.records.pop(graph, None) is not None:
            del graph.replay
        context = None
        if self.context is not None:
            with contextlib.suppress(AssertionError):  # outside of a step
                context = self.context()
        mode = getattr(context, "cudagraph_runtime_mode", None)
        if self.capturing and mode is not None and mode is self.piecewise:
            self.pending.clear()  # what was built for this graph's attention, which is not in it
        elif self.capturing:
            # A warm-up with the same metadata may have put tensors on it.
            for group in self.pending.values():
                now = self.addresses(group.metadata)
                group.planned |= {path for path, address in now.items() if group.found.get(path) != address}
                group.found = now
                group.watch(self.watches)
        elif mode is not None and mode is self.full:
            groups = self.groups(context.attn_metadata or {})
            if groups is not None:
                self.note_v1(graph, context.batch_descriptor, groups, self.context)

    @_never_in_the_way
    def note_v1(self, graph, key, groups, get_context) -> None:
        record = Record(_batch(key), groups)

        def differs():
            try:  # the short way, which every step goes as long as nothing has moved
                held = record.holds(get_context().attn_metadata)
            except Exception:  # whatever it is, the long way tells it
                held = False
            if not held:
                self.replayed(record, get_context)

        self.note(graph, record, differs)

    @_never_in_the_way
    def replayed(self, record, get_context) -> None:
        """V1: compare the metadata of this step with what was captured."""
        microbatches = _by_microbatch(get_context().attn_metadata or {})
        moved = []
        for group in record.groups:
            by_layer = (microbatches[group.at] if group.at < len(microbatches) else None) or {}
            if not any(by_layer.get(layer) is not None for layer in group.layers):
                words = f"the graph of batch {record.batch} is replayed without attention metadata of layer"
                self.tell("absent", f"{words} {group.layers[0]}: nothing is compared there")
            compared = set()  # of what the layers shared at capture, each object that there is now
            for layer in group.layers:
                metadata = by_layer.get(layer)
                if metadata is not None and id(metadata) not in compared:
                    compared.add(id(metadata))
                    now = group.fields.addresses(metadata)
                    if now != group.captured:
                        moved += self.moved(record.batch, layer, group, now)
        self.act(moved)

    def tell_of_strangers(self) -> None:
        """Say it where graphs have been captured before the guard was there."""
        if any(name in sys.modules for name in (V1_GRAPHS, V1_MICROBATCHES, V2_GRAPHS)):
            import torch

            def there():
                return sum(issubclass(type(one), torch.cuda.CUDAGraph) for one in gc.get_objects())

            if there():
                gc.collect()  # some may be garbage
                if count := there():
                    self.tell("strangers", f"{count} CUDA graphs are older than the guard: they are not watched")

    def unrecorded(self, batch) -> None:
        """Say once that there are graphs of whose metadata nothing is known."""
        words = f"the graph of batch {batch} is not watched, nor is any other whose attention metadata was not seen"
        self.tell("unrecorded", f"{words} at its capture")

    def tell(self, what, words) -> None:
        if what not in self.told:
            self.told.add(what)
            logger.warning("stalegraph guard: %s", words)

    def moved(self, batch, layer, group, now) -> list[tuple[str, str, str]]:
        """(layer, field, message) for each field of `group` that lies elsewhere now, if it is a tensor now."""
        moved = []
        for path, captured, address in zip(group.fields.paths, group.captured, now, strict=True):
            field = spell(path)
            if address and address != captured:  # 0 is an empty tensor, of which nothing is read
                what, where = "moved since capture", f"captured {captured:#x}, now {address:#x}"
            elif path in group.planned and address != captured:
                what, where = "was made by a warm-up before the capture", f"{captured:#x}, which no step writes"
            else:
                continue
            moved.append((layer, field, f"{field} of layer {layer} {what} of batch {batch}: {where}"))
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
        """V2: a builder is made with these arguments, the second its layers' names, which not all builders keep."""
        names = kwargs.get("layer_names") or (args[1] if len(args) > 1 else None)
        if names:
            self.layers[builder] = names

    @_never_in_the_way
    def built(self, builder, metadata) -> None:
        """V2: a builder returned metadata; only addresses are kept, so that no tensor lives longer than it would."""
        if self.capturing:
            known = self.layers.get(builder) or getattr(builder, "layer_names", None) or [type(builder).__name__]
            self.pending[builder] = group = self.group(0, known[0], metadata)
            group.metadata = metadata
            return
        seen = self.seen.get(builder)
        if seen is not None:
            seen.build(builder, metadata)

    @_never_in_the_way
    def captured(self, key, graph) -> None:
        """V2: `graph` has just been captured under `key`, an int or a batch descriptor."""
        groups, all_seen = [], []
        for builder, group in self.pending.items():
            seen = self.seen.get(builder)
            if seen is None:
                seen = self.seen[builder] = Seen(builder)
                with contextlib.suppress(AttributeError):
                    builder._stalegraph_seen = seen
            # What the forward put there anew within the capture is the graph's own.
            now = self.addresses(group.metadata)
            for path in [path for path in group.planned if now.get(path) != group.found[path]]:
                del group.found[path]
            group.watch(self.watches)
            seen.extend(group.fields.paths)
            group.metadata = None
            groups.append(group)
            all_seen.append(seen)
        self.pending.clear()
        record = Record(_batch(key), groups, all_seen)

        def differs():
            try:
                held = record.held()
            except Exception:
                held = False
            if not held:
                self.run(record)

        self.note(graph, record, differs)
        self.shorten()  # builders may return more fields now than the graphs before this one have

    @_never_in_the_way
    def run(self, record) -> None:
        """V2: compare what the builders returned last with what was captured."""
        moved = []
        for group, now in record.differing():
            if now is None:
                self.tell(
                    "unbuilt",
                    f"the graph of batch {record.batch} is replayed with no attention metadata built since its last "
                    "replay: such replays are not compared",
                )
            else:
                moved += self.moved(record.batch, group.layers[0], group, now)
        self.act(moved)
        record.passed()


def _by_microbatch(attn_metadata) -> list:
    """V1's dicts by layer name; without microbatches there is one."""
    return attn_metadata if isinstance(attn_metadata, (list, tuple)) else [attn_metadata]


def _batch(key):
    """The size a graph was captured for: requests where the key says so, else tokens."""
    return getattr(key, "num_reqs", None) or getattr(key, "num_tokens", key)


def _watch_captures():
    """Hook the beginning of every capture."""
    import torch

    guard = _guard

    def wrap(original):
        def capture_begin(graph, *args, **kwargs):
            if _guard is guard:
                guard.begins(graph)
            return original(graph, *args, **kwargs)

        return capture_begin

    if not guard.sees_captures:
        guard.sees_captures = True
        guard.hook(torch.cuda.CUDAGraph, "capture_begin", wrap)


def _watch_v1(module):
    """V1: FULL captures take place in `CUDAGraphWrapper.__call__`, under the forward context of their step."""
    guard = _guard
    if guard is None:
        return

    def hook():
        guard.context, modes = module.get_forward_context, module.CUDAGraphMode
        guard.full, guard.piecewise = modes.FULL, getattr(modes, "PIECEWISE", None)
        _watch_captures()

    _quietly(hook)


def _watch_microbatches(module):
    """Hook the V1 runner's dual batch overlap, which captures, by total tokens, with no forward context."""
    guard = _guard
    if guard is None:
        return
    full, get_context = module.CUDAGraphMode.FULL, module.get_forward_context

    def wrap(original):
        def __call__(wrapper, *args, **kwargs):
            groups = key = None
            if _guard is guard and not guard.broken:
                try:
                    context = get_context()
                    slices, metadata = context.ubatch_slices, context.attn_metadata
                    if slices is not None and metadata and context.cudagraph_runtime_mode == full:
                        key = sum(piece.token_slice.stop - piece.token_slice.start for piece in slices)
                        groups = None if key in wrapper.cudagraphs else guard.groups(metadata)
                except Exception as error:
                    guard.fail(error)
            output = original(wrapper, *args, **kwargs)
            graph = getattr(wrapper.cudagraphs.get(key), "cudagraph", None) if groups is not None else None
            if graph is not None:
                guard.note_v1(graph, key, groups, get_context)
            return output

        return __call__

    _quietly(lambda: guard.hook(module.UBatchWrapper, "__call__", wrap))


class _WatchedGraphs(dict):
    """A V2 manager's graphs by batch: every release stores a graph here right after its capture."""

    def __setitem__(self, key, graph):
        super().__setitem__(key, graph)
        if _guard is not None:
            _guard.captured(key, graph)


def _watch_v2(module):
    """Hook the V2 runner's graph manager."""
    if _guard is not None:
        _quietly(lambda: _watch_manager(module.CudaGraphManager))


def _watch_drafts(module):
    """Hook the manager of a drafter's graphs, which in 0.15.0 is no subclass of the other one."""
    if _guard is not None:
        manager = getattr(module, "EagleCudaGraphManager", None)
        if manager is not None and not any(base.__name__ == "CudaGraphManager" for base in manager.__mro__):
            _quietly(lambda: _watch_manager(manager))


def _watch_manager(manager):
    """Hook one class of V2 graph managers and, since only that runner needs it, the builders."""
    guard = _guard

    def managed(manager):
        if type(getattr(manager, "graphs", None)) is dict:
            manager.graphs = _WatchedGraphs(manager.graphs)
        guard.managed = True
        _quietly(guard.watch_builds)

    def wrap_init(original):
        def __init__(manager, *args, **kwargs):
            original(manager, *args, **kwargs)
            if _guard is guard:
                managed(manager)

        return __init__

    def wrap_capture(original):
        def capture(manager, *args, **kwargs):
            if _guard is not guard:
                return original(manager, *args, **kwargs)
            managed(manager)  # it may be older than the guard, or have been given a new dict of graphs
            guard.capturing += 1
            try:
                return original(manager, *args, **kwargs)
            finally:
                guard.capturing -= 1
                guard.pending.clear()

        return capture

    guard.hook(manager, "__init__", wrap_init)
    guard.hook(manager, "capture", wrap_capture)
    _watch_captures()
    if not guard.awaits_builders:
        guard.awaits_builders = True
        on_arrival(BUILDERS, _watch_builders)


def _watch_builders(module):
    """Hook the methods of every builder class that return metadata, those of classes to come included."""
    guard = _guard
    if guard is None:
        return

    def wrap(original):
        def build(builder, *args, **kwargs):
            metadata = original(builder, *args, **kwargs)
            if _guard is guard and not guard.broken:
                try:
                    seen = None if guard.capturing else builder._stalegraph_seen.build(builder, metadata)
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
            if inspect.isfunction(cls.__dict__[name]):
                guard.hook(cls, name, hooks[name])

    base = module.AttentionMetadataBuilder
    original = base.__dict__.get("__init_subclass__")

    def __init_subclass__(cls, **kwargs):
        if original is None:
            super(base, cls).__init_subclass__(**kwargs)
        else:
            original.__get__(None, cls)(**kwargs)
        if _guard is guard:
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
            more = dict.fromkeys(("build", "build_for_cudagraph_capture", "update_block_table"), wrap)
            hooks.update(more)
            hook_all(more)

    def hook():
        hook_all(hooks)
        guard.watch_builds = watch_builds
        if guard.managed:
            watch_builds()
        guard.put(base, "__init_subclass__", original, classmethod(__init_subclass__))

    _quietly(hook)


_watches = {
    V1_GRAPHS: _watch_v1,
    V1_MICROBATCHES: _watch_microbatches,
    V2_GRAPHS: _watch_v2,
    V2_DRAFTS: _watch_drafts,
}


def _quietly(hook):
    """Run `hook`; where this vLLM is built differently say so and go on without that hook."""
    try:
        hook()
    except Exception as error:
        logger.warning("stalegraph guard does not see all graphs here: %s: %s", type(error).__name__, error)
