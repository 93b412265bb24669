"""A watch around a program: each finding once, at the replay where it matters, and never a silent pass."""

import io
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from stalegraph.audit import audit, current_watch, declare, hooks, watch
from stalegraph.audit.simulated_cuda import simulated_cuda
from stalegraph.audit.watch import Watch
from stalegraph.cli import main
from stalegraph.errors import CaptureError, StaleReadError, UsageError
from stalegraph.simulator import CUDAGraph, Device

COUNT = 256
SRC = Path(__file__).parents[1] / "src"


def full(value, count=COUNT):
    return torch.full((count,), float(value))


def churn(held):
    held += [full(9, count) for count in (COUNT, 77, 1031, COUNT, COUNT)]


def captured(device, body, pool=None):
    graph = device.graph(pool)
    with graph.capture():
        out = body()
    return graph, out


def only(report):
    assert len(report.findings) == 1, report.table()
    return report.findings[0]


@pytest.fixture
def device():
    with Device(memory_bytes=1 << 26) as device:
        yield device


@pytest.fixture(params=["watch outside", "device outside"])
def both(request):
    """(watch, device) nested either way round."""
    if request.param == "watch outside":
        with watch(quiet=True) as w, Device(memory_bytes=1 << 26) as device:
            yield w, device
    else:
        with Device(memory_bytes=1 << 26) as device, watch(quiet=True) as w:
            yield w, device


def test_a_dead_owner_is_reported_once_with_who_has_its_address_and_who_let_go(both):
    w, device = both
    x, scale = full(2), full(3)
    graph, _ = captured(device, lambda: x * scale)
    graph.replay()
    assert not w.report().findings
    held = []
    del scale
    churn(held)
    for _ in range(3):
        graph.replay()
    finding = only(w.report())
    assert (finding.hazard, finding.verdict, finding.name, finding.graph) == ("B", "reused", "scale", 1)
    assert (
        "test_watch.py" in finding.owner
        and any("churn" in frame for frame in finding.stack)
        and "test_a_dead_owner" in finding.dropped[0]
    )
    assert "let go at" in finding.line() and "since step 1" in finding.line()
    assert w.report().replays == 4


def test_a_watch_keeps_nothing_alive(both):
    """Names come from the program's variables; a frame asked for them must not hold on to what they held."""
    w, device = both
    x, gone = full(2), full(3)
    address = gone.data_ptr()
    graph, _ = captured(device, lambda: x * gone)
    graph.replay()
    del gone
    assert device.memory_map().find(address).state == "freed"
    before = device.memory_map().find(x.data_ptr()).state
    del x
    assert before == "allocated"
    graph_ref = w.captures[0].graph
    del graph
    assert graph_ref() is None


def test_locals_that_the_program_itself_asked_for_stay(both):
    _, device = both
    x = full(2)
    mine = locals()
    captured(device, lambda: x * 2)
    assert mine["x"] is x


def test_a_rebound_field_that_was_declared(both):
    w, device = both
    metadata = {"num_splits": full(1)}
    w.declare(fields=lambda: metadata)
    graph, _ = captured(device, lambda: full(2) * metadata["num_splits"])
    kept = []
    for k in range(3):
        kept.append(metadata["num_splits"])
        metadata["num_splits"] = full(k)
        graph.replay()
    finding = only(w.report())
    assert (finding.hazard, finding.verdict, finding.field) == ("A", "moved", "num_splits")


def test_a_rebound_tensor_that_nobody_declared_is_found_at_the_second_replay(both):
    w, device = both
    metadata = {"num_splits": full(1)}
    graph, _ = captured(device, lambda: full(2) * metadata["num_splits"])
    kept = []
    for k in range(2):
        assert not w.report().findings
        kept.append(metadata["num_splits"])
        metadata["num_splits"] = full(k)
        graph.replay()
    finding = only(w.report())
    assert (finding.hazard, finding.verdict, finding.field) == ("A", "moved", "metadata.num_splits")


@pytest.mark.parametrize("sound", ["read by eager code", "copied into the captured one", "made once"])
def test_a_new_tensor_of_an_old_name_is_no_finding_by_itself(both, sound):
    w, device = both
    x = static = full(1)
    graph, _ = captured(device, lambda: static * 2)
    for k in range(4):
        if k == 0 or sound != "made once":
            x = full(k)
        if sound == "read by eager code":
            x.sum()
        if sound == "copied into the captured one":
            static.copy_(x)
        graph.replay()
    assert not w.report().findings


