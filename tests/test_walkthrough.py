"""The runner is strict: whatever is not a claim that held gets one clear report and a non-zero exit."""

import json
import multiprocessing
import re
import sys
from concurrent.futures import ProcessPoolExecutor

import nbformat
import pytest

from stalegraph import cli
from stalegraph.walkthrough import choose, execute, run_walkthrough
from stalegraph.walkthrough.notebook import read

LEAVING = ["import sys; sys.exit(0)", "import os; os._exit(0)", "import os; os.kill(os.getpid(), 9)"]
FIRST = "# A question?\n\n**Claim:** Two and two make four."


def write(folder, *cells, tag="parameters", first=FIRST, name="01_small"):
    book = nbformat.v4.new_notebook()
    book.cells = [nbformat.v4.new_markdown_cell(first), nbformat.v4.new_code_cell("two = 2  # a number")]
    book.cells[1].metadata["tags"] = [tag] if tag else []
    for kind, source in cells:
        make = nbformat.v4.new_markdown_cell if kind == "md" else nbformat.v4.new_code_cell
        book.cells.append(make(source))
    nbformat.write(book, folder / f"{name}.ipynb")


def run(folder, tmp_path, parameters=None, **more):
    said = []
    outcomes = run_walkthrough(choose(None, folder), parameters or {}, tmp_path / "out", say=said.append, **more)
    return outcomes, said


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "books"
    folder.mkdir()
    return folder


def test_a_claim_that_holds(folder, tmp_path):
    write(folder, ("code", "print('four')"), ("code", "assert two + two == 4"))
    (one,), said = run(folder, tmp_path)
    assert one.verdict == "held" and one.claim == "Two and two make four." and one.trouble is None
    page = (tmp_path / "out" / "01_small.html").read_text()
    assert "four" in page and "01_small" in (tmp_path / "out" / "index.html").read_text()
    assert said[0].startswith("01_small: held")


def test_pages_load_nothing_from_outside(folder, tmp_path):
    drawing = "import matplotlib.pyplot as plt\nplt.plot([1, 2]); plt.show()"
    write(folder, ("code", drawing), ("code", "assert two == 2"))
    run(folder, tmp_path)
    for page in (tmp_path / "out").glob("*.html"):
        outside = r"""(?:src|href)\s*=\s*["'](?!data:|#|\w+\.html)[^"']+|@import|url\((?!data:)"""
        assert re.findall(outside, page.read_text()) == [] and "<script" not in page.read_text()


def test_a_claim_that_does_not_hold_is_told_from_a_broken_notebook(folder, tmp_path):
    write(folder, ("md", "## The sum"), ("code", "assert two + two == 4, 'sum is off'"))
    (one,), _ = run(folder, tmp_path, {"two": 3})
    assert one.verdict == "does not hold"
    line = "assert two + two == 4, 'sum is off'"
    assert str(one.trouble) == f"cell 5, under 'The sum': {line}: AssertionError: sum is off"


def test_an_error_names_cell_heading_and_line(folder, tmp_path):
    write(folder, ("md", "## Division"), ("code", "x = 1\ny = x / 0"), ("code", "assert two == 2"))
    (one,), _ = run(folder, tmp_path)
    assert one.verdict == "broken" and one.trouble.heading == "Division" and one.trouble.line == "y = x / 0"
    assert "ZeroDivisionError" in one.trouble.message and one.trouble.cell == 4


@pytest.mark.parametrize("source", LEAVING)
def test_a_cell_that_leaves_early_is_never_green(folder, tmp_path, source):
    write(folder, ("md", "## Leaving"), ("code", source), ("code", "assert two == 2"))
    (one,), _ = run(folder, tmp_path)
    assert one.verdict == "broken" and one.trouble.heading == "Leaving" and one.trouble.message


