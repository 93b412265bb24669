"""`stalegraph reproduce` and `repro/reproduce.py`: vLLM #33638 on a rung, with the exit codes of `git bisect run`.

Exit 0 right, 1 wrong, 125 cannot tell, 2 usage; under --bisect usage and whatever else went wrong is 125 too.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import sys
import tempfile
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from stalegraph import decode
from stalegraph.errors import RungUnavailable, StalegraphError, UsageError
from stalegraph.isolate import run_isolated
from stalegraph.reciter import MAX_POSITIONS, MAX_PROMPT, VOCAB, check_prompt
from stalegraph.rungs import RUNGS, available
from stalegraph.runs import recite_here
from stalegraph.vllm import engine
from stalegraph.vllm.affected import installed_version
from stalegraph.vllm.export import export, read_prompt
from stalegraph.vllm.printout import print_report
from stalegraph.vllm.releases import ARCHITECTURES, release_of, span
from stalegraph.vllm.verdict import CRASHED, EXIT_UNKNOWN, EXIT_USAGE, RIGHT, UNKNOWN, WRONG, Run, exit_code, judge, say

SCHEMA = 1
PROMPT = (
    b"Keep what you capture: a graph replays the addresses that it saw, and reads there whatever has moved in since. "
    b"A tensor that is made anew at each step is never where the graph looks for it, and the text goes astray."
)
BUILDERS = ("regressed", "copying", "inplace", "ingraph")
CHOICES = {"eager": ("eager",), "full": ("full",), "default": ("default",)}
CHOICES |= {"NONE": CHOICES["eager"], "FULL_DECODE_ONLY": CHOICES["full"], "all": engine.GRAPH_MODES}
CHOICES["eager+full"] = ("eager", "full")
MODES_HELP = f"{', '.join(CHOICES)} (default: all; eager+full under --bisect)"
FP8 = ("fp8", "fp8_e4m3")
MAX_BATCH = 256
TOKENS = {"sim": 64, "flashmla": 250, "vllm": 250}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rung", default="sim", help=f"what runs the kernels: {', '.join(RUNGS)} (default: sim)")
    parser.add_argument(
        "--builder", help=f"{', '.join(engine.BUILDERS)} (default: installed on rung vllm, else regressed)"
    )
    parser.add_argument("--builder-file", metavar="PATH", help="a Python file with a builder class, on rung sim")
    parser.add_argument("--model", default="reciter", help="the reciter (default), or an MLA model (rung vllm)")
    parser.add_argument("--architecture", default=ARCHITECTURES[0], help=f"of the reciter: {', '.join(ARCHITECTURES)}")
    parser.add_argument("--cudagraph-mode", default=None, metavar="MODE", help=MODES_HELP)
    parser.add_argument("--batch", default="1", metavar="N", help="requests at a time, or a comma list: 1,3,5,8")
    parser.add_argument("--tokens", metavar="N", help="new tokens a request (default: 64 on rung sim, else 250)")
    parser.add_argument("--prompt-file", metavar="F", help=f"text to recite, 1 to {MAX_PROMPT:,} bytes")
    parser.add_argument("--runner", help="vLLM's model runner: v1 or v2 (default: what the release takes)")
    parser.add_argument("--kv-cache-dtype", default="fp8", help="fp8 or fp8_e4m3; the bug needs an FP8 cache")
    parser.add_argument("--life", default="taken", help=f"of captured metadata, on sim: {', '.join(decode.LIVES)}")
    parser.add_argument("--pad-block", default="-1", help="what padded block-table rows hold: -1 (to 0.19.1) or 0")
    parser.add_argument("--sm-count", help="SMs of the simulated GPU (default: 132)")
    parser.add_argument("--flashmla-lib", metavar="PATH", help="FlashMLA's library, where no vLLM is installed")
    parser.add_argument("--timeout", default="600", metavar="S", help="seconds an engine may take (default: 600)")
    parser.add_argument("--jobs", default="1", metavar="N", help="engines started at a time (default: 1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--bisect", action="store_true", help="for `git bisect run`: usage errors are 125 too")
    _refuse_as_bisect_wants(parser)


def _refuse_as_bisect_wants(parser: argparse.ArgumentParser) -> None:
    """Let this parser, also under another one, refuse what it does not know itself: 125 under --bisect, else 2."""
    parse = parser.parse_known_args

    def strict(args=None, namespace=None):
        words = sys.argv[1:] if args is None else list(args)
        code = EXIT_UNKNOWN if "--bisect" in words else EXIT_USAGE

        def error(message):
            parser.print_usage(sys.stderr)
            parser.exit(code, f"{parser.prog}: {message}\n")

        parser.error = error
        found, rest = parse(words, namespace)
        if rest:
            error(f"unrecognized arguments: {' '.join(rest)}")
        return found, rest

    parser.parse_known_args = strict


@dataclass(frozen=True)
class Request:
    """What was asked for, checked. `recites`: the model is the reciter, whose right answer is known."""

    rung: str
    builder: str
    builder_file: str | None
    model: str | None
    architecture: str
    modes: tuple[str, ...]
    batches: tuple[int, ...]
    tokens: int
    prompt: bytes
    recites: bool
    runner: str | None
    kv_cache_dtype: str
    life: str
    pad_block: int
    sm_count: int | None
    flashmla_lib: str | None
    timeout: float
    jobs: int


class CannotTell(StalegraphError):
    """Nothing that was seen decides between right and wrong; the message says why."""


def main(args: argparse.Namespace) -> int:
    """Run, print, and return the exit code; never raises but for an interrupt from the keyboard."""
    try:
        request = check(args)
        code, runs, reason = EXIT_UNKNOWN, [], None
        try:
            runs = reproduce(request)
            code = exit_code(runs)
        except (CannotTell, RungUnavailable) as error:
            reason = str(error)
        report = to_json(request, runs, code, reason)
        if args.json:
            print(json.dumps(report))
        else:
            print_report(report, runs, sys.stdout)
        if reason:
            print(f"cannot tell: {reason}", file=sys.stderr)
        return code
    except UsageError as error:
        print(f"reproduce: {error}", file=sys.stderr)
        return EXIT_UNKNOWN if args.bisect else EXIT_USAGE
    except Exception:
        traceback.print_exc()
        print("cannot tell: an unexpected exception", file=sys.stderr)
        return EXIT_UNKNOWN


def to_json(request: Request, runs: list[Run], code: int, reason: str | None) -> dict:
    """The one object of --json."""
    import torch

    found = {"torch": torch.__version__, "vllm": installed_version()}
    for run in runs:
        found |= run.facts.get("versions", {})
    return {
        "schema": SCHEMA,
        "rung": request.rung,
        "builder": request.builder_file or request.builder,
        "model": "the reciter" if request.recites else request.model,
        "exit_code": code,
        "verdict": say(code),
        "reason": reason,
        "tokens": request.tokens,
        "versions": found,
        "runs": [run.to_json() for run in runs],
    }


# ---------------------------------------------------------------------------------------------------- what was asked


def _choice(name: str, value, allowed):
    if value not in allowed:
        raise UsageError(f"{name} is {value!r}; allowed: {', '.join(map(str, allowed))}")
    return value


def _number(name: str, value: str, low: int, high: int) -> int:
    if not str(value).strip().isdigit() or not low <= int(value) <= high:
        raise UsageError(f"{name} is {value!r}; allowed: an integer from {low} to {high}")
    return int(value)


def check(args: argparse.Namespace) -> Request:
    """The request that the options make; UsageError naming the option, its value and what is allowed."""
    rung = _choice("rung", args.rung, RUNGS)
    builders = engine.BUILDERS if rung == "vllm" else (*BUILDERS, "buffers-only")
    builder = _choice("builder", args.builder or ("installed" if rung == "vllm" else "regressed"), builders)
    if args.builder_file is not None and rung != "sim":
        raise UsageError(f"builder-file is {args.builder_file!r} on rung {rung}; allowed: on rung sim only")
    if args.model != "reciter" and rung != "vllm":
        raise UsageError(f"model is {args.model!r} on rung {rung}; allowed: the reciter (other models need rung vllm)")
    mode = args.cudagraph_mode or ("eager+full" if args.bisect or rung != "vllm" else "all")
    modes = CHOICES[_choice("cudagraph-mode", mode, CHOICES)]
    if rung != "vllm" and "default" in modes:
        if mode == "default":
            raise UsageError(f"cudagraph-mode is 'default' on rung {rung}; allowed: eager, full (default needs vLLM)")
        modes = CHOICES["eager+full"]
    batches = tuple(_number("batch", one, 1, MAX_BATCH) for one in str(args.batch).split(","))
    model, prompt, recites = _model(args)
    if not recites and "eager" not in modes:
        modes = ("eager", *modes)  # another model's right answer is what it says without graphs
    room = MAX_POSITIONS - len(prompt) if recites else 1 << 20
    if args.runner is not None:
        _choice("runner", args.runner, engine.RUNNERS)
        if rung != "vllm":
            raise UsageError(f"runner is {args.runner!r} on rung {rung}; allowed: on rung vllm only")
    return Request(
        rung=rung,
        builder=builder,
        builder_file=args.builder_file,
        model=model,
        architecture=_choice("architecture", args.architecture, ARCHITECTURES),
        modes=modes,
        batches=batches,
        tokens=_number("tokens", TOKENS[rung] if args.tokens is None else args.tokens, 1, room),
        prompt=prompt,
        recites=recites,
        runner=args.runner,
        kv_cache_dtype=_choice("kv-cache-dtype", args.kv_cache_dtype, FP8),
        life=_choice("life", args.life, decode.LIVES),
        pad_block=int(_choice("pad-block", args.pad_block, ("-1", "0"))),
        sm_count=None if args.sm_count is None else _number("sm-count", args.sm_count, 1, 1024),
        flashmla_lib=args.flashmla_lib,
        timeout=_number("timeout", args.timeout, 1, 86_400),
        jobs=_number("jobs", args.jobs, 1, 64),
    )


def _model(args) -> tuple[str | None, bytes, bool]:
    """(folder or name, prompt, whether it recites); a folder's config is read, and a model without MLA refused."""
    given = read_prompt(args.prompt_file) if args.prompt_file else None
    if args.model == "reciter":
        return None, PROMPT if given is None else given, True
    folder = Path(args.model).expanduser()
    if not folder.exists():
        if folder.is_absolute() or args.model.startswith((".", "~")) or args.model.count("/") != 1:
            allowed = "reciter, a checkpoint folder, or a hub name"
            raise UsageError(f"model is {args.model!r}, which does not exist; allowed: {allowed}")
        return args.model, given or PROMPT, False
    if not (folder / "config.json").is_file():
        raise UsageError(f"model is {args.model!r}, which holds no config.json; allowed: a checkpoint folder")
    try:
        config = json.loads((folder / "config.json").read_text())
    except ValueError as error:
        raise UsageError(f"model is {args.model!r}, whose config.json is no JSON: {error}") from error
    if not config.get("kv_lora_rank"):
        kind = config.get("model_type")
        raise UsageError(f"model is {args.model!r}, a {kind} without MLA; allowed: one with kv_lora_rank")
    text = folder / "prompt.txt"
    if text.is_file() and config.get("vocab_size") == VOCAB:  # one that `stalegraph export` wrote
        own = check_prompt(text.read_bytes())
        if given is not None and len(given) != len(own):
            made_for = f"{len(own)}, which {args.model!r} was made for"
            raise UsageError(f"prompt-file has {len(given)} bytes; allowed: {made_for}")
        return str(folder), own if given is None else given, True
    limit = config.get("max_position_embeddings")
    prompt = given or PROMPT
    if limit and len(prompt.decode("utf-8", "replace").split()) > limit:
        raise UsageError(f"prompt-file has more words than the model's limit; allowed: {limit} tokens")
    return str(folder), prompt, False


