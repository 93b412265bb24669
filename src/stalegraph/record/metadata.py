"""Records schedules that FlashMLA's own metadata kernel makes for random batches: all by digest, some in full."""

from __future__ import annotations

import hashlib

import torch

from stalegraph import ops
from stalegraph.recorded.metadata import COUNT, IN_FULL, SEED, cases, digest


def record(device, count: int = COUNT) -> tuple[dict, None]:
    digests, parts, full = [], {}, []
    for index, case in enumerate(cases(SEED, count)):
        seq_lens = torch.tensor(case.seq_lens, dtype=torch.int32, device=device.torch_device)
        metadata, num_splits = ops.get_mla_metadata_dense_fp8(seq_lens, case.q_tokens_per_kv_head, 1)
        metadata, num_splits = device.to_host(metadata), device.to_host(num_splits)
        digests.append(digest(metadata, num_splits))
        parts[len(metadata)] = parts.get(len(metadata), 0) + 1
        if len(full) < IN_FULL and len(case.seq_lens) <= 16:
            full.append(
                {
                    "case": index,
                    "seq_lens": list(case.seq_lens),
                    "q_tokens_per_kv_head": case.q_tokens_per_kv_head,
                    "tile_scheduler_metadata": metadata[:, :5].tolist(),
                    "num_splits": num_splits.tolist(),
                }
            )
    return {
        "generator": "stalegraph.recorded.metadata.cases(seed, count), Python's random.Random(seed).random() only",
        "seed": SEED,
        "count": len(digests),
        "cases_by_num_sm_parts": parts,
        "all": hashlib.sha256("".join(digests).encode()).hexdigest(),
        "digests": "".join(digests),
        "in_full": full,
    }, None
