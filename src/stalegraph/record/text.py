"""Records what the reciter says for each builder, life and batch size, and when the captured metadata's block is taken."""

from __future__ import annotations

from dataclasses import asdict

from stalegraph import decode
from stalegraph.builders import BUILDERS
from stalegraph.cuda import CudaDevice, load_flashmla
from stalegraph.isolate import run_isolated

PROMPT = (
    b"A graph keeps the address that it saw, and not the tensor that the address held. When the tensor is gone the address "
    b"stays, and whoever moves in is read in its place. So keep what you capture, or capture what you keep. "
)[:204]
BATCHES, TOKENS = (1, 2, 3, 8), 250
SHOWN_STEPS = 250


def run(builder: str, life: str, batch: int, mode: str, library) -> dict:
    """One decode run on the GPU, as JSON."""
    load_flashmla(library)
    with CudaDevice() as device:
        result = decode.run(
            device, builder=builder, prompt=PROMPT, batch=batch, tokens=TOKENS, mode=mode, life=life
        )
        record = result.to_json() if hasattr(result, "to_json") else asdict(result)
    return record


def record_run(builder: str, life: str, batch: int, mode: str, library) -> dict:
    """One run in a child, since a stale schedule may trip an assert that ends the process."""
    result = run_isolated(run, builder, life, batch, mode, library, timeout=150)
    found = {"builder": builder, "life": life, "batch": batch, "mode": mode, "run": result.value}
    if not result.ok:
        found["ended"] = {key: result.to_json()[key] for key in ("exit_code", "signal", "timed_out", "cuda_error")}
        found["ended"]["asserts"] = [asdict(line) for line in result.asserts[:1]]
        found["ended"]["exception"] = (result.exception or "")[:500]
    return found


def runs() -> list[tuple[str, str, int, str]]:
    """(builder, life, batch, mode) of every run."""
    eager = [("regressed", "taken", batch, "eager") for batch in BATCHES]
    graph = [(builder, life, batch, "graph") for builder in BUILDERS for life in decode.LIVES for batch in BATCHES]
    return eager + graph
