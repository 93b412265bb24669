"""The CPU held to what was recorded on an H200: schedules bit for bit, outputs within tolerance, addresses exactly."""

import hashlib
import json
import math
from bisect import insort

import pytest
import torch

from stalegraph import schedule
from stalegraph.attention import accumulator_shapes, mla_decode_fp8_into
from stalegraph.builders import BUILDERS
from stalegraph.decode import PLANNED
from stalegraph.decode import run as run_decode
from stalegraph.errors import IllegalAddressError, UsageError
from stalegraph.record import padding
from stalegraph.record.padding import PaddedCase
from stalegraph.record.text import condense
from stalegraph.recorded import Provenance, allocator, available, decode, load, metadata, names, root
from stalegraph.recorded.store import write
from stalegraph.simulator import Device

RECORDS = ("metadata", "decode", "allocator", "leak", "padding", "text", "pointers")
RELATIVE = 2e-2  # the kernel rounds the softmax weights to e4m3, which the oracle does not


def provenance(**changes) -> Provenance:
    given = dict.fromkeys(("device", "driver", "torch", "vllm", "flashmla", "cuda", "date", "command"), "x")
    return Provenance(**{**given, "sm_count": 132, **changes})


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Each request's difference (first dimension) is within RELATIVE of its norm; equal where not finite."""
    got, want = got.float().flatten(1), want.float().flatten(1)
    finite = want.isfinite()
    if not torch.equal(got[~finite], want[~finite]) or not bool(got[finite].isfinite().all()):
        return False
    got, want = got.where(finite, 0), want.where(finite, 0)
    return bool(((got - want).norm(dim=1) <= RELATIVE * want.norm(dim=1)).all())


@pytest.mark.parametrize("item", RECORDS)
def test_every_record_says_where_it_comes_from(item):
    record = load(f"h200/{item}")
    assert record.provenance.sm_count == 132 and "H200" in record.provenance.device
    assert record.provenance.command.startswith("stalegraph record --out repro/recorded/h200")
    assert record.provenance.vllm in record.provenance.flashmla and "sha256" in record.provenance.flashmla
    for text in (record.path.read_text(), record.provenance.caption()):
        assert "/work" not in text and "/tmp" not in text


def test_all_records_together_stay_small():
    files = [path for path in root().rglob("*") if path.is_file()]
    assert 0 < sum(path.stat().st_size for path in files) < 8 << 20


def test_the_reference_scheduler_equals_the_kernel_bit_for_bit():
    data = load("h200/metadata").data
    want, size = data["digests"], metadata.DIGEST_DIGITS
    assert data["count"] >= 10_000 and len(want) == size * data["count"]
    assert set(data["cases_by_num_sm_parts"]) == {"132", "66", "44", "33"}
    wrong, batches = [], set()
    for index, case in enumerate(metadata.cases(data["seed"], data["count"])):
        parts = schedule.num_sm_parts(132, case.q_tokens_per_kv_head)
        if metadata.digest(*schedule.plan(list(case.seq_lens), parts)) != want[size * index : size * (index + 1)]:
            wrong.append(index)
        batches.add(len(case.seq_lens))
    assert wrong == []
    assert min(batches) == 1 and max(batches) == 1024


def test_the_digests_are_those_of_the_schedules_kept_in_full():
    data = load("h200/metadata").data
    assert hashlib.sha256(data["digests"].encode()).hexdigest() == data["all"]
    assert len(data["in_full"]) == metadata.IN_FULL
    for full in data["in_full"]:
        rows = torch.tensor(full["tile_scheduler_metadata"], dtype=torch.int32)
        splits = torch.tensor(full["num_splits"], dtype=torch.int32)
        at = metadata.DIGEST_DIGITS * full["case"]
        assert metadata.digest(rows, splits) == data["digests"][at : at + metadata.DIGEST_DIGITS]
        mine, mine_splits = schedule.plan(full["seq_lens"], len(rows))
        assert torch.equal(mine[:, :5], rows) and torch.equal(mine_splits, splits)


