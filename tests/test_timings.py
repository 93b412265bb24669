"""Time per output token on a stand-in vLLM: engines take turns, a round at a time, and what fails is told."""

import argparse
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import stub_graphs

from stalegraph.errors import UsageError
from stalegraph.recorded import Provenance
from stalegraph.vllm import timings
from stalegraph.vllm.pace import SKIPPED, Lane, Stamps, spread

SOURCE = Provenance("stand-in", 132, "none", "2", "0.20.2", "none", "none", "2000-01-01", "test")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the command on a stand-in release; (exit code, engines by (model, variant))."""
    monkeypatch.setattr(timings, "provenance", lambda command: SOURCE)
    monkeypatch.syspath_prepend(str(stub_graphs.install(tmp_path / "site", "0.20.2")))

    def run(*words):
        parser, out = argparse.ArgumentParser(), tmp_path / "timings.json"
        timings.add_arguments(parser)
        given = ["--out", str(out), "--rounds", "2", "--tokens", "16", "--batches", "1,3", *words]
        code = timings.main(parser.parse_args(given))
        engines = json.loads(out.read_text())["data"]["engines"]
        return code, {(one["model"], one["variant"]): one for one in engines}

    return run


def test_every_variant_of_both_models_is_timed(run):
    code, engines = run("--variants", "eager,regressed,installed,copying")
    assert code == 0 and len(engines) == 8
    for (model, variant), one in engines.items():
        assert [each["batch"] for each in one["batches"]] == [1, 3]
        for each in one["batches"]:
            assert each["ms_per_token"]["count"] == 2 == len(each["rounds_ms"]) and each["ms_per_token"]["median"] > 0
            # Dummy weights have no right answer; the reciter's is right but for the bug.
            assert each["right"] is (None if model == "deep" else variant != "regressed")


def test_an_engine_that_the_gpu_fails_ends_alone_and_is_told(run, monkeypatch):
    monkeypatch.setenv("STUB_VLLM_FAILS", "gpu")  # at batch 3
    code, engines = run("--models", "reciter", "--variants", "eager,installed")
    assert code == 1
    for one in engines.values():
        first, second = one["batches"]
        assert first["ms_per_token"]["count"] == 2 and second["ms_per_token"] is None
        assert "illegal memory access" in one["failure"]["message"]


def test_engines_that_do_not_start_are_told(run, monkeypatch):
    monkeypatch.setenv("STUB_VLLM_FAILS", "killed")
    code, engines = run("--models", "reciter", "--variants", "eager,installed")
    assert code == 1
    assert all(not one["ended"]["ok"] and "SIGKILL" in one["ended"]["summary"] for one in engines.values())


def test_the_deep_model_is_deepseek_v2_lites_dense_shape(tmp_path):
    config = json.loads((timings.deep(tmp_path / "deep") / "config.json").read_text())
    wanted = {"num_hidden_layers": 27, "hidden_size": 2048, "num_attention_heads": 16, "kv_lora_rank": 512}
    wanted |= {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "intermediate_size": 10_944}
    wanted |= {"first_k_dense_replace": 27, "q_lora_rank": None}
    assert {name: config[name] for name in wanted} == wanted
    folders = {"deep": str(tmp_path / "deep"), "reciter": "r"}
    one, other = timings.plan(("deep", "reciter"), ("ingraph",), folders, (1, 64), 3, 20)
    found = timings.arguments(one, None)
    assert found["load_format"] == "dummy" and found["max_num_seqs"] == 64
    assert found["kv_cache_memory_bytes"] >= 64 * (len(timings.SHORT) + 256) * 27 * 576
    assert "load_format" not in timings.arguments(other, None)
    assert "kv_cache_memory_bytes" not in timings.arguments(one, {"seed"})


def test_the_plan_keeps_eager_and_its_name():
    found = timings.plan(("reciter",), timings.VARIANTS, {"reciter": "r"}, (1,), 3, 20)
    assert [(one.settings.mode, one.settings.builder) for one in found] == [
        ("eager", "installed"), ("full", "regressed"), ("full", "installed"),
        ("full", "ingraph"), ("full", "inplace"), ("full", "copying"),
    ]  # fmt: skip
    assert len({one.name for one in found}) == 6


# --------------------------------------------------------------------------------------------- stamps and lanes


def stamped(seconds):
    """Stamps of a builder whose builds end at `seconds`."""

    class FlashMLAMetadataBuilder:
        def _build_decode(self):
            return "metadata"

    times = iter(seconds)
    stamps = Stamps(clock=lambda: next(times))
    stamps.attach(SimpleNamespace(FlashMLAMetadataBuilder=FlashMLAMetadataBuilder))
    return stamps, FlashMLAMetadataBuilder()


def test_the_first_steps_are_left_out():
    seconds = [float(at) for at in range(SKIPPED)] + [100.0, 100.001, 100.002, 100.006]
    stamps, builder = stamped(seconds)
    found = stamps.round(lambda: [builder._build_decode() for _ in seconds])
    assert found["steps"] == len(seconds)
    assert found["mean_ms"] == pytest.approx(2) and found["median_ms"] == pytest.approx(1)


def test_a_round_is_not_mixed_with_the_one_before():
    stamps, builder = stamped(range(100))
    stamps.round(lambda: [builder._build_decode() for _ in range(50)])
    assert stamps.round(lambda: [builder._build_decode() for _ in range(SKIPPED + 2)])["mean_ms"] == pytest.approx(1e3)
    assert stamps.round(builder._build_decode)["mean_ms"] is None


def test_two_ways_take_turns_and_the_step_of_the_change_is_left_out():
    now, way, ended = [0.0], [None], []
    stamps, builder = stamped(iter(lambda: now[0], None))

    def ask():
        for _ in range(SKIPPED + 4 * 5 + 1):
            builder._build_decode()
            ended.append(way[0])
            # The step after a change is slow, whichever way it is.
            slow = len(ended) > 1 and ended[-1] != ended[-2]
            now[0] += {None: 9.0, "on": 0.003, "off": 0.002}[way[0]] + slow

    found = stamps.turns(ask, {name: lambda name=name: way.__setitem__(0, name) for name in ("on", "off")}, 5)
    assert found == [pytest.approx({"on": 3.0, "off": 2.0})] * 2
    order = ended[SKIPPED - 1 : SKIPPED - 1 + 20 : 5]
    assert order == ["on", "off", "off", "on"]
    now[0], way[0] = 0.0, None
    assert stamps.turns(builder._build_decode, {"on": print, "off": print}, 5) == []


def test_spread():
    assert spread([None]) is None and spread([5.0])["quartiles"] == [5.0, 5.0]
    found = spread([4.0, None, 1.0, 3.0, 2.0])
    assert found["median"] == 2.5 and found["range"] == [1.0, 4.0] and found["count"] == 4


def test_rounds_of_two_engines_never_overlap(tmp_path):
    inside, most, lock = [], [], threading.Lock()

    def child(name):
        lane = Lane(str(tmp_path), name)
        lane.arrive()
        turns = 0
        while lane.wait():
            with lock:
                inside.append(name)
                most.append(len(inside))
            turns += 1
            with lock:
                inside.remove(name)
            lane.arrive()
        return turns

    lanes = [Lane(str(tmp_path), name).lay() for name in ("a", "b")]
    with ThreadPoolExecutor(2) as pool:
        children = [pool.submit(child, name) for name in ("a", "b")]
        assert all(lane.arrived(one) for lane, one in zip(lanes, children))
        for _ in range(5):
            assert all(lane.go(one) for lane, one in zip(lanes, children))
        [lane.end() for lane in lanes]
        assert [one.result() for one in children] == [5, 5]
    [lane.close() for lane in lanes]
    assert most == [1] * 10


def test_a_child_that_ended_is_not_waited_for(tmp_path):
    lane = Lane(str(tmp_path), "a").lay()
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(lambda: None)
        assert not lane.arrived(ended) and not lane.go(ended)
    lane.close()


def test_a_parent_that_is_gone_reads_as_end(tmp_path):
    lane = Lane(str(tmp_path), "a").lay()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(Lane(str(tmp_path), "a").wait)
        while not waiting.running():
            pass
        # The reader has the pipe open before the last writer leaves.
        threading.Event().wait(0.2)
        lane.close()
        assert waiting.result(timeout=10) is False
    os.unlink(lane.down)


# --------------------------------------------------------------------------------------------------- bad options


@pytest.mark.parametrize(
    "words, says",
    [
        (["--models", "llama"], "models names 'llama'"),
        (["--variants", "hotfix"], "variants names 'hotfix'"),
        (["--batches", "1,,8"], "batches is '1,,8'"),
        (["--rounds", "0"], "rounds is 0"),
        (["--tokens", "5"], "tokens 5"),
    ],
)
def test_bad_options_are_refused(words, says):
    parser = argparse.ArgumentParser()
    timings.add_arguments(parser)
    with pytest.raises(UsageError, match=says):
        timings.main(parser.parse_args(["--out", "x.json", *words]))


def test_a_record_is_a_json_file():
    parser = argparse.ArgumentParser()
    timings.add_arguments(parser)
    with pytest.raises(UsageError, match="out is 'folder'"):  # before an engine is looked for
        timings.main(parser.parse_args(["--out", "folder"]))


RECORD = Path(__file__).parents[1] / "repro" / "recorded" / "h200" / "vllm-0.20.2" / "timings.json"


@pytest.mark.skipif(not RECORD.is_file(), reason="no timings.json was recorded on an H200")
def test_the_recorded_times_are_of_engines_that_ended_well_and_only_the_regressed_one_recites_wrong():
    engines = json.loads(RECORD.read_text())["data"]["engines"]
    assert [(one["model"], one["variant"]) for one in engines] == [
        (model, variant) for model in timings.MODELS for variant in timings.VARIANTS
    ]
    for one in engines:
        right = None if one["model"] == "deep" else one["variant"] != "regressed"
        assert one["ended"]["ok"] and [each["batch"] for each in one["batches"]] == [1, 8, 64]
        assert all(each["right"] is right and each["ms_per_token"]["count"] >= 5 for each in one["batches"])
