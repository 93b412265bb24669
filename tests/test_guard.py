"""The guard in stand-ins for vLLM's two runners: what moved is named once, what may move is not."""

import collections
import copy
import enum
import importlib
import inspect
import logging
import sys
import types
from dataclasses import dataclass, field

import pytest
import torch

from stalegraph.errors import StaleReadError, UsageError
from stalegraph.vllm import guard


class CUDAGraphMode(enum.Enum):
    NONE = 0
    PIECEWISE = 1
    FULL = 2


@dataclass
class SchedulerMetadata:
    tile_scheduler_metadata: torch.Tensor | None = None
    num_splits: torch.Tensor | None = None


@dataclass
class Decode:
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    scheduler_metadata: SchedulerMetadata


@dataclass
class Metadata:
    query_start_loc: torch.Tensor
    decode: Decode
    prefill: object = None
    num_decodes: int = 4
    by_size: dict = field(default_factory=dict)


BLOCK_TABLE, SEQ_LENS, START = (torch.zeros(8, dtype=torch.int32) for _ in range(3))
HELD = []  # a fresh tensor must not land on a freed address


def metadata(splits=None, planned=True, **changes):
    """Metadata whose schedule is fresh unless `splits` is given."""
    schedule = SchedulerMetadata()
    if planned:
        fresh = splits if splits is not None else torch.zeros(9, dtype=torch.int32)
        HELD.append(fresh)
        schedule = SchedulerMetadata(fresh, fresh[1:])
    made = Metadata(START[:5], Decode(BLOCK_TABLE[:4], SEQ_LENS[:4], schedule))
    for name, value in changes.items():
        setattr(made, name, value)
    return made


@dataclass(frozen=True)
class Descriptor:
    num_tokens: int
    num_reqs: int | None = None


class Graph:
    """Replays nothing; counts."""

    def __init__(self):
        self.replays = 0

    def capture_begin(self, *_, **__):
        pass

    def replay(self):
        self.replays += 1


class Capturing:
    """Stands for `torch.cuda.graph`."""

    def __init__(self, graph, *_, **__):
        self.graph = graph

    def __enter__(self):
        self.graph.capture_begin()

    def __exit__(self, *_):
        pass


@pytest.fixture
def module(monkeypatch):
    """Make stand-in modules by name, and take them and the guard away afterwards; graphs capture nothing."""
    made = []
    monkeypatch.setattr("torch.cuda.CUDAGraph", type("CUDAGraph", (Graph,), dict(vars(Graph))))
    monkeypatch.setattr("torch.cuda.graph", Capturing)

    def make(name, **attributes):
        stand_in = types.ModuleType(name)
        vars(stand_in).update(attributes)
        sys.modules[name] = stand_in
        made.append(name)
        return stand_in

    yield make
    guard.uninstall()
    for name in made:
        del sys.modules[name]


def v1(module, runtime_mode=CUDAGraphMode.FULL):
    """V1: one wrapper, `step(attn_metadata, batch)` captures at first and replays then."""
    context = types.SimpleNamespace(attn_metadata=None, batch_descriptor=None, cudagraph_runtime_mode=None)

    class CUDAGraphWrapper:
        def __init__(self):
            self.runtime_mode = runtime_mode
            self.concrete_cudagraph_entries = {}

        def __call__(self, plan=None):
            entry = self.concrete_cudagraph_entries.setdefault(
                context.batch_descriptor, types.SimpleNamespace(cudagraph=None)
            )
            if entry.cudagraph is None:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    if plan is not None:
                        plan()  # a schedule computed inside the graph appears on the metadata now
                entry.cudagraph = graph
                return "captured"
            entry.cudagraph.replay()
            return "replayed"

    module(
        guard.V1_GRAPHS,
        CUDAGraphWrapper=CUDAGraphWrapper,
        CUDAGraphMode=CUDAGraphMode,
        get_forward_context=lambda: context,
    )
    wrapper = CUDAGraphWrapper()

    def step(attn_metadata, batch=4, mode=CUDAGraphMode.FULL, plan=None):
        context.attn_metadata, context.batch_descriptor = attn_metadata, Descriptor(batch, batch)
        context.cudagraph_runtime_mode = mode
        return wrapper(plan)

    step.wrapper = wrapper
    return step


def watch(mode="warn", **options):
    guard.install(mode, on_device=lambda tensor: True, **options)
    return guard._guard


def test_v1_names_the_field_that_moved_once(module, caplog):
    step = v1(module)
    watching = watch()
    layers = [f"model.layers.{index}.self_attn.attn" for index in range(27)]
    with caplog.at_level(logging.ERROR, "vllm.stalegraph.guard"):
        captured = metadata()
        assert step(dict.fromkeys(layers, captured)) == "captured"
        now = metadata()
        for _ in range(3):
            assert step(dict.fromkeys(layers, now)) == "replayed"
    old, new = (item.decode.scheduler_metadata.num_splits.data_ptr() for item in (captured, now))
    assert (
        f"decode.scheduler_metadata.num_splits of layer {layers[0]} moved since capture of batch 4: "
        f"captured {old:#x}, now {new:#x}"
    ) in watching.messages
    assert sorted(message.split(" ")[0] for message in watching.messages) == [
        "decode.scheduler_metadata.num_splits",
        "decode.scheduler_metadata.tile_scheduler_metadata",
    ]
    assert len(caplog.records) == 2


def test_v1_is_silent_while_nothing_moves(module):
    step = v1(module)
    watching = watch()
    persistent = torch.zeros(9, dtype=torch.int32)
    for batch in (8, 4, 8, 4):
        step({"layer": metadata(persistent)}, batch)
    assert watching.messages == []
    assert len(watching.records) == 2


