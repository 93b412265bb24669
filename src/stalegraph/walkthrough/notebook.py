"""What the runner needs to know of a notebook before it runs: its claim, its parameters, its form's faults."""

from __future__ import annotations

import ast
import os
from dataclasses import dataclass
from pathlib import Path

import nbformat

from stalegraph.errors import UsageError


def notebooks_folder() -> Path:
    """The folder of notebook sources: of this checkout, or STALEGRAPH_NOTEBOOKS."""
    named = os.environ.get("STALEGRAPH_NOTEBOOKS")
    folder = Path(named) if named else Path(__file__).resolve().parents[3] / "notebooks"
    if not folder.is_dir():
        raise UsageError(f"no notebooks at {folder}; allowed: a checkout, or STALEGRAPH_NOTEBOOKS naming a folder")
    return folder


@dataclass(frozen=True)
class Notebook:
    """A notebook source. `problem` says what keeps it from being run, if anything does."""

    path: Path
    title: str
    claim: str
    parameters: dict
    problem: str | None = None

    @property
    def name(self) -> str:
        return self.path.stem


def read(path: Path) -> Notebook:
    """Read one notebook; what is wrong with its form goes into `problem`."""
    try:
        cells = nbformat.read(path, as_version=4).cells
    except (nbformat.reader.NotJSONError, nbformat.ValidationError, UnicodeDecodeError) as error:
        return Notebook(path, path.stem, "", {}, f"this file is no notebook: {str(error)[:80]}")
    first = cells[0].source if cells else ""
    title = next((line[2:].strip() for line in first.splitlines() if line.startswith("# ")), path.stem)
    claim = next((line.partition("Claim:")[2].strip(" *") for line in first.splitlines() if "Claim:" in line), "")
    tagged = [cell for cell in cells if "parameters" in cell.metadata.get("tags", [])]
    problem, parameters = None, {}
    if not claim:
        problem = "the first cell has no line 'Claim: ...'"
    elif len(tagged) != 1:
        problem = f"{len(tagged)} cells are tagged 'parameters'; allowed: exactly one, or none would reach it"
    else:
        try:
            parameters = _literals(tagged[0].source)
        except (SyntaxError, ValueError) as error:
            problem = f"the parameters cell is not plain literals: {error}"
    return Notebook(path, title, claim, parameters, problem)


def _literals(source: str) -> dict:
    found = {}
    for statement in ast.parse(source).body:
        if not (isinstance(statement, ast.Assign) and len(statement.targets) == 1):
            raise ValueError(f"line {statement.lineno} is no plain assignment")
        found[statement.targets[0].id] = ast.literal_eval(statement.value)
    return found


def choose(only: str | None, folder: Path | None = None) -> list[Notebook]:
    """All notebooks in reading order, or those that `only` names: "01", "01,02" or whole names."""
    found = [read(path) for path in sorted((folder or notebooks_folder()).glob("[0-9][0-9]_*.ipynb"))]
    if only is None:
        return found
    chosen = []
    for word in filter(None, (word.strip() for word in only.split(","))):
        matching = [one for one in found if one.name == word or one.name.split("_")[0] == word.zfill(2)]
        if not matching:
            raise UsageError(f"only is {word!r}; allowed: {', '.join(one.name for one in found)} or their numbers")
        chosen += [one for one in matching if one not in chosen]
    if not chosen:
        raise UsageError(f"only is {only!r}; allowed: {', '.join(one.name for one in found)} or their numbers")
    return sorted(chosen, key=lambda one: one.name)
