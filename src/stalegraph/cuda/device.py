"""A GPU with the simulator's verbs: graphs that show their nodes, a memory map with labels, an allocation history."""

from __future__ import annotations

import time
import warnings
from bisect import bisect_right
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from stalegraph.blocks import DEFAULT_POOL, AllocationEvent, MemoryMap
from stalegraph.cuda.graph import CudaGraph
from stalegraph.cuda.library import LibraryInfo, missing_device
from stalegraph.cuda.memory import Memory
from stalegraph.errors import RungUnavailable, UsageError

HISTORY_LENGTH = 1_000_000  # allocator events kept; the oldest go first
ACTIONS = {"alloc": "alloc", "free_completed": "free", "segment_alloc": "segment_alloc", "segment_free": "segment_free"}


@dataclass(frozen=True)
class Counters:
    """What was done so far; subtract two to get what was done between. None: the hardware does not count it."""

    allocations: int = 0
    frees: int = 0
    launches: int | None = None
    copies: int | None = None
    bytes_copied: int | None = None
    replays: int = 0

    def snapshot(self) -> Counters:
        return self

    def __sub__(self, earlier: Counters) -> Counters:
        pairs = ((getattr(self, field.name), getattr(earlier, field.name)) for field in fields(self))
        return Counters(*(None if now is None or then is None else now - then for now, then in pairs))


@dataclass(frozen=True)
class _Label:
    name: str
    address: int
    nbytes: int
    since: int  # microseconds of the clock that the allocator's history uses
    storage: StorageWeakRef