def test_a_cell_that_was_skipped_is_never_green(folder, tmp_path):
    write(folder, ("md", "## Skipped"), ("code", "assert two == 3"))
    book = nbformat.read(folder / "01_small.ipynb", as_version=4)
    book.cells[-1].metadata["tags"] = ["skip-execution"]  # nbclient passes over such a cell without a word
    nbformat.write(book, folder / "01_small.ipynb")
    (one,), _ = run(folder, tmp_path)
    assert one.verdict == "broken" and one.trouble.heading == "Skipped" and "never ran" in one.trouble.message


@pytest.mark.parametrize("source", ["exit()", "quit"])
def test_after_a_shell_exit_the_last_cell_still_decides(folder, tmp_path, source):
    write(folder, ("code", source), ("code", "assert two == 3"))
    (one,), _ = run(folder, tmp_path)
    assert one.verdict == "does not hold"


def test_a_cell_that_hangs_is_stopped(folder, tmp_path):
    write(folder, ("code", "while True: pass"), ("code", "assert two == 2"))
    (one,), _ = run(folder, tmp_path, timeout=2)
    assert one.verdict == "broken" and "more than 2 s" in one.trouble.message


@pytest.mark.parametrize(
    "change,problem",
    [
        (dict(tag=None), "0 cells are tagged 'parameters'"),
        (dict(tag="parameter"), "0 cells are tagged 'parameters'"),
        (dict(first="# A question?"), "has no line 'Claim: ...'"),
    ],
)
def test_a_malformed_notebook_is_broken_before_it_runs(folder, tmp_path, change, problem):
    write(folder, ("code", "assert two == 2"), **change)
    (one,), said = run(folder, tmp_path)
    assert one.verdict == "broken" and problem in one.trouble.message and problem in said[0]


def test_results_reach_the_caller(folder, tmp_path):
    telling = "from stalegraph.runs import publish\npublish('sum', value=two + two)"
    write(folder, ("code", telling), ("code", "assert two == 2"))
    (one,), _ = run(folder, tmp_path)
    assert one.results == [{"name": "sum", "value": 4}]


def command(folder, tmp_path, monkeypatch, *words):
    monkeypatch.setenv("STALEGRAPH_NOTEBOOKS", str(folder))
    return cli.main(["walkthrough", "--out", str(tmp_path / "report" / "out"), *words])


def test_the_command_prints_one_json_object(folder, tmp_path, monkeypatch, capsys):
    write(folder, ("code", "assert two + two == 4"))
    assert command(folder, tmp_path, monkeypatch, "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["schema"] == 1 and record["held"] and record["notebooks"][0]["verdict"] == "held"


def test_the_command_exits_1_when_a_claim_fails(folder, tmp_path, monkeypatch, capsys):
    write(folder, ("code", "assert two + two == 4"))
    assert command(folder, tmp_path, monkeypatch, "--set", "two=5") == 1
    assert "does not hold" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words,message",
    [
        (["--set", "tow=3"], "no notebook chosen has a parameter 'tow'; allowed: two"),
        (["--set", "two"], "set is 'two'; allowed: NAME=VALUE"),
        (["--only", "09"], "only is '09'; allowed: 01_small or their numbers"),
        (["--rung", "moon"], "rung is 'moon'; allowed: sim, flashmla, vllm"),
        (["--prompt-file", "nowhere.txt"], "prompt-file is 'nowhere.txt', which is no file"),
        (["--sm-count", "0"], "sm-count is '0'; allowed: an integer from 1 to 1024"),
        (["--sm-count", "many"], "sm-count is 'many'"),
        (["--set", "two=many"], "two is 'many'; allowed: int, such as 2"),
        (["--set", "two=True"], "two is True; allowed: int, such as 2"),
        (["--set", "rung=moon"], "rung is 'moon'; allowed: sim, flashmla, vllm"),
    ],
)
def test_bad_input_exits_2_in_one_line_and_writes_nothing(folder, tmp_path, monkeypatch, capsys, words, message):
    write(folder, ("code", "assert two == 2"))
    assert command(folder, tmp_path, monkeypatch, *words) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not (tmp_path / "report").exists()


