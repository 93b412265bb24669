"""environment.yml, the locks, the CI file and pyproject.toml stay in step."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
ENVIRONMENT = (ROOT / "environment.yml").read_text()


def names(requirements):
    return {re.match(r"[A-Za-z0-9_.-]+", one).group().lower() for one in requirements}


def locked(text):
    return dict(re.findall(r"^([A-Za-z0-9_.-]+)==([^\s;]+)", text, re.M))


def test_environment_brings_all_the_products_packages():
    extras = re.search(r"-e \.\[([a-z,]+)\]", ENVIRONMENT).group(1).split(",")
    lock = ROOT / re.search(r"-r (\S+)", ENVIRONMENT).group(1)
    pinned = {name.lower() for name in locked(lock.read_text())}
    have = set().union(*(names(EXTRAS[extra]) for extra in extras)) | pinned | names(PROJECT["project"]["dependencies"])
    assert {"jupyterlab", "torch", "vllm", "matplotlib", "papermill"} <= have
    assert set(extras) >= {"notebooks", "test", "gpu"} and "vllm" in pinned  # FlashMLA is inside vLLM


def test_environments_vllm_is_one_that_the_package_allows():
    lock = ROOT / re.search(r"-r (\S+)", ENVIRONMENT).group(1)
    version = tuple(map(int, locked(lock.read_text())["vllm"].split(".")))
    low, high = re.fullmatch(r"vllm>=([\d.]+),<=([\d.]+)", EXTRAS["vllm"][0]).groups()
    assert tuple(map(int, low.split("."))) <= version <= tuple(map(int, high.split(".")))


def test_the_cpu_route_pins_torch_within_what_is_allowed():
    pin = re.fullmatch(r"torch==([\d.]+)\n", (ROOT / "constraints-cpu.txt").read_text()).group(1)
    least = next(one for one in PROJECT["project"]["dependencies"] if one.startswith("torch")).partition(">=")[2]
    assert tuple(map(int, pin.split("."))) >= tuple(map(int, least.split(".")))


def test_python_of_environment_is_allowed():
    python = re.search(r"python=(\d+)\.(\d+)", ENVIRONMENT).groups()
    least = re.search(r">=(\d+)\.(\d+)", PROJECT["project"]["requires-python"]).groups()
    assert tuple(map(int, python)) >= tuple(map(int, least))


def test_ci_runs_the_same_two_commands():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert re.findall(r"- run: (.+)", workflow) == ["make test", "make walkthrough"]
    script = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line and not line.startswith("#")]
    assert script[-1] == "exec make test" and len(script) == 3


def make(*words, tmp_path, driver):
    """`make -n` on a machine with or without an NVIDIA driver."""
    folders = [one for one in os.environ["PATH"].split(os.pathsep) if not (Path(one) / "nvidia-smi").exists()]
    if driver:
        (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        folders.insert(0, str(tmp_path))
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "constraints-cpu.txt"):
        (tmp_path / name).touch()
    environment = {**os.environ, "PATH": os.pathsep.join(folders)}
    return subprocess.run([shutil.which("make"), *words], cwd=tmp_path, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("words", [["gpu-env"], ["walkthrough", "RUNG=flashmla"], ["walkthrough", "RUNG=vllm"]])
def test_a_gpu_rung_has_its_own_locked_environment(words, tmp_path):
    done = make("-n", *words, tmp_path=tmp_path, driver=True)
    lock = re.search(r"\.venv-gpu/bin/python -m pip install .* -r (repro/locks/\S+) -e '\.\[(\S+)\]'", done.stdout)
    assert lock and (ROOT / lock.group(1)).is_file() and "constraints-cpu" not in done.stdout
    assert set(lock.group(2).split(",")) <= set(EXTRAS)


@pytest.mark.parametrize("driver", [False, True])
@pytest.mark.parametrize("words", [["test"], ["walkthrough"]])
def test_the_cpu_route_never_touches_a_gpus_environment(words, driver, tmp_path):
    done = make("-n", *words, tmp_path=tmp_path, driver=driver)
    assert "-c constraints-cpu.txt -e '.[notebooks,test]'" in done.stdout and ".venv-gpu" not in done.stdout


def test_without_a_driver_no_gpu_environment_is_made(tmp_path):
    assert ".venv-gpu" not in make("-n", "walkthrough", "RUNG=flashmla", tmp_path=tmp_path, driver=False).stdout
    done = make("gpu-env", tmp_path=tmp_path, driver=False)
    assert done.returncode == 2 and "gpu-env needs an NVIDIA driver" in done.stderr
    assert not (tmp_path / ".venv-gpu").exists()


def test_every_entry_point_exists():
    import importlib

    groups = PROJECT["project"]["entry-points"] | {"scripts": PROJECT["project"]["scripts"]}
    for entries in groups.values():
        for target in entries.values():
            module, _, attribute = target.partition(":")
            found = importlib.import_module(module)
            assert not attribute or callable(getattr(found, attribute))


def test_the_kernel_source_is_packaged():
    (pattern,) = PROJECT["tool"]["setuptools"]["package-data"]["stalegraph.kernels"]
    assert list((ROOT / "src" / "stalegraph" / "kernels").glob(pattern))


def test_licence():
    assert "Apache License" in (ROOT / "LICENSE").read_text() and "Apache-2.0" in PROJECT["project"]["license"]["text"]