class CudaDevice:
    """The GPU `index` through torch. `history=False` spares the allocator its event log: no generations, no steps.

    `stacks=True` keeps the Python frames of each allocation. Hardware keeps no record of stale reads: `stale_reads` is
    always empty. `library` is what `load_flashmla` returned where a rung opened the device.
    """

    stale_reads: tuple = ()
    _open: CudaDevice | None = None

    def __init__(self, index: int = 0, *, history: bool = True, stacks: bool = False):
        if torch.version.cuda is None or not torch.cuda.is_available():
            raise RungUnavailable(missing_device() or "no CUDA device")
        if not 0 <= index < torch.cuda.device_count():
            raise UsageError(f"index is {index}; allowed: 0 to {torch.cuda.device_count() - 1}")
        self.index = index
        self.torch_device = torch.device("cuda", index)
        self.library: LibraryInfo | None = None
        self.memory = Memory(self)
        self.replays = 0
        self._history = history
        self._stacks = stacks
        self._labels: list[_Label] = []
        self._steps: list[tuple[int, int]] = [(0, 0)]  # (microseconds, step), in order
        self._capture_stream: torch.cuda.Stream | None = None
        self._context = None

    def __enter__(self) -> CudaDevice:
        if CudaDevice._open is not None:
            raise UsageError("a CudaDevice is open already; allowed: one at a time")
        CudaDevice._open = self
        self._context = torch.cuda.device(self.index)
        self._context.__enter__()
        if self._history:
            context = "alloc" if self._stacks else None
            torch.cuda.memory._record_memory_history(
                "all", context=context, stacks="python", max_entries=HISTORY_LENGTH
            )
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def close(self) -> None:
        """Stops the history; a device whose context is dead (a sticky CUDA error) closes quietly too."""
        if CudaDevice._open is not self:
            return
        CudaDevice._open = None
        try:
            if self._history:
                torch.cuda.memory._record_memory_history(None)
            self._context.__exit__(None, None, None)
        except RuntimeError:
            pass

    @property
    def sm_count(self) -> int:
        return torch.cuda.get_device_properties(self.index).multi_processor_count

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.index)

    @property
    def capture_stream(self) -> torch.cuda.Stream:
        if self._capture_stream is None:
            self._capture_stream = torch.cuda.Stream(self.index)
        return self._capture_stream

    def graph(self, pool=None) -> CudaGraph:
        """A graph to capture; `pool` is another graph's `pool()`, to share its memory."""
        return CudaGraph(self, pool)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.index)

    def empty_cache(self) -> None:
        """Gives free segments back to the driver."""
        torch.cuda.empty_cache()

    def memory_snapshot(self) -> list[dict]:
        """The allocator's segments and blocks on this device, in the form of `torch.cuda.memory_snapshot()`."""
        try:
            segments = torch.cuda.memory_snapshot(include_traces=False)  # else the whole event log is copied each time
        except TypeError:  # torch before 2.12
            segments = torch.cuda.memory_snapshot()
        return [segment for segment in segments if segment["device"] == self.index]

    def memory_map(self) -> MemoryMap:
        """The blocks now, with labels; with history, also generations and the step at which their state began."""
        blocks = MemoryMap.from_snapshot(self.memory_snapshot()).blocks
        born: dict[int, list[int]] = {}  # address -> times at which an allocation started there
        changed: dict[int, int] = {}
        for entry in self._trace():
            if entry["action"] == "alloc":
                born.setdefault(entry["addr"], []).append(entry["time_us"])
            if entry["action"] in ("alloc", "free_completed"):
                changed[entry["addr"]] = entry["time_us"]
        labels = {label.address: label for label in self._labels}  # the last one given wins
        result = []
        for block in blocks:
            starts = born.get(block.address, ())
            label = self._label_of(block, labels, starts)
            since = self._step_at(changed[block.address]) if block.address in changed else None
            result.append(replace(block, generation=len(starts), label=label, since=since))
        return MemoryMap(result)

    def _label_of(self, block, labels: dict[int, _Label], starts) -> str | None:
        label = labels.get(block.address)
        if label is None:
            return None
        if not label.storage.expired():
            return label.name
        # The tensor is gone. Its name stays with the block until it is handed out again, which only history shows.
        handed_out = any(start > label.since for start in starts)
        return label.name if self._history and not handed_out and block.state == "freed" else None

    def label(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Names the block that `tensor` lives in, for tables and plots; returns the tensor. Does not keep it alive."""
        storage = tensor.untyped_storage()
        self._labels.append(_Label(name, storage.data_ptr(), storage.nbytes(), _now(), StorageWeakRef(storage)))
        return tensor

    def _trace(self) -> list[dict]:
        """The allocator's event log since the device was opened, oldest first; empty without history."""
        if not self._history:
            return []
        traces = torch.cuda.memory._snapshot(self.index)["device_traces"]
        return traces[self.index] if self.index < len(traces) else []

    @property
    def step(self) -> int:
        """The decode step that is running: the decode loop sets it, the history is told apart by it."""
        return self._steps[-1][1]

    @step.setter
    def step(self, value: int) -> None:
        self._steps.append((_now(), value))

    def _step_at(self, microseconds: int) -> int:
        at = bisect_right(self._steps, microseconds, key=lambda begun: begun[0]) - 1
        return self._steps[max(at, 0)][1]

    @property
    def history(self) -> list[AllocationEvent]:
        """What the allocator did, oldest first; empty without history. Steps are told apart by the host's clock."""
        segments = sorted(
            (segment["address"], segment["total_size"], tuple(segment["segment_pool_id"]))
            for segment in self.memory_snapshot()
        )
        bases = [address for address, _, _ in segments]
        trace = self._trace()
        named = self._names(trace)
        current: dict[int, str | None] = {}
        events = []
        for place, entry in enumerate(trace):
            action, address = ACTIONS.get(entry["action"]), entry["addr"]
            if action is None:
                continue
            if action == "alloc":
                current[address] = named.get(place)
            at = bisect_right(bases, address) - 1
            mapped = at >= 0 and address < segments[at][0] + segments[at][1]
            events.append(
                AllocationEvent(
                    step=self._step_at(entry["time_us"]),
                    action=action,
                    address=address,
                    size=entry["size"],
                    label=current.get(address) if action in ("alloc", "free") else None,
                    pool=segments[at][2] if mapped else DEFAULT_POOL,
                )
            )
        return events

    def _names(self, trace: list[dict]) -> dict[int, str]:
        """Which allocation of the trace (by place) each label named: the last at its address before it was given."""
        starts: dict[int, list[tuple[int, int]]] = {}
        for place, entry in enumerate(trace):
            if entry["action"] == "alloc":
                starts.setdefault(entry["addr"], []).append((entry["time_us"], place))
        named = {}
        for label in self._labels:
            earlier = [place for time_us, place in starts.get(label.address, ()) if time_us <= label.since]
            if earlier:
                named[earlier[-1]] = label.name
        return named

    @property
    def counters(self) -> Counters:
        """Allocations and frees from the allocator's statistics, replays from this device's graphs."""
        allocation = torch.cuda.memory_stats_as_nested_dict(self.index)["allocation"]["all"]
        return Counters(allocation["allocated"], allocation["freed"], replays=self.replays)

    def counted(self, work: Callable[[], object]) -> dict[str, int]:
        """What `work()` would have the device do: "launches", "copies" and "bytes_copied".

        Counted from the nodes of a graph that it is captured into and that is thrown away, so nothing of it runs.
        `work` must be capturable: run it once before, and let it not wait for the device.
        """
        graph = self.graph()
        with warnings.catch_warnings(), graph.capture():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            work()
        kinds = [(node.kind, dict(node.scalars).get("bytes", 0)) for node in graph.nodes]
        graph.reset()
        copied = [nbytes for kind, nbytes in kinds if kind == "memcpy"]
        launches = sum(kind in ("kernel", "memset") for kind, _ in kinds)
        return {"launches": launches, "copies": len(copied), "bytes_copied": sum(copied)}

    def host(self):
        """Code in this context runs on the host: nothing to switch off on hardware."""
        return nullcontext()

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in host memory; waits for the device."""
        return tensor.detach().cpu()

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A pinned host copy of `tensor`, which captured copies re-read at every replay."""
        return tensor.detach().cpu().pin_memory()


def _now() -> int:
    return time.time_ns() // 1000