@pytest.mark.parametrize("size", [0, 4097])
def test_a_prompt_file_of_the_wrong_size(folder, tmp_path, monkeypatch, capsys, size):
    write(folder, ("code", "assert two == 2"))
    (tmp_path / "text").write_bytes(b"x" * size)
    assert command(folder, tmp_path, monkeypatch, "--prompt-file", str(tmp_path / "text")) == 2
    assert f"prompt has {size} bytes; allowed: 1 to 4096" in capsys.readouterr().err


def test_a_rung_that_this_machine_lacks_says_what_is_missing(folder, tmp_path, monkeypatch, capsys):
    import stalegraph.walkthrough.command as module

    write(folder, ("code", "assert two == 2"))
    monkeypatch.setattr(module, "available", lambda lib: {"sim": None, "flashmla": "no CUDA device", "vllm": None})
    assert command(folder, tmp_path, monkeypatch, "--rung", "flashmla") == 2
    assert "rung flashmla cannot run on this machine: no CUDA device" in capsys.readouterr().err


def test_an_unknown_builder_is_refused_before_anything_runs(tmp_path, capsys):
    words = ["walkthrough", "--only", "01", "--set", "builder=nonsense", "--out", str(tmp_path / "report" / "out")]
    assert cli.main(words) == 2 and not (tmp_path / "report").exists()
    assert "builder is 'nonsense'; allowed: regressed, copying, inplace, ingraph" in capsys.readouterr().err


def test_a_parameter_that_a_notebook_refuses_leaves_the_earlier_report(folder, tmp_path, monkeypatch, capsys):
    refusal = "from stalegraph.errors import UsageError\nif two > 2: raise UsageError(f'two is {two}; allowed: 1 or 2')"
    write(folder, ("code", refusal), ("code", "assert two == 2"))
    assert command(folder, tmp_path, monkeypatch) == 0
    before = (tmp_path / "report" / "out" / "index.html").read_bytes()
    assert command(folder, tmp_path, monkeypatch, "--set", "two=3") == 2
    assert capsys.readouterr().err.endswith("stalegraph walkthrough: 01_small: two is 3; allowed: 1 or 2\n")
    assert (tmp_path / "report" / "out" / "index.html").read_bytes() == before
    assert [path.name for path in (tmp_path / "report").iterdir()] == ["out"]


@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_is_no_report_is_never_replaced(folder, tmp_path, monkeypatch, capsys, what):
    write(folder, ("code", "assert two == 2"))
    precious = tmp_path / "report" / "out"
    precious.parent.mkdir()
    kept = precious if what == "file" else precious / "thesis.txt"
    kept.parent.mkdir(exist_ok=True)
    kept.write_text("years of work")
    assert command(folder, tmp_path, monkeypatch) == 2
    assert "which holds something else; allowed: a new folder, or an earlier report" in capsys.readouterr().err
    assert kept.read_text() == "years of work"


def test_the_kernel_is_this_environments_whatever_the_user_has_installed(folder, tmp_path, monkeypatch):
    home = tmp_path / "jupyter"
    (home / "kernels" / "python3").mkdir(parents=True)
    (home / "kernels" / "python3" / "kernel.json").write_text(
        json.dumps({"argv": ["/nowhere/python", "{connection_file}"], "display_name": "other", "language": "python"})
    )
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(home))
    monkeypatch.setenv("JUPYTER_PATH", str(home))
    write(folder, ("code", "import sys\nprint(sys.prefix)"), ("code", "assert two == 2"))
    one = apart(folder, tmp_path)
    assert one.verdict == "held", str(one.trouble)
    assert sys.prefix in (tmp_path / "01_small.ipynb").read_text()


def apart(folder, tmp_path):
    """One notebook in a process with this test's environment; the runner's own server keeps the one it began with."""
    (one,) = choose(None, folder)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(execute, one.path, tmp_path / one.path.name, one.title, one.claim, {}).result()


def test_a_killed_runner_is_a_broken_notebook_and_the_others_go_on(folder, tmp_path):
    write(folder, ("code", "import os\nos.kill(os.getppid(), 9)"), ("code", "assert two == 2"))
    write(folder, ("code", "assert two == 2"), name="02_small")
    (first, second), _ = run(folder, tmp_path)
    assert first.verdict == "broken" and "was killed" in first.trouble.message and second.verdict == "held"
    assert "was killed" in (tmp_path / "out" / "index.html").read_text()