def test_resize_moves_a_storage_and_is_class_c():
    """FlashInfer #4398: `workspace.resize_(larger)` keeps the storage and moves its bytes."""
    from stalegraph.audit.storages import StorageBook

    book = StorageBook()
    tensor = torch.zeros(8)
    note = book.note(tensor)
    tensor.resize_(1 << 20)
    assert note.alive() and not note.intact() and note.moved_to() == tensor.data_ptr() and book.find(tensor) is None


def test_a_resized_workspace_is_class_c_with_nothing_declared(both):
    w, device = both
    workspace, x = full(0), full(2)
    graph, _ = captured(device, lambda: workspace.add_(x) * 1)
    graph.replay()
    workspace.resize_(4 * COUNT)
    graph.replay()
    finding = only(w.report())
    assert (finding.hazard, finding.field) == ("C", "workspace")


def test_writes_that_nobody_reads_beside_a_read_that_nobody_writes_are_class_f(both):
    """SGLang #32555, with nothing declared: the front is refreshed, the graph reads the tail."""
    w, device = both
    buffer, x = full(0, 4 * COUNT), full(2)
    graph, _ = captured(device, lambda: x * buffer[-COUNT:])
    for k in range(3):
        buffer[:COUNT].copy_(full(k))
        graph.replay()
    finding = only(w.report())
    assert (finding.hazard, finding.field) == ("F", "buffer") and f"bytes 0 to {4 * COUNT}" in finding.message


@pytest.mark.parametrize(
    "sound", ["eager code reads the front", "another graph reads the front", "the tail was written once"]
)
def test_a_buffer_in_parts_is_no_finding_by_itself(both, sound):
    w, device = both
    buffer, x = full(0, 4 * COUNT), full(2)
    graph, _ = captured(device, lambda: x * buffer[-COUNT:])
    other, _ = captured(device, lambda: x * buffer[:COUNT])
    if sound == "the tail was written once":
        buffer[-COUNT:].fill_(3)
    for k in range(4):
        buffer[:COUNT].copy_(full(k))
        if sound == "eager code reads the front":
            buffer[:COUNT].sum()
        if sound == "another graph reads the front":
            other.replay()
        graph.replay()
    assert not w.report().findings


