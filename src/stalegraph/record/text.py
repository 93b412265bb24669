"""Records what the reciter says for each builder, life and batch size, and when the captured block is taken."""

from __future__ import annotations

from dataclasses import asdict

from stalegraph import decode
from stalegraph.builders import BUILDERS
from stalegraph.cuda import CudaDevice, load_flashmla
from stalegraph.isolate import run_isolated

PROMPT = (
    b"A graph keeps the address that it saw, and not the tensor that the address held. When the tensor is gone the "
    b"address stays, and whoever moves in is read in its place. So keep what you capture, or capture what you keep. "
)[:204]
BATCHES, TOKENS = (1, 2, 3, 8), 250
KEPT = (
    "builder", "mode", "life", "batch", "padded_batch", "num_heads", "texts", "accuracy", "first_wrong", "stale_fields",
    "captured_addresses", "takers", "nodes", "failure",
)  # fmt: skip
WHOLE_HISTORY = 2  # batches up to here keep the life of the captured blocks step by step


def condense(run: decode.DecodeRun) -> dict:
    """What is worth keeping of a run: `moves` has (step, field, address) where a field was built at a new address."""
    record = run.to_json()
    found = {key: record[key] for key in KEPT}
    moves, last = [], {}
    for at in run.addresses:
        if last.get(at.field) != at.built:
            moves.append([at.step, at.field, at.built])
            last[at.field] = at.built
    events = [[event[key] for key in ("step", "action", "address", "size", "label")] for event in run.history]
    whole = run.batch <= WHOLE_HISTORY and run.builder == "regressed"
    obeyed, needed = run.schedule_obeyed or {}, run.schedule_needed or {}
    return found | {
        "moves": moves if whole else moves[:16],
        "history": events if whole else events[:16],
        "num_splits_obeyed": obeyed.get("num_splits"),
        "num_splits_needed": needed.get("num_splits"),
        "first_rows_obeyed": obeyed.get("tile_scheduler_metadata", [])[:4],
    }


def run(runs, library) -> list[dict]:
    """Decode runs on the GPU, in order, in this process; `runs` are (builder, life, batch, mode)."""
    load_flashmla(library)
    found = []
    for builder, life, batch, mode in runs:
        with CudaDevice() as device:
            device.empty_cache()
            result = decode.run(
                device, builder=builder, prompt=PROMPT, batch=batch, tokens=TOKENS, mode=mode, life=life
            )
            found.append(condense(result))
    return found


def record_runs(runs, library) -> list[dict]:
    """Runs that share one child; where it ends early, each of them says how."""
    result = run_isolated(run, runs, library, timeout=150)
    if result.ok:
        return result.value
    ended = {key: result.to_json()[key] for key in ("exit_code", "signal", "timed_out", "cuda_error")}
    ended["asserts"] = [asdict(line) for line in result.asserts[:1]]
    ended["exception"] = (result.exception or "")[:500]
    return [
        {"builder": builder, "life": life, "batch": batch, "mode": mode, "ended": ended}
        for builder, life, batch, mode in runs
    ]


def children() -> list[list[tuple[str, str, int, str]]]:
    """All runs, grouped by child: a regressed run has one to itself, since it may end the process."""
    alone = [[("regressed", life, batch, "graph")] for life in decode.LIVES for batch in BATCHES]
    together = [
        [(builder, life, batch, "graph") for batch in BATCHES]
        for builder in BUILDERS if builder != "regressed" for life in decode.LIVES
    ]  # fmt: skip
    eager = [[("regressed", "taken", batch, "eager") for batch in BATCHES]]
    return alone + together + eager
