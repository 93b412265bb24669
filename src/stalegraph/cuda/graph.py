"""A CUDA graph that can be asked what it has baked in: captured with keep_graph, replayed, reset."""

from __future__ import annotations

import gc
from contextlib import contextmanager

import torch

from stalegraph.blocks import MemoryMap
from stalegraph.cuda.nodes import read_nodes
from stalegraph.errors import CaptureError
from stalegraph.nodes import Node


class CudaGraph:
    """One `torch.cuda.CUDAGraph(keep_graph=True)` with the verbs of the simulator's graph.

    Captures on the device's one side stream, so that graphs that share a pool share its blocks. Unlike
    `torch.cuda.graph` it does not empty the allocator's cache: a capture gives no segment back.
    """

    def __init__(self, device, pool=None):
        self.device = device
        self._given = pool  # the caller's pool, or None for one of this graph's own at each capture
        self._pool = pool
        self._graph: torch.cuda.CUDAGraph | None = None
        self._memory: MemoryMap | None = None
        self._nodes: tuple[Node, ...] | None = None

    @contextmanager
    def capture(self, pool=None):
        """Records the block's work instead of running it; `pool` defaults to the one the graph was made with."""
        if self._graph is not None:
            raise CaptureError("this graph is captured already; call reset() first, or make another graph")
        self._pool = pool or self.pool()  # made here and not by torch, so that it is known also where the capture fails
        stream = self.device.capture_stream
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        torch.cuda.synchronize(stream.device)
        gc.collect()  # so that garbage does not keep blocks
        with torch.cuda.stream(stream):
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                yield self
            except BaseException:
                _abandon(graph, self.device.index, self._pool)
                self.reset()
                raise
            try:
                graph.capture_end()
            except RuntimeError as error:
                _stop_routing(self.device.index, self._pool)
                self.reset()
                raise CaptureError(f"the capture was invalidated: {str(error).splitlines()[0]}") from error
        graph.instantiate()
        self._graph = graph
        # Taken now: by the time somebody asks for the nodes, what they point to may be unmapped.
        self._memory = MemoryMap.from_snapshot(self.device.memory_snapshot())

    def replay(self) -> None:
        """Launches every node on the current stream; returns before they have run."""
        if self._graph is None:
            raise CaptureError("replay() before capture(); capture the graph first")
        self._graph.replay()
        self.device.replays += 1

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The captured nodes with every pointer in their parameters, read once and kept."""
        if self._nodes is None:
            if self._graph is None:
                raise CaptureError("a graph has no nodes before capture()")
            self._nodes = read_nodes(self._graph.raw_cuda_graph(), self._memory)
        return self._nodes

    def pool(self):
        """The id of the memory pool that the graph's own tensors live in; share it by passing it to another graph."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool

    def reset(self) -> None:
        """Gives up the graph and its hold on its pool; it can be captured again."""
        if self._graph is not None:
            self._graph.reset()
        self._graph = self._memory = self._nodes = None
        self._pool = self._given  # torch refuses a pool that nobody has held since


def _abandon(graph: torch.cuda.CUDAGraph, index: int, pool) -> None:
    """Ends a capture whose body failed, so that the stream is usable; the body's own error is the one to report."""
    try:
        graph.capture_end()
        graph.reset()
    except RuntimeError:
        _stop_routing(index, pool)


def _stop_routing(index: int, pool) -> None:
    """Tells the allocator that no capture fills `pool` any more, which a failed capture_end leaves out."""
    torch._C._cuda_endAllocateToPool(index, pool)
    torch._C._cuda_releasePool(index, pool)
