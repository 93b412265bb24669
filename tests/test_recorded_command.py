"""`stalegraph record` refuses what it cannot do, says why, and writes what each child hands back."""

import argparse

import pytest
import torch

from stalegraph.errors import UsageError
from stalegraph.isolate import Isolated
from stalegraph.record import add_arguments, command, main
from stalegraph.recorded import Provenance, load

PROVENANCE = Provenance("GPU", 132, *["x"] * 7)


def parse(*arguments):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    "arguments, message",
    [(("--only", "metadata,addresses"), "--only names 'addresses'"), (("--jobs", "0"), "--jobs is 0")],
)
def test_bad_arguments_are_refused(tmp_path, arguments, message):
    with pytest.raises(UsageError, match=message):
        main(parse("--out", str(tmp_path), *arguments))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_what_it_needs(tmp_path):
    with pytest.raises(UsageError, match="recording needs the flashmla rung"):
        main(parse("--out", str(tmp_path), "--only", "leak"))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def children(monkeypatch):
    """Children that run nothing: what each target hands back, by name or by item."""
    back = {"provenance_of": PROVENANCE}

    def run_isolated(target, *args, **kwargs):
        value = back[target.__name__] if target.__name__ in back else back[args[0]]
        return value if isinstance(value, Isolated) else Isolated(value=value)

    monkeypatch.setattr(command, "run_isolated", run_isolated)
    return back


def test_items_are_written_with_provenance_and_a_failed_one_leaves_the_rest(tmp_path, children, monkeypatch, capsys):
    children["metadata"] = ({"count": 1}, None)
    children["leak"] = Isolated(exit_code=None, signal="SIGABRT", stderr="assert\n")
    assert main(parse("--out", str(tmp_path / "h200"), "--only", "leak,metadata")) == 1
    out, err = capsys.readouterr()
    assert out.startswith("metadata: ") and "leak: not recorded: signal SIGABRT" in err
    monkeypatch.setenv("STALEGRAPH_RECORDED", str(tmp_path))
    assert load("h200/metadata").data == {"count": 1} and load("h200/metadata").provenance == PROVENANCE


def test_records_that_grew_too_large_are_refused(tmp_path, children):
    children["metadata"] = ({"digests": "x" * (command.LARGEST + 1)}, None)
    with pytest.raises(UsageError, match="the records take"):
        main(parse("--out", str(tmp_path), "--only", "metadata"))
