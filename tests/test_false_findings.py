"""Programs without a bug: no finding in any, and each gives the right output, so that it is one."""

import pytest
import torch

from stalegraph.zoo import sound

HERE = [name for name in sound.PROGRAMS if name not in sound.GPU_ONLY]


def test_there_are_at_least_ten():
    assert len(HERE) >= 10 and len(sound.GPU_ONLY) >= 1


@pytest.mark.parametrize("name", HERE)
def test_no_false_finding(name):
    if torch.cuda.is_available():
        pytest.skip("with a GPU the programs run on it, in test_gpu_audit.py")
    right, report = sound.run(name)
    assert right
    assert not report.findings, report.table()
    assert report.graphs >= 1 and report.replays >= 2
    assert not report.not_seen


def test_a_bug_put_into_such_a_program_is_found(monkeypatch):
    """The programs can fail: one that lets go of what its graph reads is faulted."""
    if torch.cuda.is_available():
        pytest.skip("with a GPU the programs run on it, in test_gpu_audit.py")

    def broken():
        x, scale = torch.ones(256, device="cuda"), torch.full((256,), 2.0, device="cuda")
        graph, out = sound.capture(lambda: x * scale)
        del scale
        held = []
        sound.churn(held)
        graph.replay()
        return sound.close(out, x * 2)

    monkeypatch.setitem(sound.PROGRAMS, "broken", broken)
    right, report = sound.run("broken")
    # The lambda that was captured keeps its variable as long as it lives itself: it is gone once capture() returned.
    assert not right and [finding.hazard for finding in report.findings] == ["B"]
