"""Where a recording was made: device, driver, versions and date, read from the machine and never typed in."""

from __future__ import annotations

import ctypes
import hashlib
from datetime import datetime, timezone

import torch

from stalegraph.cuda.elf import read_library
from stalegraph.cuda.library import build_of, find_library, release_of
from stalegraph.recorded import Provenance


def driver_version() -> str:
    """The driver's release through NVML, or "unknown" where NVML is not installed."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return "unknown"
    text = ctypes.create_string_buffer(80)
    if nvml.nvmlInit_v2() != 0 or nvml.nvmlSystemGetDriverVersion(text, len(text)) != 0:
        return "unknown"
    return text.value.decode()


def provenance(device, library_path, command: str) -> Provenance:
    """The provenance of what is recorded now on `device` with the FlashMLA library at `library_path`."""
    library = read_library(find_library(library_path))
    build = build_of(library, release_of(library))
    release = release_of(library) or (build.first if build and build.first == build.last else "unknown")
    digest = hashlib.sha256(library.path.read_bytes()).hexdigest()
    return Provenance(
        device=device.name,
        sm_count=device.sm_count,
        driver=driver_version(),
        torch=torch.__version__,
        vllm=release,
        flashmla=f"{library.path.name} of vLLM {release}, {library.nbytes} bytes, sha256 {digest}",
        cuda=torch.version.cuda,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=command,
    )
