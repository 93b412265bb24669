"""The three rungs that every notebook and every reproduction can stand on, lowest first."""

from __future__ import annotations

import importlib.util

from stalegraph.errors import RungUnavailable, UsageError

RUNGS = ("sim", "flashmla", "vllm")


def open_rung(
    name: str, *, sm_count: int | None = None, flashmla_lib=None, strict: bool = False, memory_bytes: int = 1 << 30
):
    """The device of rung `name`, a context manager; raises RungUnavailable, saying what is missing.

    `sm_count`, `strict` and `memory_bytes` are the simulator's; a real GPU has as many SMs as it has, and is never strict.
    """
    if name == "sim":
        from stalegraph.simulator import Device

        return Device(sm_count=132 if sm_count is None else sm_count, memory_bytes=memory_bytes, strict=strict)
    if name not in RUNGS:
        raise UsageError(f"rung is {name!r}; allowed: {', '.join(RUNGS)}")
    if strict:
        raise UsageError(f"strict is True on rung {name}; allowed: on sim only, a GPU reads stale memory silently")
    from stalegraph.cuda import CudaDevice, load_flashmla

    if name == "vllm":
        _require_vllm()
    library = load_flashmla(flashmla_lib)
    device = CudaDevice()
    device.library = library
    if sm_count is not None and sm_count != device.sm_count:
        raise UsageError(f"sm_count is {sm_count}; this GPU has {device.sm_count} SMs, other counts need rung sim")
    return device


def _require_vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise RungUnavailable("the vllm rung needs an installed vLLM; pip install vllm")


def available(flashmla_lib=None) -> dict[str, str | None]:
    """Each rung, with None where it can run on this machine and else the reason why it cannot."""
    from stalegraph.cuda.library import check_torch, build_of, find_library, missing_device, read_library, release_of

    import torch

    reasons: dict[str, str | None] = {"sim": None, "flashmla": missing_device(), "vllm": None}
    if reasons["flashmla"] is None:
        try:
            library = read_library(find_library(flashmla_lib))
            check_torch(library, build_of(library, release_of(library)), torch.__version__, torch.version.cuda)
        except RungUnavailable as error:
            reasons["flashmla"] = str(error)
    wanting = [missing_device()]  # first what a driver or a GPU lacks: no vLLM would help there
    try:
        _require_vllm()
    except RungUnavailable as error:
        wanting.append(str(error))
    reasons["vllm"] = "; ".join(filter(None, wanting)) or None
    return reasons


def highest(flashmla_lib=None) -> str:
    """The highest rung that this machine has."""
    reasons = available(flashmla_lib)
    return [name for name in RUNGS if reasons[name] is None][-1]
