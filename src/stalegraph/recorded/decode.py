"""Small decode problems under fresh and stale schedules, whose inputs are computed from integers rather than stored."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch

from stalegraph import schedule

PAGES = 48
SOFTMAX_SCALE = 192**-0.5
DESCALE_Q, DESCALE_K = 1.0, 0.5
Q_AMPLITUDE = 6.0  # makes the softmax peaked: an output that averages everything would hide a wrong page
# What the buffers hold before the kernel runs, so that rows it never writes are known.
OUT_BEFORE, LSE_BEFORE, OUT_ACCUM_BEFORE, LSE_ACCUM_BEFORE = -7.0, -9.0, 2.0, 0.5


@dataclass(frozen=True)
class DecodeCase:
    """One call: requests of `seq_lens` tokens under a schedule planned for other lengths.

    `tile_scheduler_metadata` is planned for `rows_for`, `num_splits` for `splits_for`; fresh if both are `seq_lens`.
    `heads` per KV head, `queries` per request.
    """

    name: str
    seq_lens: tuple[int, ...]
    rows_for: tuple[int, ...]
    splits_for: tuple[int, ...]
    heads: int = 16
    queries: int = 1
    seed: int = 1

    @property
    def fresh(self) -> bool:
        return self.rows_for == self.seq_lens == self.splits_for

    def to_json(self) -> dict:
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def from_json(cls, record: dict) -> DecodeCase:
        return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in record.items()})


def cases() -> list[DecodeCase]:
    """The cases, named by what is stale."""
    now = {
        "one": (204,),
        "block": (64,),
        "long": (705,),
        "pair": (204, 205),
        "uneven": (600, 3),
        "three": (204, 205, 130),
        "four": (300, 64, 65, 1),
    }
    found = [DecodeCase(f"fresh-{name}", lens, lens, lens, seed=at) for at, (name, lens) in enumerate(now.items())]
    found.append(DecodeCase("fresh-two-queries", (204, 70), (204, 70), (204, 70), queries=2, seed=20))
    found.append(DecodeCase("fresh-128-heads", (130,), (130,), (130,), heads=128, seed=21))
    for at, (name, lens) in enumerate(now.items()):
        captured = (1,) * len(lens)
        found.append(DecodeCase(f"captured-{name}", lens, captured, captured, seed=30 + at))
    for at, name in enumerate(("one", "pair", "four")):
        lens, captured = now[name], (1,) * len(now[name])
        found.append(DecodeCase(f"captured-rows-{name}", lens, captured, lens, seed=40 + at))
        found.append(DecodeCase(f"captured-splits-{name}", lens, lens, captured, seed=50 + at))
    for at, (name, lens, planned) in enumerate(
        (
            ("a-step-behind-at-a-block-end", (65, 129), (64, 128)),
            ("longer-request-before", (200, 70), (640, 70)),
            ("shorter-request-before", (640, 70), (200, 70)),
            ("exchanged", (300, 64, 65, 1), (1, 65, 64, 300)),
            ("grown-much", (700, 700), (100, 100)),
        )
    ):
        found.append(DecodeCase(name, lens, planned, planned, seed=60 + at))
    return found


def hashed(count: int, seed: int) -> torch.Tensor:
    """`count` integers 0..65535, the i-th from a 32-bit integer hash of i + 2^20 seed: the same on any machine.

    >>> hashed(3, 1).tolist() == hashed(5, 1)[:3].tolist()
    True
    """
    mask = 0xFFFFFFFF
    value = (torch.arange(count, dtype=torch.int64) + (seed << 20)) & mask
    for shift, factor in ((16, 0x7FEB352D), (15, 0x6C078965)):  # odd factors: each round is a bijection of 32 bits
        value = ((value ^ (value >> shift)) * factor) & mask
    return (value ^ (value >> 16)) & 0xFFFF


def tensors(case: DecodeCase) -> dict[str, torch.Tensor]:
    """q, k_cache, block_table, seq_lens, descale_q and descale_k of `case`, on the CPU.

    q is uniform in +-Q_AMPLITUDE, k_cache in +-1, both rounded to e4m3; request r's pages are a permutation's entries.
    """
    batch = len(case.seq_lens)
    longest = max(case.seq_lens + case.rows_for)
    width = math.ceil(longest / schedule.BLOCK_SIZE) + 1
    shape = (batch, case.queries, case.heads, 576)
    uniform = hashed(math.prod(shape), case.seed).float() / 32768 - 1
    cache = hashed(PAGES * 64 * 576, case.seed + 1000).float() / 32768 - 1
    order = torch.argsort(hashed(PAGES, case.seed + 2000), stable=True).to(torch.int32)
    places = torch.arange(batch * width) % PAGES
    return {
        "q": (uniform * Q_AMPLITUDE).to(torch.float8_e4m3fn).view(shape),
        "k_cache": cache.to(torch.float8_e4m3fn).view(PAGES, 64, 1, 576),
        "block_table": order[places].view(batch, width).contiguous(),
        "seq_lens": torch.tensor(case.seq_lens, dtype=torch.int32),
        "descale_q": torch.tensor([DESCALE_Q]),
        "descale_k": torch.tensor([DESCALE_K]),
    }


def planned(case: DecodeCase, sm_count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`(tile_scheduler_metadata, num_splits)` that the call is given: reference schedules of the two lists."""
    parts = schedule.num_sm_parts(sm_count, case.heads * case.queries)
    return schedule.plan(list(case.rows_for), parts)[0], schedule.plan(list(case.splits_for), parts)[1]
