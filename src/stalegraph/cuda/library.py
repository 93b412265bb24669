"""FlashMLA's library as vLLM ships it: found without importing vLLM, checked before it is loaded."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from stalegraph.cuda.elf import SharedLibrary, read_library
from stalegraph.errors import RungUnavailable

PATTERN = "_flashmla_extension_C*.so"
OPS = ("get_mla_decoding_metadata_dense_fp8", "fwd_kvcache_mla_fp8")
CAPABILITY = (9, 0)  # the kernels assert sm_90 and nothing else


@dataclass(frozen=True)
class Build:
    """One build of the library: the first and last release that ships it, what it was built with, its size in bytes."""

    first: str
    last: str
    torch: str
    cuda_major: int
    nbytes: int
    stable_abi: bool = False


# Read from the x86-64 Linux wheels of vLLM: METADATA for torch, ELF for the rest.
BUILDS = (
    Build("0.13.0", "0.14.1", "2.9", 12, 968248),
    Build("0.15.0", "0.16.0", "2.9", 12, 972344),
    Build("0.17.1", "0.19.1", "2.10", 12, 840648),
    Build("0.20.2", "0.20.2", "2.11", 13, 257296),
    Build("0.21.0", "0.24.0", "2.11", 13, 250848),
    Build("0.26.0", "0.26.0", "2.11", 13, 209856, stable_abi=True),
    Build("0.28.0", "0.30.0", "2.13", 13, 214040, stable_abi=True),
    Build("0.33.0", "0.33.0", "2.14", 13, 219736, stable_abi=True),
)


@dataclass(frozen=True)
class LibraryInfo:
    """A loaded library: the vLLM release it comes from (None where that is not known), what it was built with."""

    file: str
    vllm: str | None
    torch: str | None
    cuda_major: int | None
    stable_abi: bool
    nbytes: int

    def to_json(self) -> dict:
        return asdict(self)


def numbers(release: str) -> tuple[int, ...]:
    """The leading numbers of a release name: "2.11.0+cu130" gives (2, 11, 0).

    >>> numbers("0.20.2") > numbers("0.9.1")
    True
    """
    match = re.match(r"\d+(\.\d+)*", release)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def table() -> str:
    """Which torch and CUDA go with which vLLM release, a line for each build."""
    lines = []
    for build in BUILDS:
        releases = build.first if build.first == build.last else f"{build.first} to {build.last}"
        later = " or later (stable ABI)" if build.stable_abi else ""
        lines.append(f"  vLLM {releases}: torch {build.torch}{later}, CUDA {build.cuda_major}")
    return "\n".join(lines)


def find_library(path=None) -> Path:
    """The library at `path` (a file, or a folder that holds it), else in an installed vLLM, which is not imported.

    Without `path`, the environment's STALEGRAPH_FLASHMLA_LIB comes before an installed vLLM.
    """
    path = path or os.environ.get("STALEGRAPH_FLASHMLA_LIB")
    if path is not None:
        path = Path(path)
        found = [path] if path.is_file() else sorted(path.glob(PATTERN)) if path.is_dir() else []
        if not found:
            raise RungUnavailable(f"flashmla_lib is {path}; allowed: {PATTERN} or a folder that holds it")
        return found[0]
    spec = importlib.util.find_spec("vllm")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for candidate in sorted(Path(folder).glob(PATTERN)):
            return candidate
    where = "the vLLM that is installed has no FlashMLA library" if spec else "vLLM is not installed"
    raise RungUnavailable(f"{where}; install vLLM or name its {PATTERN} with --flashmla-lib")


def release_of(library: SharedLibrary) -> str | None:
    """The vLLM release that installed `library`, from the metadata beside it; None for a file on its own."""
    site = library.path.resolve().parent.parent
    for distribution in importlib.metadata.distributions(name="vllm", path=[str(site)]):
        return distribution.version
    return None


def build_of(library: SharedLibrary, release: str | None) -> Build | None:
    """The build that `library` is: by its release where known, else by its size; None where not in the table."""
    for build in BUILDS:
        if release is None:
            known = build.nbytes == library.nbytes
        else:
            known = numbers(build.first) <= numbers(release)[:3] <= numbers(build.last)
        if known and (build.cuda_major, build.stable_abi) == (library.cuda_major, library.stable_abi):
            return build
    return None


def check_torch(library: SharedLibrary, build: Build | None, torch_version: str, torch_cuda: str | None) -> None:
    """Raises RungUnavailable where this torch cannot load `library`, and says which torch goes with which release."""
    origin = f"vLLM {build.first}'s" if build else "this"
    if torch_cuda is None:
        raise RungUnavailable(
            f"torch {torch_version} is built without CUDA; {origin} FlashMLA library needs one of\n{table()}"
        )
    if library.cuda_major is not None and library.cuda_major != numbers(torch_cuda)[0]:
        raise RungUnavailable(
            f"{origin} FlashMLA library needs CUDA {library.cuda_major}, torch {torch_version} brings CUDA {torch_cuda}"
            f"; install the torch that goes with the release:\n{table()}"
        )
    if build is None:
        return
    have, want = numbers(torch_version)[:2], numbers(build.torch)
    if have < want or (have != want and not build.stable_abi):
        raise RungUnavailable(
            f"{origin} FlashMLA library was built against torch {build.torch}, this is torch {torch_version}"
            f"; install the torch that goes with the release:\n{table()}"
        )


def check_device(capability: tuple[int, int] | None, name: str, driver_cuda: int, torch_cuda: str) -> None:
    """Raises RungUnavailable unless the GPU is sm_90 and its driver new enough; `driver_cuda` 13000 is CUDA 13.0."""
    if capability is None:
        raise RungUnavailable("no CUDA device is visible; the flashmla rung needs an sm_90 GPU (H100, H200, H20)")
    if capability != CAPABILITY:
        raise RungUnavailable(
            f"{name} is sm_{capability[0]}{capability[1]}; FlashMLA's FP8 dense decode runs on sm_90 only (H100, H200)"
        )
    if driver_cuda == 0:
        raise RungUnavailable("the NVIDIA driver's library libcuda.so.1 is missing; install the driver")
    if driver_cuda // 1000 < numbers(torch_cuda)[0]:
        raise RungUnavailable(
            f"the driver supports CUDA {driver_cuda // 1000}.{driver_cuda % 1000 // 10}, torch brings CUDA {torch_cuda}"
            "; install a newer driver, or a torch for the driver's CUDA:\n" + table()
        )


def driver_cuda() -> int:
    """The newest CUDA that the driver supports, 13000 for 13.0; 0 where there is no NVIDIA driver."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return 0
    return 0 if failed else version.value


