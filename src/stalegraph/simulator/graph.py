"""A simulated CUDA graph: what torch code ran under capture, replayed on raw addresses and nothing else."""

from __future__ import annotations

from contextlib import contextmanager

import torch

from stalegraph.blocks import Block
from stalegraph.errors import CaptureError, IllegalAddressError, StaleReadError
from stalegraph.nodes import Node
from stalegraph.simulator.events import StaleRead
from stalegraph.simulator.recorder import Recorder


class CUDAGraph:
    """Same verbs as `torch.cuda.CUDAGraph`: capture (a context manager here), replay, pool, reset; and `nodes`.

    `state` is "new", "capturing", "captured" or "invalid" (its capture failed).
    """

    def __init__(self, device, pool=None):
        self.device = device
        self.index = device.count_graph()
        self.state = "new"
        self._pool = device.check_pool(pool)
        self._forget()

    def _forget(self) -> None:
        self._recorder: Recorder | None = None
        self._program: list = []
        self._guards: list = []
        self._blocks: tuple[Block, ...] = ()

    def pool(self) -> tuple[int, int]:
        """The id of the pool that the graph's own tensors live in, to be shared with later captures."""
        if self._pool is None:
            self._pool = self.device.allocator.new_pool()
        return self._pool

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Every captured node, in order of launch."""
        if self.state != "captured":
            raise CaptureError(f"a graph has nodes after a capture that ended well; this graph is {self.state}")
        return self._recorder.nodes

    @property
    def generations(self) -> dict[tuple[int, str], tuple[int, int]]:
        """(node, argument) -> (block address, generation at capture) of each read of memory not the graph's own."""
        return {
            (use.node, use.name): (guard.start, guard.allocation.generation)
            for guard in self._guards
            for use in guard.uses
            if use.access != "write" and guard.allocation is not None
        }

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks of the graph's pool that its capture allocated, freed since or not, each as it was then."""
        return self._blocks

    @contextmanager
    def capture(self, pool=None):
        """Records what runs inside: as on CUDA nothing is executed, and results come from the graph's private pool.

        `pool` defaults to the one the graph was made with. Where the body raises, the graph is invalid until reset().
        """
        device = self.device
        if self.state != "new":
            raise CaptureError(f"this graph is {self.state}; allowed: capture into a new graph, or after reset()")
        device.check_capture()
        if pool is not None:
            self._pool = device.check_pool(pool)
        recorder = Recorder(device, self.pool())
        device.allocator.begin_pool(self._pool, self.index)
        device.capturing, self.state = recorder, "capturing"
        try:
            yield self
        except BaseException:
            self.state = "invalid"
            raise
        else:
            self._recorder, self.state = recorder, "captured"
            self._program, self._guards = recorder.program, list(recorder.guards.values())
        finally:
            device.capturing = None
            self._blocks = device.allocator.end_pool()

    def replay(self) -> None:
        """Runs every node on the addresses that were baked in, whatever lives there now."""
        device = self.device
        if self.state != "captured":
            raise CaptureError(f"this graph is {self.state}; allowed: replay a graph whose capture ended well")
        device.check_replay()
        end, error = len(self._program), None
        device.pinned.settle()
        if any(guard.live.get(guard.start) is not guard.allocation for guard in self._guards):
            end, error = self._note_stale(end)
        device.count_replay()
        at = 0
        try:
            with device.host(), torch._C._AutoDispatchBelowADInplaceOrView():
                for at, (call, results) in enumerate(self._program[:end] if error else self._program):
                    got = call()
                    if results is not None:
                        if isinstance(got, torch.Tensor):
                            got = (got,)
                        for result, value in zip(results, got):
                            if result is not None:
                                result.copy_(value)
        except Exception as failure:
            raise device.failed(failure, f"node {at} {self.nodes[at].name}") from failure
        if error is not None:
            raise device.failed(error)

    def _note_stale(self, end: int):
        """Notes the stale reads; where memory is gone, returns how many nodes still run and the error that stops it."""
        device = self.device
        reads, error = [], None
        for guard in self._guards:
            if guard.live.get(guard.start) is guard.allocation:
                continue
            for use in guard.uses:
                state, generation, owner = device.ownership(use.address, use.nbytes)
                if state == "unmapped" and use.node < end:
                    end, error = use.node, IllegalAddressError(
                        f"an illegal memory access was encountered: node {use.node} {self.nodes[use.node].name}, "
                        f"{use.name}, {use.nbytes} bytes at 0x{use.address:x}, which is not mapped any more"
                    )  # fmt: skip
                if use.access != "write":
                    captured = guard.allocation.generation if guard.allocation is not None else 0
                    reads.append(
                        StaleRead(
                            device.step, self.index, use.node, use.name, use.address, captured, generation, owner, state
                        )
                    )
        reads.sort(key=lambda read: read.node)
        device.stale_reads += reads
        if reads and device.strict:
            read = reads[0]
            raise StaleReadError(
                f"node {read.node} {self.nodes[read.node].name} reads {read.argument} at 0x{read.address:x}, captured "
                f"in generation {read.generation_captured}, now generation {read.generation_now}, "
                f"{read.state_now}{f' by {read.owner_now}' if read.owner_now else ''}"
            )
        return end, error

    def reset(self) -> None:
        """Forgets the nodes and lets go of the pool, whose free segments `empty_cache()` may then give back."""
        if self.state == "capturing":
            raise CaptureError("this graph is capturing; allowed: reset() after the capture has ended")
        if self.state in ("captured", "invalid"):
            self.device.allocator.release_pool(self._pool)
        self._pool, self.state = None, "new"
        self._forget()

    def __del__(self):
        # As CUDAGraph's destructor: a graph that nobody holds does not hold its pool either.
        if getattr(self, "state", None) in ("captured", "invalid"):
            self.device.allocator.release_pool(self._pool)
