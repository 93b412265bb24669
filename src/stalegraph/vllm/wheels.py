"""The Python sources of vLLM releases, taken out of their wheels with the ordinary pip client."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from stalegraph.errors import UsageError

# What a wheel is opened for: these files and those that `suspects` and the guard's tests execute.
MEMBERS = (
    "vllm/v1/attention/",
    "vllm/v1/worker/",
    "vllm/compilation/cuda_graph.py",
    "vllm/third_party/flashmla/",
    "vllm/model_executor/layers/attention/",
    "vllm/model_executor/layers/mamba/linear",
    "vllm/model_executor/models/whisper_causal.py",
)
PLATFORMS = ("manylinux_2_24_x86_64", "manylinux_2_28_x86_64", "manylinux_2_31_x86_64", "manylinux_2_35_x86_64")


def sources(release: str, folder: Path | None = None) -> Path:
    """The folder that holds the Python sources of vLLM `release` (".../vllm/v1/..." below it).

    Looked for in STALEGRAPH_VLLM_SOURCES/<release>, then in `folder`/<release>; else pip downloads the wheel (250 to
    500 MB), the sources are taken out of it and it is deleted. Raises UsageError where there is neither folder nor
    wheel.
    """
    given = os.environ.get("STALEGRAPH_VLLM_SOURCES")
    for place in (given, folder):
        if place and (Path(place) / release / "vllm").is_dir():
            return Path(place) / release
    if folder is None:
        raise UsageError(f"no sources of vLLM {release}: set STALEGRAPH_VLLM_SOURCES, or name a folder to download to")
    target = Path(folder) / release
    with tempfile.TemporaryDirectory() as wheels:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        command += ["--python-version", "3.12", "--implementation", "cp", "--abi", "abi3", "--dest", wheels]
        for platform in PLATFORMS:
            command += ["--platform", platform]
        done = subprocess.run([*command, f"vllm=={release}"], capture_output=True, text=True)
        found = list(Path(wheels).glob("*.whl"))
        if done.returncode or not found:
            raise UsageError(f"pip cannot download vllm=={release}: {done.stderr.strip().splitlines()[-1:]}")
        with zipfile.ZipFile(found[0]) as wheel:
            for name in wheel.namelist():
                if name.endswith(".py") and name.startswith(MEMBERS):
                    wheel.extract(name, target)
    return target
