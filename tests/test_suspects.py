"""Suspect builders: the verdict on small builders whose answer is known, and on real releases (make releases)."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from stalegraph.simulator import Device
from stalegraph.vllm import kernels
from stalegraph.vllm.suspects import SUSPECTS, Case, Examination, examine, examine_release
from stalegraph.vllm.suspects.__main__ import reports
from stalegraph.vllm.wheels import sources

RECORDED = Path(__file__).parents[1] / "repro" / "recorded"


@dataclass
class Metadata:
    rows: torch.Tensor
    unread: torch.Tensor
    rows_cpu: torch.Tensor


def case(kind):
    """`output = table[rows]`; the builder hands on a buffer, a fresh tensor, or fresh tensors that do not matter."""
    table, buffer = torch.arange(100), torch.zeros(4, dtype=torch.int32)
    output = torch.zeros(4, dtype=torch.int64)

    def build(step):
        buffer.copy_(torch.arange(4) + (0 if step is None or kind == "frozen" else 4 * step))
        rows = buffer if kind in ("sound", "unread field") else buffer.clone()
        unread = torch.zeros(4) if kind == "unread field" else buffer
        return Metadata(rows, unread, buffer.clone())

    def forward(metadata):
        output.copy_(table.index_select(0, metadata.rows))

    return Case("Builder", build, forward, output, kept=kind == "frozen")


def verdict(kind):
    examined = {}
    for persistent in (False, True):
        with Device(memory_bytes=1 << 24) as device:
            examined[persistent] = examine(device, case(kind), 5, persistent)
    (fields, wrong, _), (_, wrong_persistent, _) = examined[False], examined[True]
    return Examination("", "", "", "", 5, len(wrong), len(wrong_persistent), None, fields)


@pytest.mark.parametrize(
    "kind, expected, moved",
    [
        ("sound", "cleared", []),
        ("unread field", "cleared", ["unread"]),
        ("moving", "confirmed", ["rows"]),
        ("frozen", "latent", ["rows"]),  # kept alive and never different, as in plain decode under dual batch overlap
    ],
)
def test_the_verdict_follows_from_what_moved_who_reads_it_and_what_came_out(kind, expected, moved):
    examination = verdict(kind)
    assert [item["field"] for item in examination.fields if item["moved"]] == moved
    assert examination.verdict == expected
    assert (examination.wrong_steps > 0) == (expected == "confirmed")
    assert examination.wrong_steps_persistent == 0


def test_the_reader_of_a_field_is_named():
    rows = next(item for item in verdict("moving").fields if item["field"] == "rows")
    assert rows["read_by"] and all(reader.startswith("aten::index") for reader in rows["read_by"])


def test_flash_attention_stand_in_is_plain_attention_whatever_the_number_of_splits():
    lengths, block_size, heads, dim = [37, 64, 5], 16, 4, 8
    keys, values = torch.randn(2, 20, block_size, 2, dim)
    table = torch.arange(1, 13, dtype=torch.int32).reshape(3, 4)
    query = torch.randn(6, heads, dim)
    for splits in ([1, 1, 1], [3, 5, 1], None):
        plan = None if splits is None else torch.tensor([0, *splits], dtype=torch.int32)
        out = torch.zeros_like(query)
        kernels.flash_attn_varlen_func(
            query, keys, values, out=out, cu_seqlens_q=torch.tensor([0, 2, 4, 6], dtype=torch.int32),
            seqused_k=torch.tensor(lengths, dtype=torch.int32), block_table=table, softmax_scale=0.3, causal=True,
            scheduler_metadata=plan,
        )  # fmt: skip
        for request, length in enumerate(lengths):
            pages = table[request].long()
            k = keys[pages].flatten(0, 1)[:length].repeat_interleave(2, 1).transpose(0, 1)
            v = values[pages].flatten(0, 1)[:length].repeat_interleave(2, 1).transpose(0, 1)
            q = query[2 * request : 2 * request + 2].transpose(0, 1)
            mask = torch.ones(2, length, dtype=torch.bool).tril(length - 2)
            expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)
            assert torch.allclose(out[2 * request : 2 * request + 2], expected.transpose(0, 1), atol=1e-5)


def test_linear_attention_stand_in_is_the_recurrence():
    batch, heads, dim, slope = 3, 2, 4, torch.tensor([0.1, 0.5]).reshape(2, 1, 1)
    states = torch.randn(9, heads, dim, dim)
    before = states.clone()
    q, k, v = torch.randn(3, batch, heads, 1, dim)
    slots = torch.tensor([7, -1, 2])
    out = kernels.linear_decode_forward_triton(q, k, v, states, slope, slots)
    for request, slot in enumerate(slots.tolist()):
        if slot < 0:
            assert torch.equal(out[request], torch.zeros(heads * dim))
            continue
        for head in range(heads):
            decayed = before[slot, head] * torch.exp(-slope[head])
            state = decayed + torch.outer(k[request, head, 0], v[request, head, 0])
            assert torch.allclose(states[slot, head], state, atol=1e-6)
            assert torch.allclose(out[request].reshape(heads, dim)[head], q[request, head, 0] @ state, atol=1e-5)
    untouched = [slot for slot in range(9) if slot not in (7, 2)]
    assert torch.equal(states[untouched], before[untouched])


@pytest.mark.releases
@pytest.mark.parametrize("release", ["0.15.0", "0.20.2", "0.33.0"])
@pytest.mark.parametrize("suspect", SUSPECTS, ids=lambda suspect: suspect.name)
def test_real_releases(suspect, release, tmp_path_factory):
    root = sources(release, tmp_path_factory.getbasetemp() / "vllm")
    examination = examine_release(suspect, release, root)
    assert examination.verdict == suspect.expected[release], examination
    # The audit, which compares storages and not outputs, agrees on what moved.
    moved = {item["field"] for item in examination.fields if item["moved"] and item["read_by"]}
    named = {finding["field"] or finding["argument"] for finding in examination.findings}
    # A field that no step brings again has no name now: then the kernel's name for it, which is the last part here.
    assert named == moved or named == {field.rpartition(".")[2] for field in moved}
    assert (examination.verdict == "cleared") == (not moved)


def test_the_reports_say_what_the_record_says():
    record = json.loads((RECORDED / "sim" / "suspects.json").read_text())
    expected = {
        (suspect.name, release): verdict for suspect in SUSPECTS for release, verdict in suspect.expected.items()
    }
    assert {(item["suspect"], item["release"]): item["verdict"] for item in record["data"]} == expected
    texts = reports(record)
    assert sorted(texts) == sorted(suspect.report for suspect in SUSPECTS if suspect.report)
    for name, text in texts.items():
        assert (RECORDED.parent / "reports" / f"{name}.md").read_text() == text


def test_a_suspect_that_is_nowhere_confirmed_gets_no_report():
    record = json.loads((RECORDED / "sim" / "suspects.json").read_text())
    for item in record["data"]:
        item["verdict"] = "cleared"
    assert reports(record) == {}