def test_raise_mode_fails_every_step_that_would_replay_on_a_moved_field(module):
    step = v1(module)
    watch("raise")
    step({"layer": metadata()})
    graph = step.wrapper.concrete_cudagraph_entries[Descriptor(4, 4)].cudagraph
    for _ in range(2):
        with pytest.raises(StaleReadError, match="decode.scheduler_metadata.num_splits of layer layer moved"):
            step({"layer": metadata()})
    assert graph.replays == 0


@pytest.mark.parametrize(
    "case",
    ["allowed by the user", "prefill only", "planned inside the graph", "gone at replay", "host tensor", "piecewise"],
)
def test_what_may_move_is_not_reported(module, case):
    options, runtime_mode, plan = {}, CUDAGraphMode.FULL, None
    captured, replayed = metadata(torch.zeros(9)), metadata(torch.zeros(9))
    if case == "allowed by the user":
        options = {"allow": ["decode.scheduler_*"]}
    elif case == "prefill only":
        captured, replayed = (metadata(START, prefill={"seq_lens": torch.zeros(4)}) for _ in range(2))
    elif case == "planned inside the graph":
        captured, replayed = metadata(planned=False), metadata()
        plan = lambda: setattr(captured.decode.scheduler_metadata, "num_splits", torch.zeros(5))  # noqa: E731
    elif case == "gone at replay":
        replayed = metadata(planned=False)
    elif case == "piecewise":
        runtime_mode = CUDAGraphMode.PIECEWISE
    step = v1(module, runtime_mode)
    watching = watch(**options)
    if case == "host tensor":
        watching.on_device = lambda tensor: tensor.is_cuda
    assert step({"layer": captured}, mode=runtime_mode, plan=plan) == "captured"
    assert step({"layer": replayed}, mode=runtime_mode) == "replayed"
    assert watching.messages == []


def test_graphs_are_known_by_object_so_a_discarded_capture_leaves_no_record(module):
    step = v1(module)
    watching = watch("raise")
    step({"layer": metadata()})
    step.wrapper.concrete_cudagraph_entries.clear()  # as vLLM does after captures for memory profiling
    assert len(watching.records) == 0
    persistent = torch.zeros(9, dtype=torch.int32)
    assert step({"layer": metadata(persistent)}) == "captured"
    assert step({"layer": metadata(persistent)}) == "replayed"


def test_dicts_in_metadata_are_descended(module):
    step = v1(module)
    watching = watch()
    for _ in range(2):
        fresh = torch.zeros(3)
        HELD.append(fresh)
        step({"layer": metadata(START, by_size={4: {"indices": fresh}})})
    assert [message.split(" of ")[0] for message in watching.messages] == ["by_size[4][indices]"]


@pytest.mark.parametrize("fresh", [False, True])
def test_microbatches_have_graphs_of_their_own(module, fresh, monkeypatch):
    """Dual batch overlap: two dicts of metadata, and graphs kept by total tokens beside the wrapper's."""
    slices = [types.SimpleNamespace(token_slice=slice(0, 4)), types.SimpleNamespace(token_slice=slice(4, 8))]
    context = types.SimpleNamespace(ubatch_slices=slices, cudagraph_runtime_mode=CUDAGraphMode.FULL, attn_metadata=None)

    class UBatchWrapper:
        def __init__(self):
            self.cudagraphs = {}

        def __call__(self):
            if 8 in self.cudagraphs:
                self.cudagraphs[8].cudagraph.replay()
            else:
                self.cudagraphs[8] = types.SimpleNamespace(cudagraph=torch.cuda.CUDAGraph())

    module(
        guard.V1_MICROBATCHES,
        UBatchWrapper=UBatchWrapper,
        CUDAGraphMode=CUDAGraphMode,
        get_forward_context=lambda: context,
    )
    watching = watch(allow=["*.tile_scheduler_metadata"])
    wrapper, persistent = UBatchWrapper(), torch.zeros(9, dtype=torch.int32)
    for _ in range(3):
        context.attn_metadata = [{"layer": metadata(persistent)}, {"layer": metadata(None if fresh else persistent)}]
        wrapper()
        if not fresh:
            monkeypatch.setattr(guard.Guard, "replayed", lambda *_: pytest.fail("the long way"))
    assert [graph.replays for graph in watching.records] == [2]
    moved = [message.split(" moved")[0] for message in watching.messages]
    assert moved == (["decode.scheduler_metadata.num_splits of layer layer"] if fresh else [])


def v2(module, run_name, capture=None):
    """V2: a manager that builds, captures and stores graphs as vLLM does, and replays with no forward context."""

    class AttentionMetadataBuilder:
        layer_names = ("layer",)

        def build(self, *args):
            raise NotImplementedError

    class Manager:
        def __init__(self):
            self.graphs = {}

        def capture(self, builder, sizes):
            for size in sizes:
                builder.build(size)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    pass
                self.graphs[size] = graph

    def run(self, key):
        self.graphs[key].replay()
        return "replayed"

    setattr(Manager, run_name, run)
    Manager.capture = capture or Manager.capture
    module(guard.BUILDERS, AttentionMetadataBuilder=AttentionMetadataBuilder)
    module(guard.V2_GRAPHS, CudaGraphManager=Manager)
    return AttentionMetadataBuilder, Manager


