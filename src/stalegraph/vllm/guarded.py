"""`python -m stalegraph.vllm.guarded`: what the guard says in engines of the installed vLLM, and what it costs.

Four questions, put to engines of the reciter with full decode graphs: is the guard silent where nothing is wrong,
does it name the stale fields at the first replay, does raise mode fail the request, and what does a token cost more.
The last is also put to a model of DeepSeek-V2-Lite's depth: the reciter's one layer leaves a step little else to do.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import wraps
from inspect import isfunction
from pathlib import Path

from stalegraph.errors import StalegraphError, StaleReadError, UsageError
from stalegraph.isolate import run_isolated
from stalegraph.reciter import expected
from stalegraph.recorded.store import write
from stalegraph.vllm import engine, guard
from stalegraph.vllm.evidence import provenance
from stalegraph.vllm.export import export
from stalegraph.vllm.pace import SKIPPED, Lane, Stamps, spread
from stalegraph.vllm.reproduce import PROMPT
from stalegraph.vllm.timings import DEEP, MODELS, SHORT, arguments, deep, numbers, release, say, target

BATCHES = (1, 3, 8)
TOKENS = 1000
COST_BATCHES = (1, 64)
COST_TOKENS, COST_ROUNDS = 400, 20
TURN = 6  # steps that the guard is on, or off, at a time
MOST_COST = 1.01  # of the time per output token without the guard
STALE = ("tile_scheduler_metadata", "num_splits")
MESSAGES_KEPT = 16
PLANNED_UNTIL = (0, 22)  # the V2 runner builds metadata anew between warm-up and capture since then
PLANNED = "was made by a warm-up before the capture"


@dataclass(frozen=True)
class Case:
    """One engine with the guard in `guard` mode: `question` is "silent", "named", "raised", "planned" or "cost".

    `model` is one of `timings.MODELS`; all but "cost" are put to the reciter.
    """

    question: str
    runner: str
    settings: engine.Settings
    guard: str = "warn"
    model: str = "reciter"

    @property
    def name(self) -> str:
        return f"{self.question}-{self.model}-{self.runner}"


def plan(folders: dict[str, str], batches, tokens: int, runners=engine.RUNNERS) -> list[Case]:
    """The engines that are watched while they answer."""

    def one(question, runner, builder, mode="warn", asked=tuple(batches)):
        given = {"batches": asked, "tokens": tokens, "runner": runner}
        return Case(question, runner, engine.Settings(folders["long"], PROMPT, builder=builder, **given), mode)

    found = []
    for runner in runners:
        found.append(one("silent", runner, "installed"))
        found.append(one("named", runner, "regressed"))
        found.append(one("raised", runner, "regressed", "raise", tuple(batches)[:1]))
    return found


def plan_bf16(folders: dict[str, str], batches, tokens: int, version: str, runners=engine.RUNNERS) -> list[Case]:
    """Engines with a bf16 cache, whose V2 runner captured what its warm-up had planned (to 0.21.0)."""
    found = []
    for runner in runners:
        given = {"batches": tuple(batches), "tokens": tokens, "runner": runner, "kv_cache_dtype": "auto"}
        planned = runner == "v2" and tuple(map(int, version.split(".")[:2])) < PLANNED_UNTIL
        settings = engine.Settings(folders["long"], PROMPT, **given)
        found.append(Case("planned" if planned else "silent", runner, settings))
    return found


def costs(folders: dict[str, str], batches, tokens: int, runners=engine.RUNNERS) -> list[Case]:
    """The engines whose tokens are timed, with the guard on and off in turn: `folders` by model."""
    base = engine.Settings("", SHORT, batches=tuple(batches), tokens=tokens)
    return [
        Case("cost", runner, replace(base, model=folders[model], runner=runner), model=model)
        for model in MODELS
        for runner in runners
    ]


def environment(case: Case) -> dict[str, str]:
    return engine.environment(case.settings) | {"STALEGRAPH_GUARD": case.guard, "STALEGRAPH_GUARD_ALLOW": ""}


class Heard(logging.Handler):
    """Keeps each finding that the guard logs, with the replays that the engine had done by then in this request."""

    def __init__(self, builds):
        super().__init__(logging.DEBUG)
        self.builds = builds
        self.batch: int | None = None  # None while the engine starts
        self.findings: list[dict] = []
        self.others: list[str] = []

    def emit(self, record):
        words = record.getMessage()
        if record.levelno < logging.ERROR:
            self.others.append(f"{record.levelname}: {words}")
            return
        replays = len(self.builds.steps) if self.batch is not None else None
        self.findings.append({"batch": self.batch, "replays_before": replays, "message": words})


def begin(case: Case):
    """In the child: the builder put in place, and the guard as vLLM loads plugins; returns (torch, vllm, facts)."""
    import torch
    import vllm

    facts = {"versions": engine.versions(torch, vllm)}
    facts["built_by"] = engine.put_builder(case.settings.builder, vllm.__version__)
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    facts["guard_by"] = "the plugin as vLLM loads it"
    if guard._guard is None:  # stalegraph is on the path, but its entry points are not installed
        guard.register()
        facts["guard_by"] = "its entry point, called here"
    if guard._guard is None:
        raise UsageError(f"STALEGRAPH_GUARD is {os.environ.get('STALEGRAPH_GUARD')!r}, and the guard is not installed")
    return torch, vllm, facts


def start(case: Case, vllm, facts: dict):
    known = set(getattr(getattr(vllm, "EngineArgs", None), "__dataclass_fields__", ())) or None
    llm = vllm.LLM(**arguments(case, known))
    facts["engine"] = engine.facts(llm) | engine.machine()
    return llm


def watch(case: Case, progress: str) -> dict:
    """In the child: ask each batch with the guard watching; returns what was said, by the model and by the guard."""
    from stalegraph.vllm.arrivals import on_arrival
    from stalegraph.vllm.builds import BACKEND, Builds

    builds = Builds()
    torch, vllm, found = begin(case)
    heard, logger = Heard(builds), logging.getLogger("vllm.stalegraph.guard")
    logger.addHandler(heard)  # after the import of vLLM, which sets up all loggers below its own anew
    logger.setLevel(logging.DEBUG)
    on_arrival(BACKEND, lambda module: builds.attach(module, torch.cuda.CUDAGraph))
    found |= {"batches": [], "findings": heard.findings, "guard_log": heard.others, "failure": None}
    try:
        llm = start(case, vllm, found)
        found["graphs_noted"] = len(guard._guard.records)
        for batch in case.settings.batches:
            heard.batch = batch
            found["batches"].append(ask(llm, vllm, case.settings, batch, builds))
            Path(progress).write_text(json.dumps(found))
    except Exception as error:
        found["failure"] = failure(error) | {"batch": heard.batch}
        if found["failure"]["guard"] is None and not any(one in str(error) for one in engine.GPU_ERRORS):
            raise
    found["guard_broken"] = guard._guard.broken
    return found


def ask(llm, vllm, settings: engine.Settings, batch: int, builds) -> dict:
    """One batch: whether each text is right, the replays that were compared, and what the watcher saw move."""
    prompts = engine.token_prompts(llm, settings, batch)
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=settings.tokens, ignore_eos=True, detokenize=False)
    builds.begin()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    said = [list(output.outputs[0].token_ids) for output in outputs]
    wanted = [list(expected(bytes(ids), settings.tokens)) for ids in prompts]
    right = sum(a == b for one, want in zip(said, wanted) for a, b in zip(one, want))
    seen = builds.summary()
    return {
        "batch": batch,
        "tokens": [len(one) for one in said],
        "accuracy": right / (batch * settings.tokens),
        "replays": seen["replays"],
        "stale_fields": seen["stale_fields"],
    }


def failure(error: BaseException) -> dict:
    """What a request failed with; `guard` is the guard's own message, also where another exception carries it."""
    own, seen = None, error
    while seen is not None and own is None:
        own = str(seen) if isinstance(seen, StaleReadError) else None
        seen = seen.__cause__ or seen.__context__
    return {"kind": type(error).__name__, "message": str(error), "guard": own}


