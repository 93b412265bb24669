"""The walkthrough's decode loop as a program that the audit knows nothing about: nothing is declared."""

from __future__ import annotations

from stalegraph import decode
from stalegraph.audit import Report, watch
from stalegraph.errors import StaleReadError
from stalegraph.isolate import run_isolated
from stalegraph.rungs import open_rung

SECONDS = 300  # a child that takes longer has hung


def audited(
    rung: str, prompt: bytes, sm_count: int | None, flashmla_lib: str, **options
) -> tuple[float | None, Report]:
    """(fraction of bytes right, report) of one decode run under a watch; options as of `decode.run`.

    On a GPU in a child process that stops at the first finding, since a kernel that obeys a stale schedule may end it;
    then there is no text, and the fraction is None.
    """
    if rung == "sim":
        return _audited(rung, prompt, sm_count, None, False, options)
    done = run_isolated(_audited, rung, prompt, None, flashmla_lib or None, True, options, timeout=SECONDS)
    if not done.ok:
        raise RuntimeError(f"the audited run did not end: {done.summary()}")
    return done.value


def _audited(rung, prompt, sm_count, flashmla_lib, raises, options):
    accuracy = None
    with watch(quiet=True, raises=raises) as opened:
        try:
            with open_rung(rung, sm_count=sm_count, flashmla_lib=flashmla_lib) as device:
                accuracy = decode.run(device, prompt=prompt, **options).accuracy
        except StaleReadError:
            pass  # told by the report
        return accuracy, opened.report(pointers_too=True)
