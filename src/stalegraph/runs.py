"""Runs for notebooks and reports: one call opens a rung, recites, and comes back with a record even from a crash."""

from __future__ import annotations

from pathlib import Path

from stalegraph import decode
from stalegraph.builders import BUILDERS
from stalegraph.errors import UsageError
from stalegraph.isolate import run_isolated
from stalegraph.reciter import MAX_PROMPT, check_prompt
from stalegraph.recorded import shown
from stalegraph.rungs import open_rung

PROMPT = (
    b"A graph keeps the address that it saw, and not the tensor that the address held. When the tensor is gone the "
    b"address stays, and whoever moves in is read in its place. So keep what you capture, or capture what you keep. "
)[:204]
RESULT = "application/vnd.stalegraph+json"
SECONDS = 300  # a child that takes longer has hung


def prompt_text(prompt_file: str = "") -> bytes:
    """The bytes of `prompt_file` (1 to 4,096 of them), or the built-in English text of 204 bytes for an empty name."""
    if not prompt_file:
        return PROMPT
    path = Path(prompt_file)
    if not path.is_file():
        allowed = f"a file of 1 to {MAX_PROMPT} bytes"
        raise UsageError(f"prompt_file is {prompt_file!r}, which is no file; allowed: {allowed}")
    return check_prompt(path.read_bytes())


def memory_bytes(prompt: bytes, batch: int, tokens: int) -> int:
    """Bytes of memory that the simulated device needs for a run: a gigabyte, or what the cache takes and half again."""
    cache = 576 * batch * (len(prompt) + tokens + 64)
    return max(1 << 30, 1 << (2 * cache).bit_length())


def recite_here(
    rung: str, sm_count: int | None, flashmla_lib: str | None, prompt: bytes, options: dict
) -> decode.DecodeRun:
    """One decode run on `rung` in this process."""
    room = memory_bytes(prompt, options.get("batch", 1), options.get("tokens", 250))
    memory = {"memory_bytes": room} if rung == "sim" else {}
    with open_rung(rung, sm_count=sm_count, flashmla_lib=flashmla_lib, **memory) as device:
        return decode.run(device, prompt=prompt, **options)


def may_crash(options: dict) -> bool:
    """Whether a run may end its process on a GPU: a graph that reads a stale schedule, or padded rows left unsafe."""
    if options.get("mode", "graph") == "eager":
        return False
    builder = options.get("builder", "regressed")
    return builder not in BUILDERS or builder == "regressed" or options.get("sanitize_padding") is False


def recite(
    rung: str = "sim", *, prompt: bytes = PROMPT, sm_count: int | None = None, flashmla_lib: str = "", **options
) -> decode.DecodeRun:
    """`decode.run` on a rung, with its options; on a GPU in a child process where a stale schedule may end the process.

    What ended a child (a CUDA error, a signal, an assert and how often it was printed) stands in the run's `failure`.
    """
    if rung == "sim" or not may_crash(options):
        return recite_here(rung, sm_count if rung == "sim" else None, flashmla_lib or None, prompt, options)
    done = run_isolated(recite_here, rung, None, flashmla_lib or None, prompt, options, timeout=SECONDS)
    if done.ok:
        return done.value
    batch, tokens = options.get("batch", 1), options.get("tokens", 250)
    return decode.DecodeRun(
        rung=rung, builder=options.get("builder", "regressed"), mode=options.get("mode", "graph"),
        life=options.get("life", "taken"), prompt=prompt, batch=batch, padded_batch=batch, tokens=tokens,
        num_heads=options.get("num_heads", 16), sm_count=0, texts=[b""] * batch,
        expected=[decode.expected(one, tokens) for one in decode.rotations(prompt, batch)],
        failure={"kind": "child", "message": done.summary(), "step": None},
    )  # fmt: skip


def block_life(run: decode.DecodeRun, field: str) -> list[tuple[str, float, float]]:
    """Who owned the block in which the graph reads `field`: (owner, begin, end) in decode steps.

    From the allocator's history. Before step 0 stand the owners of the capture's time, evenly and in order: no step
    tells them apart.
    """
    at = {one.step: one for one in run.addresses if one.field == field}
    if not at:  # the run ended before its first step
        return []
    address = at[0].captured
    events = [one for one in run.history if one["address"] == address and one["action"] in ("alloc", "free")]
    early = [one for one in events if one["step"] == 0]
    if early and early[-1]["action"] == "alloc" and not (early[-1]["label"] or "").endswith("at capture"):
        early.pop()  # this one is step 0's own
    begins = [run.tokens / 8 * (order / len(early) - 1) for order in range(len(early))]
    begins += [float(one["step"]) for one in events[len(early):]]
    stays: list[tuple[str, float, float]] = []
    for event, begin, end in zip(events, begins, [*begins[1:], float(run.tokens)]):
        if event["action"] == "free":
            owner = "nobody"
        elif event["label"]:
            owner = event["label"].replace(f"{field} at capture", "capture")
        else:
            built = begin >= 0 and int(begin) in at and at[int(begin)].built == address
            owner = "each step's plan, by luck" if built else "others"
        if end > begin and stays and stays[-1][0] == owner:
            stays[-1] = owner, stays[-1][1], end
        elif end > begin:
            stays.append((owner, begin, end))
    return stays


def publish(name: str, **facts) -> None:
    """Hand a result of a notebook to whoever runs it, as JSON beside one line of text.

    Where the notebook has loaded records, `recorded` names the devices that they are from.
    """
    from IPython.display import display

    facts |= {"recorded": shown()} if shown() else {}
    line = f"{name}: " + ", ".join(f"{key} {value}" for key, value in facts.items())
    display({RESULT: {"name": name, **facts}, "text/plain": line}, raw=True)
