"""A confirmed suspect as an issue that can be filed: the story stands in the text, the numbers come from the run."""

from __future__ import annotations

from dataclasses import dataclass

from stalegraph.recorded import load


@dataclass(frozen=True)
class Story:
    """What a maintainer needs beside the numbers."""

    title: str
    what: str
    where: str
    reach: str
    fix: str
    replica: str  # its name in the zoo
    note: str = ""  # on the table
    engine: str = ""  # the recording of real engines that show it
    remedy: str = "with each step's metadata copied into the tensors of the capture"


STORIES = {
    "v2-flashmla-bf16-plan": Story(
        title="V2 runner to 0.21.0: bf16 FlashMLA decode graphs keep the plan of their warm-up (fixed by 0.22.0)",
        what="""
            FlashMLA's bf16 decode plans at its first call with a metadata object and stores the plan on it. The V2
            runner warms up and captures with one and the same object, so the capture finds a plan and puts no
            planner into the graph. What it has baked in are the warm-up's plan tensors: made for sequences of one
            token, written by no step, and freed with the metadata, so that a replay obeys whatever lies there then.
        """,
        where="""
            `vllm/v1/worker/gpu/cudagraph_utils.py` (`CudaGraphManager.capture`),
            `vllm/third_party/flashmla/flash_mla_interface.py` (`flash_mla_with_kvcache`).
        """,
        reach="""
            Any MLA model on the FLASHMLA backend with a bf16 cache, `VLLM_USE_V2_MODEL_RUNNER=1` and full decode
            graphs, in the releases from 0.15.0 to 0.21.0: those in the table were run, the others read. The V1 runner
            builds metadata anew for each capture. The sparse builder plans the same way, by reading. Not tried with a
            public model.
        """,
        fix="""
            Build metadata anew between warm-up and capture, which the V2 runner does from 0.22.0 on (by reading;
            0.33.0 was run).
        """,
        engine="h200/vllm-0.20.2/guard_bf16",
        note="The stand-in for the decode kernel, `fwd_kvcache_mla_fp8`, is one for bf16 and fp8 caches.",
        remedy="with metadata built anew between warm-up and capture",
        replica="warmup_plan",
    ),
    "linear-attention-align": Story(
        title="""
            Linear attention with mamba_cache_mode=align: full decode graphs read the state indices of their capture
        """,
        what="""
            `LinearAttentionMetadataBuilder` declares `UNIFORM_SINGLE_TOKEN_DECODE`, so its metadata is baked into
            full decode graphs. In mode `align` its `state_indices_tensor` is the result of a gather
            (`mamba_get_block_table_tensor`), a new tensor at each step. A captured decode kernel keeps the address
            of the capture's tensor, which is freed and handed on: it reads and writes the states of slots that are
            not this step's. In mode `none` the tensor is a view of the runner's block table and stays.
        """,
        where="""
            `vllm/v1/attention/backends/linear_attn.py` (`LinearAttentionMetadataBuilder.build`),
            `vllm/v1/attention/backends/utils.py` (`mamba_get_block_table_tensor`).
        """,
        reach="""
            Models on the plain linear attention backend (MiniMax-Text-01, MiniMax-M1) with
            `--enable-prefix-caching`, which puts models without support for mode `all` into `align`, and a cudagraph
            mode with full decode graphs, the default for hybrid models. Read from the configuration code of 0.15.0, not
            tried with a model.
        """,
        fix="""
            A persistent int32 buffer of `max_num_seqs` entries in the builder, copied into when the batch is decode
            only and full graphs are on, padded rows set to the pad slot; the Bailing subclass in the same file does
            so in 0.33.0.
        """,
        replica="gathered_indices",
    ),
    "whisper-block-pooling": Story(
        title="""
            Whisper causal attention with block pooling: all metadata of a captured graph is freed (fixed by 0.33.0)
        """,
        what="""
            `WhisperCausalAttentionWithBlockPoolingBuilder.build` deep-copies the common metadata, so
            query_start_loc, seq_lens, block_table and slot_mapping are new tensors at each step, while the builder
            inherits FlashAttention's support for full graphs. Captured kernels read the capture's freed copies; the
            table has those that the attention kernel reads, slot_mapping is read by the write to the cache alone.
        """,
        where="""
            `vllm/model_executor/models/whisper_causal.py` (`create_whisper_attention_backend_with_block_pooling`).
        """,
        reach="""
            Voxtral realtime and streaming, whose encoder runs inside the captured forward, with full graphs. 0.33.0
            writes to persistent buffers; by reading, 0.30.0 does so too.
        """,
        fix="Upgrade to a release that has the persistent buffers (0.33.0 was run; 0.30.0 has them by reading).",
        replica="copied_metadata",
    ),
    "microbatch-split": Story(
        title="V1 dual batch overlap: a request cut by the split leaves frozen seq_lens in full decode graphs",
        what="""
            `_make_metadata_with_slice` makes `query_start_loc` anew for each microbatch, and clones `seq_lens`
            where the last request of a microbatch continues in the next one. The wrapper keeps the capture's
            metadata alive, so the graph reads values frozen at capture. In plain decode the frozen query starts
            equal those of every step and nothing is wrong. With two queries per request (one speculated token) and
            an odd number of requests the split cuts a request, and the first microbatch attends with the lengths of
            the capture.
        """,
        where="`vllm/v1/worker/ubatch_utils.py` (`_make_metadata_with_slice`, `slice_query_start_locs`).",
        reach="""
            The V1 runner with `--enable-dbo`, speculative decoding, full decode graphs, and a batch whose middle
            token falls inside a request. Nothing in the configuration of 0.15.0 refuses the combination; it was not
            tried with a model.
        """,
        fix="""
            Write query_start_loc and seq_lens of each microbatch to persistent buffers (the V2 runner's overlap
            does, from 0.30.0 on), or split at a request's boundary.
        """,
        replica="split_microbatch",
    ),
}


