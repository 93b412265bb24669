"""The doctor: its verdict by version and by source, without importing vLLM; advice, redaction and shapes of output."""

import getpass
import json
import socket
import sys
from pathlib import Path

import pytest
import stub_release

from stalegraph.cli import main
from stalegraph.vllm import doctor


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A vLLM of some version that cannot be imported; `edit` changes its builder's source."""

    def install(version, edit=None):
        site = stub_release.install(tmp_path / "site", version)
        (site / "vllm" / "__init__.py").write_text("raise ImportError('libcudart.so.12 is missing')\n")
        backend = site / "vllm" / "v1" / "attention" / "backends" / "mla" / "flashmla.py"
        if edit:
            backend.write_text(edit(backend.read_text()))
        monkeypatch.syspath_prepend(str(site))
        return backend

    for name in ("VLLM_PLUGINS", "STALEGRAPH_HOTFIX", "VLLM_USE_V2_MODEL_RUNNER"):
        monkeypatch.delenv(name, raising=False)
    return install


def plugin(monkeypatch, on):
    monkeypatch.setattr(doctor, "hotfix_is_on", lambda: on)


def asked(capsys, *words):
    code = main(["doctor", *words])
    assert "vllm" not in sys.modules
    return code, capsys.readouterr().out


@pytest.mark.parametrize(
    "version, on, code, verdict, cured",
    [
        ("0.15.0", False, 1, "affected", False),
        ("0.15.0", True, 0, "affected", True),
        ("0.18.1", False, 1, "affected", False),
        ("0.19.1", False, 0, "not affected", False),
        ("0.20.2", True, 0, "not affected", False),
    ],
)
def test_the_verdict_and_its_exit_code(installed, monkeypatch, capsys, version, on, code, verdict, cured):
    installed(version)
    plugin(monkeypatch, on)
    got, out = asked(capsys, "--json")
    found = json.loads(out)
    assert len(out.splitlines()) == 1 and found["schema"] == 1
    assert got == code
    about = found["vllm"]
    assert (about["verdict"], about["by_version"], about["by_source"]) == (verdict, verdict, verdict)
    assert about["agree"] and about["cured"] == cured
    assert found["facts"]["vLLM"] == version


def test_padding_is_named_where_it_is_unsafe(installed, monkeypatch, capsys):
    plugin(monkeypatch, False)
    installed("0.19.1")
    assert "#33664" in asked(capsys)[1]


def test_version_and_source_that_disagree_are_told(installed, monkeypatch, capsys):
    plugin(monkeypatch, True)
    add = "        self.cg_buf_num_splits = self.cg_buf_tile_scheduler_metadata\n        carrier ="
    installed("0.15.0", lambda source: source.replace("        carrier =", add))
    code, out = asked(capsys, "--json")
    about = json.loads(out)["vllm"]
    assert code == 0 and about["verdict"] == "cannot tell" and not about["agree"] and not about["cured"]
    assert "disagree" in about["advice"][0] and "reproduce --rung vllm" in about["advice"][0]


def test_outside_of_the_map_the_source_alone_speaks(installed, monkeypatch, capsys):
    plugin(monkeypatch, True)
    installed("0.40.0", lambda source: "".join(line for line in source.splitlines(True) if "# FIXED" not in line))
    code, out = asked(capsys, "--json")
    about = json.loads(out)["vllm"]
    assert about["by_version"] == "cannot tell" and about["by_source"] == about["verdict"] == "affected"
    assert code == 1 and not about["cured"]  # the hot-fix leaves such a release alone
    assert any("outside the release map" in one for one in about["advice"])


def test_without_a_builder_the_version_alone_speaks(installed, monkeypatch, capsys):
    plugin(monkeypatch, False)
    installed("0.15.0").unlink()
    about = json.loads(asked(capsys, "--json")[1])["vllm"]
    assert (about["verdict"], about["by_source"]) == ("affected", "cannot tell")


def test_without_vllm_there_is_nothing_to_cure(capsys):
    code, out = asked(capsys)
    assert code == 0 and "#33638: no vLLM is installed here, so there is none to judge" in out
    assert "cannot tell" not in out


def test_the_hotfix_counts_only_where_vllm_would_load_it(monkeypatch):
    class Point:
        name = "stalegraph_hotfix"

    monkeypatch.setattr(doctor.importlib.metadata, "entry_points", lambda group: [Point])
    for name, value, on in (
        ("VLLM_PLUGINS", "stalegraph_hotfix,other", True),
        ("VLLM_PLUGINS", "other", False),
        ("VLLM_PLUGINS", "", False),
        ("STALEGRAPH_HOTFIX", "off", False),
        ("STALEGRAPH_HOTFIX", "inplace", True),
    ):
        with monkeypatch.context() as one:
            one.delenv("VLLM_PLUGINS", raising=False)
            one.delenv("STALEGRAPH_HOTFIX", raising=False)
            one.setenv(name, value)
            assert doctor.hotfix_is_on() is on, (name, value)
    monkeypatch.setattr(doctor.importlib.metadata, "entry_points", lambda group: [])
    assert not doctor.hotfix_is_on()


@pytest.mark.parametrize(
    "version, asks, says",
    [
        ("0.15.0", None, "v1 for DeepseekV2"),
        ("0.24.0", None, "v2 for DeepseekV2"),
        ("0.15.0", "1", "v2, by VLLM_USE"),
    ],
)
def test_the_runner(installed, monkeypatch, version, asks, says):
    installed(version)
    if asks:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", asks)
    assert says in doctor.runner()


def test_markdown_can_be_pasted_and_names_nobody(installed, monkeypatch, capsys):
    installed("0.15.0")
    plugin(monkeypatch, False)
    monkeypatch.setattr(Path, "home", lambda: Path("/home/someone"))
    monkeypatch.setattr(getpass, "getuser", lambda: "someone")
    monkeypatch.setattr(socket, "gethostname", lambda: "lab-machine-7")
    monkeypatch.setattr(sys, "executable", "/home/someone/venvs/lab-machine-7/python")
    out = asked(capsys, "--markdown")[1]
    assert out.startswith("### Environment") and "### Diagnosis" in out and "\n- vLLM: `0.15.0`" in out
    assert "someone" not in out and "lab-machine-7" not in out and "~/venvs" in out


def test_a_name_inside_a_longer_word_stays(monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: Path("/home/ann"))
    monkeypatch.setattr(getpass, "getuser", lambda: "ann")
    monkeypatch.setattr(socket, "gethostname", lambda: "box1")
    assert doctor.redact("cannot tell ann about box1 or /home/ann/x") == "cannot tell <user> about <host> or ~/x"


def test_every_fact_is_there_even_where_asking_fails(monkeypatch, capsys):
    def fail():
        raise RuntimeError("driver too old\nand more")

    monkeypatch.setattr(doctor, "gpu", fail)
    out = asked(capsys)[1]
    assert "unknown (driver too old)" in out
    for name in (
        "GPU",
        "driver",
        "Python",
        "torch",
        "vLLM",
        "FlashMLA library",
        "FP8 KV cache",
        "model runner",
        "rung vllm",
    ):
        assert name in out
