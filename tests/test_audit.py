"""One graph, looked at: every address gets its verdict, what is broken its class, and a gap is said to be one."""

import json
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from stalegraph import audit as package
from stalegraph.audit import HAZARDS, VERDICTS, Report, audit, note
from stalegraph.audit.capture import Capture
from stalegraph.audit.extents import Extents, ranges
from stalegraph.audit.judge import judge
from stalegraph.audit.now import Now
from stalegraph.audit.pointers import pointers
from stalegraph.audit.tree import walk
from stalegraph.blocks import Block, MemoryMap
from stalegraph.errors import CaptureError, UsageError
from stalegraph.nodes import Argument, Node
from stalegraph.simulator import Device

COUNT = 256


@pytest.fixture
def device():
    with Device(memory_bytes=1 << 26) as device:
        yield device


def full(value, count=COUNT):
    return torch.full((count,), float(value))


def churn():
    """Odd sizes and the usual one, held: the freed block does not stay free, nor does a fresh tensor land there."""
    return [full(9, count) for count in (COUNT, 77, 1031, COUNT, COUNT)]


def captured(device, body, pool=None):
    graph = device.graph(pool)
    with graph.capture():
        out = body()
    return graph, out


def only(report: Report):
    assert len(report.findings) == 1, report.table()
    return report.findings[0]


# trees
@dataclass
class Decode:
    num_splits: torch.Tensor
    plans: dict


def test_tensors_are_found_by_name_in_any_tree():
    one, two, three, four, five = (torch.zeros(k + 1) for k in range(5))
    root = SimpleNamespace(decode=Decode(one, {4: [two], "all": (three,)}), nothing=None, number=3)
    root.itself = root  # a cycle
    root.module = torch.nn.Linear(2, 2)

    class Slotted:
        __slots__ = ("seq_lens", "empty")

        def __init__(self):
            self.seq_lens = four

    root.slotted = Slotted()
    names = dict(walk(root))
    assert {name: tensor for name, tensor in names.items() if not name.startswith("module")}.keys() == {
        "decode.num_splits", "decode.plans[4][0]", "decode.plans.all[0]", "slotted.seq_lens",
    }  # fmt: skip
    assert names["slotted.seq_lens"] is four and names["decode.plans[4][0]"] is two
    assert {"module.weight", "module.bias"} < names.keys()
    assert walk(five, "alone") == [("alone", five)]


def test_a_tree_deeper_than_any_metadata_ends():
    root = here = {}
    for _ in range(1000):
        here["next"] = {}
        here = here["next"]
    here["tensor"] = torch.zeros(1)
    assert walk(root) == []


# extents
def test_extents_agree_with_sets_of_bytes():
    generator = torch.Generator().manual_seed(0)

    def pick(high):
        return int(torch.randint(high, (1,), generator=generator))

    for _ in range(300):
        extents, model = Extents(), set()
        for _ in range(pick(8) + 1):
            low = pick(60)
            high = low + pick(12)
            extents.add(low, high)
            model |= set(range(low, high))
        assert {byte for low, high in extents for byte in range(low, high)} == model
        assert all(low < high for low, high in extents)
        low, high = sorted((pick(70), pick(70)))
        missing = {byte for a, b in extents.missing(low, high) for byte in range(a, b)}
        assert missing == set(range(low, high)) - model
        assert extents.overlaps(low, high) == bool(set(range(low, high)) & model)


@pytest.mark.parametrize("view", [
    lambda t: t, lambda t: t[2:], lambda t: t[:, 1:3], lambda t: t.t(), lambda t: t[::2, ::3], lambda t: t[1],
    lambda t: t[:, 0], lambda t: t.expand(2, 6, 8), lambda t: t.reshape(-1)[::7], lambda t: t[:0],
])  # fmt: skip
def test_the_bytes_of_a_view_are_its_elements(view):
    base = torch.arange(48, dtype=torch.int16).view(6, 8)
    tensor = view(base)
    wanted = {int(value) * 2 + byte for value in tensor.flatten() for byte in range(2)}
    assert {byte for low, high in ranges(tensor) for byte in range(low, high)} == wanted