class Switch:
    """Takes the guard's hooks out of the way and puts them back: its records of captured graphs stay.

    In each hook's place stands, from now on, a function that calls either the hook or what vLLM had there. Both ways
    pay for that alike; to set the classes' attributes again and again would make the interpreter forget what it knows
    of these classes, and the turns after it slower.
    """

    def __init__(self, watching: guard.Guard):
        self.watches = True
        self.hooks = [one for one in watching.hooks if isfunction(one[-1])]  # how a class makes subclasses is no step
        self.replays = [(graph, graph.replay) for graph in watching.records]
        for owner, name, original, hooked in self.hooks:
            watching.put(owner, name, hooked, self._either(original, hooked))

    def _either(self, original, hooked):
        @wraps(original)
        def either(*args, **kwargs):
            return (hooked if self.watches else original)(*args, **kwargs)

        return either

    def on(self) -> None:
        self.watches = True
        for graph, replay in self.replays:
            graph.replay = replay

    def off(self) -> None:
        self.watches = False
        for graph, _ in self.replays:
            vars(graph).pop("replay", None)


class Meter:
    """Counts the replays that the guard compares while the context is open, and its own seconds; not for timed rounds.

    `seconds` go from the start to the end of what it does at each step: noting what a builder returned, comparing.
    """

    STEPS = ((guard.Seen, "build", 0), (guard.Record, "held", 1), (guard.Record, "holds", 1))  # which of them compare

    def __init__(self):
        self.compared, self.seconds = 0, 0.0
        self.own = [(owner, name, getattr(owner, name)) for owner, name, _ in self.STEPS]

    def __enter__(self):
        for (owner, name, compares), (_, _, method) in zip(self.STEPS, self.own):
            setattr(owner, name, self._metered(method, compares))
        return self

    def _metered(self, method, compares):
        def metered(*args):
            self.compared += compares
            began = time.perf_counter()
            try:
                return method(*args)
            finally:
                self.seconds += time.perf_counter() - began

        return metered

    def __exit__(self, *_):
        for owner, name, method in self.own:
            setattr(owner, name, method)