SHOWN = """
    The release's own builder and forward method, taken from its wheel, ran on a simulated GPU with the kernels below
    them stood in for: one step captured, the next ones replayed, each compared with the same step without a graph.
    Odd-sized tensors were allocated between steps. The fourth column is the same run {remedy}: that alone
    made the output right. Command: `{command}` (torch {torch}, {date}). {gpu} A
    replica of the bug in plain torch operations, `stalegraph.zoo.{replica}`, runs with its fixed twin on the simulated
    GPU and on a real one.
"""


def _flow(text):
    return " ".join(text.split())


def in_engines(record) -> str:
    """What a recording of `python -m stalegraph.vllm.guarded --bf16` shows, as a section."""
    told = []
    for one in record.data["engines"]:
        accuracies = [100 * batch["accuracy"] for batch in one["batches"]]
        right = " to ".join(dict.fromkeys(f"{value:.0f}" for value in (min(accuracies), max(accuracies))))
        batches = ", ".join(str(batch["batch"]) for batch in one["batches"])
        told.append(f"- {one['runner'].upper()} runner, batches of {batches}: {right} % of the bytes right.")
        told += [f"  - {finding['message']}" for finding in one["findings"]]
    shown = (
        "A one-layer model of DeepSeek's shape whose weights make it recite its prompt (`stalegraph export`), with a "
        "bf16 cache and FULL_DECODE_ONLY, in vLLM as installed; the lines below a runner are the guard's. It was "
        f"{record.provenance.caption()}."
    )
    return f"## In a running engine\n\n{shown}\n\n" + "\n".join(told)


def report(name: str, examinations: list[dict], provenance: dict) -> str:
    """The issue text of story `name`, with a table of its examinations as `Examination.to_json` gives them."""
    story = STORIES[name]
    command, date = provenance["command"].split(" --record")[0], provenance["date"][:10]
    shown = _flow(SHOWN).format(
        remedy=story.remedy, command=command, torch=provenance["torch"], date=date, replica=story.replica,
        gpu="On a GPU it was seen too, below." if story.engine else "The release's code was not run on a GPU.",
    )  # fmt: skip
    head = ("vLLM", "verdict", "wrong steps", "with the remedy", "stale and read by a captured kernel")
    rows = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for item in examinations:
        stale = [at for at in item["fields"] if at["moved"] and at["read_by"]]
        read = [f"`{at['field']}` ({', '.join(at['read_by'])})" for at in stale]
        wrong = f"{item['wrong_steps']} of {item['steps']}"
        if item["failure"]:
            wrong = f"stopped at step {item['first_wrong']}: {item['failure'].split(':')[0]}"
        rows.append(
            f"| {item['release']} | {item['verdict']} | {wrong} "
            f"| {item['wrong_steps_persistent']} of {item['steps']} | {'; '.join(read) or 'none'} |"
        )
    return "\n\n".join(
        [
            f"# {_flow(story.title)}",
            f"## What happens\n\n{_flow(story.what)}",
            f"## Where\n\n{_flow(story.where)}",
            "## How it was shown\n\n" + shown,
            "\n".join(rows) + (f"\n\n{story.note}" if story.note else ""),
            *([in_engines(load(story.engine))] if story.engine else []),
            f"## Who can meet it\n\n{_flow(story.reach)}",
            f"## What would fix it\n\n{_flow(story.fix)}",
        ]
    ) + "\n"
