"""The GPU benchmark without a GPU: its statistics, its claims on made-up measurements, and what it refuses."""

import argparse
import json

import pytest
import torch

from stalegraph.bench import gpu

COSTS = {"empty": 1.0, "regressed": 20.0, "copying": 22.0, "inplace": 4.0, "copying_0_14": 24.0}


def spread_of(costs):
    over = tuple(name for name in ("regressed", "copying") if name in costs)
    return gpu.take_turns({name: lambda cost=cost: cost for name, cost in costs.items()}, 1, over)


def slow(found, name, value):
    """`found` of take_turns, but `name` takes `value`."""
    return spread_of({other: one["median"] for other, one in found.items()} | {name: value})


def row(batch=1, context=1024, heads=16):
    host = {"regressed": 16.0, "copying": 52.0, "inplace": 12.0, "ingraph": 0.5, "copying_0_14": 80.0}
    allocates = {name: 0 if name in ("inplace", "ingraph") else 2 for name in gpu.WAYS}
    return {
        "heads": heads, "batch": batch, "context": context, "num_sm_parts": 132,
        "gpu_schedule_us": spread_of(COSTS),
        "host_plan_us": spread_of({name: host[name] for name in gpu.PLANNERS}),
        "host_build_us": spread_of(host),
        "step_us": spread_of({name: 100.0 + cost for name, cost in host.items()}),
        "attention_us": gpu.spread([60.0]),
        "build_allocates": {name: {"allocations": count, "bytes": 512.0 * count} for name, count in allocates.items()},
    }  # fmt: skip


@pytest.fixture
def data():
    largest = {"heads": 16, "batch": 2048, "context": 1024, "gpu_schedule_us": spread_of(COSTS)}
    between = {"heads": 16, "batch": 64, "context": 1024, "gpu_schedule_us": row()["gpu_schedule_us"]}
    return {"rows": [row(), row(batch=512)], "between": [between], "largest": [largest]}


def test_spread_gives_median_and_deciles():
    found = gpu.spread([float(value) for value in range(101)])
    assert found == {"median": 50.0, "low": 10.0, "high": 90.0, "samples": 101}
    assert gpu.spread([7.0]) == {"median": 7.0, "low": 7.0, "high": 7.0, "samples": 1}


def test_ways_take_turns_forwards_and_backwards():
    order = []
    ways = {name: lambda name=name: order.append(name) or float(len(order)) for name in "abc"}
    found = gpu.take_turns(ways, 2)
    assert order == list("abccba")
    assert found["a"]["median"] == 3.5 and found["c"]["samples"] == 2


def test_a_quotient_is_taken_within_a_round():
    clock = iter([10.0, 20.0, 30.0, 15.0, 40.0, 80.0])  # a, b, then b, a, then a, b
    found = gpu.take_turns({"a": lambda: next(clock), "b": lambda: next(clock)}, 3, ("b",))
    assert found["a"]["over"]["b"] == 0.5 and found["b"]["over"]["b"] == 1.0
    assert found["a"]["median"] == 15.0 and found["b"]["median"] == 30.0


def test_every_claim_holds_where_it_should(data):
    claims = gpu.summary(data)
    assert len(claims) == 8 and all(claim["holds"] for claim in claims)
    assert claims[0]["worst"] == 0.2 and claims[0]["limit"] == 0.3


@pytest.mark.parametrize(
    ("what", "name", "value", "claim"),
    [
        ("gpu_schedule_us", "inplace", 6.5, "GPU time of scheduling, ours over FlashMLA's"),
        ("gpu_schedule_us", "inplace", 8.5, "GPU time of our scheduling, us"),
        ("host_build_us", "inplace", 16.5, "host time of a build, in place over regressed"),
        ("host_plan_us", "inplace", 16.5, "host time of a plan, in place over regressed"),
        ("host_plan_us", "inplace", 19.0, "host time of a plan, in place over #35175's"),
        ("host_build_us", "ingraph", 1.5, "host time of a build, in graph, us"),
        ("step_us", "ingraph", 117.0, "whole step, in graph over regressed"),
    ],
)
def test_one_slow_row_breaks_its_claim_and_is_named(data, what, name, value, claim):
    data["rows"][1][what] = slow(data["rows"][1][what], name, value)
    broken = {found["claim"]: found for found in gpu.summary(data) if not found["holds"]}
    assert broken[claim]["where"] == "batch 512, context 1024, 16 heads"


def test_an_allocation_breaks_its_claim(data):
    data["rows"][0]["build_allocates"]["ingraph"]["allocations"] = 1
    assert [found["claim"] for found in gpu.summary(data) if not found["holds"]] == [
        "allocations a build, in place and in graph"
    ]


def test_a_batch_between_counts_for_both_limits(data):
    data["between"][0]["gpu_schedule_us"] = slow(data["between"][0]["gpu_schedule_us"], "inplace", 9.0)
    broken = [found for found in gpu.summary(data) if not found["holds"]]
    assert [found["where"] for found in broken] == ["batch 64, context 1024, 16 heads"] * 2


def test_the_largest_batches_count_for_the_absolute_limit_only(data):
    data["largest"][0]["gpu_schedule_us"] = slow(data["largest"][0]["gpu_schedule_us"], "inplace", 9.0)
    broken = [found for found in gpu.summary(data) if not found["holds"]]
    assert [found["claim"] for found in broken] == ["GPU time of our scheduling, us"]
    assert "batch 2048" in broken[0]["where"]


def test_the_table_shows_every_row_and_claim(data):
    text = gpu.table(data)
    assert "  512  " in text and "batch 2048" in text and "2/2/0/0/2" in text
    assert all(found["claim"] in text for found in gpu.summary(data))
    json.dumps(data)


def test_lengths_are_the_same_in_every_run():
    found = gpu.lengths(64, 8192, "cpu")
    assert torch.equal(found, gpu.lengths(64, 8192, "cpu")) and found.dtype == torch.int32
    assert found[0] == 8192 and 6144 < found.min() < found.max() == 8192
    assert gpu.lengths(1, 1, "cpu").tolist() == [1]


@pytest.mark.gpu
def test_a_quick_run_measures_every_way(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "QUICK", gpu.Sizes((2,), (1024,), (16,), (3,), (1500,), 2))
    path = tmp_path / "bench.json"
    gpu.main(argparse.Namespace(json=str(path), quick=True, flashmla_lib=None))
    record = json.loads(path.read_text())
    (found,) = record["data"]["rows"]
    assert set(found["step_us"]) == set(found["host_build_us"]) == set(gpu.WAYS)
    allocations = {name: count["allocations"] for name, count in found["build_allocates"].items()}
    assert allocations["inplace"] == allocations["ingraph"] == 0 < allocations["regressed"]
    assert record["provenance"]["sm_count"] > 0
    assert [record["data"][name][0]["batch"] for name in ("between", "largest")] == [3, 1500]
