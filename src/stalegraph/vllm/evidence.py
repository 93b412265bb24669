"""`python -m stalegraph.vllm.evidence`: records what engines of the installed vLLM say, builder by builder.

Every engine has a process of its own; several start side by side on one GPU and take turns when they are asked, so that
times are of one engine alone.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path

from stalegraph.errors import StalegraphError, UsageError
from stalegraph.isolate import run_isolated
from stalegraph.recorded import Provenance
from stalegraph.recorded.store import write
from stalegraph.vllm import engine
from stalegraph.vllm.affected import installed_version
from stalegraph.vllm.export import export
from stalegraph.vllm.releases import ARCHITECTURES, release_of, span
from stalegraph.vllm.reproduce import PROMPT, runs_of
from stalegraph.vllm.server import FULL, serve_once

V2, V3 = ARCHITECTURES
BATCHES = (1, 3, 8, 5)  # five last: padded to eight it may end the engine (#33664)
TOKENS = 250
FIXES = ("copying", "inplace", "ingraph")
ITEMS = ("engine", "serve", "issue")
ASKED = 120  # new tokens of the served completion


def plan(version: str) -> list[tuple[str, str | None, str, str]]:
    """The engines worth starting on a release: (architecture, runner, mode, builder), likeliest to matter first."""
    release = release_of(version)
    if release is None:
        raise UsageError(f"vLLM {version} is outside the release map; allowed: {span()}")
    if release.affected:
        full = ("installed", "buffers-only", "hotfix", *FIXES)
        found = [(V2, "v1", "eager", "installed"), *((V2, "v1", "full", builder) for builder in full)]
        found += [(V2, "v1", "default", "installed"), (V2, "v1", "default", "hotfix")]
        for architecture, runner in ((V3, "v1"), (V2, "v2")):
            found += [(architecture, runner, "eager", "installed")]
            found += [(architecture, runner, "full", builder) for builder in ("installed", "hotfix")]
        return found
    full = ("installed", "regressed", *FIXES)
    found = []
    for architecture, runner in ((V2, "v1"), (V2, "v2"), (V3, "v1")):
        found += [(architecture, runner, "eager", "installed")]
        found += [(architecture, runner, "full", builder) for builder in full]
    return found + [(V2, "v1", "default", "installed"), (V2, "v1", "default", "regressed")]


def settings_of(chosen, folders: dict[str, str]) -> engine.Settings:
    architecture, runner, mode, builder = chosen
    return engine.Settings(
        model=folders[architecture],
        prompt=PROMPT,
        mode=mode,
        builder=builder,
        batches=BATCHES,
        tokens=TOKENS,
        runner=runner,
    )


def record_engine(chosen, folders, turns: engine.Turns, timeout) -> dict:
    """One engine's record: what it says of itself, and each batch's verdict, texts, addresses and times."""
    settings = settings_of(chosen, folders)
    record, result = engine.start(settings, timeout=timeout, turns=turns)
    architecture, runner, mode, builder = chosen
    found = {"architecture": architecture, "runner": runner, "mode": mode, "builder": builder, "batches": []}
    for name in ("engine", "versions", "captured", "log"):
        found[name] = (record or {}).get(name)
    found["built_by"] = (record or {}).get("builder")
    found["ended"] = {"ok": result.ok, "seconds": round(result.seconds, 1), "summary": result.summary()}
    if not result.ok:
        found["ended"]["stderr"] = result.stderr[-1500:]
    try:
        runs = runs_of(settings, record, result)
    except StalegraphError as error:
        found["ended"]["summary"] = str(error)
        return found
    for run in runs:
        one = {"batch": run.batch, "verdict": run.verdict, "why": run.why, "accuracy": run.accuracy}
        one |= {"first_wrong": run.first_wrong, "texts": [bytes(text).hex() for text in run.said]}
        one |= {"stale_fields": run.stale_fields, "addresses": run.addresses}
        one |= {name: run.facts.get(name) for name in ("moves", "replays", "ms_per_token", "us_per_build")}
        found["batches"].append(one)
        words = (*chosen, "batch", run.batch, run.verdict, run.accuracy, run.why)
        print(*words, file=sys.stderr, flush=True)
    return found


def record_serve(folder, timeout) -> dict:
    """What `vllm serve` completes with the hot-fix off and on, in its default mode and with full decode graphs only."""
    prompt = PROMPT.decode()
    want = (prompt * 2)[:ASKED]
    cases = [(mode, hotfix) for mode in ("default", "full") for hotfix in ("off", "auto")]

    def one(case):
        mode, hotfix = case
        with tempfile.TemporaryDirectory(prefix="stalegraph-serve-") as scratch:
            log = Path(scratch, "log")
            options = FULL if mode == "full" else {}
            found = serve_once(folder, prompt, ASKED, log, hotfix=hotfix, options=options, timeout=timeout)
            lines = log.read_text(errors="replace").splitlines()
        found |= {"mode": mode, "hotfix": hotfix}
        found["right"] = sum(got == wanted for got, wanted in zip(found["text"] or "", want)) / ASKED
        found["log"] = [line[:400] for line in lines if "stalegraph.hotfix" in line or "stalegraph hot-fix" in line][:4]
        if found["text"] is None:
            found["log"] += [line[:400] for line in lines if "Error" in line][:20] + [
                line[:400] for line in lines[-15:]
            ]
        print(f"serve {mode}, hot-fix {hotfix}: {found['right']:.1%} right {found['why']}", file=sys.stderr, flush=True)
        return found

    with ThreadPoolExecutor(len(cases)) as pool:
        return {"prompt": prompt, "tokens": ASKED, "runs": list(pool.map(one, cases))}


def record_issue() -> dict:
    """The one-file reproduction, run in an empty folder."""
    script = Path(__file__).resolve().parents[3] / "repro" / "issue_33638.py"
    with tempfile.TemporaryDirectory(prefix="stalegraph-issue-") as folder:
        copy = Path(folder, script.name)
        copy.write_bytes(script.read_bytes())
        done = subprocess.run([sys.executable, str(copy)], cwd=folder, capture_output=True, text=True, timeout=500)
    print(f"issue script: exit {done.returncode}", file=sys.stderr, flush=True)
    return {"exit_code": done.returncode, "output": done.stdout[-3000:]}


def provenance(command: str) -> Provenance:
    """Device and versions as a child process finds them; the library by its file."""
    from stalegraph.cuda.elf import read_library
    from stalegraph.cuda.library import find_library

    asked = run_isolated(engine.machine)
    if not asked.ok:
        raise UsageError(f"records need a machine that can say what it is: {asked.summary()}")
    library = read_library(find_library(None))
    digest = hashlib.sha256(library.path.read_bytes()).hexdigest()
    return Provenance(
        vllm=installed_version(),
        flashmla=f"{library.path.name}, {library.nbytes} bytes, sha256 {digest}",
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=command,
        **asked.value,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", required=True, help="folder of the records, such as repro/recorded/h200/vllm-0.20.2")
    parser.add_argument("--only", default=",".join(ITEMS), help=f"comma list of {', '.join(ITEMS)} (default: all)")
    parser.add_argument("--jobs", type=int, default=8, help="engines started side by side (default: 8)")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for one engine (default: 240)")
    parser.add_argument("--limit", type=int, default=None, help="only this many engines, for a trial")
    parser.add_argument(
        "--runner", choices=engine.RUNNERS, help="only engines with this runner, recorded as engine-RUNNER"
    )


def main(args: argparse.Namespace) -> int:
    """Record the items asked for; 0 if all engines ended by themselves."""
    items = args.only.split(",")
    for item in items:
        if item not in ITEMS:
            raise UsageError(f"only names {item!r}; allowed: {', '.join(ITEMS)}")
    version = installed_version()
    if version is None:
        raise UsageError("vLLM is not installed; the records are of an installed vLLM")
    chosen = [one for one in plan(version) if args.runner in (None, one[1])][: args.limit]
    began = time.monotonic()
    options = f" --runner {args.runner}" if args.runner else ""
    command = f"python -m stalegraph.vllm.evidence --out repro/recorded/h200/vllm-{version}{options}"
    with tempfile.TemporaryDirectory(prefix="stalegraph-evidence-") as scratch:
        folders = {name: str(export(Path(scratch, name), PROMPT, architecture=name)) for name in ARCHITECTURES}
        engines = []
        with ThreadPoolExecutor(args.jobs) as pool:
            # Engines first and by themselves: times of one are not to be those of others' start.
            if "engine" in items:
                turns = engine.Turns(scratch, min(args.jobs, len(chosen)))
                engines = list(pool.map(lambda one: record_engine(one, folders, turns, args.timeout), chosen))
                source = provenance(command)
                data = {"prompt": PROMPT.decode(), "tokens": TOKENS, "texts_are": "hex of bytes", "jobs": args.jobs}
                write(
                    args.out, f"engine-{args.runner}" if args.runner else "engine", data | {"engines": engines}, source
                )
            others = {"serve": lambda: record_serve(folders[V2], args.timeout), "issue": record_issue}
            jobs = {name: pool.submit(take) for name, take in others.items() if name in items}
            for name, job in jobs.items():
                write(args.out, name, job.result(), provenance(command))
    print(f"{len(engines)} engines in {time.monotonic() - began:.0f} s", file=sys.stderr)
    return 0 if all(one["ended"]["ok"] for one in engines) else 1


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(prog="python -m stalegraph.vllm.evidence", description=__doc__.splitlines()[0])
    add_arguments(_parser)
    try:
        sys.exit(main(_parser.parse_args()))
    except StalegraphError as _error:
        print(_error, file=sys.stderr)
        sys.exit(2)
