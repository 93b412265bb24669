"""The same few questions put to the simulated GPU and to CUDA: what is mapped, what a graph holds, whose pool it is."""

from __future__ import annotations

import torch

from stalegraph.blocks import MemoryMap
from stalegraph.errors import CaptureError, RungUnavailable, UsageError
from stalegraph.nodes import Node


class Simulated:
    """A `stalegraph.simulator.Device` and its graphs."""

    name = "sim"

    def __init__(self, device):
        self.device = device

    def on_device(self, tensor: torch.Tensor, capturing: bool = False) -> bool:
        address = tensor.data_ptr()
        return self.device.in_arena(address) or self.is_host(address)

    def is_host(self, address: int) -> bool:
        return address in self.device.pinned

    def is_host_tensor(self, tensor: torch.Tensor) -> bool:
        return self.is_host(tensor.data_ptr())

    def memory_map(self) -> MemoryMap:
        return self.device.memory_map()

    def nodes(self, graph, memory) -> tuple[Node, ...]:
        return graph.nodes

    def pool(self, graph) -> tuple[int, int]:
        return tuple(graph.pool())

    def generations(self, graph) -> dict[tuple[int, str], tuple[int, int]]:
        """(node, argument) -> (block address, generation at capture) of reads of memory that the graph does not own."""
        return graph.generations

    def host_map(self) -> MemoryMap:
        """The blocks of pinned host memory."""
        return self.device.pinned_map()

    def view(self, address: int, shape, strides, dtype: str) -> torch.Tensor | None:
        """The bytes at `address` as they lie now."""
        memory = self.device.pinned if self.is_host(address) else self.device.memory
        if address not in memory:
            return None
        with self.device.host():
            return memory.tensor(address, shape, strides, getattr(torch, dtype))

    def paused(self):
        return self.device.host()


class Cuda:
    """Graphs of torch, through `torch.cuda.CUDAGraph` or the project's own CudaDevice where there is one."""

    name = "cuda"

    def __init__(self, device=None):
        self.device = device

    def on_device(self, tensor: torch.Tensor, capturing: bool = False) -> bool:
        if tensor.is_cuda:
            return True
        # A host tensor with dimensions can only be the source or target of a captured copy; a number goes by value.
        return capturing and tensor.device.type == "cpu" and tensor.dim() > 0

    def is_host(self, address: int) -> bool:
        return False

    def is_host_tensor(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    def memory_map(self) -> MemoryMap:
        if self.device is not None:
            return self.device.memory_map()
        try:
            return MemoryMap.from_snapshot(torch.cuda.memory_snapshot(include_traces=False))
        except TypeError:  # torch before 2.12
            return MemoryMap.from_snapshot(torch.cuda.memory_snapshot())

    def nodes(self, graph, memory) -> tuple[Node, ...]:
        own = getattr(graph, "nodes", None)
        if own is not None:
            return own
        from stalegraph.cuda.nodes import read_nodes

        if not hasattr(graph, "raw_cuda_graph"):
            raise RungUnavailable(
                f"torch {torch.__version__} keeps no graph to read; torch 2.8 or later does (keep_graph)"
            )
        try:
            raw = graph.raw_cuda_graph()
        except RuntimeError as error:
            raise CaptureError(
                "this graph was made without keep_graph=True, so its nodes are gone; make it inside watch(), or with "
                f"torch.cuda.CUDAGraph(keep_graph=True) ({str(error).splitlines()[0][:120]})"
            ) from error
        return read_nodes(raw, memory)

    def pool(self, graph) -> tuple[int, int]:
        return tuple(graph.pool())

    def generations(self, graph) -> dict:
        return {}

    def host_map(self) -> None:
        return None  # torch keeps no list of its pinned blocks that Python could read

    def view(self, address: int, shape, strides, dtype: str):
        return None

    def paused(self):
        from contextlib import nullcontext

        return nullcontext()


def backend_of(graph, device=None):
    """The backend that `graph` belongs to; UsageError naming what is allowed where it is no graph."""
    from stalegraph.simulator import CUDAGraph, Device

    graph = getattr(graph, "simulated", graph)
    if isinstance(graph, CUDAGraph):
        return Simulated(graph.device)
    if isinstance(device, Device):
        raise UsageError(f"graph is {type(graph).__name__} but device is simulated; allowed: a graph of that device")
    if hasattr(graph, "raw_cuda_graph") or hasattr(graph, "nodes") or type(graph).__name__ == "CUDAGraph":
        return Cuda(device)
    raise UsageError(
        f"graph is {type(graph).__name__}; allowed: a simulated CUDAGraph, a CudaGraph or a torch.cuda.CUDAGraph"
    )


def state_of(graph) -> str | None:
    """Why `graph` cannot be audited now, or None."""
    state = getattr(getattr(graph, "simulated", graph), "state", None)
    if state in ("new", "reset"):
        return "it was reset, or never captured"
    if state == "capturing":
        return "it is still capturing"
    if state == "invalid":
        return "its capture failed"
    if state is None and hasattr(graph, "_graph") and graph._graph is None:
        return "it was reset, or never captured"
    return None