def test_a_page_that_cannot_be_made_costs_no_executed_notebook(folder, tmp_path):
    in_the_way = "import pathlib\n[(one / '01_small.html').mkdir() for one in pathlib.Path('..').glob('.out-*')]"
    write(folder, ("code", in_the_way), ("code", "assert two == 2"))
    (one,), said = run(folder, tmp_path)
    assert one.verdict == "broken" and "its page could not be made: IsADirectoryError" in one.trouble.message
    assert (tmp_path / "out" / "01_small.ipynb").is_file() and said[0].count("it ran, but") == 1
    assert 'href="01_small.html"' not in (tmp_path / "out" / "index.html").read_text()


def test_a_file_that_is_no_notebook_is_broken(folder, tmp_path):
    (folder / "01_small.ipynb").write_text("not JSON")
    (one,), _ = run(folder, tmp_path)
    assert one.verdict == "broken" and "this file is no notebook" in one.trouble.message


def test_the_index_links_only_to_pages_that_exist_and_shows_code_as_code(folder, tmp_path):
    write(folder, ("code", "assert two == 2"), first="# A question?\n\n**Claim:** `two` is < 3.")
    (folder / "02_small.ipynb").write_text("not JSON")
    run(folder, tmp_path)
    index = (tmp_path / "out" / "index.html").read_text()
    assert "<code>two</code> is &lt; 3." in index and "width=device-width" in index
    assert re.findall(r'href="([^"]+)"', index) == ["01_small.html"]


def test_a_failed_run_replaces_the_report_as_a_whole(folder, tmp_path):
    write(folder, ("code", "assert two == 2"))
    run(folder, tmp_path)
    (tmp_path / "out" / "left-over").write_text("old")
    run(folder, tmp_path, {"two": 3})
    assert not (tmp_path / "out" / "left-over").exists() and (tmp_path / "out" / "index.html").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".out")] == []


def test_a_report_keeps_the_pages_of_notebooks_that_are_not_chosen(folder, tmp_path, monkeypatch, capsys):
    write(folder, ("code", "assert two == 2"))
    write(folder, ("code", "assert two == 2"), name="02_small")
    out = tmp_path / "report" / "out"
    assert command(folder, tmp_path, monkeypatch) == 0
    earlier = (out / "02_small.html").read_bytes()
    assert command(folder, tmp_path, monkeypatch, "--only", "01") == 0
    assert (out / "02_small.html").read_bytes() == earlier
    first, second = re.findall(r"<tr><td>.*?</tr>", (out / "index.html").read_text())
    assert 'href="01_small.html"' in first and 'class="held"' in first
    assert 'href="02_small.html"' in second and "not run now" in second and 'class="held"' not in second
    (folder / "02_small.ipynb").unlink()
    assert command(folder, tmp_path, monkeypatch) == 0 and not (out / "02_small.html").exists()


def test_what_a_notebook_shows_is_what_it_published(folder, tmp_path, monkeypatch, capsys):
    telling = "from stalegraph.runs import publish\nfrom stalegraph.recorded import load\n"
    telling += "publish('sum', rung='sim')\nload('h200/padding')\npublish('product', value=4)"
    write(folder, ("code", telling), ("code", "assert two == 2"))
    assert command(folder, tmp_path, monkeypatch) == 0
    assert "sim; recorded on" in capsys.readouterr().out
    assert "<td>sim; recorded on NVIDIA H200</td>" in (tmp_path / "report" / "out" / "index.html").read_text()


def test_parameters_must_be_plain_literals(folder):
    write(folder, ("code", "assert two == 2"))
    book = nbformat.read(folder / "01_small.ipynb", as_version=4)
    book.cells[1].source = "two = len('ab')"
    nbformat.write(book, folder / "01_small.ipynb")
    assert "not plain literals" in read(folder / "01_small.ipynb").problem
