"""`reproduce`: exit codes, what is shown, and bad input, on the simulator and on a stand-in vLLM."""

import argparse
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import stub_release

from stalegraph.cli import main as cli
from stalegraph.isolate import Isolated
from stalegraph.vllm import reproduce
from stalegraph.vllm.export import export
from stalegraph.vllm.printout import marked
from stalegraph.vllm.verdict import CRASHED, RIGHT, UNKNOWN, WRONG, Run, exit_code

SCRIPT = Path(__file__).parents[1] / "repro" / "reproduce.py"


def args(*words):
    parser = argparse.ArgumentParser()
    reproduce.add_arguments(parser)
    return parser.parse_args(list(words))


def report(capsys, *words):
    """(exit code, the one JSON object)."""
    code = reproduce.main(args(*words, "--json"))
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 1
    found = json.loads(out)
    assert found["schema"] == 1 and found["exit_code"] == code
    return code, found


# ------------------------------------------------------------------------------------------------- the simulator


@pytest.mark.parametrize("builder, code", [("regressed", 1), ("copying", 0), ("inplace", 0), ("ingraph", 0)])
def test_the_simulator_tells_each_builder(capsys, builder, code):
    got, found = report(capsys, "--builder", builder, "--tokens", "6", "--batch", "1,3")
    assert got == code and found["rung"] == "sim"
    verdicts = {(run["mode"], run["batch"]): run["verdict"] for run in found["runs"]}
    assert verdicts["eager", 1] == verdicts["eager", 3] == RIGHT
    assert verdicts["full", 1] == verdicts["full", 3] == (WRONG if code else RIGHT)
    stale = {field for run in found["runs"] if run["mode"] == "full" for field in run["stale_fields"]}
    assert stale == ({"tile_scheduler_metadata", "num_splits"} if code else set())


@pytest.mark.parametrize("batch, code, verdict", [("3", 0, RIGHT), ("5", 1, CRASHED)])
def test_buffers_alone_uncover_the_padded_rows(capsys, batch, code, verdict):
    got, found = report(capsys, "--builder", "buffers-only", "--tokens", "4", "--batch", batch)
    assert got == code and found["runs"][-1]["verdict"] == verdict


def test_buffers_alone_do_where_padded_rows_hold_page_zero(capsys):
    assert report(capsys, "--builder", "buffers-only", "--tokens", "4", "--batch", "5", "--pad-block", "0")[0] == 0


def test_the_printed_report_shows_text_marks_addresses_and_versions(capsys):
    assert reproduce.main(args("--tokens", "40", "--life", "lucky")) == 1
    out = capsys.readouterr().out
    assert "rung sim" in out and "torch" in out and "^^^^" in out and "(exit 1)" in out
    moved = [line.split() for line in out.splitlines() if line.startswith(("tile_scheduler_metadata", "num_splits"))]
    assert [line[-1] for line in moved] == ["moved", "moved"] and all(line[1] != line[2] for line in moved)
    assert "\x1b" not in out


def test_wrong_bytes_are_marked_with_and_without_colour():
    assert marked(list(b"abxd"), list(b"abcd")) == "  abxd\n    ^"
    assert marked(list(b"ab"), list(b"abcd")) == "  ab  \n    __"
    assert "\x1b[38;5;166mx\x1b[0m" in marked(list(b"abxd"), list(b"abcd"), color=True)