@pytest.mark.parametrize("run_name", ["run", "run_fullgraph"])
@pytest.mark.parametrize("when", ["before", "after"])  # the builder class is defined before or after the hooks
@pytest.mark.parametrize("fresh", [False, True])
def test_v2_compares_what_the_builder_returned_last(module, run_name, when, fresh):
    base, manager_class = v2(module, run_name)
    persistent = torch.zeros(9, dtype=torch.int32)

    def define():
        class Builder(base):
            def build(self, size):
                return metadata(None if fresh else persistent)

        return Builder

    builder_class = define() if when == "before" else None
    watching = watch()
    builder = (builder_class or define())()
    manager = manager_class()
    manager.capture(builder, [8, 4])
    assert len(watching.records) == 2
    for _ in range(2):
        builder.build(4)
        assert getattr(manager, run_name)(4) == "replayed"
    fields = [message.split(" ")[0] for message in watching.messages]
    schedule = ["decode.scheduler_metadata.num_splits", "decode.scheduler_metadata.tile_scheduler_metadata"]
    assert sorted(fields) == (schedule if fresh else [])
    assert all("since capture of batch 4" in message for message in watching.messages)


def test_uninstall_leaves_no_hook(module):
    base, manager_class = v2(module, "run")
    graph_class = torch.cuda.CUDAGraph

    def hookable():
        return manager_class.__init__, manager_class.capture, graph_class.capture_begin, base.build

    originals = hookable()
    watch()
    Builder = type("Builder", (base,), {"build": lambda self, size: metadata()})
    manager = manager_class()
    manager.capture(Builder(), [4])
    assert all(now is not original for now, original in zip(hookable(), originals))
    assert "replay" in vars(manager.graphs[4])
    guard.uninstall()
    assert hookable() == originals
    assert "__init_subclass__" not in base.__dict__ and "replay" not in vars(manager.graphs[4])


def test_a_fault_of_the_guard_ends_the_guard_and_not_the_step(module, monkeypatch, caplog):
    step = v1(module)
    watching = watch("raise")
    step({"layer": metadata()})
    (record,) = watching.records.values()
    monkeypatch.setattr(record.groups[0].fields, "addresses", lambda *_: 1 / 0)
    with caplog.at_level(logging.WARNING, "vllm.stalegraph.guard"):
        assert step({"layer": metadata()}) == "replayed"
        assert step({"layer": metadata()}) == "replayed"
    assert watching.broken
    assert len(caplog.records) == 1


def test_builders_are_watched_only_where_a_manager_replays(module):
    base, manager_class = v2(module, "run_fullgraph")
    own = base.build
    watch()
    assert base.build is own  # the V1 runner's steps pay for nothing
    manager_class()
    hooked = base.build
    manager_class()
    assert hooked is not own and base.build is hooked
    guard.uninstall()
    assert base.build is own


@pytest.mark.parametrize("where", ["build", "replay"])
def test_v2_a_fault_of_the_guard_is_told_and_ends_it_but_no_step(module, where, caplog, monkeypatch):
    base, manager_class = v2(module, "run_fullgraph")

    class Builder(base):
        def build(self, size):
            return metadata(None)

    watching, manager, builder = watch("raise"), manager_class(), Builder()
    manager.capture(builder, [4])

    def fails(*_):
        raise RuntimeError("odd metadata")

    fields = watching.seen[builder].fields
    owner, name = (fields, "addresses") if where == "build" else (guard.Record, "held")
    monkeypatch.setattr(owner, name, fails)
    monkeypatch.setattr(guard.Record, "differing", fails)
    assert builder.build(4) is not None and manager.run_fullgraph(4) == "replayed"
    assert watching.broken and "odd metadata" in caplog.text


def test_v2_names_the_layer_of_a_builder_that_does_not_keep_it(module):
    base, manager_class = v2(module, "run_fullgraph")

    class Builder(base):
        def __init__(self, kv_cache_spec, layer_names, vllm_config=None, device=None):
            self.layer_names = None

        def build(self, size):
            return metadata(None)

    watching, manager = watch(), manager_class()
    for builder in (Builder("spec", ["one.attn"]), Builder("spec", layer_names=["two.attn", "three.attn"])):
        manager.capture(builder, [4])
        builder.build(4)
        manager.run_fullgraph(4)
    layers = {message.split(" of layer ")[1].split(" ")[0] for message in watching.messages}
    assert layers == {"one.attn", "two.attn"} and not watching.broken


# ------------------------------------------------------------------------- metadata that changes its shape


def fresh_tensor():
    HELD.append(torch.zeros(9))
    return HELD[-1]


@dataclass
class Pair:
    a: object = None
    b: object = None


def fields_of(watching):
    """The fields named so far, each with its layer."""
    return sorted(message.split(" moved since")[0] for message in watching.messages)


def test_layers_that_no_longer_share_their_metadata_are_each_compared(module):
    step = v1(module)
    watching = watch()
    shared = Pair(fresh_tensor(), fresh_tensor())
    step({"one": shared, "two": shared, "three": shared})
    step({"one": shared, "two": Pair(shared.a, shared.b), "three": shared})
    assert watching.messages == []
    step({"one": shared, "two": Pair(shared.a, fresh_tensor()), "three": shared})
    assert fields_of(watching) == ["b of layer two"]
    step({"one": Pair(fresh_tensor(), shared.b), "two": shared, "three": Pair(fresh_tensor(), shared.b)})
    assert fields_of(watching) == ["a of layer one", "a of layer three", "b of layer two"]


def test_microbatches_that_no_longer_share_their_metadata_are_each_compared(module):
    step = v1(module)
    watching = watch()
    shared = Pair(fresh_tensor(), fresh_tensor())
    step([{"layer": shared}, {"layer": shared}])
    step([{"layer": shared}, {"layer": Pair(fresh_tensor(), shared.b)}])
    assert fields_of(watching) == ["a of layer layer"]


def test_one_object_under_two_names_is_watched_under_both(module):
    step = v1(module)
    watching = watch()
    inner = Pair(fresh_tensor(), fresh_tensor())
    inner.b = inner  # a circle ends
    step({"layer": Pair(inner, inner)})
    step({"layer": Pair(inner, Pair(fresh_tensor(), inner))})
    assert fields_of(watching) == ["b.a of layer layer"]


