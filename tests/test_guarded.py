"""The guard's experiments on a stand-in vLLM: what counts as shown, what does not, and the switch on and off."""

import argparse
import json
import types
from pathlib import Path

import pytest
import stub_graphs

from stalegraph.errors import StaleReadError, UsageError
from stalegraph.recorded import Provenance
from stalegraph.vllm import guard, guarded, timings

SOURCE = Provenance("stand-in", 132, "none", "2", "0.20.2", "none", "none", "2000-01-01", "test")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the command with few tokens on a stand-in release; (exit code, data)."""
    monkeypatch.setattr(guarded, "provenance", lambda command: SOURCE)
    monkeypatch.setattr(guarded, "MOST_COST", 100.0)  # a stand-in's step is nearly nothing

    def run(version, *words, site=None):
        monkeypatch.syspath_prepend(str(stub_graphs.install(tmp_path / version, version)))
        parser, out = argparse.ArgumentParser(), tmp_path / "guard.json"
        guarded.add_arguments(parser)
        given = ["--out", str(out), "--tokens", "24", "--cost-tokens", "40", "--rounds", "3", *words]
        code = guarded.main(parser.parse_args(given))
        return code, json.loads(out.read_text())["data"]

    return run


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_fixed_release_answers_all_four_questions(run, runner):
    code, data = run("0.20.2", "--runner", runner, "--cost-batches", "1,3")
    silent, named, raised = data["engines"]
    assert [one["question"] for one in data["engines"]] == ["silent", "named", "raised"]
    assert all(one["shown"] for one in data["engines"]) and code == 0
    assert silent["findings"] == [] and [one["accuracy"] for one in silent["batches"]] == [1, 1, 1]
    assert [one["replays"] for one in silent["batches"]] == [24, 24, 24] and silent["graphs_noted"] == 4
    assert named["findings_count"] == 2 and {one["replays_before"] for one in named["findings"]} == {0}
    assert {one["batch"] for one in named["findings"]} == {1}
    assert any("num_splits of layer model.layers.0" in one["message"] for one in named["findings"])
    assert [one["accuracy"] < 1 for one in named["batches"]] == [True] * 3
    assert raised["batches"] == [] and raised["failure"]["batch"] == 1
    assert raised["failure"]["kind"] == "StaleReadError" and "num_splits" in raised["failure"]["guard"]
    assert [(cost["model"], cost["shown"]) for cost in data["cost"]] == [("reciter", True), ("deep", True)]
    assert all([one["batch"] for one in cost["batches"]] == [1, 3] for cost in data["cost"])
    for cost, one in [(cost, one) for cost in data["cost"] for one in cost["batches"]]:
        assert one["compared"] == {"on": 40, "off": 0} and one["findings"] == []
        assert one["right"] is (True if cost["model"] == "reciter" else None)
        assert one["added_us"]["pairs"] == 3 * 2 and one["own_us"] > 0  # 40 steps: 8 skipped, two pairs of turns of 6
        added = one["added_us"]["median"] / (1e3 * one["off"]["median"])
        assert one["ratio"] == pytest.approx(1 + added)


def test_a_release_with_the_bug_is_not_shown_silent(run):
    code, data = run("0.18.1", "--runner", "v1", "--cost-batches", "1")
    silent, named, raised = data["engines"]
    assert code == 1 and not silent["shown"] and named["shown"] and raised["shown"]
    assert silent["findings_count"] == 2
    assert not data["cost"][0]["shown"] and not data["cost"][0]["batches"][0]["right"]


def test_an_error_of_the_gpu_is_recorded_and_not_taken_for_the_guard(run, monkeypatch):
    monkeypatch.setenv("STUB_VLLM_FAILS", "gpu")
    code, data = run("0.20.2", "--runner", "v1", "--cost-batches", "1")
    silent, named, raised = data["engines"]
    assert code == 1 and not silent["shown"] and silent["failure"]["guard"] is None
    assert "illegal memory access" in silent["failure"]["message"] and silent["failure"]["batch"] == 3
    assert [one["batch"] for one in silent["batches"]] == [1]


def test_engines_that_do_not_start_are_told(run, monkeypatch):
    monkeypatch.setenv("STUB_VLLM_FAILS", "killed")
    code, data = run("0.20.2", "--runner", "v1")
    assert code == 1 and not any(one["shown"] for one in [*data["engines"], *data["cost"]])
    assert all("SIGKILL" in one["ended"]["summary"] for one in [*data["engines"], *data["cost"]])


def found(question, **changes):
    case = guarded.plan({"long": "folder"}, (1,), 10, ("v1",))[["silent", "named", "raised"].index(question)]
    stale = [
        {"batch": 1, "replays_before": 0, "message": f"stalegraph guard: decode.{name} of layer l moved"}
        for name in guarded.STALE
    ]
    good = {
        "silent": {"findings": [], "batches": [{"batch": 1, "accuracy": 1, "replays": 9}]},
        "named": {"findings": stale, "batches": [{"batch": 1}]},
        "raised": {"findings": stale, "batches": [], "failure": {"guard": " ".join(guarded.STALE)}},
    }[question]
    return case, {"graphs_noted": 4, "guard_broken": False} | good | changes


@pytest.mark.parametrize(
    "question, changes",
    [
        ("silent", {"graphs_noted": 0}),  # a guard that sees no graph is silent too
        ("silent", {"guard_broken": True}),
        ("silent", {"batches": [{"batch": 1, "accuracy": 1, "replays": 0}]}),
        ("silent", {"batches": [{"batch": 1, "accuracy": 0.99, "replays": 9}]}),
        ("silent", {"batches": []}),
        ("silent", {"failure": {"guard": None}}),
        ("named", {"findings": []}),
        ("named", {"batches": []}),
        ("raised", {"failure": None}),
        ("raised", {"failure": {"guard": None}}),
        ("raised", {"batches": [{"batch": 1}]}),
    ],
)
def test_what_is_not_shown(question, changes):
    assert guarded.shown(*found(question))
    assert not guarded.shown(*found(question, **changes))


@pytest.mark.parametrize("change", ["late", "twice", "one field", "one more"])
def test_fields_must_be_named_once_and_at_the_first_replay(change):
    case, record = found("named")
    first, second = record["findings"]
    other = first | {"message": "stalegraph guard: query_start_loc of layer l moved"}
    record["findings"] = {
        "late": [first, second | {"replays_before": 1}],
        "twice": [first, second, second],
        "one field": [first],
        "one more": [first, second, other],
    }[change]
    assert not guarded.shown(case, record)


def test_the_guards_message_is_found_below_another_exception():
    try:
        try:
            raise StaleReadError("num_splits moved")
        except StaleReadError as error:
            raise RuntimeError("the engine is dead") from error
    except RuntimeError as error:
        assert guarded.failure(error) == {
            "kind": "RuntimeError", "message": "the engine is dead", "guard": "num_splits moved",
        }  # fmt: skip
    assert guarded.failure(ValueError("x"))["guard"] is None


def test_the_switch_takes_the_hooks_out_of_the_way_and_leaves_the_class_as_it_is():
    class Wrapper:
        def __call__(self, word="own"):
            return word

    own, watching = Wrapper.__call__, guard.Guard("warn")
    watching.hook(Wrapper, "__call__", lambda original: lambda wrapper, word="": "hooked " + original(wrapper, word))
    switch, standing = guarded.Switch(watching), Wrapper.__call__
    for _ in range(2):
        switch.off()
        assert Wrapper()("word") == "word" and Wrapper()() == "own"
        switch.on()
        assert Wrapper()("word") == "hooked word"
    assert Wrapper.__call__ is standing
    watching.unhook()
    assert Wrapper.__call__ is own


def test_the_price_is_what_is_added_from_one_turn_to_the_one_beside_it():
    drifting = [{"on": 2.0 + at / 10 + 0.01, "off": 2.0 + at / 10} for at in range(100)] + [{"on": 9.0, "off": 2.0}]
    found = guarded.prices(drifting)
    assert found["added_us"]["median"] == pytest.approx(10) and found["added_us"]["pairs"] == 101
    low, high = found["added_us"]["interval"]
    assert low == pytest.approx(10) and high == pytest.approx(10)
    assert found["ratio"] == pytest.approx(1 + 0.01 / found["off"]["median"])
    assert guarded.prices([])["ratio"] is None and guarded.price(guarded.prices([])) == "too few steps to time"


def test_the_interval_covers_the_true_median_in_nineteen_cases_of_twenty():
    import random

    draw, hits = random.Random(3), 0
    for _ in range(400):
        pairs = [{"on": 2.0 + draw.gauss(0.005, 0.05), "off": 2.0} for _ in range(60)]
        low, high = guarded.prices(pairs)["added_us"]["interval"]
        hits += low <= 5.0 <= high
    assert 0.93 * 400 <= hits <= 0.995 * 400


@pytest.mark.parametrize(
    "words, says",
    [
        (["--batches", "0"], "batches is '0'"),
        (["--cost-batches", "1,x"], "cost-batches is '1,x'"),
        (["--cost-tokens", "21"], "cost-tokens 21"),
        (["--rounds", "0"], "rounds 0"),
    ],
)
def test_bad_options_are_refused(words, says):
    parser = argparse.ArgumentParser()
    guarded.add_arguments(parser)
    with pytest.raises(UsageError, match=says):
        guarded.main(parser.parse_args(["--out", "x.json", *words]))


def test_no_vllm_is_a_usage_error(monkeypatch, capsys):
    monkeypatch.setattr(timings, "installed_version", lambda: None)
    with pytest.raises(UsageError, match="not installed"):
        timings.release()


RECORD = Path(__file__).parents[1] / "repro" / "recorded" / "h200" / "vllm-0.20.2" / "guard.json"


@pytest.mark.skipif(not RECORD.is_file(), reason="no guard.json was recorded on an H200")
def test_the_recorded_guard():
    data = json.loads(RECORD.read_text())["data"]
    assert {(one["question"], one["runner"]) for one in data["engines"]} >= {
        ("silent", "v1"), ("named", "v1"), ("raised", "v1"), ("silent", "v2"), ("named", "v2"),
    }  # fmt: skip
    for one in data["engines"]:
        case = types.SimpleNamespace(question=one["question"])
        case.settings = types.SimpleNamespace(batches=(1, 3, 8))
        assert one["shown"] and guarded.shown(case, one)
    prices = {
        (one["model"], one["runner"], each["batch"]): each["ratio"] for one in data["cost"] for each in one["batches"]
    }
    assert set(prices) == {(m, r, b) for m in ("reciter", "deep") for r in ("v1", "v2") for b in (1, 64)}
    assert all(ratio <= guarded.MOST_COST for ratio in prices.values())


def test_with_a_bf16_cache_the_v2_runners_warm_up_must_be_named_until_it_is_fixed():
    def questions(version):
        return [(one.question, one.runner) for one in guarded.plan_bf16({"long": "folder"}, (1,), 9, version)]

    assert questions("0.20.2") == questions("0.15.0") == [("silent", "v1"), ("planned", "v2")]
    assert questions("0.22.0") == questions("0.33.0") == [("silent", "v1"), ("silent", "v2")]
    case = guarded.plan_bf16({"long": "folder"}, (1,), 9, "0.20.2")[1]
    findings = [
        {"message": f"decode.scheduler_metadata.{field} of layer l {what} of batch 1: 0x7f", "replays_before": 0}
        for field in guarded.STALE
        for what in [guarded.PLANNED]
    ]
    assert guarded.shown(case, {"graphs_noted": 4, "findings": findings})
    assert not guarded.shown(case, {"graphs_noted": 4, "findings": findings[:1]})
    moved = [{**one, "message": one["message"].replace(guarded.PLANNED, "moved since capture")} for one in findings]
    assert not guarded.shown(case, {"graphs_noted": 4, "findings": moved})


RECORD_BF16 = RECORD.with_name("guard_bf16.json")


def test_the_recorded_guard_names_what_the_v2_runners_warm_up_planned():
    """Real engines of vLLM 0.20.2 as installed, bf16 cache: V1 is right and silent, V2 is wrong and is told why."""
    data = json.loads(RECORD_BF16.read_text())["data"]
    v1, v2 = data["engines"]
    assert [(one["question"], one["runner"], one["builder"]) for one in (v1, v2)] == [
        ("silent", "v1", "installed"),
        ("planned", "v2", "installed"),
    ]
    for one in (v1, v2):
        case = types.SimpleNamespace(question=one["question"], settings=types.SimpleNamespace(batches=(1, 3, 8)))
        assert one["shown"] and guarded.shown(case, one) and all(batch["replays"] for batch in one["batches"])
    assert all(batch["accuracy"] == 1 for batch in v1["batches"])
    assert all(batch["accuracy"] < 0.5 for batch in v2["batches"])
