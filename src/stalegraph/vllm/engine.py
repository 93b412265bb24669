"""One real vLLM engine in a process of its own: started with a builder and a graph mode, asked, and watched.

The engine core runs inside that process (VLLM_ENABLE_V1_MULTIPROCESSING=0), so that builds can be seen.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import tempfile
import time
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from stalegraph.errors import UsageError
from stalegraph.isolate import Isolated, run_isolated
from stalegraph.reciter import rotations
from stalegraph.vllm.releases import release_of

GRAPH_MODES = ("eager", "full", "default")
BUILDERS = ("installed", "regressed", "buffers-only", "copying", "inplace", "ingraph", "hotfix")
RUNNERS = ("v1", "v2")
CAPTURE_SIZES = (1, 2, 4, 8)
MAX_MODEL_LEN = 4096  # tokens; raised where prompt and answer need more
RECITER_CACHE = 256 << 20  # bytes of KV cache: a reciter's token takes 576
PATIENCE = 60.0  # seconds that an engine waits for its neighbours to start
GPU_ERRORS = ("illegal memory access", "device-side assert", "misaligned address", "unspecified launch failure")


@dataclass(frozen=True)
class Settings:
    """One engine: `model` a checkpoint folder or name, `prompt` the text, each of `batches` a number of requests.

    `recites`: the model is the reciter, whose right answer is known; tokens are bytes. Otherwise the engine tokenises.
    """

    model: str
    prompt: bytes
    mode: str = "full"
    builder: str = "installed"
    batches: tuple[int, ...] = (1,)
    tokens: int = 250
    recites: bool = True
    runner: str | None = None
    kv_cache_dtype: str = "fp8"
    max_model_len: int = MAX_MODEL_LEN
    repeats: int = 1  # how often each batch is asked; a later answer must equal the first where the engine is right


def environment(settings: Settings) -> dict[str, str]:
    """What the child's environment needs beside the user's own."""
    found = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "STALEGRAPH_HOTFIX": "auto" if settings.builder == "hotfix" else "off",
        "STALEGRAPH_HOTFIX_FORCE": "0",
    }
    if settings.runner is not None:
        found["VLLM_USE_V2_MODEL_RUNNER"] = "1" if settings.runner == "v2" else "0"
    if Path(settings.model).is_dir():
        found["HF_HUB_OFFLINE"] = "1"
    if settings.mode == "default":
        found["VLLM_DISABLE_COMPILE_CACHE"] = "1"  # engines side by side must not share a half-written one
    return found


def capture_sizes(batches) -> list[int]:
    """1, 2, 4, 8 and on by doubling, up to the first that holds the largest batch."""
    sizes = list(CAPTURE_SIZES)
    while sizes[-1] < max(batches):
        sizes.append(2 * sizes[-1])
    return sizes


def arguments(settings: Settings, known: set[str] | None = None) -> dict:
    """The arguments of `vllm.LLM`; `known` are those that this release has, None for all."""
    sizes = capture_sizes(settings.batches)
    found = {
        "model": settings.model,
        "skip_tokenizer_init": settings.recites,
        "kv_cache_dtype": settings.kv_cache_dtype,
        "block_size": 64,
        "attention_config": {"backend": "FLASHMLA"},
        "max_num_seqs": sizes[-1],
        "seed": 0,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
    }
    if settings.recites:
        found |= {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": RECITER_CACHE, "dtype": "bfloat16"}
        found |= {"max_model_len": settings.max_model_len}
    if settings.mode == "eager":
        found["enforce_eager"] = True
    elif settings.mode == "full":
        found["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": sizes,
        }
    else:
        found["compilation_config"] = {"cudagraph_capture_sizes": sizes}  # every other choice is vLLM's own
    optional = {"kv_cache_memory_bytes", "enable_prefix_caching", "disable_log_stats", "seed"}
    return {name: value for name, value in found.items() if known is None or name not in optional or name in known}


def put_builder(builder: str, version: str) -> str:
    """Make this process's vLLM build decode metadata by `builder`; says what was done. Before any engine is started."""
    from stalegraph.vllm import hotfix

    release = release_of(version)
    if builder == "installed" or (builder == "regressed" and release is not None and release.affected):
        return f"vLLM {version} as installed"
    if builder == "regressed":
        return hotfix.regress()
    if builder == "buffers-only":
        return hotfix.install("copying", sanitize_padding=False, force=True)
    if builder == "hotfix":
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        return "the plugin as vLLM loads it"
    return hotfix.install(builder, force=True)