def test_a_microbatch_that_is_missing_leaves_the_others_watched(module):
    step = v1(module)
    watching = watch()
    kept = fresh_tensor()
    step([{"layer": Pair(kept)}, {"layer": Pair(fresh_tensor())}])
    for present in (Pair(kept), Pair(fresh_tensor())):
        step([{"layer": present}, None])
    assert fields_of(watching) == ["a of layer layer"] and not watching.broken


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_field_that_is_empty_in_a_step_has_not_moved(module, runner):
    kept = fresh_tensor()
    steps = [Pair(kept, fresh_tensor()), Pair(kept, torch.empty(0)), Pair(kept, None), Pair(kept, 3)]
    if runner == "v1":
        step = v1(module)
        watching = watch("raise")
        for one in steps:
            step({"layer": one})
    else:
        base, manager_class = v2(module, "run_fullgraph")
        Builder = type("Builder", (base,), {"build": lambda self, size: next(given)})
        watching, manager, builder, given = watch("raise"), manager_class(), Builder(), iter(steps)
        manager.capture(builder, [4])
        for _ in steps[1:]:
            builder.build(4)
            manager.run_fullgraph(4)
    assert watching.messages == [] and not watching.broken


@pytest.mark.parametrize("slots", ["dataclass", "tuple", "string"])
def test_metadata_without_a_dict_is_watched(module, slots):
    if slots == "dataclass":
        made = dataclass(slots=True)(type("Slotted", (), {"__annotations__": {"a": object}, "a": None}))
    else:
        made = type("Slotted", (), {"__slots__": ("a", "never_set") if slots == "tuple" else "a"})
    step = v1(module)
    watching = watch()
    for _ in range(2):
        one = made()
        one.a = fresh_tensor()
        step({"layer": one})
    assert fields_of(watching) == ["a of layer layer"]


@pytest.mark.parametrize("allow, named", [("a[0]", ["a[1]"]), ("a[*]", []), ("a?0?", ["a[1]"]), ("a[1]*", ["a[0]"])])
def test_brackets_in_an_allow_list_stand_for_themselves(module, allow, named):
    step = v1(module)
    watching = watch(allow=[allow])
    for _ in range(2):
        step({"layer": Pair([fresh_tensor(), fresh_tensor()])})
    assert [field.split(" of ")[0] for field in fields_of(watching)] == named


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_another_allow_list_holds_for_the_graphs_that_are_there(module, runner):
    if runner == "v1":
        run = v1(module)
        watching = watch(allow=["a"])
        step = lambda: run({"layer": Pair(fresh_tensor(), fresh_tensor())})  # noqa: E731
        step()
    else:
        base, manager_class = v2(module, "run_fullgraph")
        Builder = type("Builder", (base,), {"build": lambda self, size: Pair(fresh_tensor(), fresh_tensor())})
        watching, manager, builder = watch(allow=["a"]), manager_class(), Builder()
        manager.capture(builder, [4])
        step = lambda: (builder.build(4), manager.run_fullgraph(4))  # noqa: E731
    step()
    assert fields_of(watching) == ["b of layer layer"]
    guard.install("raise", allow=["b"])
    with pytest.raises(StaleReadError, match="^a of layer layer moved since capture of batch 4: [^;]*$"):
        step()
    guard.install("raise", allow=["a", "b"])
    step()


def test_v2_graphs_of_one_builder_may_hold_different_fields(module, monkeypatch):
    base, manager_class = v2(module, "run_fullgraph")
    one, two, other = fresh_tensor(), fresh_tensor(), fresh_tensor()
    Builder = type("Builder", (base,), {"build": lambda self, size: current})
    watching, manager, builder = watch(), manager_class(), Builder()
    for size, current in ((4, Pair({1: one, 2: two})), (8, Pair({2: two, 1: one})), (16, Pair({2: two}, other))):
        manager.capture(builder, [size])
    looked = []
    monkeypatch.setattr(guard.Record, "differing", lambda record: looked.append(record.batch) or iter(()))
    for size, current in ((4, Pair({1: one, 2: two})), (8, Pair({1: one, 2: two})), (16, Pair({2: two}, other))):
        builder.build(size)
        manager.run_fullgraph(size)
    assert looked == []  # the long way is for fields that moved
    monkeypatch.undo()
    current = Pair({1: two, 2: one})
    builder.build(8)
    manager.run_fullgraph(8)
    assert fields_of(watching) == ["a[1] of layer layer", "a[2] of layer layer"]


def test_v2_a_graph_captured_again_is_not_held_to_what_was_built_before(module):
    base, manager_class = v2(module, "run_fullgraph")
    Builder = type("Builder", (base,), {"build": lambda self, size: current})
    watch("raise")
    manager, builder, current = manager_class(), Builder(), Pair(fresh_tensor())
    manager.capture(builder, [4])
    builder.build(4)
    manager.run_fullgraph(4)
    current = Pair(fresh_tensor())
    manager.capture(builder, [4])
    manager.run_fullgraph(4)
    current = Pair(fresh_tensor())
    builder.build(4)
    with pytest.raises(StaleReadError):
        manager.run_fullgraph(4)


def test_v2_what_a_copy_of_a_builder_returns_is_not_its_own(module):
    base, manager_class = v2(module, "run_fullgraph")
    Builder = type("Builder", (base,), {"build": lambda self, size: current})
    watching, manager, builder, kept = watch(), manager_class(), Builder(), Pair(fresh_tensor())
    current = kept
    manager.capture(builder, [4])
    builder.build(4)
    current = Pair(fresh_tensor())
    copy.copy(builder).build(4)
    manager.run_fullgraph(4)
    assert watching.messages == []