def cost(case: Case, folder: str, rounds: int, progress: str) -> dict:
    """In the child: once the parent lets it, requests with the guard on and off in turn, at each batch."""
    from stalegraph.vllm.arrivals import on_arrival
    from stalegraph.vllm.builds import BACKEND

    lane, stamps = Lane(folder, case.name), Stamps()
    _, vllm, found = begin(case)
    on_arrival(BACKEND, stamps.attach)
    llm = start(case, vllm, found)
    switch, settings = Switch(guard._guard), case.settings
    hooks = [f"{owner.__name__}.{name}" for owner, name, *_ in switch.hooks] + ["replay of each graph"]
    found |= {"hooks": hooks, "batches": []}
    lane.arrive()
    if not lane.wait():
        return found
    for batch in settings.batches:
        found["batches"].append(turns(llm, vllm, case, batch, rounds, switch, stamps))
        Path(progress).write_text(json.dumps(found))
    found["guard_broken"] = guard._guard.broken
    lane.arrive()
    return found


def turns(llm, vllm, case: Case, batch: int, rounds: int, switch: Switch, stamps: Stamps) -> dict:
    """One batch: `rounds` requests, during each of which the guard is on and off in turn, TURN steps at a time.

    `right` is None for a model of which no answer is the right one.
    """
    settings = case.settings
    prompts, texts = engine.token_prompts(llm, settings, batch), []
    wanted = [list(expected(bytes(ids), settings.tokens)) for ids in prompts]
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=settings.tokens, ignore_eos=True, detokenize=False)

    def generate():
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        texts.append([list(output.outputs[0].token_ids) for output in outputs] == wanted)

    one = {"batch": batch, "compared": {}, "pairs": []}
    ways = {"on": switch.on, "off": switch.off}
    for name in ways:  # not timed: warms up, and shows that the switch does what it says
        ways[name]()
        with Meter() as meter:
            generate()
        one["compared"][name] = meter.compared
        if meter.compared:
            one["own_us"] = 1e6 * meter.seconds / meter.compared
    for _ in range(rounds):
        one["pairs"] += stamps.turns(generate, ways, TURN)
    switch.on()
    right = all(texts) if case.model == "reciter" else None
    return one | {"right": right, "findings": list(guard._guard.messages)}


# ------------------------------------------------------------------------------------------------- in the parent


