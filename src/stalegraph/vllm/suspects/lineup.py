"""All suspects, each with the question put to it and the verdict expected of each release."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stalegraph.simulator import Device
from stalegraph.vllm.suspects.cases import block_pooling, linear_attention, microbatches, reused_plan, shared_update
from stalegraph.vllm.suspects.examination import Examination, examine
from stalegraph.vllm.suspects.release import release_modules


@dataclass(frozen=True)
class Suspect:
    """One question to a release: `make(release, find)` gives the Case, `expected` the verdict for each release."""

    name: str
    question: str
    make: Callable
    expected: dict
    report: str | None = None  # name of its file in repro/reports, where a release is confirmed


SUSPECTS = (
    Suspect(
        "linear attention, mamba_cache_mode align",
        "MiniMax-Text-01 with prefix caching and full decode graphs: state_indices_tensor is gathered into a fresh "
        "tensor",
        lambda release, find: linear_attention(release, find, "align"),
        {"0.15.0": "confirmed", "0.20.2": "confirmed", "0.33.0": "confirmed"},
        "linear-attention-align",
    ),
    Suspect(
        "linear attention, mamba_cache_mode none",
        "the same layer without prefix caching: state_indices_tensor is a view of the runner's block table",
        lambda release, find: linear_attention(release, find, "none"),
        {"0.15.0": "cleared", "0.20.2": "cleared", "0.33.0": "cleared"},
    ),
    Suspect(
        "Whisper causal attention with block pooling",
        "Voxtral realtime: the builder deep-copies all common metadata at each step",
        block_pooling,
        {"0.15.0": "confirmed", "0.20.2": "confirmed", "0.33.0": "cleared"},
        "whisper-block-pooling",
    ),
    Suspect(
        "FlashAttention update_block_table, second group",
        "V1 runner, two KV cache groups of one spec: the second group's scheduler_metadata is written at capture only",
        shared_update,
        {"0.15.0": "latent", "0.20.2": "latent", "0.33.0": "latent"},
    ),
    Suspect(
        "V1 microbatch split, one query per request",
        "dual batch overlap in plain decode: query_start_loc is a fresh tensor",
        lambda release, find: microbatches(release, find, 1),
        {"0.15.0": "latent", "0.20.2": "latent", "0.33.0": "latent"},
    ),
    Suspect(
        "V1 microbatch split, one query per request, padded",
        "the same with a padded request, which has no query in query_start_loc at replay and one at capture",
        lambda release, find: microbatches(release, find, 1, padded=4, requests=3),
        {"0.15.0": "latent", "0.20.2": "latent", "0.33.0": "latent"},
    ),
    Suspect(
        "V1 microbatch split, two queries per request, a request across both",
        "dual batch overlap with one speculated token and an odd batch: seq_lens is cloned where a request straddles",
        lambda release, find: microbatches(release, find, 2, requests=3),
        {"0.15.0": "confirmed", "0.20.2": "confirmed", "0.33.0": "confirmed"},
        "microbatch-split",
    ),
    Suspect(
        "FlashMLA bf16 plan reused from the warm-up, V2 runner",
        "the V2 runner to 0.21.0 captures with the warm-up's metadata, which carries a plan by then",
        reused_plan,
        {"0.15.0": "confirmed", "0.20.2": "confirmed", "0.33.0": "cleared"},
        "v2-flashmla-bf16-plan",
    ),
)


def examine_release(suspect: Suspect, release: str, root: Path, steps: int = 12) -> Examination:
    """Drive one suspect of one release, as it is and then with its fields kept in place, each on a fresh device."""
    case, fields, wrong, findings = _run(suspect, release, root, steps, persistent=False)
    _, _, wrong_persistent, _ = _run(suspect, release, root, steps, persistent=True)
    return Examination(
        suspect=suspect.name,
        release=release,
        builder=case.builder,
        question=suspect.question,
        steps=steps,
        wrong_steps=len(wrong),
        wrong_steps_persistent=len(wrong_persistent),
        first_wrong=wrong[0][0] if wrong else None,
        fields=fields,
        findings=findings,
        failure=next((failure for _, failure in wrong if failure), None),
    )


def _run(suspect, release, root, steps, persistent):
    with Device(memory_bytes=1 << 26) as device, release_modules(release, root) as find:
        case = suspect.make(release, find)
        return case, *examine(device, case, steps, persistent)
