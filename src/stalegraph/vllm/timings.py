"""`python -m stalegraph.vllm.timings`: time per output token of the installed vLLM, builder beside builder.

All engines of a model start side by side on one GPU and are then asked in turn, one round of one engine at a time: so
no two run at once, and a drift of the machine falls on all of them alike.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from stalegraph.errors import StalegraphError, UsageError
from stalegraph.isolate import run_isolated
from stalegraph.reciter import Reciter, expected, rotations
from stalegraph.recorded.store import write
from stalegraph.vllm import engine
from stalegraph.vllm.affected import installed_version
from stalegraph.vllm.evidence import provenance
from stalegraph.vllm.export import config, export
from stalegraph.vllm.pace import SKIPPED, Lane, Stamps, spread
from stalegraph.vllm.releases import release_of, span
from stalegraph.vllm.reproduce import PROMPT

# "eager" is the installed builder without graphs. In the order of what matters first.
VARIANTS = ("eager", "regressed", "installed", "ingraph", "inplace", "copying")
MODELS = ("reciter", "deep")
BATCHES = (1, 8, 64)
ROUNDS, TOKENS = 7, 128
FEWEST = SKIPPED + 4  # new tokens of a round that still leave a step to time
SHORT = PROMPT[:96]  # bytes: 64 requests prefill in one step
DEEP_CACHE = 2 << 30  # bytes of KV cache: a token takes 27 * 576
# DeepSeek-V2-Lite's config, every layer dense, without its YaRN scaling; weights are dummies, since time asks for none.
DEEP = {
    "vocab_size": 102_400,
    "hidden_size": 2048,
    "intermediate_size": 10_944,
    "num_hidden_layers": 27,
    "first_k_dense_replace": 27,
    "rope_theta": 10_000.0,
}


@dataclass(frozen=True)
class Timing:
    """One engine to be timed: `variant` of VARIANTS on `model` of MODELS, whose checkpoint is `settings.model`."""

    model: str
    variant: str
    settings: engine.Settings

    @property
    def name(self) -> str:
        return f"{self.model}-{self.variant}"


def deep(folder: Path) -> Path:
    """A checkpoint folder of the deep model: a config, no weights (`load_format="dummy"`)."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config(Reciter(len(SHORT)), "DeepseekV2ForCausalLM") | DEEP))
    return folder


def arguments(timing, known: set[str] | None) -> dict:
    """The arguments of `vllm.LLM` for an engine with `model` and `settings`; `known` are those of this release."""
    found = engine.arguments(timing.settings, known)
    if timing.model == "deep":
        found |= {"load_format": "dummy", "gpu_memory_utilization": 0.1}
        if "kv_cache_memory_bytes" in found:
            found["kv_cache_memory_bytes"] = DEEP_CACHE
    return found


def run(timing: Timing, folder: str, progress: str) -> dict:
    """In the child: start the engine, then time one round of the next batch at each word of the parent's."""
    import torch
    import vllm

    from stalegraph.vllm.arrivals import on_arrival
    from stalegraph.vllm.builds import BACKEND

    lane, settings, stamps = Lane(folder, timing.name), timing.settings, Stamps()
    record = {"versions": engine.versions(torch, vllm), "rounds": [], "failure": None}
    record["built_by"] = engine.put_builder(settings.builder, vllm.__version__)
    on_arrival(BACKEND, stamps.attach)
    known = set(getattr(getattr(vllm, "EngineArgs", None), "__dataclass_fields__", ())) or None
    llm = vllm.LLM(**arguments(timing, known))
    record["engine"] = engine.facts(llm) | engine.machine()
    lane.arrive()
    turn = 0
    while lane.wait():
        batch = settings.batches[turn // (settings.repeats + 1)]
        one = ask(llm, vllm, settings, batch, stamps, timing.model == "reciter")
        one |= {"batch": batch, "warm_up": turn % (settings.repeats + 1) == 0}
        record["rounds"].append(one)
        record["failure"] = one["failure"]
        Path(progress).write_text(json.dumps(record))
        if one["failure"]:
            break
        turn += 1
        lane.arrive()
    return record


def ask(llm, vllm, settings: engine.Settings, batch: int, stamps: Stamps, recites: bool) -> dict:
    """One round: milliseconds a step, and whether the text was right (None where no answer is the right one)."""
    prompts = rotations(settings.prompt, batch)
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=settings.tokens, ignore_eos=True, detokenize=False)
    given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    outputs: list = []
    try:
        found = stamps.round(lambda: outputs.extend(llm.generate(given, sampling, use_tqdm=False)))
    except Exception as error:
        if not any(known in str(error) for known in engine.GPU_ERRORS):
            raise
        return {"failure": {"kind": type(error).__name__, "message": str(error).splitlines()[0]}, "right": None}
    said = [list(output.outputs[0].token_ids) for output in outputs]
    right = said == [list(expected(prompt, settings.tokens)) for prompt in prompts] if recites else None
    return found | {"failure": None, "right": right}