def test_a_digest_changes_with_any_used_entry_and_with_no_unused_one():
    rows, splits = schedule.plan([200, 70], 132)
    first = metadata.digest(rows, splits)
    unused, used, other = rows.clone(), rows.clone(), splits.clone()
    unused[:, 5:] = 9
    used[3, 4] += 1
    other[1] += 1
    assert metadata.digest(unused, splits) == first
    assert metadata.digest(used, splits) != first != metadata.digest(rows, other)


DECODE = load("h200/decode") if available("h200/decode") else None
DECODE_CASES = [decode.DecodeCase.from_json({k: v for k, v in c.items() if k != "buffers_known"}) for c in
                (DECODE.data["cases"] if DECODE else ())]  # fmt: skip


def oracle(case):
    """The oracle's (out, lse) into buffers prefilled as on the GPU."""
    inputs = decode.tensors(case)
    rows, splits = decode.planned(case, 132)
    batch, width = len(case.seq_lens), case.heads * case.queries
    partials, partials_lse = accumulator_shapes(batch, len(rows), width)
    out = torch.full((batch, case.queries, case.heads, 512), decode.OUT_BEFORE, dtype=torch.bfloat16)
    lse = torch.full((batch, case.heads, case.queries), decode.LSE_BEFORE)
    out_accum = torch.full(partials, decode.OUT_ACCUM_BEFORE)
    lse_accum = torch.full(partials_lse, decode.LSE_ACCUM_BEFORE)
    mla_decode_fp8_into(
        inputs["q"], inputs["k_cache"], inputs["block_table"], inputs["seq_lens"], rows, splits, decode.SOFTMAX_SCALE,
        inputs["descale_q"], inputs["descale_k"], True, out, lse, out_accum, lse_accum,
    )  # fmt: skip
    return out, lse


@pytest.mark.parametrize("case", DECODE_CASES, ids=lambda case: case.name)
def test_the_oracle_writes_what_the_kernels_wrote(case):
    record = next(entry for entry in DECODE.data["cases"] if entry["name"] == case.name)
    assert record["buffers_known"], "the op's buffers were not the prefilled ones: the record proves nothing"
    out, lse = oracle(case)
    assert close(out, DECODE.tensors[f"{case.name}.out"])
    assert close(lse, DECODE.tensors[f"{case.name}.lse"])


def test_the_decode_record_holds_fresh_and_stale_schedules_and_none_failed():
    assert DECODE.data["failure"] is None
    assert [case.to_json() for case in decode.cases()] == [case.to_json() for case in DECODE_CASES]
    assert sum(case.fresh for case in DECODE_CASES) >= 5 and sum(not case.fresh for case in DECODE_CASES) >= 10


def test_the_comparison_can_fail():
    """A fresh schedule's output is told from the stale one's of the same problem, so agreement means something."""
    stale = next(case for case in decode.cases() if case.name == "captured-one")
    fresh = decode.DecodeCase(stale.name, stale.seq_lens, stale.seq_lens, stale.seq_lens, seed=stale.seed)
    assert not close(oracle(fresh)[0], oracle(stale)[0])
    assert not close(torch.tensor([[1.0, math.inf]]), torch.tensor([[1.0, 2.0]]))
    assert not close(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, math.inf]]))


def test_generated_inputs_are_the_same_everywhere():
    draws = decode.hashed(1 << 12, 7)
    digest = hashlib.sha256(draws.numpy().astype("<i4").tobytes()).hexdigest()
    assert digest[:16] == "108d09fe353f397c"
    assert 0 <= int(draws.min()) and int(draws.max()) < 1 << 16 and len(draws.unique()) > 3900
    lengths = [case.seq_lens for case in metadata.cases(1, 50)]
    assert hashlib.sha256(json.dumps(lengths).encode()).hexdigest()[:16] == "b33d2e1a1d30297c"


