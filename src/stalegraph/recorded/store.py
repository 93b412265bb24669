"""Where records lie and what stands in one: data, and the provenance without which it would prove nothing."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path

from stalegraph.errors import UsageError

SCHEMA = 1
CHECKOUT = Path(__file__).resolve().parents[3] / "repro" / "recorded"
PACKAGED = Path(__file__).resolve().parent / "data"


@dataclass(frozen=True)
class Provenance:
    """Where a record comes from: `flashmla` names the library by release, bytes and sha256; `date` is UTC, ISO 8601."""

    device: str
    sm_count: int
    driver: str
    torch: str
    vllm: str
    flashmla: str
    cuda: str
    date: str
    command: str

    def caption(self) -> str:
        """One line for a figure or a table."""
        return (
            f"recorded on {self.device} ({self.sm_count} SMs), driver {self.driver}, torch {self.torch}, "
            f"kernels of vLLM {self.vllm}, {self.date[:10]}"
        )


@dataclass(frozen=True)
class Record:
    """One record: `name` is "h200/metadata", `data` its JSON, `tensors` what lies beside it in a .safetensors file."""

    name: str
    data: dict
    provenance: Provenance
    path: Path

    @cached_property
    def tensors(self) -> dict:
        path = self.path.with_suffix(".safetensors")
        if not path.is_file():
            return {}
        from safetensors.torch import load_file

        return load_file(path)


def root() -> Path:
    """The folder of all records: STALEGRAPH_RECORDED, else the checkout's repro/recorded, else the package's."""
    override = os.environ.get("STALEGRAPH_RECORDED")
    if override:
        return Path(override)
    return CHECKOUT if CHECKOUT.is_dir() else PACKAGED


_shown: dict[str, None] = {}  # the devices of the records that this process has loaded, in order


def shown() -> list[str]:
    """The devices whose records this process has loaded: what is shown from them did not run here."""
    return list(_shown)


def names() -> list[str]:
    """Every record there is, as `load` takes it."""
    return sorted(str(path.relative_to(root()).with_suffix("")) for path in root().glob("*/*.json"))


def available(name: str) -> bool:
    """Whether `load(name)` would find a record."""
    return (root() / f"{name}.json").is_file()


def load(name: str) -> Record:
    """The record `name`, checked for its schema and its provenance."""
    path = root() / f"{name}.json"
    if not path.is_file():
        raise UsageError(f"record is {name!r}; allowed: {', '.join(names()) or f'none, {root()} holds no records'}")
    text = json.loads(path.read_text())
    if text.get("schema") != SCHEMA:
        raise UsageError(f"{name} has schema {text.get('schema')!r}; allowed: {SCHEMA}")
    wanted = {field.name for field in fields(Provenance)}
    given = text.get("provenance", {})
    if set(given) != wanted:
        raise UsageError(f"{name} has provenance {sorted(given)}; allowed: {sorted(wanted)}")
    record = Record(name, text["data"], Provenance(**given), path)
    _shown[record.provenance.device] = None
    return record


def write(folder, name: str, data: dict, provenance: Provenance, tensors: dict | None = None) -> Path:
    """Writes `folder/name.json` and, for tensors, `folder/name.safetensors`; returns the JSON's path."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    # One line an entry, so that differences between two recordings can be read.
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in data.items())
    head = f'"schema": {SCHEMA},\n"provenance": {json.dumps(asdict(provenance))}'
    path.write_text(f'{{{head},\n"data": {{\n{lines}\n}}}}\n')
    if tensors:
        from safetensors.torch import save_file

        save_file(tensors, path.with_suffix(".safetensors"))
    return path