@pytest.mark.parametrize("written, findings", [("nothing", 1), ("half", 1), ("all", 0), ("by the graph", 0)])
def test_a_declared_input_must_be_written_before_each_replay(both, written, findings):
    w, device = both
    x = full(1)
    w.declare(inputs=lambda: {"x": x})
    graph, _ = captured(device, lambda: x.add_(1) if written == "by the graph" else x * 2)
    for k in range(3):
        if written == "half":
            x[: COUNT // 2].fill_(k)
        elif written == "all":
            x.fill_(k)
        graph.replay()
    assert [finding.hazard for finding in w.report().findings] == ["F"] * findings


def pointed_at(x):
    return torch.empty(0).set_(x)


def cut(x):
    return torch.empty(0).set_(x).resize_(COUNT)


@pytest.mark.parametrize(
    "body",
    [pointed_at, cut, lambda x: x.view(1, COUNT).squeeze_(0), lambda x: x.view(1, COUNT).t_()],
    ids=["set_", "resize_", "squeeze_", "t_"],
)
@pytest.mark.parametrize("written", [True, False])
def test_ops_that_only_point_at_an_input_do_not_count_as_writing_it(both, body, written):
    w, device = both
    x = full(1)
    w.declare(inputs=lambda: {"x": x})
    graph, _ = captured(device, lambda: body(x) * 2)
    for k in range(3):
        if written or not k:
            x.fill_(k)
        graph.replay()
    assert [finding.hazard for finding in w.report().findings] == ([] if written else ["F"])


def test_a_tensor_that_grows_within_a_capture_is_the_captures_own(both):
    w, device = both
    x, kept = full(3), torch.empty(0)
    graph, out = captured(device, lambda: kept.resize_(COUNT).copy_(x) * 2)
    for _ in range(2):
        graph.replay()
    assert not w.report().findings and out.tolist() == [6.0] * COUNT


def test_an_input_that_changes_unseen_is_a_gap_and_no_finding(both):
    w, device = both
    x = full(1)
    w.declare(inputs=lambda: {"x": x})
    graph, _ = captured(device, lambda: x * 2)
    for k in range(3):
        with device.host():  # as a raw kernel of somebody's would
            x.fill_(k)
        graph.replay()
    report = w.report()
    assert not report.findings and any("dispatcher does not show" in unseen.why for unseen in report.not_seen)


def test_a_block_carved_twice_during_capture_is_class_e(both):
    """AITER #5393: a workspace made lazily under capture lies where the graph has its own temporary."""
    w, device = both
    x, cache = full(3), {}

    def body():
        temporary = x * 2
        total = temporary.sum()
        del temporary
        cache["workspace"] = torch.empty(COUNT)
        return total

    graph, _ = captured(device, body)
    cache["workspace"].fill_(1234)
    graph.replay()
    assert float(cache["workspace"][0]) != 1234  # clobbered: the finding is not the only evidence
    finding = only(w.report())
    assert (finding.hazard, finding.verdict, finding.field) == ("E", "reused", "cache.workspace")


def test_a_result_of_another_pool_that_was_dropped_is_class_d(both):
    w, device = both
    x = full(2)
    first, middle = captured(device, lambda: x * 2)
    second, _ = captured(device, lambda: middle + 1)
    del middle
    first.replay()
    second.replay()
    assert not w.report().findings  # its maker wrote it last
    third, _ = captured(device, lambda: x * 5, pool=first.pool())
    first.replay()
    third.replay()
    second.replay()
    assert only(w.report()).hazard == "D"


@pytest.mark.parametrize("refreshed", [True, False])
def test_a_dead_input_in_the_pool_is_right_while_the_host_refreshes_its_bytes(both, refreshed):
    """Cudagraph trees drop their static inputs, let the graph reuse the block, and copy into it by address."""
    w, device = both
    maker, x = captured(device, lambda: torch.empty(COUNT))
    address = x.data_ptr()

    def body():
        nonlocal x
        y = x * 2
        x = None
        return [y, full(7)]  # the fill takes the block of x

    graph, out = captured(device, body, pool=maker.pool())
    assert out[1].data_ptr() == address
    with device.host():
        raw = device.memory.tensor(address, (COUNT,), (1,), torch.float32)  # a tensor made from an address
    for k in range(3):
        if refreshed:
            raw.copy_(full(k))
        graph.replay()
        assert float(out[0][0]) == (2 * k if refreshed else float(out[0][0]))
    found = [finding.hazard for finding in w.report().findings]
    assert found == ([] if refreshed else ["E"])


def test_numbers_and_work_are_asked_for_at_capture_and_at_replay(both):
    w, device = both
    x, state = full(2), {"round": 7, "rows": 2}
    w.declare(scalars={"round": lambda: state["round"]}, work={"rows": lambda: state["rows"]})
    graph, _ = captured(device, lambda: x * state["round"])
    graph.replay()
    assert not w.report().findings
    state.update(round=8, rows=5)
    graph.replay()
    assert {(finding.hazard, finding.field) for finding in w.report().findings} == {("G", "round"), ("H", "rows")}


def test_raises_stops_before_the_replay(device):
    with pytest.raises(StaleReadError, match=r"\[B freed\].*scale"):
        with watch(raises=True, quiet=True):
            x, scale = full(2), full(3)
            graph, out = captured(device, lambda: x * scale)
            del scale
            graph.replay()


def test_findings_and_the_summary_are_printed(device):
    stream = io.StringIO()
    with Watch(stream=stream):
        x, scale = full(2), full(3)
        graph, _ = captured(device, lambda: x * scale)
        del scale
        graph.replay()
        graph.replay()
    lines = stream.getvalue().splitlines()
    assert sum(line.startswith("[B freed]") for line in lines) == 1
    assert lines[-1] == "[stalegraph] 1 of class B (1 graph, 1 nodes, 2 replays)"


# never a silent pass
def test_a_graph_captured_before_the_watch_is_audited_by_its_nodes_and_told(device):
    x, scale, sound = full(2), full(3), full(4)
    early, _ = captured(device, lambda: x * scale)
    right, _ = captured(device, lambda: x * sound)
    del scale
    with watch(quiet=True) as w:
        early.replay()
        right.replay()
        report = w.report()
    assert [finding.hazard for finding in report.findings] == ["B"]
    assert sum("before the watch began" in unseen.what for unseen in report.not_seen) == 1
    assert report.graphs == 2


def test_failed_running_and_unreplayed_captures_are_told(both):
    w, device = both
    x = full(2)
    with pytest.raises(CaptureError):
        with device.graph().capture():
            x.sum().item()
    assert any("failed" in unseen.what for unseen in w.report().not_seen)
    with device.graph().capture():
        assert any("still capturing" in unseen.why for unseen in w.report().not_seen)
    assert any("never replayed" in unseen.why for unseen in w.report().not_seen)
    assert not w.report().findings


def test_a_declared_thing_that_raises_is_told(both):
    w, device = both
    w.declare(fields=lambda: {}["missing"])
    graph, _ = captured(device, lambda: full(2) * 2)
    graph.replay()
    assert any("KeyError" in unseen.why for unseen in w.report().not_seen)


def test_a_fault_of_the_watch_itself_is_told_and_ends_no_program(both, monkeypatch):
    from stalegraph.audit.witness import Witness

    w, device = both
    monkeypatch.setattr(Witness, "_see", lambda *_: 1 / 0)
    graph, out = captured(device, lambda: full(2) * 2)
    graph.replay()
    assert float(out[0]) == 4
    assert any("ZeroDivisionError" in unseen.why for unseen in w.report().not_seen)


def test_one_watch_at_a_time_and_all_hooks_are_taken_back():
    verbs = {name: CUDAGraph.__dict__[name] for name in ("capture", "replay", "reset")}
    enter = Device.__dict__["__enter__"]
    with watch(quiet=True) as w:
        assert current_watch() is w and CUDAGraph.__dict__["replay"] is not verbs["replay"]
        with pytest.raises(UsageError, match="open already"):
            watch(quiet=True).__enter__()
    assert {name: CUDAGraph.__dict__[name] for name in verbs} == verbs and Device.__dict__["__enter__"] is enter
    assert current_watch() is None and not hooks._undo
    declare(fields=lambda: {})  # without a watch: nothing happens
    with pytest.raises(UsageError, match="work"):
        watch(work={"rows": 3})


def test_audit_inside_a_watch_uses_what_the_watch_saw(both):
    w, device = both
    x, scale = full(2), full(3)
    graph, _ = captured(device, lambda: x * scale)
    del scale
    held = []
    churn(held)
    finding = only(audit(graph))
    assert finding.field == "scale" and any("churn" in frame for frame in finding.stack)
    graph.reset()
    assert "reset" in audit(graph).not_seen[0].why


class Base:
    """What torch's extension gives: a graph that forgets its nodes unless it was made to keep them."""

    def __new__(cls, *args, **kwargs):
        return object.__new__(cls)

    def __init__(self, keep_graph=False):
        self.kept, self.calls = keep_graph, []

    def pool(self):
        return (0, 1)

    def raw_cuda_graph(self):
        raise RuntimeError("no driver here")


def verb(name):
    def call(self, *args, **kwargs):
        self.calls.append(name)

    return call


class TorchGraph(Base):
    """As torch.cuda.CUDAGraph is written: `__new__` takes the flag, `__init__` is the extension's."""

    def __new__(cls, keep_graph=False):
        instance = super().__new__(cls, keep_graph)
        instance._tracker = None
        return instance

    capture_begin, capture_end, replay, reset, instantiate = (
        verb(name) for name in ("capture_begin", "capture_end", "replay", "reset", "instantiate")
    )


def test_torchs_own_graphs_are_made_to_keep_their_nodes_while_a_watch_is_open(monkeypatch):
    before = dict(TorchGraph.__dict__)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", TorchGraph)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda **_: [])
    with watch(quiet=True) as w:
        mine, kept = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph(keep_graph=True)
        for graph in (mine, kept):
            assert graph.kept and graph._tracker is None
            graph.capture_begin(pool=None)
            graph.capture_end()
            graph.replay()
            graph.reset()
        assert mine.calls == ["capture_begin", "capture_end", "instantiate", "replay", "reset"]
        assert kept.calls == ["capture_begin", "capture_end", "replay", "reset"]
        assert (w.report().graphs, w.report().replays) == (2, 2)
        assert any("nodes of graph 1" in unseen.what for unseen in w.report().not_seen)
    assert dict(TorchGraph.__dict__) == before
    assert not torch.cuda.CUDAGraph().kept


# torch.cuda on the simulated GPU
def test_memory_counts_are_those_of_blocks():
    with simulated_cuda():
        before = torch.cuda.memory_allocated()
        kept = torch.empty(1000, device="cuda")
        passing = torch.empty(3000, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_allocated() - before == 4096 + 3072
        del passing
        assert torch.cuda.memory_allocated() - before == 4096 == kept.nbytes + 96
        assert torch.cuda.max_memory_allocated() - before == 4096 + 3072
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated() <= torch.cuda.memory_reserved()


def test_a_cuda_program_runs_on_the_simulated_gpu():
    with watch(quiet=True) as w, simulated_cuda():
        assert torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
        host = torch.arange(8.0)
        x = host.to("cuda")
        assert x.is_cuda and x.device == torch.device("cuda", 0) and not host.is_cuda
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            assert torch.cuda.is_current_stream_capturing()
            y = x * 2
        host.fill_(5)
        assert x[1].item() == 1  # a copy, as it would be on a GPU
        x.copy_(host)
        graph.replay()
        assert torch.equal(y.cpu(), host * 2) and not y.cpu().is_cuda
        assert torch.zeros(2, device="cuda").dtype == torch.float32 and not torch.zeros(2).is_cuda
        with pytest.raises(CaptureError):
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                y.sum().item()
        assert audit(graph).pointers[0].verdict == "live"
        assert w.report().replays == 1
    assert not torch.cuda.is_available() or torch.version.cuda is not None


# the command and the fixture
PROGRAM = """
    import sys, torch
    x, scale = torch.ones(256, device="cuda"), torch.full((256,), 2.0, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * scale
    if "drop" in sys.argv:
        del scale
    held = [torch.full((256,), 9.0, device="cuda") for _ in range(3)]
    graph.replay()
    print("y is", y[0].item())
    if "fail" in sys.argv:
        raise SystemExit("no luck")
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(PROGRAM))
    return str(path)


@pytest.mark.parametrize("arguments, code", [([], 0), (["drop"], 1), (["fail"], 125), (["drop", "fail"], 1)])
def test_the_command_runs_a_program_and_says_what_it_found(program, capsys, arguments, code):
    saved = list(sys.argv)
    assert main(["audit", "--sim", "--json", program, *arguments]) == code
    out, err = capsys.readouterr()
    record = json.loads(out)  # the program's own output went to stderr
    assert record["schema"] == 1 and "y is" in err
    assert [finding["hazard"] for finding in record["findings"]] == ["B"] * ("drop" in arguments)
    assert record["verdicts"]["graph-owned"] == 1
    assert sys.argv == saved


def test_the_command_says_each_finding_once(program, capsys):
    assert main(["audit", "--sim", program, "drop"]) == 1
    out, err = capsys.readouterr()
    assert out.count("[B ") == 1 and "[B " not in err and "[stalegraph] 1 of class B" in err


def test_a_program_that_is_interrupted_is_reported(tmp_path, capsys):
    (tmp_path / "server.py").write_text(textwrap.dedent(PROGRAM).replace("print(", "raise KeyboardInterrupt; print("))
    assert main(["audit", "--sim", str(tmp_path / "server.py"), "drop"]) == 1
    out, err = capsys.readouterr()
    assert "[B " in out and "ended with an interrupt" in err


def test_the_command_on_bad_usage(program, tmp_path, capsys):
    assert main(["audit", "--sim", str(tmp_path / "missing.py")]) == 2
    assert main(["audit"]) == 2
    empty = tmp_path / "empty.py"
    empty.write_text("")
    assert main(["audit", "--sim", str(empty)]) == 0
    assert "no graph was captured" in capsys.readouterr().out
    assert main(["audit", "--bench", "0"]) == 2
    assert main(["audit", "--bench", "50", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["nodes"] == 50


TESTS = """
    import torch
    from stalegraph.simulator import Device

    def step(drop):
        with Device(memory_bytes=1 << 26) as device:
            x, scale = torch.ones(8), torch.ones(8)
            graph = device.graph()
            with graph.capture():
                y = x * scale
            if drop:
                del scale
            graph.replay()

    def test_right(stalegraph_watch):
        step(drop=False)

    def test_wrong(stalegraph_watch):
        step(drop=True)

    def test_foreseen(stalegraph_watch):
        stalegraph_watch.allow = ("B",)
        step(drop=True)
        assert stalegraph_watch.report().findings
"""


def test_the_fixture_fails_the_test_that_replays_a_stale_address(tmp_path):
    path = tmp_path / "test_program.py"
    path.write_text(textwrap.dedent(TESTS))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "stalegraph.audit.pytest_plugin",
        "-p",
        "no:cacheprovider",
        "-q",
        str(path),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env={"PYTHONPATH": str(SRC), "PATH": ""}
    )
    assert "3 passed, 1 error" in done.stdout, done.stdout + done.stderr
    assert "ERROR test_program.py::test_wrong" in done.stdout and "[B freed]" in done.stdout
