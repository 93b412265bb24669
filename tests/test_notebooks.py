"""Every notebook is well formed, holds its claim in a fresh kernel, and fails in its last cell where it must."""

import statistics
import subprocess
import sys

import nbformat
import pytest

from stalegraph.walkthrough import choose, execute
from stalegraph.walkthrough.notebook import notebooks_folder

NOTEBOOKS = choose(None)
NAMES = [one.name for one in NOTEBOOKS]
STRIP = [
    "--keep-id", "--extra-keys",
    "metadata.papermill metadata.language_info cell.metadata.papermill cell.metadata.execution cell.metadata.tags_run",
]  # fmt: skip
# What makes each claim false: the wrong builder, or the right one where the bug is the claim.
WRONG = {
    "00_start_here": {"rebind": False},
    "01_garbled_output": {"builder": "copying", "tokens": 40},
    "02_stale_addresses": {"builder": "copying", "tokens": 60, "theft_step": 20},
    "03_fixed_builder": {"builders": ["regressed"], "batches": [1], "tokens": 40},
    "04_padded_rows": {"builder": "regressed", "tokens": 20},
    "05_performance": {"cheap_builders": ["regressed"], "tokens": 10},
    "06_vllm_engine": {"buggy": "copying"},
    "07_find_the_next_one": {"builder": "copying", "tokens": 6},
}
# Smaller than the walkthrough's own sizes, so that the suite stays short.
RIGHT = {
    "01_garbled_output": {"tokens": 100},
    "02_stale_addresses": {"tokens": 60, "theft_step": 20},
    "03_fixed_builder": {"tokens": 40, "batches": [1, 3, 8]},
    "05_performance": {"tokens": 20},
}


def source(name):
    return notebooks_folder() / f"{name}.ipynb"


@pytest.mark.parametrize("name", NAMES)
def test_the_claim_holds_in_a_fresh_kernel(name, tmp_path):
    one = next(one for one in NOTEBOOKS if one.name == name)
    outcome = execute_apart(one, tmp_path, RIGHT.get(name, {}))
    assert outcome.verdict == "held", str(outcome.trouble)
    assert outcome.results and outcome.peak_mb < 1500


@pytest.mark.parametrize("name", WRONG)
def test_the_last_cell_fails_with_the_wrong_builder(name, tmp_path):
    one = next(one for one in NOTEBOOKS if one.name == name)
    outcome = execute_apart(one, tmp_path, WRONG[name])
    assert outcome.verdict == "does not hold" and outcome.trouble.last_cell, str(outcome.trouble)


def execute_apart(one, tmp_path, parameters):
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(execute, one.path, tmp_path / one.path.name, one.title, one.claim, parameters).result()


@pytest.mark.parametrize("name", NAMES)
def test_form(name):
    cells = nbformat.read(source(name), as_version=4).cells
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    assert cells[0].source.startswith("# ") and "**Claim:**" in cells[0].source
    prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    headings = [line for line in prose.splitlines() if line.startswith("# ")]
    assert len(headings) == 1 and headings[0].endswith("?")
    assert cells[1].metadata.get("tags") == ["parameters"] and all("#" in line for line in cells[1].source.splitlines())
    assert cells[-1].cell_type == "code" and cells[-1].source.startswith("assert ")
    assert len(cells) <= 30
    lengths = [len(text.splitlines()) for text in code]
    assert max(lengths) <= 12
    assert not any(line.startswith(("class ", "def ")) for text in code for line in text.splitlines())
    assert "Where to read next" in "".join(cell.source for cell in cells)


def test_code_cells_are_short():
    books = [nbformat.read(source(name), as_version=4) for name in NAMES]
    cells = [cell for book in books for cell in book.cells if cell.cell_type == "code"]
    assert statistics.median(len(cell.source.splitlines()) for cell in cells) <= 4


@pytest.mark.parametrize("name", NAMES)
def test_sources_hold_no_outputs(name):
    done = subprocess.run(
        [sys.executable, "-m", "nbstripout", "--verify", *STRIP, str(source(name))], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    book = nbformat.read(source(name), as_version=4)
    assert book.metadata.kernelspec.name == "python3"
    assert all(cell.execution_count is None and not cell.outputs for cell in book.cells if cell.cell_type == "code")