# verdicts
def test_a_graph_whose_tensors_live_has_no_finding(device):
    x, scale = full(2), full(3)
    graph, out = captured(device, lambda: torch.mul(x, scale))
    report = audit(graph, fields={"x": x, "scale": scale})
    assert not report.findings and not report.not_seen
    assert report.summary().startswith("no broken invariant")
    assert [(one.argument, one.verdict) for one in report.pointers] == [
        ("self", "live"), ("other", "live"), ("result", "graph-owned"),
    ]  # fmt: skip
    assert [one.address for one in report.pointers] == [x.data_ptr(), scale.data_ptr(), out.data_ptr()]


def test_a_freed_owner_is_class_b(device):
    x, scale = full(2), full(3)
    address = scale.data_ptr()
    graph, _ = captured(device, lambda: torch.mul(x, scale))
    del scale
    finding = only(audit(graph))
    assert (finding.hazard, finding.verdict, finding.argument, finding.address) == ("B", "freed", "other", address)
    assert finding.owner == "nobody: free" and finding.node == 0 and finding.advice == HAZARDS["B"].advice


def test_a_reused_block_is_told_by_its_generation_and_names_its_owner(device):
    x, scale = full(2), full(3)
    address = scale.data_ptr()
    graph, _ = captured(device, lambda: torch.mul(x, scale))
    del scale
    device.step = 5
    taken = device.label(full(9), "somebody else's logits")
    assert taken.data_ptr() == address  # the very same address: only the generation differs
    finding = only(audit(graph))
    assert (finding.hazard, finding.verdict, finding.owner, finding.since) == (
        "B",
        "reused",
        "somebody else's logits",
        5,
    )
    assert {one.argument: one.verdict for one in audit(graph).pointers}["other"] == "reused"


def test_memory_given_back_to_the_driver_is_freed(device):
    x, scale = full(2), full(3, 4 << 20)  # a segment of its own
    graph, _ = captured(device, lambda: torch.mul(x[0], scale))
    del scale
    device.empty_cache()
    finding = only(audit(graph))
    assert (finding.hazard, finding.verdict, finding.owner) == ("B", "freed", "nobody: not mapped")


@pytest.mark.parametrize("life", ["kept", "dropped", "lucky"])
def test_a_rebound_field_is_class_a_whatever_became_of_the_old_tensor(device, life):
    num_splits = full(1)
    graph, _ = captured(device, lambda: full(2).mul(num_splits))
    noted = note({"num_splits": num_splits})
    address = num_splits.data_ptr()
    kept = num_splits if life == "kept" else None
    del num_splits
    held = churn() if life == "dropped" else []
    now = full(4)
    if life == "lucky":
        assert now.data_ptr() == address  # equal addresses are luck, and not the same tensor
    finding = only(audit(graph, fields={"num_splits": now}, captured=noted))
    assert (finding.hazard, finding.field, finding.address) == ("A", "num_splits", address)
    assert finding.verdict == {"kept": "moved", "dropped": "reused", "lucky": "reused"}[life]
    assert ("by luck" in finding.message) == (life == "lucky")
    if life == "lucky":  # the generation tells, also where nobody noted the field at capture
        assert only(audit(graph, fields={"num_splits": now})).hazard == "A"
    del kept, held


def test_fields_are_matched_by_argument_names_where_nothing_was_noted(device):
    def step(metadata):
        torch.ops.aten.index_select(metadata["self"], 0, metadata["index"])

    metadata = {"self": full(2), "index": torch.zeros(4, dtype=torch.long)}
    graph, _ = captured(device, lambda: step(metadata))
    old = metadata["index"]
    metadata["index"] = torch.zeros(4, dtype=torch.long)
    finding = only(audit(graph, fields=lambda: metadata))
    assert (finding.hazard, finding.verdict, finding.field, finding.argument) == ("A", "moved", "index", "index")
    assert finding.address == old.data_ptr()


def test_a_field_that_no_node_holds_is_said_to_be_unseen(device):
    x = full(2)
    graph, _ = captured(device, lambda: x * 2)
    report = audit(graph, fields={"unrelated": full(1)})
    assert not report.findings
    assert [("unrelated" in unseen.what) for unseen in report.not_seen] == [True]


