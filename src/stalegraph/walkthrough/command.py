"""`stalegraph walkthrough`: choose notebooks, run them two at a time, write the report in one piece."""

from __future__ import annotations

import argparse
import ast
import json
import multiprocessing
import os
import platform
import shutil
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from datetime import datetime, timezone
from functools import partial
from math import prod
from pathlib import Path

from tabulate import tabulate

from stalegraph.builders import BUILDERS
from stalegraph.decode import LIVES
from stalegraph.errors import RungUnavailable, UsageError
from stalegraph.reciter import check_prompt
from stalegraph.rungs import RUNGS, available
from stalegraph.walkthrough import notebook as notebooks
from stalegraph.walkthrough.page import is_report, write_index, write_page
from stalegraph.walkthrough.runner import Outcome, Trouble, execute

SCHEMA = 1
EARLIER = "not run now: a page of an earlier run"
AT_ONCE = 2
MAX_SMS = 1024
CHOICES = {
    "rung": RUNGS, "builder": tuple(BUILDERS), "builders": tuple(BUILDERS), "cheap_builders": tuple(BUILDERS),
    "fixes": tuple(BUILDERS), "life": LIVES,
}  # fmt: skip
# What a notebook's process needs, imported once in a server from which those processes fork.
IMPORTS = ["papermill", "nbclient.exceptions", "nbconvert", "pygments.formatters", "stalegraph.walkthrough.runner"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rung", default="sim", help=f"what runs the kernels: {', '.join(RUNGS)} (default: sim)")
    parser.add_argument("--prompt-file", help="text to recite, any 1 to 4,096 bytes (default: the notebooks' own)")
    parser.add_argument(
        "--only", help="notebooks to run, by number or name: 01 or 01,03; an earlier report keeps its other pages"
    )
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a parameter of the notebooks")
    parser.add_argument("--sm-count", help="SMs of the simulated GPU: 132 an H100 or H200, 78 an H20")
    parser.add_argument("--flashmla-lib", help="FlashMLA's library, where no vLLM is installed (rung flashmla)")
    parser.add_argument("--out", default="build/walkthrough", help="where the report goes (default: build/walkthrough)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def main(args) -> int:
    chosen = notebooks.choose(args.only)
    parameters = _parameters(args, chosen)
    _require_rung(parameters["rung"], args.flashmla_lib)
    outcomes = run_walkthrough(
        chosen, parameters, Path(args.out), say=partial(print, file=sys.stderr, flush=True), keep=args.only is not None
    )
    if args.json:
        record = {"schema": SCHEMA, "rung": parameters["rung"], "held": all(one.held for one in outcomes),
                  "notebooks": [one.to_json() for one in outcomes]}  # fmt: skip
        print(json.dumps(record))
    else:
        rows = [(one.notebook, one.claim, one.shows, one.verdict, f"{one.seconds:.1f}") for one in outcomes]
        headers = ["notebook", "claim", "shows", "verdict", "seconds"]
        print(tabulate(rows, headers=headers, maxcolwidths=[24, 72, 22, 14, None]))
        print(f"rung {parameters['rung']}; report in {args.out}/index.html")
    return 0 if all(one.held for one in outcomes) else 1


def _value(text: str):
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def _parameters(args, chosen) -> dict:
    """What is passed to the notebooks, each name checked against what they declare."""
    given: dict = {"rung": args.rung}
    if args.rung not in RUNGS:
        raise UsageError(f"rung is {args.rung!r}; allowed: {', '.join(RUNGS)}")
    if args.sm_count is not None:
        if not args.sm_count.isdigit() or not 1 <= int(args.sm_count) <= MAX_SMS:
            raise UsageError(f"sm-count is {args.sm_count!r}; allowed: an integer from 1 to {MAX_SMS}")
        given["sm_count"] = int(args.sm_count)
    if args.flashmla_lib is not None:
        given["flashmla_lib"] = str(_file(args.flashmla_lib, "flashmla-lib"))
    if args.prompt_file is not None:
        path = _file(args.prompt_file, "prompt-file")
        check_prompt(_content(path, "prompt-file"))
        given["prompt_file"] = str(path)
    for assignment in args.set:
        name, equals, text = assignment.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"set is {assignment!r}; allowed: NAME=VALUE")
        given[name] = _value(text)
    declared = {name: one.parameters[name] for one in chosen for name in one.parameters}
    for name, value in given.items():
        if name not in declared and name != "rung":
            allowed = ", ".join(sorted(declared)) or "none"
            raise UsageError(f"no notebook chosen has a parameter {name!r}; allowed: {allowed}")
        _check_value(name, value, declared.get(name, ""))
    return given


def _check_value(name: str, value, default) -> None:
    """Refuse what is of another kind than the notebook's own value, and names that nothing has."""
    if type(value) is not type(default):
        raise UsageError(f"{name} is {value!r}; allowed: {type(default).__name__}, such as {default!r}")
    values = value if isinstance(value, list) else [value]
    if name in CHOICES and not (values and set(map(str, values)) <= set(CHOICES[name])):
        raise UsageError(f"{name} is {value!r}; allowed: {', '.join(CHOICES[name])}")
    if name == "prompt_file" and value:
        check_prompt(_content(_file(value, name), name))


def _file(name: str, argument: str) -> Path:
    path = Path(name)
    if not path.is_file():
        raise UsageError(f"{argument} is {name!r}, which is no file; allowed: the path of an existing file")
    return path.resolve()


def _content(path: Path, argument: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{argument} is {str(path)!r}: {error.strerror}; allowed: a file that can be read") from None


def _require_rung(rung: str, flashmla_lib) -> None:
    reason = available(flashmla_lib)[rung]
    if reason is not None:
        raise RungUnavailable(f"rung {rung} cannot run on this machine: {reason}")


def run_walkthrough(
    chosen, parameters: dict, out: Path, say=print, timeout: int | None = None, keep: bool = False
) -> list[Outcome]:
    """Run the notebooks, write their report to `out` (replaced as a whole), and return one outcome each, in order.

    Each notebook gets those of `parameters` that it declares. `out` must be new, empty, or an earlier report, of which
    `keep` takes over the pages of other notebooks. A parameter that a notebook refuses raises UsageError, and the
    earlier report stays.
    """
    scratch = _scratch_for(out)
    try:
        outcomes = _run_all(chosen, parameters, scratch, say, timeout)
        for one in outcomes if set(parameters) - {"rung"} else ():
            if one.trouble and one.trouble.message.startswith("UsageError: "):
                raise UsageError(f"{one.notebook}: {one.trouble.message.removeprefix('UsageError: ')}")
        earlier = _take_over(out, scratch, {one.name for one in chosen}) if keep else []
        listed = sorted([*outcomes, *earlier], key=lambda one: one.notebook)
        write_index(scratch / "index.html", listed, provenance(parameters))
        scratch.chmod(0o755)
        _put_in_place(scratch, out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return outcomes


def _scratch_for(out: Path) -> Path:
    """A fresh folder beside `out`, once it is clear that `out` may be replaced."""
    if out.exists() and not (out.is_dir() and (is_report(out) or not any(out.iterdir()))):
        allowed = "a new folder, or an earlier report"
        raise UsageError(f"out is {str(out)!r}, which holds something else; allowed: {allowed}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        raise UsageError(f"out is {str(out)!r}: {error.strerror}; allowed: a folder that can be written") from None


def _take_over(out: Path, scratch: Path, chosen: set[str]) -> list[Outcome]:
    """Copy the pages of notebooks that are not chosen out of the report `out`; an outcome each, for the index."""
    kept = []
    for page in sorted(out.glob("[0-9][0-9]_*.html")):
        executed = page.with_suffix(".ipynb")
        if page.stem not in chosen and executed.is_file():
            for path in out.glob(f"{page.stem}.*"):
                shutil.copy2(path, scratch)
            one = notebooks.read(executed)
            when = datetime.fromtimestamp(page.stat().st_mtime, timezone.utc).isoformat(timespec="seconds")
            kept.append(Outcome(one.name, one.title, one.claim, verdict=f"{EARLIER}, {when}"))
    return kept


def _put_in_place(scratch: Path, out: Path) -> None:
    """Swap by renaming, so that at every moment `out` is the old report, the new one, or for an instant neither."""
    old = scratch.with_name(scratch.name + "-old")
    try:
        if out.exists():
            os.replace(out, old)
        os.replace(scratch, out)
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _cases(one, parameters: dict) -> int:
    """How many cases a notebook goes through: it runs one for each element of a parameter that is a list."""
    values = {**one.parameters, **parameters}
    return prod(len(values[name]) for name in one.parameters if isinstance(values[name], list))


def _run_all(chosen, parameters, scratch, say, timeout) -> list[Outcome]:
    outcomes: dict[str, Outcome] = {}
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    processes = multiprocessing.get_context(method)
    if method == "forkserver":
        processes.set_forkserver_preload(IMPORTS)
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        jobs = {}
        # Those with most cases first, then the later ones, so that no long one is left for the end.
        for one in sorted(chosen, key=lambda one: (_cases(one, parameters), one.name), reverse=True):
            if one.problem is not None:
                outcomes[one.name] = Outcome(one.name, one.title, one.claim, trouble=Trouble(1, "", "", one.problem))
                say(f"{one.name}: broken: {one.problem}")
                continue
            own = {name: value for name, value in parameters.items() if name in one.parameters}
            jobs[pool.submit(_in_fresh_process, processes, one, scratch, own, timeout)] = one
        for job in as_completed(jobs):
            outcome = outcomes[jobs[job].name] = job.result()
            tail = "" if outcome.trouble is None else f": {outcome.trouble}"
            say(f"{outcome.notebook}: {outcome.verdict} ({outcome.seconds:.1f} s){tail}")
    finally:
        pool.shutdown(cancel_futures=True)
    return [outcomes[one.name] for one in chosen]


def _in_fresh_process(processes, one, scratch: Path, parameters: dict, timeout: int | None) -> Outcome:
    """A process of its own, so that a notebook's peak memory is its own kernel's and no state leaks into the next."""
    limit = {} if timeout is None else {"timeout": timeout}
    arguments = (one.path, scratch / one.path.name, one.title, one.claim, parameters)
    try:
        with ProcessPoolExecutor(1, mp_context=processes) as process:
            return process.submit(_run_and_render, *arguments, **limit).result()
    except BrokenProcessPool:
        died = Trouble(0, "", "", "the process that ran this notebook was killed, perhaps for want of memory")
        return Outcome(one.name, one.title, one.claim, trouble=died)


def _run_and_render(source: Path, executed: Path, title: str, claim: str, parameters: dict, **limit) -> Outcome:
    outcome = execute(source, executed, title, claim, parameters, **limit)
    if executed.is_file():
        try:
            write_page(executed, executed.with_suffix(".html"), title)
        except Exception as error:  # the executed notebook, minutes of a GPU perhaps, is worth keeping
            why = f"it ran, but its page could not be made: {type(error).__name__}: {str(error).splitlines()[0]}"
            outcome.verdict, outcome.trouble = "broken", outcome.trouble or Trouble(0, "", "", why)
    return outcome


def provenance(parameters: dict) -> dict:
    """What ran the notebooks, and when."""
    import torch

    return {
        "rung": parameters.get("rung", "sim"),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