def measure(watched: list[Case], timed: list[Case], rounds: int, timeout: float) -> tuple[list[dict], list[dict]]:
    """Start all engines side by side; the timed ones go, one by one, after the others have ended."""
    with tempfile.TemporaryDirectory(prefix="stalegraph-guard-") as folder:
        cases = [*watched, *timed]
        files = {case: os.path.join(folder, f"{case.name}.json") for case in cases}
        lanes = {case: Lane(folder, case.name).lay() for case in timed}
        with ThreadPoolExecutor(max(1, len(cases))) as pool:

            def begun(target, case, *args):
                env = environment(case)
                return pool.submit(run_isolated, target, case, *args, files[case], timeout=timeout, env=env)

            children = {case: begun(watch, case) for case in watched}
            children |= {case: begun(cost, case, folder, rounds) for case in timed}
            answers = [told(case, children[case].result(), files[case]) for case in watched]
            # All have started, or ended, before the first is timed: a start takes processor time from its neighbours.
            ready = [case for case in timed if lanes[case].arrived(children[case])]
            for case in ready:
                lanes[case].go(children[case])
                children[case].result()
            prices = [priced(case, children[case].result(), files[case]) for case in timed]
        for lane in lanes.values():
            lane.close()
    return answers, prices


def found_by(result, file: str) -> dict:
    """A child's record, as far as it came."""
    found = result.value
    if found is None:
        found = json.loads(Path(file).read_text()) if os.path.exists(file) else {}
    ended = {"ok": result.ok, "seconds": round(result.seconds, 1), "summary": result.summary()}
    if not result.ok:
        ended["stderr"] = result.stderr[-1500:]
    return found | {"ended": ended}


def told(case: Case, result, file: str) -> dict:
    """One watched engine's record, and whether it shows what it must."""
    found = found_by(result, file)
    head = {"question": case.question, "runner": case.runner, "builder": case.settings.builder, "guard": case.guard}
    found = head | found
    found["findings"] = found.get("findings", [])
    found["findings_count"] = len(found["findings"])
    found["shown"] = shown(case, found)
    found["findings"] = found["findings"][:MESSAGES_KEPT]
    say(f"{case.name}: {'as it must' if found['shown'] else 'NOT as it must'}; {found['ended']['summary']}")
    for one in found["findings"][:4]:
        say(f"  {one['message']}")
    return found


def fields_of(findings) -> list[str]:
    """The last name of each finding's field: "num_splits" of "decode.scheduler_metadata.num_splits of layer ..."."""
    return [one["message"].split(" of layer ")[0].split(" ")[-1].split(".")[-1] for one in findings]


def shown(case: Case, found: dict) -> bool:
    """Whether the record answers its question as issue #33638 and a guard demand."""
    batches, findings = found.get("batches", []), found["findings"]
    if not found.get("graphs_noted") and case.question != "raised" or found.get("guard_broken"):
        return False
    if case.question == "silent":
        asked = [one["batch"] for one in batches] == list(case.settings.batches)
        right = all(one["accuracy"] == 1 and one["replays"] for one in batches)
        return asked and right and not findings and not found.get("failure")
    at_once = sorted(fields_of(findings)) == sorted(STALE) and all(
        one["replays_before"] in (0, None) for one in findings
    )
    if case.question == "named":
        return at_once and bool(batches)
    if case.question == "planned":  # the engine may die of what it then reads, so that no answer is asked of it
        return at_once and all(PLANNED in one["message"] for one in findings)
    message = (found.get("failure") or {}).get("guard") or ""
    return at_once and all(field in message for field in STALE) and not batches


def priced(case: Case, result, file: str) -> dict:
    """One timed engine's record: time per output token with the guard on and off, and their ratio."""
    head = {"question": "cost", "model": case.model, "runner": case.runner, "builder": case.settings.builder}
    found = head | found_by(result, file)
    for one in found.setdefault("batches", []):
        one |= prices(one.pop("pairs"))
        silent = one["compared"]["on"] > 0 and one["compared"]["off"] == 0 and not one["findings"]
        cheap = one["ratio"] is not None and one["ratio"] <= MOST_COST
        one["shown"] = silent and one["right"] is not False and cheap
        say(f"{case.name} batch {one['batch']}: {price(one)}, as it must: {one['shown']}")
    asked = [one["batch"] for one in found["batches"]] == list(case.settings.batches)
    found["shown"] = asked and all(one["shown"] for one in found["batches"]) and found["ended"]["ok"]
    if not found["ended"]["ok"]:
        say(f"{case.name}: {found['ended']['summary']}")
    return found


