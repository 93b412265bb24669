"""The ops give what the reference scheduler and the oracle give, fresh or in place, and refuse what does not fit."""

import pytest
import torch

from stalegraph import ops
from stalegraph.attention import mla_reference
from stalegraph.errors import UsageError
from stalegraph.schedule import plan
from stalegraph.simulator import Device

ONE = torch.ones(1)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_metadata_is_fresh_on_each_call():
    lens = ints(500, 70, 3000)
    first = ops.get_mla_metadata_dense_fp8(lens, 16, 1)
    second = ops.get_mla_metadata_dense_fp8(lens, 16, 1)
    for got, again, want in zip(first, second, plan(lens, 132)):
        assert torch.equal(got, want) and got.data_ptr() != again.data_ptr()


def test_parts_follow_the_simulated_device():
    with Device(sm_count=78):
        metadata, _ = ops.get_mla_metadata_dense_fp8(ints(500), 128, 1)
        assert metadata.shape == (39, 8)


def test_schedule_into_writes_the_plan_and_the_tail():
    metadata, num_splits = torch.full((140, 8), -7, dtype=torch.int32), torch.full((9,), -7, dtype=torch.int32)
    ops.schedule_into(ints(5000, 0, 70), metadata, num_splits, num_q_tokens_per_head_k=16)
    want, want_splits = plan([5000, 0, 70], 132)
    assert torch.equal(metadata[:132], want) and (metadata[132:] == -7).all()
    assert torch.equal(num_splits[:4], want_splits) and (num_splits[4:] == want_splits[-1]).all()


def test_decode_equals_plain_softmax():
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(2, 1, 16, 576, generator=generator).to(torch.float8_e4m3fn)
    cache = torch.randn(9, 64, 1, 576, generator=generator).to(torch.float8_e4m3fn)
    table, lens = torch.arange(8, dtype=torch.int32).view(2, 4), ints(250, 3)
    out, lse = ops.flash_mla_with_kvcache_fp8(
        q, cache, table, lens, 512, *ops.get_mla_metadata_dense_fp8(lens, 16, 1), 192**-0.5, False, ONE, ONE
    )
    want, want_lse = mla_reference(q, cache, table, lens, 192**-0.5, ONE, ONE)
    assert out.dtype == torch.bfloat16 and (out.double() - want).norm() / want.norm() < 4e-3
    assert torch.allclose(lse.double(), want_lse, atol=1e-4)


def test_decode_is_one_node_that_shows_every_buffer():
    with Device() as device:
        q = torch.zeros(1, 1, 16, 576).to(torch.float8_e4m3fn)
        cache = torch.zeros(3, 64, 1, 576).to(torch.float8_e4m3fn)
        table, lens, one = torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, dtype=torch.int32), torch.ones(1)
        metadata, num_splits = ops.get_mla_metadata_dense_fp8(lens, 16, 1)
        graph = device.graph()
        with graph.capture():
            ops.flash_mla_with_kvcache_fp8(q, cache, table, lens, 512, metadata, num_splits, 1.0, False, one, one)
        nodes = [node for node in graph.nodes if "fwd_kvcache_mla_fp8" in node.name]
        assert len(nodes) == 1
        found = {argument.name: argument for argument in nodes[0].arguments}
        assert found["tile_scheduler_metadata"].address == metadata.data_ptr()
        assert found["num_splits"].address == num_splits.data_ptr()
        assert found["tile_scheduler_metadata"].access == "read" and "write" in found["out"].access
        assert {"lse", "lse_accum", "out_accum", "k_cache", "block_table", "seq_lens"} <= set(found)


@pytest.mark.parametrize(
    "metadata,num_splits,message",
    [
        (torch.zeros(131, 8, dtype=torch.int32), torch.zeros(2, dtype=torch.int32), "tile_scheduler_metadata has 131 rows"),
        (torch.zeros(132, 8, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), "num_splits has 1 rows"),
        (torch.zeros(132, 8), torch.zeros(2, dtype=torch.int32), "tile_scheduler_metadata is torch.float32"),
    ],
)
def test_buffers_that_do_not_fit_are_refused_before_anything_is_written(metadata, num_splits, message):
    with pytest.raises(UsageError, match=message):
        ops.schedule_into(ints(64), metadata, num_splits, num_q_tokens_per_head_k=16)
    assert (metadata == 0).all() and (num_splits == 0).all()