class Lines(logging.Handler):
    """Keeps what a logger says."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.kept: list[str] = []

    def emit(self, record):
        self.kept.append(f"{record.levelname}: {record.getMessage()}")


def listen() -> Lines:
    """The lines that the hot-fix logs in this process from now on."""
    lines, logger = Lines(), logging.getLogger("vllm.stalegraph.hotfix")
    logger.addHandler(lines)
    logger.setLevel(logging.DEBUG)
    return lines


@dataclass(frozen=True)
class Turns:
    """Engines that share a GPU are asked one at a time, none before all `engines` have started (or PATIENCE is over).

    So the times of one are not those of its neighbours' start. `folder` is theirs alone.
    """

    folder: str
    engines: int = 1

    @contextmanager
    def mine(self):
        folder = Path(self.folder)
        (folder / f"ready-{os.getpid()}").touch()
        ends = time.monotonic() + PATIENCE
        while len(list(folder.glob("ready-*"))) < self.engines and time.monotonic() < ends:
            time.sleep(0.1)
        with open(folder / "turn", "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def run(settings: Settings, progress: str, turns: Turns | None = None) -> dict:
    """In the child: start the engine, ask each batch, return the record; `progress` gets it as JSON after each batch.

    What the GPU reports as an error ends the run and is recorded in `failure` of its batch.
    """
    import torch
    import vllm

    from stalegraph.vllm.arrivals import on_arrival
    from stalegraph.vllm.builds import BACKEND, Builds

    said, builds = listen(), Builds()
    record = {"settings": describe(settings), "versions": versions(torch, vllm), "batches": [], "engine": None}
    record["builder"] = put_builder(settings.builder, vllm.__version__)
    on_arrival(BACKEND, lambda module: builds.attach(module, torch.cuda.CUDAGraph))
    known = set(getattr(getattr(vllm, "EngineArgs", None), "__dataclass_fields__", ())) or None
    llm = vllm.LLM(**arguments(settings, known))
    record["engine"] = facts(llm) | machine()
    if record["engine"]["mla"] is False:
        raise UsageError(f"model is {settings.model!r}, which has no MLA; allowed: a DeepSeek-style MLA model")
    record["captured"] = builds.order
    with turns.mine() if turns else nullcontext():
        for batch in settings.batches:
            record["batches"].append(ask(llm, vllm, settings, batch, builds))
            record["log"] = said.kept
            Path(progress).write_text(json.dumps(record))
            if record["batches"][-1]["failure"]:
                break
    return record


def ask(llm, vllm, settings: Settings, batch: int, builds) -> dict:
    """What `batch` requests answered, token ids, one list a request; and what the builder did meanwhile."""
    prompts = token_prompts(llm, settings, batch)
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=settings.tokens, ignore_eos=True, detokenize=False)
    answers, failure = [], None
    for _ in range(settings.repeats):
        builds.begin()
        try:
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        except Exception as error:
            if not any(known in str(error) for known in GPU_ERRORS):
                raise
            failure = {"kind": type(error).__name__, "message": str(error).splitlines()[0]}
            break
        answers.append([list(output.outputs[0].token_ids) for output in outputs])
    return {
        "batch": batch,
        "prompts": prompts,
        "answers": answers[0] if answers else [],
        "repeats_agree": all(answer == answers[0] for answer in answers),
        "failure": failure,
        **builds.summary(),
    }


def token_prompts(llm, settings: Settings, batch: int) -> list[list[int]]:
    """One prompt a request, begun at evenly spread places of the text; the reciter's token ids are bytes."""
    if settings.recites:
        return [list(prompt) for prompt in rotations(settings.prompt, batch)]
    ids = llm.get_tokenizer().encode(settings.prompt.decode("utf-8", errors="replace"))
    starts = [request * len(ids) // batch for request in range(batch)]
    return [ids[start:] + ids[:start] for start in starts]


def describe(settings: Settings) -> dict:
    """The settings for a record: the prompt as hex, a checkpoint of our own without its path."""
    found = asdict(settings) | {"prompt": settings.prompt.hex(), "batches": list(settings.batches)}
    return found | ({"model": "the reciter"} if settings.recites else {})


def versions(torch, vllm) -> dict:
    import platform

    return {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def machine() -> dict:
    """The GPU that torch sees, the driver, torch and CUDA; also the target of a child that asks and ends."""
    import torch

    from stalegraph.record.provenance import driver_version

    device = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    return {
        "device": getattr(device, "name", "none"),
        "sm_count": getattr(device, "multi_processor_count", None),
        "driver": driver_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def facts(llm) -> dict:
    """What the started engine says of itself: runner, graph mode, whether it runs MLA."""
    engine = getattr(llm, "llm_engine", None)
    config = getattr(engine, "vllm_config", None)
    model, compilation = getattr(config, "model_config", None), getattr(config, "compilation_config", None)
    return {
        "mla": getattr(model, "use_mla", None),
        "architecture": next(iter(getattr(model, "architectures", None) or ()), None),
        "runner": runner_of(engine),
        "cudagraph_mode": getattr(getattr(compilation, "cudagraph_mode", None), "name", None),
        "compile_mode": getattr(getattr(compilation, "mode", None), "name", None),
    }


def runner_of(engine) -> str | None:
    """The runner of this process's engine core, "v1" or "v2", by its module; None where it is not found."""
    at = engine
    for name in ("engine_core", "engine_core", "model_executor", "driver_worker", "worker", "model_runner"):
        at = getattr(at, name, None) or at
    module = type(at).__module__
    return {"vllm.v1.worker.gpu_model_runner": "v1", "vllm.v1.worker.gpu.model_runner": "v2"}.get(module)


def start(settings: Settings, *, timeout: float = 600.0, turns: Turns | None = None) -> tuple[dict | None, Isolated]:
    """Run one engine in a child: its record (as far as it came) and how the child ended; never raises for either."""
    with tempfile.TemporaryDirectory(prefix="stalegraph-engine-") as folder:
        progress = os.path.join(folder, "record.json")
        result = run_isolated(run, settings, progress, turns, timeout=timeout, env=environment(settings))
        record = result.value
        if record is None and os.path.exists(progress):
            record = json.loads(Path(progress).read_text() or "null")
    return record, result
