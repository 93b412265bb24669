"""Runs one notebook through papermill, strictly: whatever is not a claim that held is reported as what it is."""

from __future__ import annotations

import os
import re
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import nbformat

from stalegraph.runs import RESULT

CELL_SECONDS = 600  # a cell that takes longer has hung
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_ARROW = re.compile(r"-+>\s*\d+\s(.*)")


@dataclass(frozen=True)
class Trouble:
    """Where a notebook stopped: cell position from 1 (0: in none), the heading above it, the line, what happened."""

    cell: int
    heading: str
    line: str
    message: str
    last_cell: bool = False

    def __str__(self) -> str:
        where = f"cell {self.cell}" + (f", under '{self.heading}'" if self.heading else "")
        what = f"{self.line + ': ' if self.line else ''}{self.message}"
        return f"{where}: {what}" if self.cell else what


@dataclass
class Outcome:
    """What came of one notebook: `verdict` is "held", "does not hold" (its last cell's assert failed) or "broken"."""

    notebook: str
    title: str
    claim: str
    verdict: str = "broken"
    seconds: float = 0.0
    peak_mb: float = 0.0
    trouble: Trouble | None = None
    results: list = field(default_factory=list)

    @property
    def held(self) -> bool:
        return self.verdict == "held"

    @property
    def shows(self) -> str:
        """What the notebook's numbers are from, by what it published: a rung that ran, recordings, or both."""
        rungs = dict.fromkeys(str(one["rung"]) for one in self.results if one.get("rung"))
        devices = dict.fromkeys(device for one in self.results for device in one.get("recorded", ()))
        return "; ".join([*rungs, *(f"recorded on {device}" for device in devices)])

    def to_json(self) -> dict:
        return asdict(self)


def execute(
    source: Path, output: Path, title: str, claim: str, parameters: dict, timeout: int = CELL_SECONDS
) -> Outcome:
    """Run `source` in a fresh kernel of this very interpreter and write the executed notebook to `output`."""
    _prepare_environment()
    _send_stderr_to(output.with_suffix(".log"))
    import papermill
    from nbclient.exceptions import CellTimeoutError, DeadKernelError

    outcome = Outcome(source.stem, title, claim)
    started = time.monotonic()
    raised = None
    try:
        papermill.execute_notebook(
            str(source), str(output), parameters=parameters, kernel_name="python3", language="python",
            progress_bar=False, cwd=str(source.parent), execution_timeout=timeout, start_timeout=120,
        )  # fmt: skip
    except papermill.PapermillExecutionError as error:
        raised = (error.cell_index, error.traceback, f"{error.ename}: {error.evalue}".rstrip(": "))
    except DeadKernelError:
        raised = (None, (), "the kernel died")
    except CellTimeoutError:
        raised = (None, (), f"the cell took more than {timeout} s and was stopped")
    except Exception as error:  # no kernel, or one that did not start
        raised = (None, (), f"{type(error).__name__}: {error}")
    outcome.seconds = time.monotonic() - started
    outcome.peak_mb = _peak_mb()
    cells = _executed_cells(output)
    outcome.results = [result for cell in cells for result in _results(cell)]
    outcome.trouble = _trouble(cells, raised)
    if outcome.trouble is None:
        outcome.verdict = "held"
    elif outcome.trouble.last_cell and outcome.trouble.message.startswith("AssertionError"):
        outcome.verdict = "does not hold"
    return outcome


def _prepare_environment() -> None:
    # ipykernel stops capturing output of C code when it believes that pytest runs it.
    os.environ.pop("PYTEST_CURRENT_TEST", None)
    # The kernel "python3" must be this interpreter's, whatever a user has installed under that name.
    own = os.path.join(sys.prefix, "share", "jupyter")
    os.environ["JUPYTER_PATH"] = os.pathsep.join(filter(None, [own, os.environ.get("JUPYTER_PATH")]))
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"


def _send_stderr_to(log: Path) -> None:
    """What the kernel's C code prints goes beside the executed notebook; this process runs one notebook and ends."""
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 2)


def _peak_mb() -> float:
    import resource

    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024


def _executed_cells(output: Path):
    if not output.is_file():
        return []
    cells = nbformat.read(output, as_version=4).cells
    # papermill puts a banner and a mark of its own before a cell that raised; they are no cells of the notebook.
    return [cell for cell in cells if "papermill-error-cell-tag" not in cell.metadata.get("tags", [])]


def _results(cell) -> list:
    found = []
    for output in cell.get("outputs", ()):
        data = output.get("data", {})
        if RESULT in data:
            found.append(data[RESULT])
    return found


def _heading(cells, position: int) -> str:
    for cell in reversed(cells[: position + 1]):
        if cell.cell_type == "markdown":
            lines = [line for line in cell.source.splitlines() if line.startswith("#")]
            if lines:
                return lines[-1].lstrip("#").strip()
    return ""


def _trouble(cells, raised) -> Trouble | None:
    code = [at for at, cell in enumerate(cells) if cell.cell_type == "code" and cell.source.strip()]
    if not cells:
        return Trouble(0, "", "", raised[2] if raised else "no cell was run")
    failed = [at for at in code if any(output.output_type == "error" for output in cells[at].outputs)]
    unrun = [at for at in code if cells[at].execution_count is None]
    if raised is None and not failed and not unrun:
        return None
    if failed:
        at = failed[0]
        error = next(output for output in cells[at].outputs if output.output_type == "error")
        line = _line(error.traceback)
        message = f"{error.ename}: {error.evalue}".strip().rstrip(":")
        if error.ename == "KeyboardInterrupt" and raised is not None:
            message = raised[2]  # the runner interrupted it, and knows why
    else:
        # Passed over, or the kernel was gone: the cell that it was in is the first that has no count, or the last one.
        at = unrun[0] if unrun else code[-1]
        line = ""
        message = raised[2] if raised else "this cell never ran"
    return Trouble(at + 1, _heading(cells, at), line, message, at == code[-1])


def _line(traceback) -> str:
    for entry in traceback:
        for text in _ANSI.sub("", entry).splitlines():
            match = _ARROW.match(text.strip())
            if match:
                return match.group(1).strip()
    return ""