def planning(base, kept):
    """A builder class whose metadata is planned by the first forward that runs with it, as FlashMLA's bf16 decode."""

    class Builder(base):
        def build(self, size=0):
            return Pair(kept, Pair())

    def forward(made):
        made.b.a = made.b.a if made.b.a is not None else fresh_tensor()

    return Builder, forward


@pytest.mark.parametrize(
    "case", ["planned by the warm-up", "planned in the graph", "planned in both", "built anew", "allowed"]
)
def test_v2_what_a_warm_up_planned_is_read_by_the_graph_and_written_by_no_step(module, case):
    def capture(manager, builder, sizes):
        for size in sizes:
            made = builder.build(size)
            if case != "planned in the graph":
                forward(made)
            if case == "built anew":
                made = builder.build(size)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                if case == "planned in both":
                    made.b.a = None
                forward(made)
            manager.graphs[size] = graph

    base, manager_class = v2(module, "run_fullgraph", capture)
    Builder, forward = planning(base, fresh_tensor())
    watching = watch(allow=["b.*"] if case == "allowed" else [])
    manager, builder = manager_class(), Builder()
    manager.capture(builder, [8, 4])
    for _ in range(2):
        builder.build(4)
        manager.run_fullgraph(4)
    if case == "planned by the warm-up":
        (message,) = watching.messages
        assert message.startswith("b.a of layer layer was made by a warm-up before the capture of batch 4: 0x")
        assert message.endswith(", which no step writes")
    else:
        assert watching.messages == []


def test_v2_metadata_that_is_made_from_another_groups_is_watched(module):
    """0.33.0 gives the later ones of equal groups `update_block_table` of the first one's metadata, at capture too."""
    base, manager_class = v2(module, "run_fullgraph")

    class Builder(base):
        def build(self, size):
            raise AssertionError("not in this group")

        def update_block_table(self, metadata, *_):
            return Pair(metadata.a, fresh_tensor())

    first = Pair(fresh_tensor())

    def capture(manager, builder, sizes):
        for size in sizes:
            builder.update_block_table(first)
            manager.graphs[size] = torch.cuda.CUDAGraph()

    manager_class.capture = capture
    watching, manager, builder = watch(), manager_class(), Builder()
    manager.capture(builder, [4])
    builder.update_block_table(first)
    manager.run_fullgraph(4)
    assert fields_of(watching) == ["b of layer layer"]


def test_v2_a_drafters_manager_of_its_own_is_watched(module):
    """0.15.0's EagleCudaGraphManager is no subclass of the runner's manager."""
    base, manager_class = v2(module, "run")
    methods = {name: manager_class.__dict__[name] for name in ("__init__", "capture", "run")}
    drafts = type("EagleCudaGraphManager", (), methods)
    module(guard.V2_DRAFTS, EagleCudaGraphManager=drafts)
    Builder = type("Builder", (base,), {"build": lambda self, size: Pair(fresh_tensor())})
    watching = watch()
    manager, builder = drafts(), Builder()
    manager.capture(builder, [4])
    builder.build(4)
    manager.run(4)
    assert fields_of(watching) == ["a of layer layer"]


def test_v2_a_replay_without_a_build_is_told_and_judged_by_no_older_one(module, caplog):
    base, manager_class = v2(module, "run_fullgraph")
    Builder = type("Builder", (base,), {"build": lambda self, size: current})
    watching, manager, builder, kept = watch("raise"), manager_class(), Builder(), Pair(fresh_tensor())
    current = kept
    manager.capture(builder, [4, 8])
    with caplog.at_level(logging.WARNING, "vllm.stalegraph.guard"):
        builder.build(4)
        manager.run_fullgraph(4)
        manager.run_fullgraph(8)  # of the same build, for a drafter's first step
        assert caplog.records == []
        current = Pair(fresh_tensor())
        builder.build(4)
        for _ in range(2):  # a replay that was refused has not used the build up
            with pytest.raises(StaleReadError):
                manager.run_fullgraph(4)
        guard.install("warn")
        builder.build(4)
        for _ in range(2):
            manager.run_fullgraph(4)
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [words.split(" is replayed")[0] for words in told] == ["stalegraph guard: the graph of batch 4"]
    assert len(watching.messages) == 1


def test_where_an_encoders_keys_go_is_read_by_no_decode_graph(module):
    step = v1(module)
    watching = watch(allow=["*.mixer:b"])
    layers = ("model.decoder.layers.0.encoder_attn.attn", "model.layers.0.self_attn.attn", "model.layers.1.mixer")

    def given():
        made = {layer: types.SimpleNamespace(slot_mapping=fresh_tensor(), b=fresh_tensor()) for layer in layers}
        step(made)

    given()
    given()
    assert fields_of(watching) == sorted(
        [f"b of layer {layers[0]}"]
        + [f"{name} of layer {layers[1]}" for name in ("b", "slot_mapping")]
        + [f"slot_mapping of layer {layers[2]}"]
    )


@pytest.mark.parametrize("allow", ["decode.*", [None], [3]])
def test_an_allow_list_that_is_none_is_a_usage_error_and_changes_nothing(module, allow):
    watching = watch("raise")
    with pytest.raises(UsageError, match="allowed: a list of globs over field names"):
        guard.install("warn", allow=allow)
    assert watching.mode == "raise"


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict, tuple, list])
def test_v1_takes_the_short_way_while_nothing_moves(module, kind, monkeypatch):
    step = v1(module)
    watch()
    by_layer = {"one": Pair(fresh_tensor()), "two": Pair(fresh_tensor())}
    given = kind([by_layer, by_layer]) if kind in (tuple, list) else kind(by_layer)
    step(given)
    monkeypatch.setattr(guard.Guard, "replayed", lambda *_: pytest.fail("the long way"))
    assert step(given) == "replayed"