class Mapped:
    """Memory of which only [first, first + len(data)) is mapped, as `attention` asks for it."""

    def __init__(self, first: int, data: torch.Tensor):
        self.first, self.data = first, data

    def read(self, address: int, nbytes: int) -> torch.Tensor:
        if not self.first <= address <= self.first + len(self.data) - nbytes:
            raise IllegalAddressError(f"{address:#x} is not mapped")
        return self.data[address - self.first : address - self.first + nbytes]


PADDING = load("h200/padding").data["cases"] if available("h200/padding") else []


def padded(case) -> tuple:
    return len(case["seq_lens"]), case["fill"], case["schedule"], case["before_cache"]


@pytest.mark.parametrize("recorded", PADDING, ids=lambda case: "-".join(map(str, padded(case))))
def test_padded_rows_fault_or_give_what_was_recorded(recorded):
    case = PaddedCase(tuple(recorded["seq_lens"]), *(recorded[key] for key in ("fill", "schedule", "before_cache")))
    inputs = decode.tensors(decode.DecodeCase("padded", case.seq_lens, case.seq_lens, case.seq_lens))
    before = padding.PAGE_BYTES if case.before_cache == "tensor" else 0
    raw = torch.full((before + inputs["k_cache"].numel(),), 0x38, dtype=torch.uint8)
    cache = raw[before:].view(torch.float8_e4m3fn).view(inputs["k_cache"].shape)
    cache.copy_(inputs["k_cache"])
    table, lengths, planned = case.inputs()
    rows, splits = schedule.plan(planned, 132)
    partials, partials_lse = accumulator_shapes(len(lengths), len(rows), 16)
    out = torch.full((len(lengths), 1, 16, 512), decode.OUT_BEFORE, dtype=torch.bfloat16)
    lse = torch.full((len(lengths), 16, 1), decode.LSE_BEFORE)
    call = lambda: mla_decode_fp8_into(  # noqa: E731
        inputs["q"], cache, table, torch.tensor(lengths, dtype=torch.int32), rows, splits, decode.SOFTMAX_SCALE,
        inputs["descale_q"], inputs["descale_k"], True, out, lse, torch.full(partials, decode.OUT_ACCUM_BEFORE),
        torch.full(partials_lse, decode.LSE_ACCUM_BEFORE), memory=Mapped(raw.data_ptr(), raw),
    )  # fmt: skip
    if recorded["faulted"]:
        assert recorded["cuda_error"] == "an illegal memory access was encountered"
        with pytest.raises(IllegalAddressError):
            call()
        return
    call()
    for row, want in enumerate(recorded["result"]["rows"]):
        assert bool((out[row] != decode.OUT_BEFORE).any()) == want["written"]
        assert bool((out[row] == 0).all()) == want["all_zero"]
        assert float(lse[row, 0, 0]) == pytest.approx(float(want["lse"]), rel=RELATIVE)


def test_the_padding_record_holds_both_ends():
    """One padded row is harmless, several with -1 fault where nothing lies before the cache, a stale plan hides it."""
    fault = {padded(case): case["faulted"] for case in PADDING}
    zeros = {len(c["seq_lens"]): c["seq_lens"].count(0) for c in PADDING if c["fill"] == -1}
    assert fault[8, -1, "fresh", "segment"] and not fault[8, 0, "fresh", "segment"] and zeros[8] == 3
    assert not fault[8, -1, "fresh", "tensor"]  # the same read, silent: another tensor of ours lies there
    assert not fault[3, -1, "captured", "segment"]


def test_a_thousand_captures_leave_the_memory_as_it_was():
    data = load("h200/leak").data
    assert data["captures"] >= 1000
    for what, before in data["before"].items():
        assert abs(data["after"][what] - before) <= data["segment"], what


TEXT = load("h200/text") if available("h200/text") else None
TEXT_RUNS = [run for run in (TEXT.data["runs"] if TEXT else ()) if "ended" not in run and run["mode"] == "graph"]