def test_a_grown_cache_is_class_c(device):
    x, caches = full(2), {"workspace": full(0)}
    graph, _ = captured(device, lambda: caches["workspace"].add_(x))
    noted = note(caches)
    caches["workspace"] = full(0, 4 * COUNT)
    finding = only(audit(graph, caches=caches, captured=noted))
    assert (finding.hazard, finding.field) == ("C", "workspace")
    assert "grown from 1024 to 4096 bytes" in finding.message


def test_another_graphs_pool_is_foreign(device):
    x = full(2)
    first, middle = captured(device, lambda: x * 2)
    second, _ = captured(device, lambda: middle + 1)
    report = audit(second)
    assert not report.findings  # the result is kept
    assert report.pointers[0].verdict == "foreign-pool"
    del middle
    finding = only(audit(second))
    assert (finding.hazard, finding.verdict, finding.argument) == ("D", "foreign-pool", "self")


def test_a_recycled_pinned_block_is_class_j2(device):
    with device.host():
        host = torch.ones(COUNT)
    pinned, x = device.pin(host), full(0)
    graph, _ = captured(device, lambda: x.copy_(pinned, non_blocking=True))
    assert not audit(graph).findings
    address = pinned.data_ptr()
    del pinned
    finding = only(audit(graph))
    assert (finding.hazard, finding.verdict, finding.address) == ("J2", "freed", address)
    again = device.pin(host)
    assert again.data_ptr() == address
    assert only(audit(graph)).verdict == "reused"


def test_a_tensor_of_which_only_the_shape_is_read_may_die(device):
    x, like = full(2), full(3)
    graph, _ = captured(device, lambda: torch.zeros_like(like) + x)
    del like
    assert not audit(graph).findings


