"""The release map: what each vLLM from 0.13.0 to 0.33.0 is built with and does with FP8 FlashMLA decode metadata.

Read from the releases' own wheels. What lies between two releases that were read is told only where both agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from stalegraph.vllm import affected as source_rules

ARCHITECTURES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
Version = tuple[int, int, int]


class Read(NamedTuple):
    """What was read of one release: `extension_bytes` of `_flashmla_extension_C`, `tag` the wheel's glibc."""

    version: Version
    torch: str
    cuda_major: int
    extension_bytes: int
    tag: str
    requires_python: str
    copies: bool  # the planner's result is copied to the builder's persistent buffers
    fills_tail: bool  # and the rest of num_splits is filled with its last value
    decode_method: str


_OLD, _NEW = ">=3.10,<3.14", ">=3.10,<3.15"
MAP = (
    Read((0, 13, 0), "2.9.0", 12, 968248, "2_31", _OLD, True, True, "_forward_decode"),
    Read((0, 14, 1), "2.9.1", 12, 968248, "2_31", _OLD, True, True, "_forward_decode"),
    Read((0, 15, 0), "2.9.1", 12, 972344, "2_31", _OLD, False, False, "_forward_decode"),
    Read((0, 15, 1), "2.9.1", 12, 972344, "2_31", _OLD, False, False, "_forward_decode"),
    Read((0, 16, 0), "2.9.1", 12, 972344, "2_31", _OLD, False, False, "forward_mqa"),
    Read((0, 17, 1), "2.10.0", 12, 840648, "2_31", _OLD, False, False, "forward_mqa"),
    Read((0, 18, 1), "2.10.0", 12, 840648, "2_31", _OLD, False, False, "forward_mqa"),
    Read((0, 19, 0), "2.10.0", 12, 840648, "2_31", _OLD, True, False, "forward_mqa"),
    Read((0, 19, 1), "2.10.0", 12, 840648, "2_31", _OLD, True, False, "forward_mqa"),
    Read((0, 20, 2), "2.11.0", 13, 257296, "2_35", _NEW, True, False, "forward_mqa"),
    Read((0, 21, 0), "2.11.0", 13, 250848, "2_24", _NEW, True, False, "forward_mqa"),
    Read((0, 22, 1), "2.11.0", 13, 250848, "2_28", _NEW, True, False, "forward_mqa"),
    Read((0, 24, 0), "2.11.0", 13, 250848, "2_28", _NEW, True, False, "forward_mqa"),
    Read((0, 26, 0), "2.11.0", 13, 209856, "2_28", _NEW, True, False, "forward_mqa"),
    Read((0, 28, 0), "2.13.0", 13, 214040, "2_28", _NEW, True, False, "forward_mqa"),
    Read((0, 30, 0), "2.13.0", 13, 214040, "2_28", _NEW, True, False, "forward_mqa"),
    Read((0, 33, 0), "2.14.0", 13, 219736, "2_28", ">=3.11,<3.15", True, False, "forward_mqa"),
)
FIRST, LAST = MAP[0].version, MAP[-1].version

# Boundaries that were found by reading the releases in between.
SAFE_PADDING_FROM = source_rules.FIRST_SAFE_PADDING  # V1 fills padded block-table rows with page 0 (vLLM #35431)
V2_RUNNER_FOR_V2_MODELS_FROM = (0, 24, 0)  # DeepseekV2ForCausalLM runs on the V2 runner unless told otherwise
V2_RUNNER_FOR_ALL_FROM = (0, 29, 0)


@dataclass(frozen=True)
class Release:
    """One vLLM release as the map knows it; a field is None where the releases read on both sides of it disagree.

    `padded_row_fill` is what the V1 runner writes to padded block-table rows: -1, or page 0.
    """

    version: str
    exact: bool  # read itself, not told from its neighbours
    torch: str | None
    cuda_major: int | None
    requires_python: str | None
    affected: bool | None
    fills_tail: bool | None
    decode_method: str | None
    padded_row_fill: int
    padding_is_safe: bool
    runner_default: dict[str, str]

    def runner(self, architecture: str) -> str:
        """The runner, "v1" or "v2", that a model of this architecture gets by default."""
        return self.runner_default.get(architecture, self.runner_default[ARCHITECTURES[1]])


def release_of(version: str) -> Release | None:
    """The release called `version` ("0.15.0", "0.15.0+cu129"); None outside of the map and for builds from a checkout.

    >>> release_of("0.18.0").affected, release_of("0.19.0").affected, release_of("0.12.0")
    (True, False, None)
    """
    found = source_rules.release_of(version)
    if found is None or not FIRST <= found <= LAST:
        return None
    below = next(read for read in reversed(MAP) if read.version <= found)
    above = next(read for read in MAP if read.version >= found)

    def agreed(field: str):
        one, other = getattr(below, field), getattr(above, field)
        return one if one == other else None

    copies = agreed("copies")
    return Release(
        version=".".join(map(str, found)),
        exact=below is above,
        torch=agreed("torch"),
        cuda_major=agreed("cuda_major"),
        requires_python=agreed("requires_python"),
        affected=None if copies is None else not copies,
        fills_tail=agreed("fills_tail"),
        decode_method=agreed("decode_method"),
        padded_row_fill=0 if found >= SAFE_PADDING_FROM else -1,
        padding_is_safe=found >= SAFE_PADDING_FROM,
        runner_default={
            "DeepseekV2ForCausalLM": "v2" if found >= V2_RUNNER_FOR_V2_MODELS_FROM else "v1",
            "DeepseekV3ForCausalLM": "v2" if found >= V2_RUNNER_FOR_ALL_FROM else "v1",
        },
    )


def span() -> str:
    """The map's range in words: "0.13.0 to 0.33.0"."""
    return " to ".join(".".join(map(str, version)) for version in (FIRST, LAST))


def builder_source_verdict(source: str) -> str:
    """ "affected", "copies" or "unknown": whether `_build_decode` of this source uses its persistent buffers.

    Read with `ast`, so an import is never needed and a comment never counts; a source that does not parse is "unknown".
    """
    try:
        found = source_rules.by_source(source)
    except (SyntaxError, ValueError):
        return "unknown"
    return {True: "affected", False: "copies", None: "unknown"}[found]
