"""Records the pointers that a captured decode step bakes in, for each builder, and which of them move afterwards."""

from __future__ import annotations

import torch

from stalegraph import ops
from stalegraph.builders import BUILDERS
from stalegraph.recorded.decode import SOFTMAX_SCALE, DecodeCase, tensors

BATCH, MAX_BLOCKS = 4, 8


def step(builder, metadata, inputs):
    """One decode step as it is captured: the builder's part of it, then attention."""
    builder.head(metadata)
    return ops.flash_mla_with_kvcache_fp8(
        inputs["q"], inputs["k_cache"], metadata.block_table, metadata.seq_lens, 512,
        metadata.tile_scheduler_metadata, metadata.num_splits, SOFTMAX_SCALE, True,
        inputs["descale_q"], inputs["descale_k"],
    )  # fmt: skip


def record_builder(device, name: str) -> dict:
    """One builder's graph: each node's kernel and pointers, and where the fields are after the next build."""
    case = DecodeCase("pointers", (204, 70, 30, 1), (1,) * BATCH, (1,) * BATCH)
    inputs = {key: tensor.to(device.torch_device) for key, tensor in tensors(case).items()}
    builder = BUILDERS[name](
        num_heads=16, max_batch=BATCH, max_blocks=MAX_BLOCKS, sm_count=device.sm_count, device=device.torch_device
    )
    table = torch.zeros(BATCH, MAX_BLOCKS, dtype=torch.int32, device=device.torch_device)
    table[:, : inputs["block_table"].shape[1]] = inputs["block_table"][:, :MAX_BLOCKS]
    ones = torch.ones(BATCH, dtype=torch.int32, device=device.torch_device)
    metadata = builder.build(ones, table)
    step(builder, metadata, inputs)  # loads the kernels: a capture must not
    metadata = builder.build(ones, table)
    fields = ("seq_lens", "block_table", "tile_scheduler_metadata", "num_splits")
    captured = {field: getattr(metadata, field) for field in fields} | {
        key: inputs[key] for key in ("q", "k_cache", "descale_q", "descale_k")
    }
    where = {field: tensor.data_ptr() for field, tensor in captured.items()}
    graph = device.graph()
    with graph.capture():
        out = step(builder, metadata, inputs)
    where |= {"out": out[0].data_ptr(), "lse": out[1].data_ptr()}
    memory = device.memory_map()
    segments: dict[int, int] = {}
    nodes = []
    for node in graph.nodes:
        arguments = []
        for argument in node.arguments:
            block = memory.find(argument.address)
            arguments.append(
                {
                    "offset": argument.offset,
                    "field": next((field for field, address in where.items() if address == argument.address), None),
                    "address": hex(argument.address),
                    "access": argument.access,
                    "segment": segments.setdefault(block.segment, len(segments)) if block else None,
                    "into_block": argument.address - block.address if block else None,
                    "block_bytes": block.size if block else None,
                    "pool": list(block.pool) if block else None,
                    "state": block.state if block else "not the allocator's",
                }
            )
        nodes.append(
            {
                "index": node.index, "kind": node.kind, "name": node.name, "opaque": node.opaque,
                "arguments": arguments, "scalars": [[key, value] for key, value in node.scalars],
            }
        )  # fmt: skip
    del metadata, captured
    odd = [torch.empty(size, dtype=torch.uint8, device=device.torch_device) for size in (4200, 64, 700, 2048)]
    later = builder.build(ones.fill_(200), table)
    moved = {field: getattr(later, field).data_ptr() != where[field] for field in fields}
    del odd
    return {"nodes": nodes, "moved_at_the_next_build": moved}


def record(device) -> tuple[dict, None]:
    return {"batch": BATCH, "builders": {name: record_builder(device, name) for name in BUILDERS}}, None