def recite(want) -> dict:
    """The same run on the simulator, condensed as the recorded one."""
    with Device() as device:
        run = run_decode(
            device, builder=want["builder"], prompt=TEXT.data["prompt"].encode(), batch=want["batch"],
            tokens=TEXT.data["tokens"], mode=want["mode"], life=want["life"],
        )  # fmt: skip
    return condense(run)


@pytest.mark.parametrize("want", [run for run in TEXT_RUNS if run["batch"] in (1, 3)],
                         ids=lambda run: f"{run['builder']}-{run['life']}-{run['batch']}")  # fmt: skip
def test_the_simulated_reciter_goes_wrong_at_the_recorded_byte(want):
    """From the first wrong byte on, attention's output is what unwritten memory happens to hold: not compared."""
    got = recite(want)
    assert got["first_wrong"] == want["first_wrong"]
    for mine, theirs, first in zip(got["texts"], want["texts"], want["first_wrong"]):
        assert mine[: 2 * first] == theirs[: 2 * first] if first is not None else mine == theirs
    assert got["stale_fields"] == want["stale_fields"]
    assert [(step, name) for step, name, _ in got["moves"]] == [(step, name) for step, name, _ in want["moves"]]
    assert got["num_splits_obeyed"] == want["num_splits_obeyed"]
    assert got["num_splits_needed"] == want["num_splits_needed"]
    assert [row[:5] for row in got["first_rows_obeyed"]] == [row[:5] for row in want["first_rows_obeyed"]]
    for mine, theirs in zip(got["takers"], want["takers"], strict=True):
        assert all(mine[key] == theirs[key] for key in ("name", "as_large_as", "on_captured", "step"))


def test_the_record_shows_right_wrong_and_starts_normal_then_degenerates():
    accuracy = {(run["builder"], run["mode"], run["life"], run["batch"]): run["accuracy"] for run in TEXT.data["runs"]}
    for batch in (1, 2, 3, 8):
        assert accuracy["regressed", "eager", "taken", batch] == 1.0
        assert accuracy["copying", "graph", "taken", batch] == 1.0
        assert accuracy["regressed", "graph", "taken", batch] < 0.05
        assert accuracy["regressed", "graph", "kept", batch] < 0.05
        assert 0.2 < accuracy["regressed", "graph", "lucky", batch] < 0.5


def test_the_record_names_the_step_at_which_the_captured_block_was_handed_out():
    """By luck each step's metadata lands on the captured block, until another tensor gets it: wrong from there on."""
    for batch in (1, 2):
        of_kind = [run for run in TEXT_RUNS if (run["builder"], run["life"]) == ("regressed", "lucky")]
        run = next(run for run in of_kind if run["batch"] == batch)
        first_wrong = run["first_wrong"][0]
        captured = run["captured_addresses"][str(run["padded_batch"])]
        stolen = [(step, address) for step, action, address, _, label in run["history"]
                  if action == "alloc" and label == "logprobs"]  # fmt: skip
        assert {address for _, address in stolen} == {captured["tile_scheduler_metadata"], captured["num_splits"]}
        assert {step for step, _ in stolen} == set(run["first_wrong"])
        taken = [step for step, action, address, *_ in run["history"]
                 if action == "alloc" and address == captured["tile_scheduler_metadata"]]  # fmt: skip
        assert set(range(first_wrong)) <= set(taken)


ALLOCATOR = load("h200/allocator") if available("h200/allocator") else None


def test_the_recorded_traces_are_the_generators():
    found = [[list(operation) for operation in trace.operations] for trace in allocator.traces()]
    assert found == [trace["operations"] for trace in ALLOCATOR.data["traces"]]
    assert len(found) >= 50
    sizes = [operation[1] for trace in found for operation in trace if operation[0] == "alloc"]
    assert min(sizes) < 64 and max(sizes) > 20 << 20


