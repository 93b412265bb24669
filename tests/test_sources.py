"""Real builder sources on the simulated GPU: the harness on stand-ins, and the releases themselves (make releases)."""

import sys
import zipfile

import pytest

from stalegraph.errors import UsageError
from stalegraph.vllm import wheels
from stalegraph.vllm.sources import default_pad_block, drive
from stalegraph.vllm.stubs import stub, stubbed
from stalegraph.vllm.survey import EXPECTED, RELEASES
from stalegraph.vllm.wheels import sources

AFFECTED = ("0.15.0", "0.18.1")
MODES = ("copying", "inplace", "ingraph", "auto")


def test_stubs_give_way_to_real_sources_and_leave_no_trace(tmp_path):
    package = tmp_path / "vllm" / "deep"
    package.mkdir(parents=True)
    (package / "real.py").write_text(
        "from vllm.anywhere import Base, decorate, Kind, number\n"
        "@decorate('x')\n"
        "class Builder(Base[int]):\n"
        "    support = Kind.ALWAYS\n"
        "    def build(self, value: Base | None):\n"
        "        return value + number()\n"
    )
    before = {name for name in sys.modules if name.startswith("vllm")}
    with stubbed(tmp_path, ["vllm.deep.real"], {"vllm.anywhere": {"number": lambda: 2}}):
        from vllm.deep.real import Builder

        assert Builder().build(1) == 3
    assert {name for name in sys.modules if name.startswith("vllm")} == before
    with pytest.raises(ModuleNotFoundError):
        import vllm.deep.real  # noqa: F401


def test_a_stand_in_is_false_callable_and_bottomless():
    thing = stub("Thing")
    assert not thing and not thing() and not thing.a.b() and list(thing()) == []
    assert thing.register("name")(len) is len
    assert not thing.count > 1


def test_padded_rows_are_filled_as_the_release_fills_them():
    assert [default_pad_block(release) for release in RELEASES] == [-1, -1, -1, -1, 0, 0]


def test_sources_are_taken_from_a_folder_that_has_them(tmp_path, monkeypatch):
    (tmp_path / "9.9.9" / "vllm").mkdir(parents=True)
    monkeypatch.setenv("STALEGRAPH_VLLM_SOURCES", str(tmp_path))
    assert sources("9.9.9") == tmp_path / "9.9.9"
    monkeypatch.delenv("STALEGRAPH_VLLM_SOURCES")
    assert sources("9.9.9", tmp_path) == tmp_path / "9.9.9"
    with pytest.raises(UsageError, match="no sources of vLLM 9.9.9"):
        sources("9.9.9")


def test_only_the_wanted_sources_leave_the_wheel_and_the_wheel_is_deleted(tmp_path, monkeypatch):
    monkeypatch.delenv("STALEGRAPH_VLLM_SOURCES", raising=False)
    seen = []

    def download(command, **_):
        folder = command[command.index("--dest") + 1]
        seen.append(folder)
        assert "--no-deps" in command and command[-1] == "vllm==9.9.9"
        with zipfile.ZipFile(f"{folder}/vllm-9.9.9-cp38-abi3-any.whl", "w") as wheel:
            for name in ("vllm/v1/attention/backend.py", "vllm/v1/attention/kernel.so", "vllm/entrypoints/llm.py"):
                wheel.writestr(name, "x = 1")
        return type("Done", (), {"returncode": 0, "stderr": ""})

    monkeypatch.setattr(wheels.subprocess, "run", download)
    root = sources("9.9.9", tmp_path)
    found = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
    assert found == ["vllm/v1/attention/backend.py"]
    assert not wheels.Path(seen[0]).exists()


def test_a_release_that_pip_does_not_find_is_a_usage_error(tmp_path, monkeypatch):
    monkeypatch.delenv("STALEGRAPH_VLLM_SOURCES", raising=False)
    done = type("Done", (), {"returncode": 1, "stderr": "ERROR: no matching distribution"})
    monkeypatch.setattr(wheels.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(UsageError, match="no matching distribution"):
        sources("9.9.9", tmp_path)


# ----------------------------------------------------------------------------------------- the releases themselves


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    return lambda release: sources(release, tmp_path_factory.getbasetemp() / "vllm")


@pytest.mark.releases
@pytest.mark.parametrize("release", RELEASES)
def test_each_release_does_what_the_map_says(release, root):
    one, five = (drive(release, root(release), batch=batch) for batch in (1, 5))
    assert (one.stable and five.stable, one.right, five.right) == EXPECTED[release], (one, five)
    if not EXPECTED[release][0]:
        assert one.accuracy < 0.2
    elif not EXPECTED[release][2]:
        assert five.failure == "IllegalAddressError"


@pytest.mark.releases
@pytest.mark.parametrize("release", RELEASES)
def test_without_a_graph_every_release_is_right(release, root):
    assert drive(release, root(release), batch=3, mode="eager").right


@pytest.mark.releases
@pytest.mark.parametrize("life", ["kept", "taken", "lucky"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("release", AFFECTED)
def test_the_hotfix_makes_affected_releases_right_padded_rows_included(release, mode, life, root):
    for batch in (1, 3, 5, 8):
        outcome = drive(release, root(release), hotfix=mode, batch=batch, life=life)
        assert outcome.right and outcome.stable, outcome


@pytest.mark.releases
@pytest.mark.parametrize("release", AFFECTED)
def test_buffers_alone_bring_on_the_padded_row_bug(release, root):
    runs = [drive(release, root(release), hotfix="copying", sanitize_padding=False, batch=batch) for batch in (3, 5)]
    assert [run.right for run in runs] == [True, False]
    assert runs[1].failure == "IllegalAddressError"


@pytest.mark.releases
@pytest.mark.parametrize("release", ["0.19.0", "0.20.2", "0.33.0"])
def test_regress_puts_the_bug_back_and_each_fix_can_be_measured_there(release, root):
    regressed = drive(release, root(release), hotfix="regressed")
    assert not regressed.stable and regressed.accuracy < 0.2
    for mode in MODES:
        outcome = drive(release, root(release), hotfix=mode, batch=5)
        assert outcome.right and outcome.stable, outcome
