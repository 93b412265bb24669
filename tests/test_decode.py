"""The decode loop on the simulated GPU: right where it must be, wrong where the bug is, and why, from its record."""

import json

import pytest

from stalegraph import decode
from stalegraph.builders import CopyingBuilder
from stalegraph.errors import UsageError
from stalegraph.runs import PROMPT, recite

ENGLISH = PROMPT[:200]
FIXED = ("copying", "inplace", "ingraph")
STALE = ["tile_scheduler_metadata", "num_splits"]


@pytest.mark.parametrize("batch,builder", [(1, "regressed"), (3, "regressed"), (2, "ingraph")])
def test_eager_is_right(batch, builder):
    run = recite(prompt=ENGLISH, mode="eager", batch=batch, builder=builder)
    assert run.accuracy == 1.0 and run.stale_fields == [] and run.failure is None


@pytest.mark.parametrize("batch,padded", [(1, 1), (2, 2), (3, 4), (8, 8)])
@pytest.mark.parametrize("builder", FIXED)
def test_fixed_builders_are_right_over_250_bytes(builder, batch, padded):
    run = recite(prompt=ENGLISH, builder=builder, batch=batch)
    assert run.accuracy == 1.0 and run.first_wrong == [None] * batch and run.stale_fields == []
    assert run.padded_batch == padded


@pytest.mark.parametrize("builder,allocations,copies", [("regressed", 2, 5), ("copying", 2, 7), ("ingraph", 0, 5)])
def test_a_step_costs_the_same_however_many_came_before(builder, allocations, copies):
    """Time is linear in tokens because work is: each step has one replay and equal launches, copies, allocations.

    Five copies are the step's own: four inputs in, the tokens out.
    """
    run = recite(prompt=ENGLISH, builder=builder, batch=2, tokens=60, life="kept")
    assert len({tuple(cost.values()) for cost in run.step_counters[1:]}) == 1
    cost = run.step_counters[-1]
    assert (cost["replays"], cost["allocations"], cost["copies"]) == (1, allocations, copies)


def test_a_graph_has_as_many_nodes_for_many_requests_as_for_few():
    runs = [recite(prompt=PROMPT[:70], builder="copying", batch=batch, tokens=2) for batch in (2, 16)]
    assert runs[0].nodes == runs[1].nodes > 0


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_the_regressed_builder_is_wrong_once_its_blocks_are_taken(batch):
    run = recite(prompt=ENGLISH, builder="regressed", batch=batch, life="taken")
    assert run.accuracy < 0.2 and run.stale_fields == STALE
    assert all(taker["on_captured"] for taker in run.takers)


def test_by_luck_it_starts_right_and_then_degenerates():
    run = recite(prompt=ENGLISH, builder="regressed", batch=2, life="lucky", tokens=90, theft_step=30)
    assert run.first_wrong == [30, 30] and run.accuracy_per_token[:30] == [1.0] * 30
    assert sum(run.accuracy_per_token[30:]) / 60 < 0.2
    moved = {at.step for at in run.addresses if at.built != at.captured}
    assert moved == set(range(30, 90))
    assert run.schedule_obeyed["num_splits"] != run.schedule_needed["num_splits"]
    assert {read["owner_now"] for read in run.stale_reads if read["step"] >= 30} == {"logprobs"}


def test_kept_metadata_makes_replays_obey_the_captured_plan():
    run = recite(prompt=ENGLISH, builder="regressed", batch=1, life="kept", tokens=40)
    assert run.schedule_obeyed == run.schedule_captured and run.accuracy < 0.2 and run.stale_fields == STALE


@pytest.mark.parametrize("life", decode.LIVES)
@pytest.mark.parametrize("builder", FIXED)
def test_fixed_builders_are_right_whatever_became_of_the_capture(builder, life):
    assert recite(prompt=ENGLISH, builder=builder, batch=2, life=life, tokens=30, theft_step=10).accuracy == 1.0


@pytest.mark.parametrize("length", [1, 63, 64, 65, 500, 4096])
def test_prompts_of_other_lengths(length):
    prompt = (PROMPT * 21)[:length]
    assert recite(prompt=prompt, builder="ingraph", batch=2, tokens=6).accuracy == 1.0


