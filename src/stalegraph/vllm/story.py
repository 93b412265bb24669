"""What engines said, for a notebook: from engines run now where the rung is vllm, else from the record of an H200."""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from stalegraph.errors import UsageError
from stalegraph.reciter import expected
from stalegraph.recorded import available, load
from stalegraph.vllm import engine
from stalegraph.vllm.affected import installed_version
from stalegraph.vllm.export import export
from stalegraph.vllm.releases import release_of
from stalegraph.vllm.reproduce import runs_of

AT_ONCE = 3


@dataclass(frozen=True)
class Told:
    """One batch of one engine. `text` is the first request's; `moves` are (step, field, address) where one changed."""

    mode: str
    builder: str
    batch: int
    verdict: str
    why: str
    accuracy: float | None
    text: bytes
    expected: bytes
    stale_fields: list[str] = field(default_factory=list)
    captured: dict[str, int] = field(default_factory=dict)
    moves: list = field(default_factory=list)
    us_per_build: float | None = None
    ms_per_token: float | None = None
    runner: str | None = None
    architecture: str | None = None

    @property
    def right(self) -> list[bool]:
        return [got == want for got, want in zip(self.text, self.expected)]

    def place(self, name: str, step: int) -> int:
        """Where field `name` lay at `step`, as far as moves were kept."""
        return [address for at, field_, address in self.moves if field_ == name and at <= step][-1]


@dataclass(frozen=True)
class Story:
    """All that was told, where from, and of which release; `live` if the engines ran now."""

    told: list[Told]
    caption: str
    release: str
    live: bool
    prompt: bytes

    def summary(self) -> list[tuple[tuple, float, float]]:
        """For each (architecture, runner, graphs, builder) its worst and best batch's accuracy, in order of telling."""
        kinds: dict[tuple, list] = {}
        for one in self.told:
            kinds.setdefault((one.architecture, one.runner, one.mode, one.builder), []).append(one.accuracy)
        return [(kind, *_span(values)) for kind, values in kinds.items()]

    def find(self, mode: str, builder: str, batch: int) -> Told:
        """One batch of one engine; an affected release's own builder is also called "regressed"."""
        names = {builder}
        if release_of(self.release).affected and builder in ("installed", "regressed"):
            names = {"installed", "regressed"}
        for one in self.told:
            if one.mode == mode and one.builder in names and one.batch == batch:
                return one
        there = sorted({(one.mode, one.builder, one.batch) for one in self.told})
        raise UsageError(f"mode, builder, batch are {(mode, builder, batch)}; allowed: {', '.join(map(str, there))}")


def _span(values) -> tuple[float, float]:
    """(least, largest) accuracy, a crash counted as nothing right."""
    numbers = [value or 0.0 for value in values]
    return min(numbers), max(numbers)


def recorded(release: str, where: str = "h200") -> Story:
    """The story in `repro/recorded/h200/vllm-RELEASE`: engine.json, and engine-v2.json where there is one."""
    record = load(f"{where}/vllm-{release}/engine")
    prompt, told, engines = record.data["prompt"].encode(), [], list(record.data["engines"])
    if available(f"{where}/vllm-{release}/engine-v2"):
        engines += load(f"{where}/vllm-{release}/engine-v2").data["engines"]
    for one in engines:
        for batch in one["batches"]:
            texts = [bytes.fromhex(text) for text in batch["texts"]]
            told.append(
                Told(
                    mode=one["mode"],
                    builder=one["builder"],
                    batch=batch["batch"],
                    verdict=batch["verdict"],
                    why=batch["why"],
                    accuracy=batch["accuracy"],
                    text=texts[0] if texts else b"",
                    expected=expected(prompt, record.data["tokens"]),
                    stale_fields=batch["stale_fields"],
                    captured={name: then for name, (then, _) in batch["addresses"].items()},
                    moves=batch["moves"] or [],
                    us_per_build=batch["us_per_build"],
                    ms_per_token=batch["ms_per_token"],
                    runner=one["runner"],
                    architecture=one["architecture"],
                )
            )
    return Story(told, f"{record.provenance.caption()}; not run now", release, False, prompt)


def live(prompt: bytes, builders, batches, tokens: int) -> Story:
    """The story of the installed vLLM, run now: one engine eager, one a builder with full decode graphs."""
    release = installed_version()
    if release is None or release_of(release) is None:
        raise UsageError(f"the installed vLLM is {release}; allowed: a release of the map")
    with tempfile.TemporaryDirectory(prefix="stalegraph-story-") as scratch:
        model = str(export(Path(scratch, "reciter"), prompt))
        wanted = [("eager", "installed"), *(("full", builder) for builder in builders)]
        settings = [
            engine.Settings(model, prompt, mode, builder, tuple(batches), tokens)
            for mode, builder in dict.fromkeys(wanted)
        ]
        turns = engine.Turns(scratch, min(AT_ONCE, len(settings)))
        with ThreadPoolExecutor(AT_ONCE) as pool:
            ends = list(pool.map(lambda one: engine.start(one, turns=turns), settings))
    told = [_of_run(run, one.builder) for one, end in zip(settings, ends) for run in runs_of(one, *end)]
    machine = next((end[0]["engine"] for end in ends if end[0] and end[0]["engine"]), {})
    device, driver, torch = (machine.get(name) for name in ("device", "driver", "torch"))
    caption = f"run now on {device}, driver {driver}, torch {torch}, vLLM {release}"
    return Story(told, caption, release, True, prompt)


def _of_run(run, builder: str) -> Told:
    said = bytes(run.said[0]) if run.said else b""
    return Told(
        mode=run.mode,
        builder=builder,
        batch=run.batch,
        verdict=run.verdict,
        why=run.why,
        accuracy=run.accuracy,
        text=said,
        expected=bytes(run.expected[0]) if run.expected else b"",
        stale_fields=run.stale_fields,
        captured={name: then for name, (then, _) in run.addresses.items()},
        moves=run.facts.get("moves") or [],
        us_per_build=run.facts.get("us_per_build"),
        ms_per_token=run.facts.get("ms_per_token"),
        runner=(run.facts.get("engine") or {}).get("runner"),
        architecture=(run.facts.get("engine") or {}).get("architecture"),
    )


def tell(rung: str, release: str, *, prompt: bytes, builders, batches, tokens: int) -> Story:
    """Live on rung vllm, else the record of `release`, whose prompt and sizes are its own."""
    return live(prompt, builders, batches, tokens) if rung == "vllm" else recorded(release)
