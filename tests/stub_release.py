"""Installs the stand-in vLLM of tests/vllm_stub under a release's name into a folder, to be put on a path."""

import shutil
from pathlib import Path

from stalegraph.vllm.releases import release_of

STUB = Path(__file__).parent / "vllm_stub"


def install(folder: Path, version: str) -> Path:
    """A copy of the stub called `version`: with that release's bug, if any, and its padding; returns `folder`."""
    shutil.copytree(STUB / "vllm", folder / "vllm", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "vllm" / "VERSION").write_text(version)
    info = folder / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    backend = folder / "vllm" / "v1" / "attention" / "backends" / "mla" / "flashmla.py"
    release, lines = release_of(version), backend.read_text().splitlines(keepends=True)
    if release is not None and release.affected:
        lines = [line for line in lines if "# FIXED" not in line]
    text = "".join(lines)
    if release is None or release.padding_is_safe:
        text = text.replace("PADS_WITH_MINUS_ONE = True", "PADS_WITH_MINUS_ONE = False")
    backend.write_text(text)
    return folder