@pytest.mark.parametrize("batch", [9, 64])
def test_more_requests_than_the_capture_sizes_hold(batch):
    run = recite(prompt=PROMPT[:70], builder="inplace", batch=batch, tokens=4)
    assert run.accuracy == 1.0 and run.padded_batch == max(16, batch)


@pytest.mark.parametrize("sm_count,num_heads", [(78, 16), (114, 32), (132, 64), (78, 128)])
def test_other_gpus_and_heads(sm_count, num_heads):
    for builder, right in (("copying", True), ("regressed", False)):
        run = recite(prompt=PROMPT[:150], builder=builder, tokens=8, batch=2, sm_count=sm_count, num_heads=num_heads)
        assert (run.accuracy == 1.0) == right


def test_persistent_buffers_alone_meet_page_minus_one():
    one = recite(prompt=ENGLISH, builder="copying", batch=3, tokens=10, sanitize_padding=False)
    assert one.failure is None and one.accuracy == 1.0
    three = recite(prompt=ENGLISH, builder="copying", batch=5, tokens=10, sanitize_padding=False)
    assert three.failure["kind"] == "IllegalAddressError" and three.accuracy == 0.0
    assert recite(prompt=ENGLISH, builder="copying", batch=5, tokens=10).accuracy == 1.0


def test_runs_repeat_exactly():
    first, second = (recite(prompt=ENGLISH, batch=3, tokens=20) for _ in range(2))
    assert first.texts == second.texts
    origin = [min(at.built for at in run.addresses) for run in (first, second)]
    relative = [[at.built - base for at in run.addresses] for run, base in zip((first, second), origin)]
    assert relative[0] == relative[1]


def test_any_bytes_are_a_prompt():
    text = "Grüße, κόσμε! 你好 \x00\xff".encode() + bytes([0, 255, 128])
    assert recite(prompt=text, builder="copying", tokens=40).accuracy == 1.0


def test_a_builder_class_of_the_callers_own_is_taken():
    class Mine(CopyingBuilder):
        name = "mine"

    run = recite(prompt=ENGLISH, builder=Mine, tokens=5)
    assert run.builder == "mine" and run.accuracy == 1.0


def test_the_record_is_json():
    record = json.loads(json.dumps(recite(prompt=ENGLISH, tokens=5).to_json()))
    assert bytes.fromhex(record["prompt"]) == ENGLISH and record["stale_fields"] == STALE


@pytest.mark.parametrize(
    "options,message",
    [
        (dict(prompt=b""), "prompt has 0 bytes; allowed: 1 to 4096"),
        (dict(prompt=b"x" * 4097), "prompt has 4097 bytes"),
        (dict(prompt="text"), "prompt is str; allowed: bytes"),
        (dict(builder="new"), "builder is 'new'; allowed: regressed, copying"),
        (dict(life="short"), "life is 'short'; allowed: kept, taken, lucky"),
        (dict(mode="fast"), "mode is 'fast'; allowed: graph, eager"),
        (dict(batch=0), "batch is 0; allowed: 1 to 1024"),
        (dict(tokens=0), "tokens is 0; allowed: 1 to"),
        (dict(pad_block=7), "pad_block is 7; allowed: -1"),
        (dict(num_heads=20), "num_heads is 20"),
        (dict(batch=True), "batch is True"),
        (dict(capture_sizes=()), "capture_sizes is \\(\\); allowed: a tuple of batch sizes from 1 to 1024"),
        (dict(capture_sizes=(0,)), "capture_sizes is \\(0,\\)"),
        (dict(capture_sizes=4), "capture_sizes is 4"),
        (dict(theft_step=2), "theft_step is 2; allowed: 0 to 1, a step of this run"),
        (dict(theft_step=-1), "theft_step is -1"),
        (dict(sanitize_padding="no"), "sanitize_padding is 'no'"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(UsageError, match=message):
        recite(**{"prompt": ENGLISH, "tokens": 2} | options)
