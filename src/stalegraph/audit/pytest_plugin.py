"""The pytest fixture `stalegraph_watch`: a test that replays a graph which holds a stale address fails."""

from __future__ import annotations

import pytest


@pytest.fixture
def stalegraph_watch():
    """An open watch. At the end of the test a finding fails it, unless the test has put its hazard id into `allow`."""
    from stalegraph.audit import watch

    with watch(quiet=True) as opened:
        opened.allow = ()
        yield opened
        report = opened.report()
    unexpected = [finding for finding in report.findings if finding.hazard not in opened.allow]
    if unexpected:
        pytest.fail(
            "\n".join(["stalegraph found broken invariants:", *(finding.line() for finding in unexpected)]),
            pytrace=False,
        )
    for unseen in report.not_seen:
        print(unseen.line())