def follow_the_driver(memory, want, monkeypatch):
    """Maps segments in the order of addresses that the driver chose, which the allocator breaks ties by."""
    at, address = {}, memory.base
    for number in want["order"]:
        at[number], address = address, address + want["sizes"][number]
    mapped = iter(range(len(at)))

    def map_next(size, what):
        number = next(mapped)
        assert size == want["sizes"][number]
        insort(memory._starts, at[number])
        memory._sizes[at[number]] = size
        memory.version += 1
        return at[number]

    monkeypatch.setattr(memory, "map", map_next)


@pytest.mark.parametrize("index", range(allocator.COUNT))
def test_the_simulated_allocator_gives_the_recorded_addresses(index, monkeypatch):
    want = ALLOCATOR.data["traces"][index]
    with Device(memory_bytes=1 << 30) as device:
        follow_the_driver(device.memory, want, monkeypatch)
        got = allocator.run(allocator.traces()[index], device)
    assert got == {key: want[key] for key in got}


def test_the_order_of_segments_decides_ties_that_the_traces_reach():
    """Left to its own order of segments, the simulator differs in a trace that has equal free blocks in two of them."""
    tied = 25
    want = ALLOCATOR.data["traces"][tied]
    with Device(memory_bytes=1 << 30) as device:
        got = allocator.run(allocator.traces()[tied], device)
    assert want["order"] != sorted(want["order"]) and got["places"] != want["places"]
    assert sorted(got["sizes"]) == sorted(want["sizes"])


POINTERS = load("h200/pointers") if available("h200/pointers") else None


@pytest.mark.skipif(POINTERS is None, reason="h200/pointers is not recorded")
def test_the_recorded_graphs_hold_the_schedules_addresses():
    builders = POINTERS.data["builders"]
    assert set(builders) == set(BUILDERS)
    for name, graph in builders.items():
        attention, combine = (
            next(node for node in graph["nodes"] if part in node["name"]) for part in ("splitkv_mla_kernel", "combine")
        )
        where = {argument["field"]: argument["offset"] for argument in attention["arguments"]}
        assert {"seq_lens", "block_table", "q", "k_cache", "out", "lse", *PLANNED} <= set(where)
        assert "num_splits" in {argument["field"] for argument in combine["arguments"]}
        assert graph["moved_at_the_next_build"]["tile_scheduler_metadata"] == (name == "regressed")
        assert graph["moved_at_the_next_build"]["num_splits"] == (name == "regressed")


def test_a_missing_record_names_those_there_are(tmp_path, monkeypatch):
    monkeypatch.setenv("STALEGRAPH_RECORDED", str(tmp_path))
    assert not available("h200/metadata")
    with pytest.raises(UsageError, match="record is 'h200/metadata'"):
        load("h200/metadata")
    write(tmp_path / "h200", "other", {"a": [1]}, provenance())
    assert names() == ["h200/other"]
    with pytest.raises(UsageError, match="allowed: h200/other"):
        load("h200/metadata")


def test_a_record_comes_back_as_written(tmp_path, monkeypatch):
    monkeypatch.setenv("STALEGRAPH_RECORDED", str(tmp_path))
    given = {"x.out": torch.ones(2, dtype=torch.bfloat16)}
    write(tmp_path / "h200", "item", {"a": [1, 2], "b": None}, provenance(device="GPU"), given)
    record = load("h200/item")
    assert record.data == {"a": [1, 2], "b": None} and record.provenance.device == "GPU"
    assert torch.equal(record.tensors["x.out"], given["x.out"])


@pytest.mark.parametrize("change, message", [({"schema": 2}, "schema 2"), ({"provenance": {}}, "provenance")])
def test_a_record_without_schema_or_provenance_is_refused(tmp_path, monkeypatch, change, message):
    monkeypatch.setenv("STALEGRAPH_RECORDED", str(tmp_path))
    path = write(tmp_path / "h200", "item", {}, provenance())
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UsageError, match=message):
        load("h200/item")
