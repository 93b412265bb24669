"""Random batches for the tile scheduler, the same on every machine, and the digest by which a schedule is recorded."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

SEED = 33638
COUNT = 12_000
IN_FULL = 24  # the first so many with at most 16 requests are kept whole
MOST_REQUESTS, LONGEST = 1024, 200_000  # requests, tokens; both inclusive
Q_TOKENS = tuple(range(16, 257, 16))  # query tokens per KV head
DIGEST_DIGITS = 16  # hex digits kept of each sha256


@dataclass(frozen=True)
class Case:
    """One batch to schedule: tokens per request, and query tokens per KV head, which decide the number of SM parts."""

    seq_lens: tuple[int, ...]
    q_tokens_per_kv_head: int


def cases(seed: int = SEED, count: int = COUNT) -> Iterator[Case]:
    """`count` cases from `random.Random(seed)`, drawing only `random()`, whose sequence Python guarantees.

    The batch is 2^u, u uniform in 0..10 (every 500th case has 1,024 requests); lengths are of one of five kinds:
    uniform up to 200,000, log-uniform, all equal, uniform up to 500, or log-uniform with a third of the requests empty.
    """
    draw = random.Random(seed).random
    for index in range(count):
        batch = MOST_REQUESTS if index % 500 == 499 else int(2 ** (10 * draw()))
        kind = int(5 * draw())
        if kind == 0:
            lengths = [int((LONGEST + 1) * draw()) for _ in range(batch)]
        elif kind == 1:
            lengths = [int((LONGEST + 1) ** draw()) for _ in range(batch)]
        elif kind == 2:
            lengths = [int((LONGEST + 1) ** draw())] * batch
        elif kind == 3:
            lengths = [int(501 * draw()) for _ in range(batch)]
        else:
            lengths = [0 if draw() < 1 / 3 else int((LONGEST + 1) ** draw()) for _ in range(batch)]
        yield Case(tuple(lengths), Q_TOKENS[int(len(Q_TOKENS) * draw())])


def digest(tile_scheduler_metadata, num_splits) -> str:
    """sha256 over the rows' five used columns, then num_splits, as little-endian int32; the first 16 hex digits."""
    used = tile_scheduler_metadata[:, :5].contiguous().cpu().numpy().astype("<i4").tobytes()
    splits = num_splits.cpu().numpy().astype("<i4").tobytes()
    return hashlib.sha256(used + splits).hexdigest()[:DIGEST_DIGITS]