def measure(timings: list[Timing], timeout: float) -> list[dict]:
    """Start all engines side by side, then let each have its round in turn; one record an engine, in their order."""
    with tempfile.TemporaryDirectory(prefix="stalegraph-pace-") as folder, ThreadPoolExecutor(len(timings)) as pool:
        lanes = [Lane(folder, timing.name).lay() for timing in timings]
        files = [os.path.join(folder, f"{timing.name}.json") for timing in timings]
        children = [
            pool.submit(
                run_isolated, run, timing, folder, file, timeout=timeout, env=engine.environment(timing.settings)
            )
            for timing, file in zip(timings, files)
        ]
        lasting = [at for at, lane in enumerate(lanes) if lane.arrived(children[at])]
        say(f"{len(lasting)} of {len(timings)} engines started")
        settings = timings[0].settings
        turns = len(settings.batches) * (settings.repeats + 1)
        for turn in range(turns):
            # Each second turn backwards, so that none always follows the same neighbour.
            order = lasting if turn % 2 == 0 else lasting[::-1]
            lasting = sorted(at for at in order if lanes[at].go(children[at]))
        for at in lasting:
            lanes[at].end()
        ends = [child.result() for child in children]
        records = [told(*one) for one in zip(timings, ends, files)]
        for lane in lanes:
            lane.close()
    return records


def told(timing: Timing, result, file: str) -> dict:
    """What is recorded of one engine: its times by batch, whether the text was right, how it ended."""
    record = result.value
    if record is None:
        record = json.loads(Path(file).read_text()) if os.path.exists(file) else {"rounds": []}
    found = {"model": timing.model, "variant": timing.variant, "batches": []}
    found |= {name: record.get(name) for name in ("built_by", "engine", "versions", "failure")}
    for batch in timing.settings.batches:
        rounds = [one for one in record["rounds"] if one["batch"] == batch]
        timed = [one for one in rounds if not one["warm_up"] and not one["failure"]]
        one = {"batch": batch, "ms_per_token": spread(each["mean_ms"] for each in timed)}
        one |= {"median_step_ms": spread(each["median_ms"] for each in timed)}
        one |= {"rounds_ms": [each["mean_ms"] and round(each["mean_ms"], 5) for each in timed]}
        rights = {each["right"] for each in rounds}
        one["right"] = rights.pop() if len(rights) == 1 else None
        found["batches"].append(one)
        middle = (one["ms_per_token"] or {}).get("median")
        figure = "not timed" if middle is None else f"{middle:.3f} ms a token"
        say(f"{timing.model} {timing.variant} batch {batch}: {figure}, right: {one['right']}")
    found["ended"] = {"ok": result.ok, "seconds": round(result.seconds, 1), "summary": result.summary()}
    if not result.ok:
        found["ended"]["stderr"] = result.stderr[-1500:]
    return found


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def plan(models, variants, folders: dict[str, str], batches, rounds: int, tokens: int) -> list[Timing]:
    """The engines, model by model."""
    base = engine.Settings("", SHORT, batches=tuple(batches), tokens=tokens, runner="v1", repeats=rounds)
    found = []
    for model in models:
        for variant in variants:
            eager = variant == "eager"
            mode, builder = ("eager", "installed") if eager else ("full", variant)
            found.append(Timing(model, variant, replace(base, model=folders[model], mode=mode, builder=builder)))
    return found