# what the caller says
def test_a_ledger_that_misses_what_the_graph_reads_is_class_f(device):
    x, buffer = full(2), full(0, 4 * COUNT)
    tail = buffer[-COUNT:]
    graph, _ = captured(device, lambda: x * tail)
    finding = only(audit(graph, inputs={"track": tail}, ledger=[buffer[:COUNT]]))
    assert (finding.hazard, finding.field, finding.verdict) == ("F", "track", "live")
    half = only(audit(graph, inputs={"track": tail}, ledger=[tail[: COUNT // 2]]))
    assert f"bytes {2 * COUNT} to {4 * COUNT}" in half.message
    assert not audit(graph, inputs={"track": tail}, ledger=[tail[: COUNT // 2], tail[COUNT // 2 :]]).findings


def test_a_number_that_changed_and_is_baked_is_class_g(device):
    x, on_device = full(2), full(7)
    graph, _ = captured(device, lambda: x * 7)
    finding = only(audit(graph, scalars={"flag_color": (7, 8)}))
    assert (finding.hazard, finding.field, finding.argument) == ("G", "flag_color", "other")
    assert not audit(graph, scalars={"flag_color": (7, 7)}).findings
    right, _ = captured(device, lambda: x * on_device)
    assert not audit(right, scalars={"flag_color": (7, 8)}).findings


def test_a_number_too_common_to_be_told_is_unseen_and_a_second_capture_tells_it(device):
    x = full(2)
    graphs = [captured(device, lambda k=k: x + k)[0] for k in (1, 2)]
    report = audit(graphs[0], scalars={"round": (1, 2)})
    assert not report.findings and "round" in report.not_seen[0].what
    finding = only(audit(graphs[0], second=graphs[1]))
    assert (finding.hazard, finding.argument) == ("G", "other")
    same, _ = captured(device, lambda: x + 1)
    assert not audit(graphs[0], second=same).findings


def test_work_beyond_the_bound_of_the_capture_is_class_h(device):
    x = full(2).view(4, -1)
    graph, _ = captured(device, lambda: x[:2].sum(1))
    finding = only(audit(graph, work={"rows": (2, 3)}))
    assert (finding.hazard, finding.field) == ("H", "rows")
    assert not audit(graph, work={"rows": (2, 2)}).findings
    larger, _ = captured(device, lambda: x[:4].sum(1))
    assert only(audit(graph, second=larger)).hazard == "H"
    longer, _ = captured(device, lambda: x[:2].sum(1).mul(2))
    assert "2 nodes" in only(audit(graph, second=longer)).message


@pytest.mark.parametrize("lengths, sentinel, bad", [
    ((65, 70, 0), -1, None), ((65, 0, 0), -1, "row 2"), ((65, 0, 0), 0, None), ((0, 65, 65), 0, "row 0"),
    ((65, 70, 130), 0, None), ((65, 70, 80), 7, "row 0"),
])  # fmt: skip
def test_the_fp8_kernels_reading_formula(device, lengths, sentinel, bad):
    """Row i of no tokens reads block_table[i - 1, -1] (vLLM #33664), row 0 of none reads before the table."""
    from stalegraph import ops

    batch, width = len(lengths), 3
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    table = torch.full((batch, width), sentinel, dtype=torch.int32)
    for row, length in enumerate(lengths):
        if length:
            table[row] = sentinel if sentinel == 7 else 1
    metadata, num_splits = ops.get_mla_metadata_dense_fp8(seq_lens, 16, 1)
    one = torch.ones(1)
    q = torch.zeros(batch, 1, 16, 576).to(torch.float8_e4m3fn)
    cache = torch.zeros(4, 64, 1, 576).to(torch.float8_e4m3fn)
    graph, _ = captured(
        device,
        lambda: ops.flash_mla_with_kvcache_fp8(
            q, cache, table, seq_lens, 512, metadata, num_splits, 0.1, True, one, one
        ),
    )
    found = [finding for finding in audit(graph).findings if finding.hazard == "I1"]
    assert bool(found) == (bad is not None)
    if bad is not None:
        assert found[0].argument == "block_table" and bad in found[0].message


# bad input
def test_a_graph_in_no_state_to_be_audited_is_never_a_silent_pass(device):
    x = full(2)
    for report in (audit(device.graph()),):
        assert report.graphs == 0 and "never captured" in report.not_seen[0].why
    graph, _ = captured(device, lambda: x * 2)
    graph.reset()
    assert "reset" in audit(graph).not_seen[0].why
    broken = device.graph()
    with pytest.raises(CaptureError):
        with broken.capture():
            x.sum().item()
    assert "failed" in audit(broken).not_seen[0].why
    with device.graph().capture() as running:
        assert "still capturing" in audit(running).not_seen[0].why
    other, _ = captured(device, lambda: x * 2)
    gone, _ = captured(device, lambda: x * 2)
    gone.reset()
    assert "second" in audit(other, second=gone).not_seen[0].what


def test_what_is_no_graph_is_refused_by_name(device):
    with pytest.raises(UsageError, match="graph is int"):
        audit(3)
    graph, _ = captured(device, lambda: full(2) * 2)
    with pytest.raises(UsageError, match="scalars"):
        audit(graph, scalars={"round": 7})
    with pytest.raises(UsageError, match="device is simulated"):
        audit(object(), device=device)


class Backend:
    """A CUDA graph's nodes as they would be read, without a GPU."""

    name = "cuda"

    def __init__(self, nodes, error=None):
        self.given, self.error = nodes, error

    def nodes(self, graph, memory):
        if self.error:
            raise self.error
        return self.given

    def is_host(self, address):
        return False

    def host_map(self):
        return None


def cuda_capture(arguments, opaque=None, error=None):
    nodes = (Node(0, "kernel", "triton_poi_fused", tuple(arguments), opaque),)
    capture = Capture(1, lambda: None, Backend(nodes, error), (1, 0))
    capture.memory = MemoryMap(
        [Block(0x1000, 0x200, 0x200, "allocated"), Block(0x9000, 0x200, 0x200, "allocated", (1, 0))]
    )
    capture.read_nodes(None)
    return capture


FREED_LATER = MemoryMap([Block(0x1000, 0x200, 0x200, "freed"), Block(0x9000, 0x200, 0x200, "freed", (1, 0))])


def test_a_raw_launch_whose_pointer_was_freed_is_found_by_its_parameter():
    capture, report = cuda_capture([Argument("p1+0", 0x1010, offset=8), Argument("p2+0", 0x9010, offset=16)]), Report()
    judge(capture, Now(lambda: FREED_LATER), report)
    finding = only(report)
    assert (finding.hazard, finding.verdict, finding.argument, finding.offset) == ("B", "freed", "p1+0", 8)
    assert [one.verdict for one in pointers(capture, FREED_LATER)] == ["freed", "graph-owned"]


def test_a_word_deep_in_a_struct_is_no_finding_until_a_second_capture_confirms_it():
    capture, report = cuda_capture([Argument("p0+0", 0x9010, offset=0), Argument("p0+24", 0x1010, offset=24)]), Report()
    judge(capture, Now(lambda: FREED_LATER), report)
    assert not report.findings and "may be no pointers" in report.not_seen[0].why
    capture.confirmed.add((0, "p0+24"))
    judge(capture, Now(lambda: FREED_LATER), report)
    assert only(report).argument == "p0+24"


def test_the_pointers_that_a_parameter_begins_with_are_pointers():
    """An elementwise kernel gets its operands as one array of pointers."""
    words = [Argument(f"p2+{at}", 0x9010 if at < 16 else 0x1010, offset=16 + at) for at in (0, 8, 16)]
    capture, report = cuda_capture(words), Report()
    judge(capture, Now(lambda: FREED_LATER), report)
    assert only(report).argument == "p2+16" and not report.not_seen


def test_parameters_that_cannot_be_read_are_told():
    from stalegraph.audit.examine import note_gaps

    report = Report()
    note_gaps(cuda_capture([], opaque="the driver does not give this kernel's parameters"), report)
    assert "node 0 triton_poi_fused" in report.not_seen[0].what
    report = Report()
    note_gaps(cuda_capture([], error=CaptureError("made without keep_graph")), report)
    assert "keep_graph" in report.not_seen[0].why


def test_a_torch_too_old_to_keep_graphs_is_told():
    from stalegraph.audit.backend import Cuda

    class CUDAGraph:
        def pool(self):
            return (0, 1)

    with pytest.raises(Exception, match="keep_graph"):
        Cuda().nodes(CUDAGraph(), None)


# the report
def test_the_report_as_json_and_as_tables(device):
    x, scale = full(2), full(3)
    graph, _ = captured(device, lambda: torch.mul(x, scale))
    del scale
    report = audit(graph)
    record = json.loads(json.dumps(report.to_json()))
    assert record["schema"] == 1 and record["verdicts"] == {"live": 1, "freed": 1, "graph-owned": 1}
    assert {"verdict", "hazard", "argument", "address", "node", "offset", "field", "owner", "since", "advice"} <= set(
        record["findings"][0]
    )
    assert "freed" in report.table() and HAZARDS["B"].advice in report.table()
    listed = report.table(pointers=True)
    assert all(verdict in listed for verdict in ("live", "freed", "graph-owned"))
    assert {pointer.verdict for pointer in report.pointers} <= set(VERDICTS)


def test_the_address_map_gives_records_to_draw(device):
    x = full(1)
    graph, _ = captured(device, lambda: x * 2)
    noted, old = note({"x": x}), x
    report = audit(graph, fields={"x": full(2)}, captured=noted)
    finding = only(report)
    assert [(place["row"], place["address"], place["role"]) for place in report.address_map()] == [
        ("the graph reads", old.data_ptr(), "right"), ("the step writes", finding.moved_to, "wrong"),
    ]  # fmt: skip


def test_every_public_name_is_there():
    assert all(hasattr(package, name) for name in package.__all__)
    assert all(hazard.advice.endswith(".") and hazard.id == key for key, hazard in HAZARDS.items())


def test_ten_thousand_nodes_hold_memory_in_proportion():
    from stalegraph.audit.bench import bench

    small, large = bench(1_000), bench(10_000)
    assert large.pointers == 10 * small.pointers + 9
    assert large.peak_bytes < 12 * small.peak_bytes
    assert large.peak_bytes / large.nodes < 2_000
    with pytest.raises(UsageError, match="nodes is 0"):
        bench(0)