def test_no_color_is_obeyed(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    run = Run("full", 1, WRONG, said=[[120]], expected=[[97]])
    for environment, colored in ((None, True), ("1", False)):
        monkeypatch.setenv("NO_COLOR", environment) if environment else monkeypatch.delenv("NO_COLOR", raising=False)
        out = Terminal()
        reproduce.print_report(reproduce.to_json(reproduce.check(args()), [run], 1, None), [run], out)
        assert ("\x1b" in out.getvalue()) == colored


def test_a_builder_of_a_file(tmp_path, capsys):
    head = "from stalegraph import ops\nfrom stalegraph.builders import CopyingBuilder, RegressedBuilder\n"
    (tmp_path / "good.py").write_text(head + "class Mine(CopyingBuilder):\n    pass\n")
    (tmp_path / "bad.py").write_text(head + "class Mine(RegressedBuilder):\n    pass\n")
    (tmp_path / "broken.py").write_text("import no_such_module_at_all\n")
    (tmp_path / "empty.py").write_text("x = 1\n")
    for name, code in (("good", 0), ("bad", 1), ("broken", 125), ("empty", 2)):
        assert reproduce.main(args("--builder-file", str(tmp_path / f"{name}.py"), "--tokens", "4")) == code, name
    capsys.readouterr()


# --------------------------------------------------------------------------------------------------- exit codes


def runs(eager, *graphs):
    return [Run("eager", 1, eager)] * bool(eager) + [Run("full", 1, verdict) for verdict in graphs]


@pytest.mark.parametrize(
    "found, code",
    [
        (runs(RIGHT, RIGHT), 0),
        (runs(RIGHT, RIGHT, WRONG), 1),
        (runs(RIGHT, CRASHED), 1),
        (runs(RIGHT, UNKNOWN), 125),
        (runs(RIGHT, UNKNOWN, WRONG), 1),
        (runs(RIGHT, RIGHT, UNKNOWN), 125),
        (runs(WRONG, WRONG), 125),
        (runs(UNKNOWN, RIGHT), 125),
        (runs(RIGHT), 125),
        (runs(None, WRONG), 1),
        ([], 125),
    ],
)
def test_exit_codes(found, code):
    assert exit_code(found) == code


def test_an_unexpected_exception_cannot_tell(monkeypatch, capsys):
    monkeypatch.setattr(reproduce, "reproduce", lambda request: 1 // 0)
    assert reproduce.main(args()) == 125 and reproduce.main(args("--bisect")) == 125
    assert "ZeroDivisionError" in capsys.readouterr().err


BAD = [
    (["--rung", "moon"], "rung"),
    (["--builder", "best"], "builder"),
    (["--builder", "installed"], "builder"),
    (["--batch", "0"], "batch"),
    (["--batch", "1,many"], "batch"),
    (["--tokens", "0"], "tokens"),
    (["--tokens", "9000"], "tokens"),
    (["--cudagraph-mode", "PIECEWISE"], "cudagraph-mode"),
    (["--cudagraph-mode", "default"], "cudagraph-mode"),
    (["--kv-cache-dtype", "bfloat16"], "kv-cache-dtype"),
    (["--life", "long"], "life"),
    (["--sm-count", "0"], "sm-count"),
    (["--runner", "v1"], "runner"),
    (["--rung", "vllm", "--runner", "v3"], "runner"),
    (["--architecture", "LlamaForCausalLM"], "architecture"),
    (["--model", "some/model"], "model"),
    (["--rung", "vllm", "--model", "./missing"], "model"),
    (["--prompt-file", "missing"], "prompt-file"),
    (["--builder-file", "missing"], "builder-file"),
    (["--timeout", "-1"], "timeout"),
]


@pytest.mark.parametrize("words, named", BAD, ids=[" ".join(words) for words, _ in BAD])
def test_bad_input_is_usage_and_125_under_bisect(words, named, capsys):
    assert reproduce.main(args(*words)) == 2
    error = capsys.readouterr().err
    assert named in error and "allowed" in error and len(error.splitlines()) == 1
    assert reproduce.main(args(*words, "--bisect")) == 125


@pytest.mark.parametrize("content, named", [("{}", "without MLA"), ("{", "no JSON"), (None, "no config.json")])
def test_a_folder_that_is_no_mla_model_is_refused(tmp_path, capsys, content, named):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert reproduce.main(args("--rung", "vllm", "--model", str(tmp_path))) == 2
    assert named in capsys.readouterr().err


def test_a_prompt_over_the_limit_is_refused(tmp_path, capsys):
    (tmp_path / "long").write_bytes(b"x" * 4097)
    assert reproduce.main(args("--prompt-file", str(tmp_path / "long"))) == 2
    assert "4096" in capsys.readouterr().err


def test_the_script_and_the_command_line_agree(tmp_path):
    for words, code in (
        (["--builder", "copying", "--tokens", "3"], 0),
        (["--nonsense"], 2),
        (["--nonsense", "--bisect"], 125),
    ):
        done = subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == code, done.stderr


@pytest.mark.parametrize("words, code", [(["--nonsense"], 2), (["--bisect", "--nonsense"], 125), (["--tokens"], 2)])
def test_the_stalegraph_command_refuses_what_it_does_not_know(words, code, capsys):
    with pytest.raises(SystemExit) as ended:
        cli(["reproduce", *words])
    assert ended.value.code == code and "reproduce" in capsys.readouterr().err


def test_the_stalegraph_command(capsys):
    assert cli(["reproduce", "--tokens", "3"]) == 1
    assert "the bug is reproduced" in capsys.readouterr().out


# --------------------------------------------------------------------------------------- a stand-in for the engine


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """Installs the stand-in vLLM as a release, on a machine that is said to have the GPU for it."""

    def install(version):
        monkeypatch.syspath_prepend(str(stub_release.install(tmp_path / "site", version)))
        monkeypatch.setattr(reproduce, "available", lambda *_: {"sim": None, "flashmla": None, "vllm": None})

    return install


def verdicts(found):
    return {(run["mode"], run["batch"]): run["verdict"] for run in found["runs"]}


def on_stub(capsys, *words):
    return report(capsys, "--rung", "vllm", "--tokens", "12", "--jobs", "2", *words)


def test_an_affected_release_is_wrong_in_every_graph_mode(stub, capsys):
    stub("0.15.0")
    code, found = on_stub(capsys)
    assert code == 1 and verdicts(found) == {("eager", 1): RIGHT, ("full", 1): WRONG, ("default", 1): WRONG}
    assert found["builder"] == "installed" and found["versions"]["vllm"] == "0.15.0"
    full = found["runs"][1]
    assert full["stale_fields"] == ["tile_scheduler_metadata", "num_splits"] and full["replays"] == 12
    then, now = full["addresses"]["num_splits"]
    assert then != now and full["addresses"]["seq_lens"][0] == full["addresses"]["seq_lens"][1]
    assert full["us_per_build"] > 0 and full["ms_per_token"] > 0


def test_a_fixed_release_is_right_until_the_bug_is_put_back(stub, capsys):
    stub("0.20.2")
    assert on_stub(capsys, "--cudagraph-mode", "eager+full", "--batch", "1,5")[0] == 0
    code, found = on_stub(capsys, "--cudagraph-mode", "eager+full", "--builder", "regressed")
    assert code == 1 and verdicts(found) == {("eager", 1): RIGHT, ("full", 1): WRONG}


@pytest.mark.parametrize("builder", ("copying", "inplace", "ingraph", "hotfix"))
def test_every_fix_cures_an_affected_release_padded_rows_included(stub, capsys, builder):
    stub("0.15.0")
    code, found = on_stub(capsys, "--builder", builder, "--cudagraph-mode", "full", "--batch", "1,3,8,5")
    assert code == 0 and set(verdicts(found).values()) == {RIGHT}
    assert all(run["stale_fields"] == [] for run in found["runs"])


def test_buffers_alone_crash_at_three_padded_rows(stub, capsys):
    stub("0.15.0")
    code, found = on_stub(capsys, "--builder", "buffers-only", "--cudagraph-mode", "full", "--batch", "3,5,8")
    assert code == 1 and verdicts(found) == {("full", 3): RIGHT, ("full", 5): CRASHED, ("full", 8): UNKNOWN}
    assert "illegal memory access" in found["runs"][1]["why"] and "earlier batch" in found["runs"][2]["why"]


@pytest.mark.parametrize(
    "fails, why",
    [("memory", "Free memory"), ("killed", "SIGKILL"), ("import", "flashinfer")],
    ids=["memory", "killed", "import"],
)
def test_what_is_not_the_bug_cannot_tell(stub, capsys, monkeypatch, fails, why):
    stub("0.15.0")
    monkeypatch.setenv("STUB_VLLM_FAILS", fails)
    code, found = on_stub(capsys, "--cudagraph-mode", "full")
    assert code == 125 and why in found["runs"][0]["why"]


def test_an_engine_that_hangs_cannot_tell():
    ended = Isolated(exit_code=None, signal="SIGKILL", timed_out=True, seconds=600.0)
    settings = reproduce.engine.Settings("model", b"text")
    (run,) = reproduce.runs_of(settings, None, ended)
    assert run.verdict == UNKNOWN and "600 s" in run.why


def test_a_release_outside_of_the_map_cannot_tell(stub, capsys):
    stub("0.40.0")
    code, found = on_stub(capsys)
    assert code == 125 and "outside the release map" in found["reason"] and found["runs"] == []


def test_without_vllm_or_without_a_gpu_it_cannot_tell(tmp_path, monkeypatch, capsys):
    code, found = report(capsys, "--rung", "vllm")
    assert code == 125 and "pip install vllm" in found["reason"]
    monkeypatch.syspath_prepend(str(stub_release.install(tmp_path, "0.15.0")))
    monkeypatch.setattr(reproduce, "available", lambda *_: {"vllm": "no CUDA device is visible"})
    code, found = report(capsys, "--rung", "vllm")
    assert code == 125 and "no CUDA device" in found["reason"]


@pytest.fixture
def other_model(tmp_path):
    """An MLA model that is not the reciter: the same files, but nothing that says what it recites."""
    folder = export(tmp_path / "other", b"some text")
    (folder / "prompt.txt").unlink()
    return str(folder)


def test_another_model_is_compared_with_its_own_eager_answers(stub, capsys, other_model):
    stub("0.15.0")
    code, found = on_stub(capsys, "--model", other_model, "--cudagraph-mode", "full")
    assert code == 1 and verdicts(found) == {("eager", 1): RIGHT, ("full", 1): WRONG}
    assert found["runs"][1]["first_wrong"] == [0] and "without graphs" in found["runs"][1]["why"]


def test_another_model_on_a_fixed_release_is_right(stub, capsys, other_model):
    stub("0.20.2")
    assert on_stub(capsys, "--model", other_model, "--cudagraph-mode", "full")[0] == 0


def test_an_eager_engine_that_disagrees_with_itself_is_no_judge(stub, capsys, monkeypatch, other_model):
    stub("0.20.2")
    monkeypatch.setenv("STUB_VLLM_FAILS", "drift")
    code, found = on_stub(capsys, "--model", other_model, "--cudagraph-mode", "full")
    assert code == 125 and "two answers" in found["runs"][0]["why"]


def test_an_exported_checkpoint_recites_its_own_prompt(stub, capsys, tmp_path):
    stub("0.15.0")
    folder = export(tmp_path / "mine", b"my own words, said again and again; ")
    code, found = on_stub(capsys, "--model", str(folder), "--cudagraph-mode", "eager")
    assert code == 125 and verdicts(found) == {("eager", 1): RIGHT}  # eager alone decides nothing
    assert bytes(found["runs"][0]["said"][0]) == b"my own words"
