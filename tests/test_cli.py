"""The command line: every command is reachable, the user's own mistakes are one line and exit 2."""

import json
import subprocess
import sys

import pytest

from stalegraph import cli


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as done:
        cli.main([command, "--help"])
    assert done.value.code == 0 and command in capsys.readouterr().out


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    shown = capsys.readouterr().out
    assert all(command in shown for command in cli.COMMANDS)


@pytest.mark.parametrize("words", [["nonsense"], [], ["bench", "--frobnicate"]])
def test_bad_usage_exits_2(words, capsys):
    with pytest.raises(SystemExit) as done:
        cli.main(words)
    assert done.value.code == 2 and "usage" in capsys.readouterr().err


def test_the_users_mistake_is_one_line_without_a_traceback():
    done = subprocess.run([sys.executable, "-m", "stalegraph", "bench"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "stalegraph bench: bench needs one of --sim and --gpu; allowed: exactly one\n"


def test_commands_are_imported_only_when_asked_for():
    code = "import sys, stalegraph.cli; print([name for name in ('torch', 'matplotlib') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_bench_prints_one_json_object(capsys):
    assert cli.main(["bench", "--sim", "--quick", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == 1 and found["rung"] == "sim" and found["decode"]["accuracy"] == 1.0
    costs = {one["builder"]: one for one in found["builders"]}
    assert costs["ingraph"]["allocations"] == 0 < costs["regressed"]["allocations"]
    assert {"machine", "torch", "date"} <= set(found["provenance"])


def test_a_missing_extra_is_named_in_one_line(monkeypatch, capsys):
    def absent(module):
        raise ModuleNotFoundError("No module named 'nbformat'", name="nbformat")

    monkeypatch.setattr(cli.importlib, "import_module", absent)
    assert cli.main(["walkthrough"]) == 2
    wanted = "No module named 'nbformat'; pip install 'stalegraph[notebooks]' brings it"
    assert capsys.readouterr().err == f"stalegraph walkthrough: {wanted}\n"
