"""Engines in child processes: what they are started with, what is seen of their builds, what is recorded and told."""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import stub_release
import torch

from stalegraph.errors import UsageError
from stalegraph.vllm import engine, evidence, server, story
from stalegraph.vllm.builds import Builds, addresses
from stalegraph.vllm.engine import Settings, Turns, arguments, capture_sizes, environment

# ---------------------------------------------------------------------------------------------------- the builds


class Graph:
    """In the place of torch.cuda.CUDAGraph."""

    def capture_begin(self):
        pass

    def replay(self):
        pass


def decode(rows, at):
    """Decode metadata whose planned tensors are those of `at`."""
    carrier = SimpleNamespace(tile_scheduler_metadata=at[0], num_splits=at[1])
    return SimpleNamespace(seq_lens=SEQ_LENS[:rows], block_table=TABLE[:rows], scheduler_metadata=carrier)


SEQ_LENS, TABLE = torch.ones(8, dtype=torch.int32), torch.zeros((8, 4), dtype=torch.int32)


def watched(returns):
    """(watcher, builder, graph class) where the builder hands out `returns` one after the other."""

    class Backend:
        class FlashMLAMetadataBuilder:
            def _build_decode(self, *args, **kwargs):
                return returns.pop(0)

    class OwnGraph(Graph):
        pass

    ticks = iter(range(10_000))
    builds = Builds(clock=lambda: next(ticks) / 1000)
    builds.attach(Backend, OwnGraph)
    return builds, Backend.FlashMLAMetadataBuilder(), OwnGraph


def planned():
    return torch.zeros((132, 8), dtype=torch.int32), torch.zeros(9, dtype=torch.int32)


def test_a_step_is_held_to_the_build_right_before_its_graphs_capture():
    warm, own, fresh, again = planned(), planned(), planned(), planned()
    returns = [decode(4, one) for one in (warm, own, fresh, again, own)]
    builds, builder, kind = watched(list(returns))
    builder._build_decode()  # warms up
    graph = kind()
    builder._build_decode(seq_lens_device=SEQ_LENS)
    graph.capture_begin()
    builds.begin()
    for _ in range(3):
        builder._build_decode()
        graph.replay()
    found = builds.summary()
    assert found["captured"] == addresses(returns[1]) and found["last"] == addresses(returns[4])
    assert found["replays"] == found["builds"] == 3
    assert found["stale_fields"] == ["tile_scheduler_metadata", "num_splits"]
    splits = [[step, at] for step, field, at in found["moves"] if field == "num_splits"]
    assert splits == [[0, fresh[1].data_ptr()], [1, again[1].data_ptr()], [2, own[1].data_ptr()]]
    assert found["us_per_build"] == pytest.approx(1000) and found["ms_per_token"] == pytest.approx(2)


def test_steady_addresses_are_not_stale():
    own = planned()
    builds, builder, kind = watched([decode(2, own) for _ in range(4)])
    builder._build_decode()
    graph = kind()
    graph.capture_begin()
    builds.begin()
    for _ in range(3):
        builder._build_decode()
        graph.replay()
    assert builds.summary()["stale_fields"] == [] and len(builds.summary()["moves"]) == 4


def test_piecewise_graphs_and_eager_steps_are_left_out():
    builds, builder, kind = watched([decode(1, planned()) for _ in range(2)])
    piece = kind()
    piece.capture_begin()  # no build came before
    builder._build_decode()
    piece.replay()
    found = builds.summary()
    assert found["replays"] == 0 and found["captured"] is None and found["builds"] == 1
    assert found["ms_per_token"] is None


def test_both_carriers_are_read():
    metadata, splits = planned()
    old = SimpleNamespace(seq_lens=SEQ_LENS, block_table=TABLE, tile_scheduler_metadata=metadata, num_splits=splits)
    assert addresses(old) == addresses(decode(8, (metadata, splits)))


def test_a_graph_is_not_kept_alive():
    import gc
    import weakref

    builds, builder, kind = watched([decode(1, planned())])
    builder._build_decode()
    graph = kind()
    graph.capture_begin()
    ref = weakref.ref(graph)
    del graph
    gc.collect()
    assert ref() is None and len(builds.captured) == 0 and len(builds.order) == 1


# -------------------------------------------------------------------------------------------------- the settings


def test_capture_sizes_reach_the_largest_batch():
    assert capture_sizes((1, 3)) == [1, 2, 4, 8] and capture_sizes((5, 33)) == [1, 2, 4, 8, 16, 32, 64]


@pytest.mark.parametrize("mode", engine.GRAPH_MODES)
def test_the_engines_arguments(mode):
    found = arguments(Settings("model", b"text", mode=mode, batches=(9,)))
    assert found["kv_cache_dtype"] == "fp8" and found["attention_config"] == {"backend": "FLASHMLA"}
    assert found["max_num_seqs"] == 16 and found["skip_tokenizer_init"] and found["block_size"] == 64
    assert ("enforce_eager" in found) == (mode == "eager")
    graphs = found.get("compilation_config", {})
    assert graphs.get("cudagraph_mode") == ("FULL_DECODE_ONLY" if mode == "full" else None)


