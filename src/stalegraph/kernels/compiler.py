"""CUDA C++ to a loaded kernel: compiled once by NVRTC, kept as a cubin in the user's cache folder."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from stalegraph.errors import RungUnavailable, StalegraphError

OPTIONS = ("--std=c++17",)


def cache_folder() -> Path:
    """Where cubins are kept: STALEGRAPH_CACHE, else `stalegraph` in XDG_CACHE_HOME or ~/.cache."""
    override = os.environ.get("STALEGRAPH_CACHE")
    if override:
        return Path(override)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stalegraph"


def _bindings():
    try:
        from cuda.bindings import driver, nvrtc
    except ImportError as error:
        raise RungUnavailable(
            "the scheduling kernel needs cuda-bindings; install stalegraph[gpu], or cuda-bindings of your torch's CUDA"
        ) from error
    return driver, nvrtc


def done(result, what: str):
    """The values of a cuda-bindings call that succeeded; raises StalegraphError, naming `what`, for one that failed."""
    status, *values = result
    if int(status) != 0:
        raise StalegraphError(f"{what} failed: {status.name}")
    return values[0] if len(values) == 1 else values or None


def compile_cubin(source: str, arch: str) -> bytes:
    """`source` compiled for `arch` ("sm_90"); raises StalegraphError with the compiler's log where it cannot be."""
    _, nvrtc = _bindings()
    try:
        program = done(nvrtc.nvrtcCreateProgram(source.encode(), b"schedule.cu", 0, [], []), "nvrtcCreateProgram")
    except (RuntimeError, OSError) as error:  # the bindings load libnvrtc at their first call
        if isinstance(error, StalegraphError):
            raise
        raise RungUnavailable(f"the kernel needs NVRTC, which PyTorch's CUDA wheels bring: {error}") from error
    options = [option.encode() for option in (f"--gpu-architecture={arch}", *OPTIONS)]
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if int(status) != 0:
            log = b" " * done(nvrtc.nvrtcGetProgramLogSize(program), "nvrtcGetProgramLogSize")
            done(nvrtc.nvrtcGetProgramLog(program, log), "nvrtcGetProgramLog")
            text = log.decode(errors="replace").strip("\0 \n")
            raise StalegraphError(f"NVRTC cannot compile for {arch} ({status.name}): {text}")
        cubin = b" " * done(nvrtc.nvrtcGetCUBINSize(program), "nvrtcGetCUBINSize")
        done(nvrtc.nvrtcGetCUBIN(program, cubin), "nvrtcGetCUBIN")
        return cubin
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def cached_cubin(source: str, arch: str) -> bytes:
    """As `compile_cubin`, from the cache where the same NVRTC compiled the same source with the same options before.

    A cache that cannot be read or written costs a compilation and nothing else.
    """
    driver, nvrtc = _bindings()
    try:
        version = nvrtc.nvrtcVersion()[1:]
    except (RuntimeError, OSError):  # no NVRTC: what it once compiled is still good for this driver
        version = ("any",)
    key = hashlib.sha256("\0".join([source, arch, *OPTIONS]).encode()).hexdigest()[:32]
    path = cache_folder() / f"schedule-{arch}-{key}-{'.'.join(map(str, version))}.cubin"
    try:
        if version == ("any",):
            path = min(path.parent.glob(f"schedule-{arch}-{key}-*.cubin"), default=path)
        cubin = path.read_bytes()
        if cubin.startswith(b"\x7fELF"):
            return cubin
    except OSError:
        pass
    cubin = compile_cubin(source, arch)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(cubin)
        os.replace(file.name, path)  # two processes may write at once; each leaves a whole file
    except OSError:
        pass
    return cubin


def load(source: str, arch: str, names: tuple[str, ...]) -> list:
    """The kernels `names` of `source`, loaded into the current CUDA context for good, as cuda-bindings' CUfunction."""
    driver, _ = _bindings()
    status, module = driver.cuModuleLoadData(cached_cubin(source, arch))
    if int(status) != 0:  # a damaged cache: compile again
        module = done(driver.cuModuleLoadData(compile_cubin(source, arch)), "cuModuleLoadData")
    functions = [done(driver.cuModuleGetFunction(module, n.encode()), f"cuModuleGetFunction({n})") for n in names]
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_BINARY_VERSION
    for function in functions:  # asking forces the lazy loader, which must not start within a capture
        done(driver.cuFuncGetAttribute(attribute, function), "cuFuncGetAttribute")
    return functions