def missing_device() -> str | None:
    """Why this machine cannot run FlashMLA's kernels, or None."""
    if torch.version.cuda is None:
        driver = "there is no NVIDIA driver (no libcuda.so.1), and " if driver_cuda() == 0 else ""
        return f"{driver}torch {torch.__version__} is built without CUDA"
    try:
        visible = torch.cuda.is_available() and torch.cuda.device_count() > 0
        capability = torch.cuda.get_device_capability() if visible else None
        name = torch.cuda.get_device_name() if visible else "no device"
        check_device(capability, name, driver_cuda(), torch.version.cuda)
    except RungUnavailable as error:
        return str(error)
    except RuntimeError as error:
        return f"CUDA does not start: {str(error).splitlines()[0]}"
    return None


def load_flashmla(path=None) -> LibraryInfo:
    """Loads FlashMLA's FP8 dense decode into `torch.ops._flashmla_extension_C`; loading twice is harmless.

    `path` defaults to the environment's STALEGRAPH_FLASHMLA_LIB, then to an installed vLLM. Raises RungUnavailable,
    saying what would do, where the library, torch, the GPU or the driver do not fit.
    """
    library = read_library(find_library(path))
    release = release_of(library)
    build = build_of(library, release)
    check_torch(library, build, torch.__version__, torch.version.cuda)
    missing = missing_device()
    if missing:
        raise RungUnavailable(missing)
    try:
        torch.ops.load_library(str(library.path))
        for op in OPS:
            getattr(torch.ops._flashmla_extension_C, op)
    except (OSError, AttributeError, RuntimeError) as error:
        raise RungUnavailable(
            f"{library.path.name} does not load into torch {torch.__version__}: {str(error).splitlines()[0]}"
            f"; install the torch that goes with its release:\n{table()}"
        ) from error
    guess = build.first if build and build.first == build.last else None
    return LibraryInfo(
        file=library.path.name,
        vllm=release or guess,
        torch=build.torch if build else None,
        cuda_major=library.cuda_major,
        stable_abi=library.stable_abi,
        nbytes=library.nbytes,
    )