def test_v2_what_was_built_for_a_piecewise_graph_is_no_part_of_a_full_one(module):
    v1(module)  # its context is what a piecewise graph is captured under
    context = sys.modules[guard.V1_GRAPHS].get_forward_context()

    def capture(manager, builders, sizes):
        piecewise, full = builders
        context.cudagraph_runtime_mode = CUDAGraphMode.PIECEWISE
        piecewise.build(8)
        torch.cuda.CUDAGraph().capture_begin()
        context.cudagraph_runtime_mode = CUDAGraphMode.NONE
        full.build(4)
        manager.graphs[4] = torch.cuda.CUDAGraph()
        manager.graphs[4].capture_begin()

    base, manager_class = v2(module, "run_fullgraph", capture)
    Builder = type("Builder", (base,), {"build": lambda self, size: Pair(fresh_tensor())})
    watching, manager, builders = watch(), manager_class(), (Builder(), Builder())
    manager.capture(builders, [4])
    (seen,) = watching.seen
    assert seen is builders[1]


def test_v1_says_where_it_has_nothing_to_compare(module, caplog):
    step = v1(module)
    watching = watch("raise")
    with caplog.at_level(logging.WARNING, "vllm.stalegraph.guard"):
        step({}, batch=2)
        step({"layer": Pair(fresh_tensor())})
        for given in (None, {}, {"other": Pair(fresh_tensor())}):
            assert step(given) == "replayed"
    told = [record.getMessage() for record in caplog.records]
    assert [words.split(" layer: ")[0] for words in told] == [
        "stalegraph guard: the graph of batch 2 is not watched, nor is any other whose attention metadata was not seen "
        "at its capture",
        "stalegraph guard: the graph of batch 4 is replayed without attention metadata of layer",
    ]
    assert watching.messages == [] and not watching.broken


def test_a_graph_captured_a_second_time_is_what_it_is_then(module):
    step = v1(module)
    watch("raise")
    step({"layer": Pair(fresh_tensor())})
    (graph,) = guard._guard.records
    graph.capture_begin()
    assert "replay" in vars(graph)  # noted anew, under the context that stands
    context = sys.modules[guard.V1_GRAPHS].get_forward_context()
    context.cudagraph_runtime_mode = CUDAGraphMode.NONE
    graph.capture_begin()
    assert "replay" not in vars(graph) and len(guard._guard.records) == 0


# ------------------------------------------------------------------------- hooks that come and go


def test_a_guard_that_a_fault_ended_is_brought_back_by_install(module, monkeypatch):
    step = v1(module)
    watching = watch("raise")
    with monkeypatch.context() as fault:
        fault.setattr(guard, "tensors", lambda *_: 1 / 0)
        step({"layer": Pair(fresh_tensor())})
    assert watching.broken and step({"layer": Pair(fresh_tensor())}) == "replayed"
    guard.install("raise")
    step({"layer": Pair(fresh_tensor())}, batch=8)
    with pytest.raises(StaleReadError):
        step({"layer": Pair(fresh_tensor())}, batch=8)


@pytest.mark.parametrize("case", ["no build", "one build for two", "patched", "a class's own", "nothing in it"])
def test_v2_a_graph_whose_metadata_was_not_seen_is_told(module, case, caplog):
    def capture(manager, builder, sizes):
        if case == "one build for two":
            builder.build(0)
        for size in sizes:
            if case not in ("no build", "one build for two"):
                builder.build(size)
            manager.graphs[size] = torch.cuda.CUDAGraph()

    base, manager_class = v2(module, "run_fullgraph", capture)

    def build(self, size):
        return Pair(3 if case == "nothing in it" else fresh_tensor())

    Builder = type("Builder", (base,), {"build": classmethod(build) if case == "a class's own" else build})
    watching, manager, builder = watch("raise"), manager_class(), Builder()
    if case == "patched":
        Builder.build = build
    with caplog.at_level(logging.WARNING, "vllm.stalegraph.guard"):
        manager.capture(builder, [8, 4])
    builder.build(4)
    assert manager.run_fullgraph(4) == "replayed" and watching.messages == [] and not watching.broken
    (told,) = [record.getMessage() for record in caplog.records]
    assert f"the graph of batch {4 if case == 'one build for two' else 8} is not watched" in told




def test_a_graph_that_was_captured_before_the_guard_is_told_and_not_passed_over(module, caplog):
    step = v1(module)
    watch()
    step({"layer": Pair(fresh_tensor())})
    guard.uninstall()
    with caplog.at_level(logging.WARNING, "vllm.stalegraph.guard"):
        watching = watch("raise")
        for _ in range(2):
            assert step({"layer": Pair(fresh_tensor())}) == "replayed"
    told = [record.getMessage() for record in caplog.records]
    assert told == ["stalegraph guard: 1 CUDA graphs are older than the guard: they are not watched"]
    step({"layer": Pair(fresh_tensor())}, batch=8)
    with pytest.raises(StaleReadError, match="a of layer layer moved since capture of batch 8"):
        step({"layer": Pair(fresh_tensor())}, batch=8)
    assert not watching.broken


