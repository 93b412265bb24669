"""The one-file reproduction: short, self-contained, the same checkpoint as the package's, and its exit codes."""

import ast
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import stub_release
import torch
from safetensors.torch import load_file

from stalegraph.reciter import Reciter
from stalegraph.vllm.export import config

SCRIPT = Path(__file__).parents[1] / "repro" / "issue_33638.py"


def run(tmp_path, *words, site=None, **environment):
    """The script, copied to a folder of its own, with that folder as the working directory."""
    folder = tmp_path / "empty"
    folder.mkdir()
    shutil.copy(SCRIPT, folder)
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "STALEGRAPH_HOTFIX")}
    path = {"PYTHONPATH": str(site)} if site else {}
    command = [sys.executable, SCRIPT.name, *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env={**clean, **path, **environment})
    assert sorted(path.name for path in folder.iterdir()) in ([SCRIPT.name], ["__pycache__", SCRIPT.name])
    return done


def test_it_is_short_and_imports_torch_and_vllm_alone():
    source = SCRIPT.read_text()
    assert len(source.splitlines()) < 200
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module.split(".")[0])
    assert found - set(sys.stdlib_module_names) == {"torch", "vllm"}


def test_its_checkpoint_is_the_reciter(tmp_path):
    spec = importlib.util.spec_from_file_location("issue", SCRIPT)
    issue = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(issue)
    issue.write_checkpoint(tmp_path)
    model = Reciter(len(issue.PROMPT.encode()))
    mine, own = load_file(tmp_path / "model.safetensors"), model.state_dict()
    assert mine.keys() == own.keys() and all(torch.equal(mine[name], own[name]) for name in own)
    written, wanted = json.loads((tmp_path / "config.json").read_text()), config(model, "DeepseekV2ForCausalLM")
    assert {name: wanted[name] for name in written} == written


@pytest.mark.parametrize("version, code, word", [("0.15.0", 1, "WRONG"), ("0.20.2", 0, "RIGHT")])
def test_the_verdict_in_an_empty_folder(tmp_path, version, code, word):
    done = run(tmp_path, site=stub_release.install(tmp_path / "site", version))
    assert done.returncode == code, done.stdout + done.stderr
    assert word in done.stdout and f"eager (vLLM {version}), 100.0% right" in done.stdout


def test_the_hotfix_cures_it_where_asked_for(tmp_path):
    site = stub_release.install(tmp_path / "site", "0.15.0")
    assert run(tmp_path, site=site, STALEGRAPH_HOTFIX="auto").returncode == 0


@pytest.mark.parametrize("fails", ("memory", "killed", "import"))
def test_what_is_not_the_bug_cannot_tell(tmp_path, fails):
    done = run(tmp_path, site=stub_release.install(tmp_path / "site", "0.15.0"), STUB_VLLM_FAILS=fails)
    assert done.returncode == 125 and "cannot tell" in done.stdout


def test_without_vllm_it_cannot_tell(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 125 and "No module named 'vllm'" in done.stdout


def test_usage(tmp_path):
    assert run(tmp_path, "--loud").returncode == 2