def test_arguments_that_a_release_lacks_are_left_out():
    known = {"seed"}
    found = arguments(Settings("model", b"text"), known)
    assert "seed" in found and "kv_cache_memory_bytes" not in found and "model" in found


def test_another_models_limits_are_its_own():
    found = arguments(Settings("model", b"text", recites=False))
    assert not found["skip_tokenizer_init"] and "gpu_memory_utilization" not in found and "max_model_len" not in found


def test_the_childs_environment(tmp_path):
    found = environment(Settings(str(tmp_path), b"", builder="hotfix", runner="v2"))
    assert found["STALEGRAPH_HOTFIX"] == "auto" and found["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert found["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" and found["HF_HUB_OFFLINE"] == "1"
    found = environment(Settings("owner/model", b""))
    assert found["STALEGRAPH_HOTFIX"] == "off" and "HF_HUB_OFFLINE" not in found
    assert "VLLM_USE_V2_MODEL_RUNNER" not in found


def test_turns_are_taken_one_at_a_time(tmp_path):
    import threading
    import time

    inside, most, turns = [], [], Turns(str(tmp_path), 1)

    def ask():
        with turns.mine():
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.05)
            inside.pop()

    threads = [threading.Thread(target=ask) for _ in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert most == [1, 1, 1]


def test_the_runner_is_read_from_the_engines_core():
    runner = type("GPUModelRunner", (), {"__module__": "vllm.v1.worker.gpu.model_runner"})()
    at = SimpleNamespace(model_runner=runner)
    for name in ("worker", "driver_worker", "model_executor", "engine_core", "engine_core"):
        at = SimpleNamespace(**{name: at})
    assert engine.runner_of(at) == "v2" and engine.runner_of(None) is None


# ------------------------------------------------------------------------------------------------- the evidence


def test_the_plan_of_an_affected_release():
    found = evidence.plan("0.15.0")
    assert {builder for _, _, mode, builder in found if mode == "full"} >= {"installed", "buffers-only", "hotfix"}
    assert "regressed" not in {builder for *_, builder in found} and {mode for _, _, mode, _ in found} == {
        "eager", "full", "default",
    }  # fmt: skip


def test_the_plan_of_a_fixed_release():
    found = evidence.plan("0.20.2")
    for place in (("DeepseekV2ForCausalLM", "v1"), ("DeepseekV2ForCausalLM", "v2"), ("DeepseekV3ForCausalLM", "v1")):
        builders = {builder for *where, mode, builder in found if tuple(where) == place and mode == "full"}
        assert builders == {"installed", "regressed", "copying", "inplace", "ingraph"}
    with pytest.raises(UsageError):
        evidence.plan("0.40.0")


def test_evidence_is_recorded_and_told(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(stub_release.install(tmp_path / "site", "0.15.0")))
    source = evidence.Provenance("stand-in", 132, "none", "2", "0.15.0", "none", "none", "2000-01-01", "test")
    monkeypatch.setattr(evidence, "provenance", lambda command: source)
    monkeypatch.setattr(evidence, "TOKENS", 8)
    parser = argparse.ArgumentParser()
    evidence.add_arguments(parser)
    out = tmp_path / "stand-in" / "vllm-0.15.0"
    words = ["--out", str(out), "--only", "engine", "--limit", "3", "--jobs", "3"]
    assert evidence.main(parser.parse_args(words)) == 0
    record = json.loads((out / "engine.json").read_text())
    assert [one["builder"] for one in record["data"]["engines"]] == ["installed", "installed", "buffers-only"]
    monkeypatch.setenv("STALEGRAPH_RECORDED", str(tmp_path))
    told = story.recorded("0.15.0", "stand-in")
    assert not told.live and "not run now" in told.caption
    assert told.find("eager", "installed", 3).accuracy == 1.0
    wrong = told.find("full", "regressed", 3)  # on this release the installed builder is the regressed one
    assert wrong.accuracy == 0.0 and wrong.stale_fields == ["tile_scheduler_metadata", "num_splits"]
    assert wrong.place("num_splits", 0) != wrong.captured["num_splits"]
    assert told.find("full", "buffers-only", 5).verdict == "crashed"
    with pytest.raises(UsageError, match="allowed"):
        told.find("full", "copying", 3)


def test_the_story_is_live_on_rung_vllm(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(stub_release.install(tmp_path, "0.20.2")))
    told = story.tell("vllm", "0.15.0", prompt=b"some words ", builders=["regressed", "copying"], batches=[3], tokens=6)
    assert told.live and told.release == "0.20.2" and "run now" in told.caption
    assert told.find("eager", "installed", 3).accuracy == told.find("full", "copying", 3).accuracy == 1.0
    assert told.find("full", "regressed", 3).accuracy == 0.0


# --------------------------------------------------------------------------------- what was recorded on hardware


def by_kind(release):
    found = {}
    for one in story.recorded(release).told:
        found.setdefault((one.architecture, one.runner, one.mode, one.builder), {})[one.batch] = one
    return found


def test_the_recorded_affected_release_shows_all_that_it_must():
    """vLLM 0.15.0 as shipped, on an H200."""
    found = by_kind("0.15.0")
    v2 = ("DeepseekV2ForCausalLM", "v1")
    assert all(one.accuracy == 1 for one in found[(*v2, "eager", "installed")].values())
    for mode in ("full", "default"):
        assert all(one.accuracy < 0.2 for one in found[(*v2, mode, "installed")].values())
        cured = found[(*v2, mode, "hotfix")]
        assert sorted(cured) == [1, 3, 5, 8] and all(one.accuracy == 1 for one in cured.values())
    alone = found[(*v2, "full", "buffers-only")]
    assert alone[3].accuracy == 1 and alone[5].verdict == "crashed" and "illegal memory access" in alone[5].why


def test_the_recorded_v2_runner_has_the_bug_and_the_cure():
    found = by_kind("0.15.0")
    v2 = ("DeepseekV2ForCausalLM", "v2")
    assert all(one.accuracy < 0.2 for one in found[(*v2, "full", "installed")].values())
    for mode, builder in (("eager", "installed"), ("full", "hotfix")):
        assert all(one.accuracy == 1 for one in found[(*v2, mode, builder)].values())


@pytest.mark.parametrize("release, code", [("0.15.0", 1), ("0.20.2", 0)])
def test_the_recorded_issue_script(release, code):
    path = Path(__file__).parents[1] / "repro" / "recorded" / "h200" / f"vllm-{release}" / "issue.json"
    assert json.loads(path.read_text())["data"]["exit_code"] == code


def test_the_recorded_fixed_release_shows_all_that_it_must():
    """vLLM 0.20.2, both runners, both architectures, on an H200."""
    found = by_kind("0.20.2")
    assert {kind[:2] for kind in found} == {
        ("DeepseekV2ForCausalLM", "v1"), ("DeepseekV2ForCausalLM", "v2"), ("DeepseekV3ForCausalLM", "v1"),
    }  # fmt: skip
    for (*_, builder), batches in found.items():
        assert {1, 3, 8} <= set(batches)
        for one in batches.values():
            assert one.accuracy < 0.2 if builder == "regressed" else one.accuracy == 1
            assert bool(one.stale_fields) == (builder == "regressed")


# --------------------------------------------------------------------------------------------------- the server


def test_the_servers_command_line():
    words = server.command("model", 8123, server.FULL)
    assert words[1:5] == ["-m", "vllm.entrypoints.cli.main", "serve", "model"]
    assert words[words.index("--kv-cache-dtype") + 1] == "fp8" and words[words.index("--port") + 1] == "8123"
    assert json.loads(words[words.index("--compilation-config") + 1])["cudagraph_mode"] == "FULL_DECODE_ONLY"


SERVER = """
import json, sys, os
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = (asked["prompt"] * 9)[: asked["max_tokens"]]
        text = text if os.environ["STALEGRAPH_HOTFIX"] == "auto" else "#" * len(text)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [{"text": text}]}).encode())

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def test_a_server_is_started_asked_and_ended(tmp_path, monkeypatch):
    site = tmp_path / "vllm" / "entrypoints" / "cli"
    site.mkdir(parents=True)
    for folder in (tmp_path / "vllm", tmp_path / "vllm" / "entrypoints", site):
        (folder / "__init__.py").touch()
    (site / "main.py").write_text(SERVER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for hotfix, text in (("auto", "abcabca"), ("off", "#######")):
        found = server.serve_once("model", "abc", 7, tmp_path / "log", hotfix=hotfix, timeout=60)
        assert found == {"text": text, "why": ""}
    (site / "main.py").write_text("raise SystemExit(3)\n")
    found = server.serve_once("model", "abc", 7, tmp_path / "log", hotfix="off", timeout=60)
    assert found["text"] is None and "code 3" in found["why"]


def test_the_recorded_server_was_wrong_without_the_plugin_and_right_with_it():
    path = Path(__file__).parents[1] / "repro" / "recorded" / "h200" / "vllm-0.15.0" / "serve.json"
    runs = json.loads(path.read_text())["data"]["runs"]
    assert {(one["mode"], one["hotfix"]) for one in runs} == {
        (m, h) for m in ("default", "full") for h in ("off", "auto")
    }
    assert all(one["right"] == 1 if one["hotfix"] == "auto" else one["right"] < 0.2 for one in runs)
