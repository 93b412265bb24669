"""`stalegraph bench --sim`: what it reports, that it is one object with its provenance, and what it refuses."""

import json

import pytest
import torch

from stalegraph import cli
from stalegraph.bench import gpu, sim


@pytest.fixture(scope="module")
def found():
    threads = torch.get_num_threads()
    try:
        return sim.measure(quick=True)
    finally:
        torch.set_num_threads(threads)


def test_builders_are_told_apart_by_counts_and_not_by_time(found):
    costs = {one["builder"]: (one["allocations"], one["copies"]) for one in found["builders"]}
    assert costs == {"regressed": (2, 0), "copying": (2, 2), "inplace": (0, 0), "ingraph": (0, 0)}
    launches = {one["builder"]: one["launches"] for one in found["builders"]}
    assert launches["ingraph"] == 0 < launches["inplace"] <= launches["copying"]
    assert {one["host_time_ratio_on_sim"] for one in found["builders"] if one["builder"] == "regressed"} == {1.0}


def test_what_is_timed_is_a_right_run_of_the_size_it_says(found):
    assert found["decode"]["accuracy"] == 1.0
    assert (found["decode"]["batch"], found["decode"]["context"], found["scheduler"]["requests"]) == (4, 512, 4096)


def test_growth_is_measured_over_tokens_batch_and_context(found):
    for curve, size in (("over_tokens", "tokens"), ("over_batch", "batch"), ("over_context", "context")):
        sizes = [point[size] for point in found["growth"][curve]]
        assert len(sizes) >= 2 and sizes == sorted(set(sizes))
        assert all(value > 0 for point in found["growth"][curve] for value in point.values())


def test_figures_say_that_they_are_the_simulators(found, monkeypatch, capsys):
    monkeypatch.setattr(sim, "measure", lambda quick: found)
    assert cli.main(["bench", "--sim", "--quick"]) == 0
    out = capsys.readouterr().out
    assert "rung sim" in out and "not of a GPU" in out
    assert all(name in out for name in ("regressed", "copying", "inplace", "ingraph", "context", "new bytes"))


def test_json_is_one_object_on_stdout_or_in_a_file(found, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sim, "measure", lambda quick: found)
    assert cli.main(["bench", "--sim", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["schema"] == 1 and printed["rung"] == "sim" and set(printed["provenance"]) >= {"torch", "date"}
    assert cli.main(["bench", "--sim", "--json", str(tmp_path / "sim.json")]) == 0
    assert json.loads((tmp_path / "sim.json").read_text()) == printed


@pytest.mark.parametrize(
    "words,message",
    [
        ([], "bench needs one of --sim and --gpu"),
        (["--sim", "--gpu"], "bench needs one of --sim and --gpu"),
        (["--sim", "--json", "no/such/folder/sim.json"], "json is 'no/such/folder/sim.json'; allowed: a file in a"),
        (["--sim", "--json", "."], "json is '.'; allowed: a file in a folder that exists"),
        (["--sim", "--json", "/"], "json is '/'; allowed: a file"),
        (["--sim", "--json", ""], "json is ''; allowed: a file"),
        (["--sim", "--flashmla-lib", "x.so"], "flashmla-lib is 'x.so' with --sim"),
        (["--gpu", "--json"], "json is '-' with --gpu; allowed: --json FILE"),
        (["--gpu", "--json", ""], "json is ''; allowed: a file ending in .json"),
        (["--gpu", "--json", "bench.txt"], "json is 'bench.txt'; allowed: a file ending in .json"),
        (["--gpu", "--json", "no/bench.json"], "json is 'no/bench.json'; allowed: a file ending in .json"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(words, message, monkeypatch, capsys):
    monkeypatch.setattr(sim, "measure", lambda quick: pytest.fail("measured"))
    monkeypatch.setattr(gpu, "main", lambda args: pytest.fail("measured"))
    assert cli.main(["bench", *words]) == 2
    assert message in capsys.readouterr().err
