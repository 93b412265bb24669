"""One call recites on any rung; what may crash a GPU's process is told apart from what may not."""

import pytest

from stalegraph import runs
from stalegraph.builders import CopyingBuilder
from stalegraph.errors import UsageError


@pytest.mark.parametrize(
    "options,risky",
    [
        ({}, True),
        ({"builder": "regressed", "life": "lucky"}, True),
        ({"builder": "regressed", "mode": "eager"}, False),
        ({"builder": "copying"}, False),
        ({"builder": "ingraph", "sanitize_padding": True}, False),
        ({"builder": "inplace", "sanitize_padding": False}, True),
        ({"builder": CopyingBuilder}, True),
    ],
)
def test_what_may_crash_runs_apart(options, risky, monkeypatch):
    assert runs.may_crash(options) is risky
    where = []
    monkeypatch.setattr(runs, "run_isolated", lambda *args, **more: where.append("child") or runs_done())
    monkeypatch.setattr(runs, "recite_here", lambda *args: where.append("here"))
    runs.recite("flashmla", **options)
    assert where == ["child" if risky else "here"]


def runs_done():
    class Done:
        ok, value = True, "record"

    return Done()


def test_a_child_that_died_comes_back_as_a_failed_run(monkeypatch):
    class Dead:
        ok = False

        def summary(self):
            return "illegal memory access"

    monkeypatch.setattr(runs, "run_isolated", lambda *args, **more: Dead())
    run = runs.recite("flashmla", builder="regressed", batch=2, tokens=5)
    assert run.failure["message"] == "illegal memory access" and run.accuracy == 0.0 and len(run.texts) == 2


def test_prompt_files(tmp_path):
    assert runs.prompt_text() == runs.PROMPT and len(runs.PROMPT) == 204
    (tmp_path / "text").write_bytes(b"\xff\x00 any bytes")
    assert runs.prompt_text(str(tmp_path / "text")) == b"\xff\x00 any bytes"
    with pytest.raises(UsageError, match="which is no file"):
        runs.prompt_text(str(tmp_path / "missing"))


def test_the_device_has_room_for_large_runs():
    run = runs.recite(builder="copying", prompt=(runs.PROMPT * 21)[:4096], batch=64, tokens=1)
    assert run.accuracy == 1.0


@pytest.mark.parametrize("field", ["tile_scheduler_metadata", "num_splits"])
def test_block_life_comes_from_the_allocators_history(field):
    stays = runs.block_life(runs.recite(builder="regressed", batch=2, tokens=16, life="lucky", theft_step=6), field)
    assert [stay for stay in stays if stay[1] >= 0] == [("each step's plan, by luck", 0, 6), ("logprobs", 6, 16)]
    assert "capture" in [owner for owner, begin, _ in stays if begin < 0]
    assert all(end == begin for (_, _, end), (_, begin, _) in zip(stays, stays[1:]))


def test_a_persistent_buffer_has_one_owner_from_capture_to_the_end():
    stays = runs.block_life(runs.recite(builder="copying", batch=2, tokens=16, life="taken"), "num_splits")
    assert stays[-1][0] == "capture" and stays[-1][1] < 0 and stays[-1][2] == 16
