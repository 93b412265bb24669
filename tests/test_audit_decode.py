"""The project's own bug in a graph of which the audit is told nothing; and the exercises for the reader."""

import pytest

from stalegraph.errors import UsageError
from stalegraph.simulator import Device
from stalegraph.zoo import exercises
from stalegraph.zoo.answers import ANSWERS
from stalegraph.zoo.unknown import audited

PROMPT = b"The quick brown fox jumps over the lazy dog. "
RUN = dict(sm_count=132, flashmla_lib="", tokens=6, num_heads=16)


@pytest.mark.parametrize("life, verdict", [("taken", "reused"), ("kept", "moved"), ("lucky", "reused")])
def test_both_stale_tensors_are_named_whatever_became_of_the_old_ones(life, verdict):
    _, report = audited("sim", PROMPT, builder="regressed", life=life, batch=2, **RUN)
    assert {(one.hazard, one.verdict, one.field) for one in report.findings} == {
        ("A", verdict, "metadata.tile_scheduler_metadata"), ("A", verdict, "metadata.num_splits"),
    }  # fmt: skip
    assert {one.argument for one in report.findings} == {"tile_scheduler_metadata", "num_splits"}
    assert all(one.moved_to for one in report.findings)
    assert {pointer.verdict for pointer in report.pointers} >= {"live", "graph-owned"}


@pytest.mark.parametrize("builder", ["copying", "inplace", "ingraph"])
@pytest.mark.parametrize("batch", [1, 3])
def test_no_finding_with_a_builder_that_keeps_its_buffers(builder, batch):
    accuracy, report = audited("sim", PROMPT, builder=builder, batch=batch, **RUN)
    assert accuracy == 1.0 and not report.findings, report.table()


def test_padded_rows_of_minus_one_are_found_by_the_kernels_reading_formula():
    """vLLM #33664: hidden while the plan is stale, out in the open once it is not; five requests, padded to eight."""
    _, report = audited("sim", PROMPT, builder="copying", batch=5, pad_block=-1, sanitize_padding=False, **RUN)
    assert {(one.hazard, one.argument) for one in report.findings} == {("I1", "block_table")}
    accuracy, report = audited("sim", PROMPT, builder="copying", batch=5, pad_block=0, sanitize_padding=False, **RUN)
    assert accuracy == 1.0 and not report.findings


@pytest.mark.parametrize("number", list(exercises.EXERCISES))
def test_an_exercise_shows_symptoms_and_has_one_answer_that_the_audit_finds(number):
    with Device(memory_bytes=1 << 26) as device:
        outcome = exercises.symptoms(number, device)
        report = exercises.audited(number, device).report
    assert not outcome.all_right and outcome.right[0] == (number == 2)
    expected = ANSWERS[number].expected
    assert exercises.solved(number, report.findings), report.table()
    assert not exercises.solved(number, report.findings * 2) and not exercises.solved(number, [])
    assert exercises.check(number, expected.hazard, expected.named) and not exercises.check(number, "A", expected.named)
    assert expected.named in exercises.answer(number)
    with pytest.raises(UsageError, match="number is 9"):
        exercises.answer(9)
