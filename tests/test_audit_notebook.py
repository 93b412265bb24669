"""Notebook 07 fails in its last cell when the engine under suspicion is a sound one."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from stalegraph.walkthrough import choose, execute


def test_the_last_cell_fails_where_there_is_no_bug_to_find(tmp_path):
    (one,) = [one for one in choose(None) if one.name == "07_find_the_next_one"]
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        outcome = process.submit(
            execute, one.path, tmp_path / one.path.name, one.title, one.claim, {"builder": "copying", "tokens": 6}
        ).result()
    assert outcome.verdict == "does not hold" and outcome.trouble.last_cell, str(outcome.trouble)
