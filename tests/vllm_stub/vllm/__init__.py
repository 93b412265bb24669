"""A stand-in for vLLM: no model and no GPU, but the builder, its plugins, and graphs that bake addresses.

A replay says the right token where the graph's baked addresses are those of this step's metadata, else a wrong one.
Two padded rows that hold -1 are an illegal access as soon as the schedule is right (#33664).
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch

__version__ = (Path(__file__).parent / "VERSION").read_text().strip()


class Graph:
    """In place of torch.cuda.CUDAGraph."""

    def capture_begin(self, *_, **__):
        self.captured = True

    def replay(self):
        assert self.captured


torch.cuda.CUDAGraph = Graph


@dataclass
class SamplingParams:
    temperature: float = 1.0
    max_tokens: int = 16
    ignore_eos: bool = False
    detokenize: bool = True


@dataclass
class EngineArgs:
    model: str = ""
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool | None = None
    disable_log_stats: bool = False
    seed: int = 0


class LLM:
    def __init__(self, *, model, enforce_eager=False, compilation_config=None, max_num_seqs=256, **arguments):
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        for step in os.environ.get("STUB_VLLM_FAILS", "").split(","):
            if step == "memory":
                raise ValueError(
                    "Free memory on device (1.0/139.8 GiB) on startup is less than desired GPU memory utilization"
                )
            if step == "killed":
                os.kill(os.getpid(), 9)
            if step == "import":
                raise ModuleNotFoundError("No module named 'flashinfer'")
        config = json.loads((Path(model) / "config.json").read_text())
        self.vocabulary = config["vocab_size"]
        from vllm.v1.attention.backends.mla import flashmla

        self.flashmla = flashmla
        self.builder = flashmla.FlashMLAMetadataBuilder(max_num_seqs, full_graphs=not enforce_eager)
        self.implementation = flashmla.FlashMLAImpl()
        self.seq_lens = torch.ones(max_num_seqs, dtype=torch.int32)
        self.block_table = torch.zeros((max_num_seqs, 8), dtype=torch.int32)
        self.graphs = {}
        if not enforce_eager:
            for size in sorted(compilation_config["cudagraph_capture_sizes"], reverse=True):
                self.build(size)  # warm-up
                decode, graph = self.build(size), Graph()
                graph.capture_begin()
                self.forward(decode)
                graph.reads, graph.decode = self.places(decode), decode  # held: no fresh tensor lands on it by luck
                self.graphs[size] = graph
        self.llm_engine = SimpleNamespace(
            vllm_config=SimpleNamespace(
                model_config=SimpleNamespace(use_mla=True, architectures=config["architectures"]),
                compilation_config=SimpleNamespace(cudagraph_mode=None, mode=None),
            )
        )

    def get_tokenizer(self):
        return SimpleNamespace(encode=lambda text: list(text.encode()))

    def build(self, rows):
        return self.builder._build_decode(
            block_table_tensor=self.block_table[:rows], seq_lens_device=self.seq_lens[:rows], num_decode_tokens=rows
        )

    def forward(self, decode):
        self.implementation.forward_mqa(None, None, SimpleNamespace(decode=decode), None)

    @staticmethod
    def places(decode):
        planned = decode.scheduler_metadata
        return planned.tile_scheduler_metadata.data_ptr(), planned.num_splits.data_ptr()

    def generate(self, prompts, sampling_params=None, use_tqdm=True):
        prompts = [prompt["prompt_token_ids"] for prompt in prompts]
        batch, said = len(prompts), [[] for _ in prompts]
        self.asked = getattr(self, "asked", 0) + 1
        drift = self.asked - 1 if "drift" in os.environ.get("STUB_VLLM_FAILS", "") else 0  # answers differ each time
        rows = next((size for size in sorted(self.graphs) if size >= batch), batch)
        fill = -1 if self.flashmla.PADS_WITH_MINUS_ONE else 0
        for step in range(sampling_params.max_tokens):
            self.block_table[:batch] = 1
            self.block_table[batch:] = fill
            self.seq_lens[:batch] = len(prompts[0]) + step
            self.seq_lens[batch:] = 0
            decode = self.build(rows)
            right = True
            if rows in self.graphs:
                self.graphs[rows].replay()
                self.forward(self.graphs[rows].decode)  # the captured step's own launches
                right = self.graphs[rows].reads == self.places(decode)
                if right and rows - batch > 1 and self.block_table[batch:rows].min() < 0:
                    raise RuntimeError("CUDA error: an illegal memory access was encountered")
            else:
                self.forward(decode)
            for request, prompt in enumerate(prompts):
                token = prompt[step % len(prompt)]
                said[request].append((token + drift + (not right)) % self.vocabulary)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=one)]) for one in said]
