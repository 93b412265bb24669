"""The scoreboard says what runs showed, and 'not run' where nothing ran."""

import json

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
    assert found == {"rebound_kept", "rebound_dropped", "grown_workspace"}
    assert not [cell for cell in cells if cell.fixed == detectors.FALSE_ALARM]


def test_what_needs_a_gpu_is_recorded_or_not_run_with_its_reason(cells):
    recording = recorded.available(scoreboard.RECORD)
    for detector in (scoreboard.OURS_CUDA, *scoreboard.ON_GPU):
        for cell in by(cells, detector).values():
            assert cell.source
            if not recording:
                assert cell.found == "not run"
            elif cell.found != "not run":
                assert cell.source.startswith("recorded on")


@pytest.mark.skipif(not recorded.available(scoreboard.RECORD), reason="no recording of the zoo on a GPU in this checkout")
def test_the_recording_has_the_classes_and_arguments_that_the_simulator_has(cells):
    data = recorded.load(scoreboard.RECORD).data
    for name in zoo.REPLICAS:
        expected = zoo.load(name).expected
        found = data["ours"]["records"][f"{name}/buggy"]["findings"]
        assert [finding["hazard"] for finding in found] == ([] if expected is None else [expected.hazard]), name
        assert data["ours"]["records"][f"{name}/fixed"]["findings"] == [], name
        assert not all(data["ours"]["records"][f"{name}/buggy"]["right"]), name
        assert all(data["ours"]["records"][f"{name}/fixed"]["right"]), name
    assert not scoreboard.missed(cells)
    for job in ("sound", "compiled"):
        for name, result in data[job].items():
            assert result["right"] and result["findings"] == [], name


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
    assert main(["scoreboard", "--rung", "sim", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["schema"] == 1 and len(record["cells"]) == len(zoo.REPLICAS) * (3 + len(scoreboard.ON_GPU))
    if not torch.cuda.is_available():
        assert main(["scoreboard", "--rung", "cuda"]) == 2
