"""The stand-in vLLM of stub_release with the graph wrappers of both runners, so that the guard has what it hooks."""

from pathlib import Path

import stub_release

GRAPHS = """
import enum
from types import SimpleNamespace
import torch

class CUDAGraphMode(enum.Enum):
    NONE, PIECEWISE, FULL = range(3)

context = SimpleNamespace(attn_metadata=None, batch_descriptor=None, cudagraph_runtime_mode=CUDAGraphMode.FULL)

def get_forward_context():
    return context

class CUDAGraphWrapper:
    def __init__(self):
        self.runtime_mode = CUDAGraphMode.FULL
        self.concrete_cudagraph_entries = {}

    def __call__(self):
        entry = self.concrete_cudagraph_entries.setdefault(context.batch_descriptor, SimpleNamespace(cudagraph=None))
        if entry.cudagraph is None:
            entry.cudagraph = torch.cuda.CUDAGraph()
            entry.cudagraph.capture_begin()
        else:
            entry.cudagraph.replay()
"""
MANAGER = """
import torch

class CudaGraphManager:
    def __init__(self):
        self.graphs = {}

    def capture(self, size, build):
        build()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        self.graphs[size] = graph

    def run_fullgraph(self, size):
        self.graphs[size].replay()
"""
BUILDER = """

from vllm.v1.attention.backend import AttentionMetadataBuilder

class FlashMLAMetadataBuilder(FlashMLAMetadataBuilder, AttentionMetadataBuilder):
    layer_names = ("model.layers.0.self_attn.attn",)
    _build_decode = FlashMLAMetadataBuilder._build_decode

    def build(self, **arguments):
        return SimpleNamespace(decode=self._build_decode(**arguments))
"""
ENGINE = '''

import logging.config

# As vLLM does when it is imported: handlers of loggers below its own are gone then.
_loggers = {"vllm": {"handlers": [], "level": "INFO", "propagate": False}}
logging.config.dictConfig({"version": 1, "disable_existing_loggers": False, "loggers": _loggers})


class Through:
    """A captured size: capture and replay go through the runner's wrapper."""

    def __init__(self, llm, rows):
        self.llm, self.rows = llm, rows
        self.decode = llm.build(rows) if not llm.v2 else None
        if llm.v2:
            llm.manager.capture(rows, lambda: llm.build(rows))
            self.decode = llm.last.decode
        else:
            self.step()
        llm.forward(self.decode)
        self.reads = llm.places(self.decode)

    def step(self):
        from vllm.compilation import cuda_graph

        cuda_graph.context.attn_metadata = {self.llm.builder.layer_names[0]: self.llm.last}
        cuda_graph.context.batch_descriptor = self.rows
        self.llm.wrapper()

    def replay(self):
        self.llm.manager.run_fullgraph(self.rows) if self.llm.v2 else self.step()


class LLM(LLM):
    def __init__(self, *, enforce_eager=False, compilation_config=None, **arguments):
        from vllm.compilation import cuda_graph
        from vllm.v1.worker.gpu import cudagraph_utils

        self.asked_for = arguments
        super().__init__(enforce_eager=enforce_eager, compilation_config={"cudagraph_capture_sizes": []}, **arguments)
        self.v2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
        self.wrapper, self.manager = cuda_graph.CUDAGraphWrapper(), cudagraph_utils.CudaGraphManager()
        if enforce_eager:
            self.builder.cg_buf_tile_scheduler_metadata = None
        else:
            for size in sorted(compilation_config["cudagraph_capture_sizes"], reverse=True):
                self.build(size)
                self.graphs[size] = Through(self, size)

    def build(self, rows):
        self.last = self.builder.build(
            block_table_tensor=self.block_table[:rows], seq_lens_device=self.seq_lens[:rows], num_decode_tokens=rows
        )
        return self.last.decode

    def generate(self, prompts, *arguments, **options):
        if os.environ.get("STUB_VLLM_FAILS") == "gpu" and len(prompts) == 3:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return super().generate(prompts, *arguments, **options)
'''
PLUGINS = '''

_hotfix = load_general_plugins

def load_general_plugins():
    """The guard too; a stand-in's tensors are on no device, and it watches them all the same."""
    _hotfix()
    from stalegraph.vllm import guard

    if guard._guard is None:
        guard.register()
        if guard._guard is not None:
            guard._guard.on_device = lambda tensor: True
'''


def install(folder: Path, version: str) -> Path:
    """The stand-in called `version` in `folder`, with graph wrappers; returns `folder`."""
    stub_release.install(folder, version)
    root = folder / "vllm"
    for package in ("compilation", "v1/worker", "v1/worker/gpu"):
        (root / package).mkdir()
        (root / package / "__init__.py").touch()
    (root / "compilation" / "cuda_graph.py").write_text(GRAPHS)
    (root / "v1" / "worker" / "gpu" / "cudagraph_utils.py").write_text(MANAGER)
    (root / "v1" / "attention" / "backend.py").write_text(
        "class AttentionMetadataBuilder:\n    def build(self, **arguments):\n        raise NotImplementedError\n"
    )
    more = (
        ("v1/attention/backends/mla/flashmla.py", BUILDER),
        ("__init__.py", ENGINE),
        ("plugins/__init__.py", PLUGINS),
    )
    for name, text in more:
        with open(root / name, "a") as file:
            file.write(text)
    return folder
