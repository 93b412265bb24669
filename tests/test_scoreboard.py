"""The scoreboard says what runs showed, and 'not run' where nothing ran."""

import json
from types import SimpleNamespace

import pytest
import torch

from stalegraph import recorded, zoo
from stalegraph.cli import main
from stalegraph.zoo import detectors, scoreboard


@pytest.fixture(scope="module")
def cells():
    return scoreboard.scoreboard(run_sim=True, run_cuda=False)


def by(cells, detector):
    return {cell.replica: cell for cell in cells if cell.detector == detector}


def test_ours_finds_every_class_with_its_cause_and_no_twin(cells):
    ours = by(cells, scoreboard.OURS_SIM)
    assert {cell.found for name, cell in ours.items() if zoo.REPLICAS[name] != "M"} == {detectors.CAUSE}
    assert ours["look_alike"].found == detectors.CLEAR
    assert {cell.fixed for cell in ours.values()} == {detectors.NOTHING}
    assert not [one for one in scoreboard.missed(cells) if one.startswith(scoreboard.OURS_SIM)]


def test_a_comparison_of_addresses_sees_only_what_moved_among_what_it_is_told(cells):
    found = {name for name, cell in by(cells, scoreboard.POINTERS).items() if cell.found == detectors.CAUSE}
    assert found == {
        "rebound_kept", "rebound_dropped", "grown_workspace", "gathered_indices", "copied_metadata", "split_microbatch",
    }  # fmt: skip
    assert not [cell for cell in cells if cell.fixed == detectors.FALSE_ALARM]


def test_what_needs_a_gpu_is_recorded_or_not_run_with_its_reason(cells):
    for detector in (scoreboard.OURS_CUDA, *scoreboard.ON_GPU):
        for cell in by(cells, detector).values():
            assert cell.source
            if cell.found != "not run":
                assert "recorded on" in cell.source or detector == scoreboard.LIVENESS


def test_nothing_is_claimed_for_what_neither_ran_nor_was_recorded(monkeypatch, tmp_path):
    monkeypatch.setenv("STALEGRAPH_RECORDED", str(tmp_path))
    empty = scoreboard.scoreboard(run_sim=False, run_cuda=False)
    assert {cell.found for cell in empty} == {"not run"} and all(cell.source for cell in empty)
    assert "not run" in scoreboard.table(empty) and scoreboard.missed(empty) == []


def test_torchs_liveness_check_sees_dead_inputs_and_nothing_in_a_graph_pool(cells):
    if detectors.missing_simulated_liveness():
        pytest.skip(detectors.missing_simulated_liveness())
    found = {name for name, cell in by(cells, scoreboard.LIVENESS).items() if cell.found == detectors.CAUSE}
    assert found == {
        "rebound_dropped", "orphan_cast", "grown_workspace", "recycled_pinned", "gathered_indices", "copied_metadata",
        "warmup_plan",
    }  # fmt: skip


RECORDED = all(recorded.available(name) for name in scoreboard.RECORDS)
needs_recording = pytest.mark.skipif(not RECORDED, reason="no recording of the zoo on a GPU in this checkout")


@needs_recording
@pytest.mark.parametrize("name", list(zoo.REPLICAS))
def test_the_recording_has_the_class_and_the_argument_that_the_simulator_has(name):
    records = recorded.load(scoreboard.RECORDS[0]).data["ours"]["records"]
    buggy, fixed = records[f"{name}/buggy"], records[f"{name}/fixed"]
    expected = zoo.load(name).expected
    if expected is None:
        assert buggy["findings"] == []
    else:
        (finding,) = buggy["findings"]
        assert detectors.is_expected(SimpleNamespace(**finding), expected)
    assert fixed["findings"] == [] and fixed["not_seen"] == [] and all(fixed["right"])
    # A freed block that nobody has taken still holds its bytes: there the output is right for now.
    assert not all(buggy["right"]) or buggy["findings"][0]["verdict"] == "freed"


@needs_recording
def test_the_recorded_programs_without_a_bug_gave_no_finding(cells):
    data = recorded.load(scoreboard.RECORDS[0]).data
    assert len(data["sound"]) >= 10
    for name, result in {**data["sound"], **({} if "missing" in data["compiled"] else data["compiled"])}.items():
        assert result["right"] and result["findings"] == [], name
    assert not scoreboard.missed(cells)


@needs_recording
def test_memcheck_saw_nothing_and_value_probes_saw_symptoms_only(cells):
    assert {cell.found for cell in by(cells, "compute-sanitizer memcheck").values()} == {"nothing", "clear"}
    probed = by(cells, "torch-cudagraph-debug 0.2.0")
    seen = {name: cell for name, cell in probed.items() if cell.found != "not run"}
    assert {cell.found for cell in seen.values()} == {"symptom"} and len(seen) == 11
    assert all("not in what was recorded" in cell.source for name, cell in probed.items() if name not in seen)


@needs_recording
def test_a_count_of_fewer_replicas_says_which_are_missing(cells):
    title = "torch-cudagraph-debug 0.2.0"
    missing = [name for name, cell in by(cells, title).items() if cell.found == "not run"]
    (line,) = (line for line in scoreboard.legend(cells).splitlines() if line.startswith(title))
    assert missing and line.endswith(f"lacks {', '.join(missing)}.")
    assert f"was run on {len(zoo.REPLICAS) - 1 - len(missing)} of them" in line


def test_a_detector_that_misses_or_cries_wolf_is_counted():
    cell = scoreboard.Cell(scoreboard.OURS_SIM, "orphan_cast", "B", detectors.CAUSE, "", detectors.NOTHING, "run here")
    assert scoreboard.missed([cell]) == []
    for change in ({"found": detectors.NOTHING}, {"found": detectors.SYMPTOM}, {"fixed": detectors.FALSE_ALARM}):
        worse = scoreboard.Cell(**{**cell.__dict__, **change})
        assert scoreboard.missed([worse]) == [f"{scoreboard.OURS_SIM}: orphan_cast"]
    assert "(false alarm)" in worse.short()


def test_the_command_prints_a_table_or_one_object(capsys):
    assert main(["scoreboard", "--rung", "sim"]) == 0
    out, err = capsys.readouterr()
    assert all(name in out for name in zoo.REPLICAS) and "found with its cause" in out and "run here" in err
    shown, legend = out.split("\n\n")
    assert {line.split()[0] for line in legend.splitlines()} >= {"CAUSE", "symptom", "-", *zoo.REPLICAS.values()}
    assert shown.count("no finding") == len(zoo.REPLICAS)
    assert main(["scoreboard", "--rung", "sim", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["schema"] == 1 and len(record["cells"]) == len(zoo.REPLICAS) * (3 + len(scoreboard.ON_GPU))
    if not torch.cuda.is_available():
        assert main(["scoreboard", "--rung", "cuda"]) == 2


def test_a_record_names_no_folder_of_a_machine():
    from stalegraph.zoo import record

    inside = str(zoo.__file__).replace("__init__", "run")
    text = record.portable(f'["{inside}:7 run", "/opt/some/lib/python3/torch/nn.py:3 call", "a/b.py"]')
    assert text == '["stalegraph/zoo/run.py:7 run", "nn.py:3 call", "a/b.py"]'
