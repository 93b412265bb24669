"""Each rung opens or says what is missing; nothing is imported that the rung does not need."""

import pytest
import torch

from stalegraph import rungs
from stalegraph.errors import RungUnavailable, UsageError

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def test_the_simulator_is_always_there_and_has_the_sms_asked_for():
    with rungs.open_rung("sim", sm_count=78) as device:
        assert device.sm_count == 78
        assert torch.empty(4, device=device.torch_device).numel() == 4
    assert rungs.available()["sim"] is None


def test_available_names_every_rung_in_order():
    assert tuple(rungs.available()) == rungs.RUNGS


def test_an_unknown_rung_is_refused_with_the_names_allowed():
    with pytest.raises(UsageError, match="rung is 'gpu'; allowed: sim, flashmla, vllm"):
        rungs.open_rung("gpu")


@pytest.mark.parametrize("name", ["flashmla", "vllm"])
def test_strict_is_the_simulators(name):
    with pytest.raises(UsageError, match="strict"):
        rungs.open_rung(name, strict=True)


@no_gpu
def test_without_a_gpu_the_highest_rung_is_the_simulator():
    reasons = rungs.available()
    assert rungs.highest() == "sim"
    assert reasons["flashmla"] and reasons["vllm"]


@no_gpu
def test_a_missing_rung_says_what_would_do(tmp_path):
    with pytest.raises(RungUnavailable, match="--flashmla-lib|allowed"):
        rungs.open_rung("flashmla", flashmla_lib=tmp_path)


@no_gpu
def test_what_no_vllm_would_cure_is_said_before_that_it_is_missing(monkeypatch):
    monkeypatch.setattr(rungs.importlib.util, "find_spec", lambda name: None)
    reasons = rungs.available()
    assert reasons["vllm"].startswith(reasons["flashmla"]) and reasons["vllm"].endswith("pip install vllm")


def test_without_vllm_its_rung_says_so(monkeypatch):
    monkeypatch.setattr(rungs.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RungUnavailable, match="pip install vllm"):
        rungs.open_rung("vllm")
    assert "pip install vllm" in rungs.available()["vllm"]