# ------------------------------------------------------------------------------------------------------ the rungs


def reproduce(request: Request) -> list[Run]:
    """One run for each graph mode and batch; raises CannotTell where the rung cannot decide."""
    if request.rung == "vllm":
        return on_vllm(request)
    if request.rung == "flashmla":
        reason = available(request.flashmla_lib)["flashmla"]
        if reason is not None:
            raise CannotTell(reason)
    return [_decode(request, mode, batch) for mode in request.modes for batch in request.batches]


def builder_of(path: str):
    """The builder class that a file defines: `BUILDER`, or the only class there with a `build` method."""
    if not Path(path).is_file():
        raise UsageError(f"builder-file is {path!r}, which is no file; allowed: a Python file with a builder class")
    spec = importlib.util.spec_from_file_location("stalegraph_builder_file", path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise CannotTell(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    own = [kind for _, kind in inspect.getmembers(module, inspect.isclass) if kind.__module__ == module.__name__]
    kind = getattr(module, "BUILDER", None) or (own[0] if len(own) == 1 else None)
    if kind is None or not callable(getattr(kind, "build", None)):
        allowed = "one with a build method, or BUILDER"
        raise UsageError(f"builder-file is {path!r} with {len(own)} classes; allowed: {allowed}")
    if not hasattr(kind, "name"):
        kind.name = kind.__name__
    return kind


def _decode(request: Request, mode: str, batch: int) -> Run:
    buffers_only = request.builder == "buffers-only"
    options = {
        "builder": "copying" if buffers_only else request.builder,
        "batch": batch,
        "tokens": request.tokens,
        "mode": "eager" if mode == "eager" else "graph",
        "life": request.life,
        "pad_block": request.pad_block,
        "sanitize_padding": False if buffers_only else None,
    }
    if request.builder_file:
        options["builder"] = builder_of(request.builder_file)
    if request.rung == "sim":
        found = recite_here("sim", request.sm_count, None, request.prompt, options)
    else:  # what a GPU reports may end the process
        where = (request.rung, request.sm_count, request.flashmla_lib)
        result = run_isolated(recite_here, *where, request.prompt, options, timeout=request.timeout)
        if not result.ok:
            verdict = CRASHED if result.cuda_error and not result.timed_out else UNKNOWN
            return Run(mode, batch, verdict, result.summary())
        found = result.value
    return _of_decode(found, mode)


def _of_decode(found: decode.DecodeRun, mode: str) -> Run:
    said, expected = [list(text) for text in found.texts], [list(text) for text in found.expected]
    last = {at.field: (at.captured, at.built) for at in found.addresses}
    failure = found.failure
    seconds = sorted(found.step_seconds)
    facts = {"padded_batch": found.padded_batch, "life": found.life, "sm_count": found.sm_count}
    if found.rung != "sim" and seconds:  # a simulated step's time says nothing about a GPU
        facts["ms_per_token"] = 1e3 * seconds[len(seconds) // 2]
    return Run(
        mode=mode,
        batch=found.batch,
        verdict=CRASHED if failure else judge(said, expected),
        why=f"{failure['kind']} in step {failure['step']}: {failure['message']}" if failure else "",
        said=said,
        expected=expected,
        addresses=last,
        stale_fields=found.stale_fields,
        facts=facts,
    )


def on_vllm(request: Request) -> list[Run]:
    """Runs in real engines, one child process a graph mode."""
    reason = available()["vllm"]
    if reason is not None:
        raise CannotTell(reason)
    version = installed_version()
    if version is None:
        raise CannotTell("vLLM is not installed; pip install vllm")
    if release_of(version) is None:
        raise CannotTell(f"vLLM {version} is outside the release map, {span()}")
    with tempfile.TemporaryDirectory(prefix="stalegraph-model-") as folder:
        model = request.model
        if model is None:
            model = str(export(Path(folder, "reciter"), request.prompt, architecture=request.architecture))
        settings = [
            engine.Settings(
                model=model,
                prompt=request.prompt,
                mode=mode,
                # Without graphs every builder is right; the control stays vLLM's own.
                builder="installed" if mode == "eager" else request.builder,
                batches=request.batches,
                tokens=request.tokens,
                recites=request.recites,
                runner=request.runner,
                kv_cache_dtype=request.kv_cache_dtype,
                max_model_len=max(engine.MAX_MODEL_LEN, len(request.prompt) + request.tokens),
                repeats=1 if request.recites else 2,
            )
            for mode in request.modes
        ]
        turns = engine.Turns(folder, min(request.jobs, len(settings))) if request.jobs > 1 else None
        with ThreadPoolExecutor(request.jobs) as pool:
            ends = list(pool.map(lambda one: engine.start(one, timeout=request.timeout, turns=turns), settings))
    runs = [run for one, end in zip(settings, ends) for run in runs_of(one, *end)]
    return runs if request.recites else compared(runs)


def runs_of(settings: engine.Settings, record: dict | None, result) -> list[Run]:
    """One run for each batch that the engine was asked, judged against the recital where the model recites."""
    done = {one["batch"]: one for one in (record or {}).get("batches", ())}
    usage = _usage(result)
    if usage:
        raise UsageError(usage)
    return [_of_batch(settings, record, done.get(batch), result, batch) for batch in settings.batches]


def _of_batch(settings, record, found, result, batch) -> Run:
    if found is None:
        gpu = result.cuda_error and any(known in result.cuda_error for known in engine.GPU_ERRORS)
        before = bool((record or {}).get("batches")) and not gpu
        why = "not asked, an earlier batch ended the engine" if before else why_ended(result)
        return Run(settings.mode, batch, CRASHED if gpu else UNKNOWN, why)
    said = found["answers"]
    expected = [_continued(prompt, settings.tokens) for prompt in found["prompts"]] if settings.recites else []
    facts = {name: found[name] for name in ("ms_per_token", "us_per_build", "replays", "moves", "repeats_agree")}
    facts |= {"engine": record.get("engine"), "versions": record.get("versions"), "built_by": record.get("builder")}
    failure, captured, last = found["failure"], found["captured"] or {}, found["last"] or {}
    return Run(
        mode=settings.mode,
        batch=batch,
        verdict=CRASHED if failure else judge(said, expected) if settings.recites else UNKNOWN,
        why=failure["message"] if failure else "",
        said=said,
        expected=expected,
        addresses={field: (captured[field], last[field]) for field in captured if field in last},
        stale_fields=found["stale_fields"],
        facts=facts,
    )


def _continued(prompt: list[int], tokens: int) -> list[int]:
    return (prompt * (tokens // len(prompt) + 1))[:tokens]


def compared(runs: list[Run]) -> list[Run]:
    """Judge another model's runs: graph answers against the eager engine's own, token by token.

    An eager engine that disagrees with itself when asked twice is no judge.
    """
    eager = {run.batch: run for run in runs if run.control}
    found = []
    for run in runs:
        judge_run = eager.get(run.batch)
        if run.verdict == CRASHED or judge_run is None or not judge_run.said:
            found.append(run)
            continue
        want = judge_run.said
        if not judge_run.facts.get("repeats_agree", True):
            found.append(replace(run, expected=want, why="the eager engine gave two answers to one question"))
            continue
        verdict = RIGHT if run.control else judge(run.said, want)
        why = "" if verdict != WRONG else "differs from the same engine without graphs"
        found.append(replace(run, expected=want, verdict=verdict, why=why))
    return found


# What a child's exception says when the user's own input was at fault.
USAGE = (
    ("UsageError: ", ""),
    ("is not a valid model identifier", "model does not exist: "),
    ("Repository Not Found", "model does not exist: "),
    ("longer than the maximum model length", "prompt-file is too long: "),
    ("is not valid for this configuration", "not supported: "),
)


def _usage(result) -> str | None:
    text = result.exception or ""
    for pattern, prefix in USAGE:
        if pattern in text and not result.cuda_error:
            return prefix + text.replace("UsageError: ", "").splitlines()[0]
    return None


def why_ended(result) -> str:
    """Why an engine gave no answer, in one line."""
    if result.timed_out:
        return f"the engine was ended after {result.seconds:.0f} s"
    if result.signal:
        return f"the engine was ended by {result.signal}"
    text = (result.exception or result.summary()).strip().splitlines()
    return text[0] if text else "the engine ended without a word"