def numbers(name: str, text: str) -> tuple[int, ...]:
    """The integers of a comma list, each from 1 to 256."""
    words = text.split(",")
    if not all(word.strip().isdigit() and 1 <= int(word) <= 256 for word in words):
        raise UsageError(f"{name} is {text!r}; allowed: a comma list of integers from 1 to 256")
    return tuple(int(word) for word in words)


def chosen(name: str, text: str, allowed) -> tuple[str, ...]:
    """The words of a comma list, each one of `allowed`."""
    words = tuple(word.strip() for word in text.split(","))
    for word in words:
        if word not in allowed:
            raise UsageError(f"{name} names {word!r}; allowed: {', '.join(allowed)}")
    return words


def release() -> str:
    """The installed vLLM; UsageError where there is none, or one outside of the release map."""
    version = installed_version()
    if version is None:
        raise UsageError("vLLM is not installed; the records are of an installed vLLM")
    if release_of(version) is None:
        raise UsageError(f"vLLM {version} is outside the release map; allowed: {span()}")
    return version


def target(out: str) -> Path:
    """The file that a record goes to, checked before any engine is started."""
    path = Path(out)
    if path.suffix != ".json" or path.is_dir():
        raise UsageError(f"out is {out!r}; allowed: a file named *.json")
    return path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", required=True, metavar="F", help="the record, a .json file")
    parser.add_argument("--models", default=",".join(MODELS), help=f"comma list of {', '.join(MODELS)} (default: both)")
    parser.add_argument("--variants", default=",".join(VARIANTS), help=f"of {', '.join(VARIANTS)} (default: all)")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)), help="comma list (default: 1,8,64)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"timed rounds a batch (default: {ROUNDS})")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"new tokens a round (default: {TOKENS})")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds an engine may live (default: 300)")


def main(args: argparse.Namespace) -> int:
    """Time the engines and write the record; 0 if all ended by themselves, else 1."""
    models, variants = chosen("models", args.models, MODELS), chosen("variants", args.variants, VARIANTS)
    batches, out = numbers("batches", args.batches), target(args.out)
    if args.rounds < 1 or args.tokens < FEWEST:
        allowed = f"at least 1 round of at least {FEWEST} tokens"
        raise UsageError(f"rounds is {args.rounds} and tokens {args.tokens}; allowed: {allowed}")
    version = release()
    # First of all: a machine that cannot say what it is would make the record worth nothing.
    source = provenance(f"python -m stalegraph.vllm.timings --out repro/recorded/h200/vllm-{version}/timings.json")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="stalegraph-timings-") as scratch:
        folders = {"reciter": str(export(Path(scratch, "reciter"), SHORT)), "deep": str(deep(Path(scratch, "deep")))}
        engines = measure(plan(models, variants, folders, batches, args.rounds, args.tokens), args.timeout)
    data = {"tokens": args.tokens, "rounds": args.rounds, "prompt_bytes": len(SHORT), "deep": DEEP, "engines": engines}
    write(out.parent, out.stem, data, source)
    say(f"{len(engines)} engines in {time.monotonic() - began:.0f} s")
    return 0 if all(one["ended"]["ok"] and not one["failure"] for one in engines) else 1


if __name__ == "__main__":
    from stalegraph.vllm import timings  # children find their work by this name, not by "__main__"

    _parser = argparse.ArgumentParser(prog="python -m stalegraph.vllm.timings", description=__doc__.splitlines()[0])
    timings.add_arguments(_parser)
    try:
        sys.exit(timings.main(_parser.parse_args()))
    except StalegraphError as _error:
        print(_error, file=sys.stderr)
        sys.exit(2)