def prices(pairs: list[dict]) -> dict:
    """Figures of pairs of turns: `added_us` is what a step takes longer with the guard on than in the turn beside it.

    `ratio` is of the time per output token with the guard on, to that with it off: 1 and the median of what is added
    over the median step without it. `interval` holds the true median of what is added in 19 cases of 20.
    """
    if not pairs:
        return {"on": None, "off": None, "added_us": None, "ratio": None}
    added = sorted(1e3 * (pair["on"] - pair["off"]) for pair in pairs)
    count, reach = len(added), 0.98 * math.sqrt(len(added))  # 1.96 deviations of how many lie below the median
    low, high = max(0, math.floor(count / 2 - reach)), min(count - 1, math.ceil(count / 2 + reach))
    found = {name: spread(pair[name] for pair in pairs) for name in ("on", "off")}
    median = statistics.median(added)
    return found | {
        "added_us": {"median": median, "interval": [added[low], added[high]], "pairs": count},
        "ratio": 1 + median / (1e3 * found["off"]["median"]),
    }


def price(one: dict) -> str:
    """One batch's cost in words."""
    if one["ratio"] is None:
        return "too few steps to time"
    low, high = one["added_us"]["interval"]
    added = f"adds {one['added_us']['median']:.1f} us ({low:.1f} to {high:.1f}) to {one['off']['median']:.3f} ms"
    return f"{added}, ratio {one['ratio']:.4f}, of its own {one.get('own_us', 0):.1f} us"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", required=True, metavar="F", help="the record, a .json file")
    parser.add_argument("--runner", choices=engine.RUNNERS, help="only engines with this runner (default: both)")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)), help="watched (default: 1,3,8)")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"new tokens of a watched request ({TOKENS})")
    parser.add_argument("--cost-batches", default=",".join(map(str, COST_BATCHES)), help="timed (default: 1,64)")
    parser.add_argument("--cost-tokens", type=int, default=COST_TOKENS, help=f"new tokens of a timed request ({COST_TOKENS})")
    parser.add_argument("--rounds", type=int, default=COST_ROUNDS, help=f"requests timed at each batch ({COST_ROUNDS})")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds an engine may live (default: 300)")
    parser.add_argument("--bf16", action="store_true", help="watch engines with a bf16 cache instead, and time none")


def main(args: argparse.Namespace) -> int:
    """Run the engines and write the record; 0 if each shows what it must, else 1."""
    batches, cost_batches = numbers("batches", args.batches), numbers("cost-batches", args.cost_batches)
    fewest = SKIPPED + 2 * TURN + 2
    if args.tokens < 2 or args.cost_tokens < fewest or args.rounds < 1:
        given = f"tokens is {args.tokens}, cost-tokens {args.cost_tokens}, rounds {args.rounds}"
        raise UsageError(f"{given}; allowed: at least 2, {fewest} and 1")
    out, version = target(args.out), release()
    file = f"repro/recorded/h200/vllm-{version}/guard{'_bf16' if args.bf16 else ''}.json"
    source = provenance(f"python -m stalegraph.vllm.guarded {'--bf16 ' if args.bf16 else ''}--out {file}")
    began = time.monotonic()
    runners = (args.runner,) if args.runner else engine.RUNNERS
    with tempfile.TemporaryDirectory(prefix="stalegraph-guarded-") as scratch:
        texts = {"long": PROMPT, "reciter": SHORT}
        folders = {name: str(export(Path(scratch, name), text)) for name, text in texts.items()}
        if args.bf16:
            watched, timed = plan_bf16(folders, batches, args.tokens, version, runners), []
        else:
            folders["deep"] = str(deep(Path(scratch, "deep")))
            watched = plan(folders, batches, args.tokens, runners)
            timed = costs(folders, cost_batches, args.cost_tokens, runners)
        answers, prices_found = measure(watched, timed, args.rounds, args.timeout)
    data = {"tokens": args.tokens, "cost_tokens": args.cost_tokens, "rounds": args.rounds, "most_cost": MOST_COST}
    data |= {"deep": DEEP, "engines": answers, "cost": prices_found}
    write(out.parent, out.stem, data, source)
    say(f"{len(answers) + len(prices_found)} engines in {time.monotonic() - began:.0f} s")
    return 0 if all(one["shown"] for one in [*answers, *prices_found]) else 1


if __name__ == "__main__":
    from stalegraph.vllm import guarded  # children find their work by this name, not by "__main__"

    _parser = argparse.ArgumentParser(prog="python -m stalegraph.vllm.guarded", description=__doc__.splitlines()[0])
    guarded.add_arguments(_parser)
    try:
        sys.exit(guarded.main(_parser.parse_args()))
    except StalegraphError as _error:
        print(_error, file=sys.stderr)
        sys.exit(2)