@pytest.mark.parametrize("case", ["installed again", "manager is older", "graphs dropped", "builder without a hash"])
def test_v2_captures_of_any_manager_are_watched(module, case, caplog):
    base, manager_class = v2(module, "run_fullgraph")

    class Builder(base):
        def build(self, size):
            return Pair(fresh_tensor())

    if case == "builder without a hash":
        Builder.__hash__ = None
    if case == "installed again":
        watch()
    if case in ("installed again", "manager is older"):
        manager, builder = manager_class(), Builder()
        manager.capture(builder, [4])
        guard.uninstall()
    with caplog.at_level(logging.WARNING, "vllm.stalegraph.guard"):
        watching = watch()
    if case in ("graphs dropped", "builder without a hash"):
        manager, builder = manager_class(), Builder()
        manager.capture(builder, [4])
    if case == "graphs dropped":
        manager.graphs = {}
    elif case != "builder without a hash":
        builder.build(4)
        assert manager.run_fullgraph(4) == "replayed"
        assert "1 CUDA graphs are older than the guard: they are not watched" in caplog.text
    manager.capture(builder, [8])
    builder.build(8)
    manager.run_fullgraph(8)
    assert fields_of(watching) == ["a of layer layer"] and not watching.broken


def test_uninstall_leaves_a_later_patch_of_someone_else_in_place(module):
    base, manager_class = v2(module, "run_fullgraph")
    watch()
    hooked, calls = manager_class.capture, []

    def patched(manager, builder, sizes):
        calls.append(sizes)
        return hooked(manager, builder, sizes)

    manager_class.capture = patched
    guard.uninstall()
    assert manager_class.capture is patched

    class Builder(base):
        def build(self, size):
            return Pair(fresh_tensor())

    def steps():
        manager, builder = manager_class(), Builder()
        manager.capture(builder, [4])
        builder.build(4)
        assert manager.run_fullgraph(4) == "replayed"

    steps()
    watching = watch()
    assert watching.messages == []
    steps()
    assert calls == [[4], [4]] and fields_of(watching) == ["a of layer layer"]


def test_builder_classes_made_by_a_base_with_a_rule_of_its_own_are_watched(module):
    base, manager_class = v2(module, "run_fullgraph")
    kinds = []
    base.__init_subclass__ = classmethod(lambda cls, kind, **_: kinds.append(kind))
    watching = watch()

    class Builder(base, kind="decode"):
        def build(self, size):
            return Pair(fresh_tensor())

    manager, builder = manager_class(), Builder()
    manager.capture(builder, [4])
    builder.build(4)
    manager.run_fullgraph(4)
    assert kinds == ["decode"] and fields_of(watching) == ["a of layer layer"]


@pytest.mark.parametrize("value, level", [("", "DEBUG"), ("off", "DEBUG"), ("warn", "INFO"), ("loud", "WARNING")])
def test_register_never_raises(monkeypatch, caplog, value, level):
    monkeypatch.setenv("STALEGRAPH_GUARD", value)
    with caplog.at_level(logging.DEBUG, "vllm.stalegraph.guard"):
        guard.register()
    guard.uninstall()
    assert [record.levelname for record in caplog.records] == [level]


def test_a_mode_that_does_not_exist_is_a_usage_error():
    with pytest.raises(UsageError, match="mode is 'loud'; allowed: off, warn, raise"):
        guard.install("loud")


# ------------------------------------------------------ vLLM's own graph wrappers, executed from the wheels' sources

WRAPPER, MANAGER, BACKEND = guard.V1_GRAPHS, guard.V2_GRAPHS, guard.BUILDERS


CapturedGraph = type("CapturedGraph", (Graph,), dict(vars(Graph)))


@pytest.fixture
def release(request, tmp_path_factory, monkeypatch):
    """Execute a release's graph wrappers with the rest of vLLM stubbed; graphs capture nothing and count replays."""
    from contextlib import nullcontext

    from stalegraph.vllm.sources import settings
    from stalegraph.vllm.stubs import stubbed
    from stalegraph.vllm.wheels import sources

    root = sources(request.param, tmp_path_factory.getbasetemp() / "vllm")
    context = types.SimpleNamespace(attn_metadata=None, batch_descriptor=None, cudagraph_runtime_mode=None)
    monkeypatch.setattr("torch.cuda.CUDAGraph", CapturedGraph)
    monkeypatch.setattr("torch.cuda.graph", Capturing)
    monkeypatch.setattr("torch.cuda.graph_pool_handle", lambda: (0, 1))

    class Mode(enum.Enum):
        NONE, PIECEWISE, FULL, FULL_DECODE_ONLY = range(4)

        def has_full_cudagraphs(self):
            return self in (Mode.FULL, Mode.FULL_DECODE_ONLY)

        has_piecewise_cudagraphs = __bool__ = has_full_cudagraphs
        mixed_mode = decode_mode = lambda self: self
        separate_routine = lambda self: False  # noqa: E731

    null = lambda *_, **__: nullcontext()  # noqa: E731
    names = {
        "vllm.config": {"CUDAGraphMode": Mode},
        "vllm.config.compilation": {"CUDAGraphMode": Mode},
        "vllm.compilation.counter": {"compilation_counter": types.SimpleNamespace(num_cudagraph_captured=0)},
        "vllm.compilation.cudagraph_pool": {"capture_pool": null},
        "vllm.forward_context": {
            "get_forward_context": lambda: context,
            "is_forward_context_available": lambda: True,
            "set_forward_context": null,
        },
        "vllm.distributed.parallel_state": {"graph_capture": null, "is_global_first_rank": lambda: False},
        "vllm.utils.torch_utils": {"current_stream": lambda: None, "weak_ref_tensors": lambda output: output},
    }
    with stubbed(root, [WRAPPER, MANAGER, BACKEND, guard.V2_DRAFTS], names):
        yield types.SimpleNamespace(
            name=request.param, context=context, mode=Mode, settings=settings, load=importlib.import_module
        )
        guard.uninstall()


