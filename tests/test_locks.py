"""The pinned requirement sets of vLLM releases: whole, of the release they name, and free of hosts."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stalegraph.vllm.releases import release_of

FOLDER = Path(__file__).parents[1] / "repro" / "locks"
RELEASES = ("0.15.0", "0.18.1", "0.19.1", "0.20.2")
PIN = re.compile(r"[a-z0-9][a-z0-9._-]*==[A-Za-z0-9.!+]+")


def lines(release):
    return (FOLDER / f"vllm-{release}.txt").read_text().splitlines()


def pins(release):
    return dict(line.split("==") for line in lines(release) if not line.startswith("#"))


@pytest.mark.parametrize("release", RELEASES)
def test_every_line_pins_one_package(release):
    found = [line for line in lines(release) if not line.startswith("#")]
    assert found and [line for line in found if not PIN.fullmatch(line)] == []
    assert len(pins(release)) == len(found)


@pytest.mark.parametrize("release", RELEASES)
def test_the_set_is_of_its_release_with_the_torch_that_vllm_pins(release):
    found, known = pins(release), release_of(release)
    assert found["vllm"] == release and found["torch"] == known.torch
    cuda = {name for name in found if name.startswith("nvidia-cublas")}
    assert cuda == ({"nvidia-cublas-cu12"} if known.cuda_major == 12 else {"nvidia-cublas"})


@pytest.mark.parametrize("release", RELEASES)
def test_the_python_it_needs_is_stated(release):
    head = " ".join(line for line in lines(release) if line.startswith("#"))
    assert "Python 3.12" in head and release_of(release).requires_python in head


@pytest.mark.parametrize("release", RELEASES)
def test_transformers_is_one_that_the_release_runs_with(release):
    """Below 5 through 0.19.0; 5.0 to 5.5.0 never (vLLM's own bounds)."""
    major, minor = (int(part) for part in pins(release)["transformers"].split(".")[:2])
    old = tuple(int(part) for part in release.split(".")) <= (0, 19, 0)
    assert major == 4 if old else (major, minor) >= (5, 5)


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_no_index_or_host_is_named(path):
    if path.is_file():
        assert re.search(r"https?:|index-url|find-links|@ file", path.read_text()) is None


def test_the_script_knows_exactly_these_sets():
    spec = importlib.util.spec_from_file_location("resolve", FOLDER / "resolve.py")
    resolve = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(resolve)
    assert tuple(resolve.RELEASES) == RELEASES
    assert {path.name for path in FOLDER.glob("*.txt")} == {resolve.path_of(release).name for release in RELEASES}
    for release in RELEASES:
        assert resolve.header(release).splitlines() == lines(release)[:2]


@pytest.mark.releases
@pytest.mark.parametrize("release", RELEASES)
def test_the_set_resolves_today(release):
    uv = shutil.which("uv")
    if uv is None:
        pytest.skip("uv is not installed")
    command = [sys.executable, str(FOLDER / "resolve.py"), "--check", "--uv", uv, release]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
