"""On a GPU: the zoo on real CUDA graphs, programs without a bug, and what a watch makes of torch's own graphs."""

import gc

import pytest
import torch

from stalegraph import zoo
from stalegraph.audit import audit, watch
from stalegraph.cuda import CudaDevice
from stalegraph.zoo import sound
from stalegraph.zoo.detectors import is_expected
from stalegraph.zoo.run import run, run_watched

pytestmark = pytest.mark.gpu


@pytest.fixture
def device():
    with CudaDevice() as device:
        yield device


@pytest.mark.parametrize("name", list(zoo.REPLICAS))
def test_a_replica_is_wrong_and_found_and_its_twin_is_neither(name, device):
    expected = zoo.load(name).expected
    assert not run(zoo.load(name, "buggy"), device).all_right
    report = run_watched(zoo.load(name, "buggy"), device).report
    if expected is None:
        assert not report.findings
    else:
        assert len(report.findings) == 1 and is_expected(report.findings[0], expected), report.table()
    twin = run_watched(zoo.load(name, "fixed"), device)
    assert twin.all_right and not twin.report.findings, twin.report.table()


@pytest.mark.parametrize("name", list(sound.PROGRAMS))
def test_no_false_finding(name):
    right, report = sound.run(name)
    assert right and not report.findings, report.table()
    assert report.graphs >= 1


def test_a_raw_graph_of_torchs_own_under_a_watch():
    with watch(quiet=True) as w:
        x, scale = torch.ones(256, device="cuda"), torch.full((256,), 2.0, device="cuda")
        address = scale.data_ptr()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x * scale
        graph.replay()
        assert y[0].item() == 2 and not w.report().findings
        del scale
        held = [torch.full((256,), 9.0, device="cuda") for _ in range(4)]
        graph.replay()
        report = w.report()
    finding = report.findings[0]
    assert (finding.hazard, finding.verdict, finding.name, finding.address) == ("B", "reused", "scale", address)
    assert finding.node == 0 and finding.offset is not None and held
    assert not hasattr(torch.cuda.CUDAGraph, "_stalegraph_kept")


def test_a_graph_that_is_garbage_does_not_die_within_a_capture():
    """Were it destroyed there, the capture would be invalid; torch collects no garbage before a capture since 2.9."""

    class Owner:
        pass

    with watch(quiet=True) as w:
        x, owner = torch.ones(256, device="cuda"), Owner()
        owner.itself, owner.graph = owner, torch.cuda.CUDAGraph()
        with torch.cuda.graph(owner.graph):
            x * 2
        owner.graph.replay()
        gc.disable()
        try:
            del owner
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                gc.collect()
                y = x * 3
        finally:
            gc.enable()
        graph.replay()
        assert y[0].item() == 3 and not w.report().findings


def test_a_graph_without_its_nodes_is_told():
    x = torch.ones(256, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.mul_(2)
    report = audit(graph)
    assert any("keep_graph" in unseen.why for unseen in report.not_seen)
    with watch(quiet=True) as w:
        graph.replay()
        assert any("before the watch began" in unseen.what for unseen in w.report().not_seen)


def test_a_storage_moved_by_resize_is_class_c():
    with watch(quiet=True) as w:
        workspace, x = torch.zeros(256, device="cuda"), torch.ones(256, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = workspace.add_(x) * 1
        graph.replay()
        workspace.resize_(1 << 22)
        graph.replay()
        findings = w.report().findings
    assert [(finding.hazard, finding.field) for finding in findings] == [("C", "workspace")] and y is not None


def test_a_freed_block_is_found_without_a_watch(device):
    x, scale = torch.ones(256, device="cuda"), torch.full((256,), 2.0, device="cuda")
    graph = device.graph()
    with graph.capture():
        torch.mul(x, scale)
    assert not audit(graph).findings
    del scale
    findings = audit(graph).findings
    assert [(finding.hazard, finding.verdict) for finding in findings] == [("B", "freed")]


def test_ten_thousand_nodes_are_audited_in_linear_memory(device):
    import tracemalloc

    peaks = []
    for nodes in (1_000, 10_000):
        x = torch.zeros(64, device="cuda")
        graph = device.graph()
        with graph.capture():
            for _ in range(nodes):
                x.add_(1)
        len(graph.nodes)
        tracemalloc.start()
        assert audit(graph).nodes == nodes
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 15 * peaks[0]