@pytest.mark.releases
@pytest.mark.parametrize("release", ["0.14.1", "0.15.0", "0.18.1", "0.19.0", "0.20.2", "0.33.0"], indirect=True)
@pytest.mark.parametrize("fresh", [False, True])
def test_v1_wrapper_of_real_releases(release, fresh):
    module = release.load(WRAPPER)
    watching = watch()
    config = release.settings(compilation_config=release.settings())
    wrapper = module.CUDAGraphWrapper(lambda: torch.zeros(1), config, runtime_mode=release.mode.FULL)
    persistent = torch.zeros(9, dtype=torch.int32)
    context = release.context
    context.cudagraph_runtime_mode, context.batch_descriptor = release.mode.FULL, Descriptor(4)
    for _ in range(3):
        context.attn_metadata = {"layer": metadata(None if fresh else persistent)}
        wrapper()
    assert [graph.replays for graph in watching.records] == [2]
    fields = sorted(message.split(" ")[0] for message in watching.messages)
    schedule = ["decode.scheduler_metadata.num_splits", "decode.scheduler_metadata.tile_scheduler_metadata"]
    assert fields == (schedule if fresh else [])
    wrapper.concrete_cudagraph_entries.clear()
    assert len(watching.records) == 0


@pytest.mark.releases
@pytest.mark.parametrize("release", ["0.14.1", "0.15.0", "0.18.1", "0.19.0", "0.20.2", "0.33.0"], indirect=True)
@pytest.mark.parametrize("case", ["persistent", "fresh", "planned"])
def test_v2_manager_of_real_releases(release, case):
    """The first warm-up plans what the builder left open; from 0.22.0 on metadata is built anew for the capture."""
    watching = watch()
    module, interface = release.load(MANAGER), release.load(BACKEND)
    guard._watch_v2(module)  # the stubs' finder stands before the one that waits for this import
    persistent = torch.zeros(9, dtype=torch.int32)

    class Builder(interface.AttentionMetadataBuilder):
        layer_names = ("layer",)

        def __init__(self):
            pass

        def build(self, common_prefix_len=0, common_attn_metadata=None, fast_build=False):
            return metadata(None if case == "fresh" else persistent, planned=case != "planned")

    def plan(made):
        schedule = made.decode.scheduler_metadata
        if schedule.num_splits is None:
            schedule.num_splits = fresh_tensor()

    builder, made = Builder(), []
    settings, old = release.settings, release.name < "0.18"
    config = settings(
        scheduler_config=settings(max_num_seqs=8, max_num_batched_tokens=8),
        model_config=settings(max_model_len=64),
        parallel_config=settings(data_parallel_size=1, tensor_parallel_size=1),
        compilation_config=settings(cudagraph_mode=release.mode.FULL, cudagraph_capture_sizes=[4] if old else []),
        speculative_config=None,
    )
    buffers = settings(input_ids=torch.zeros(8), positions=torch.zeros(8))
    if old:

        def prepared(*_, **__):
            made[:] = [builder.build()]
            return made[0] if release.name == "0.14.1" else (made[0], {})

        def model(**_):
            plan(made[0])
            return torch.zeros(4)

        module.prepare_inputs_to_capture = prepared
        manager = module.CudaGraphManager(config, False, torch.device("cpu"))
        given = {"model": model, "input_buffers": buffers, "attn_metadata_builders": [builder]}
        wanted = inspect.signature(manager.capture).parameters
        manager.capture(**{name: given.get(name) for name in wanted})
        key, run = 4, manager.run
    else:
        manager = module.CudaGraphManager(config, torch.device("cpu"), release.mode.FULL, 1)
        key = module.BatchExecutionDescriptor(cg_mode=release.mode.FULL, num_tokens=4, num_reqs=4)
        manager._capture_descs = {release.mode.FULL: [key]}

        def create_forward_fn(desc, warmup=None):
            built = builder.build_for_cudagraph_capture(None)
            return lambda mode: plan(built)

        manager.capture(create_forward_fn)
        run = manager.run_fullgraph
    for _ in range(2):
        builder.build()
        run(key)
    assert [graph.replays for graph in watching.records] == [2]
    fields = sorted(message.split(" ")[0] for message in watching.messages)
    schedule = ["decode.scheduler_metadata.num_splits", "decode.scheduler_metadata.tile_scheduler_metadata"]
    if case == "planned":
        assert fields == (schedule[:1] if release.name < "0.22" else [])
        assert all("was made by a warm-up before the capture of batch 4" in message for message in watching.messages)
    else:
        assert fields == (schedule if case == "fresh" else [])
        assert all("of layer layer moved since capture of batch 4" in message for message in watching.messages)


@pytest.mark.releases
@pytest.mark.parametrize("release", ["0.14.1", "0.15.0"], indirect=True)
def test_v2_drafts_of_real_releases(release):
    watching = watch()
    interface, module = release.load(BACKEND), release.load(guard.V2_DRAFTS)
    guard._watch_drafts(module)

    class Builder(interface.AttentionMetadataBuilder):
        layer_names = ("layer",)

        def __init__(self):
            pass

        def build(self, common_prefix_len=0, common_attn_metadata=None, fast_build=False):
            return Pair(fresh_tensor())

    settings, builder = release.settings, Builder()
    config = settings(
        scheduler_config=settings(max_num_seqs=8, max_num_batched_tokens=8),
        model_config=settings(max_model_len=64),
        parallel_config=settings(data_parallel_size=1),
        compilation_config=settings(cudagraph_mode=release.mode.FULL, cudagraph_capture_sizes=[4]),
    )
    module.prepare_inputs_to_capture = lambda *_, **__: (builder.build(), {})
    manager = module.EagleCudaGraphManager(config, torch.device("cpu"))
    given = {"generate_fn": lambda *_: None, "attn_metadata_builders": [builder]}
    manager.capture(**{name: given.get(name) for name in inspect.signature(manager.capture).parameters})
    builder.build()
    manager.run(4)
    assert fields_of(watching) == ["a of layer layer"]
