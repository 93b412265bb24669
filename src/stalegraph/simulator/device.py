"""A GPU simulated on the CPU: its tensors are torch CPU tensors at true addresses, its streams run at once and in order."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from stalegraph.blocks import DEFAULT_POOL, MemoryMap
from stalegraph.errors import CaptureError, DeviceAssertError, IllegalAddressError, StalegraphError, UsageError
from stalegraph.simulator.allocator import CachingAllocator
from stalegraph.simulator.graph import CUDAGraph, StaleRead, span
from stalegraph.simulator.memory import Memory
from stalegraph.simulator.pinned import PinnedAllocator

_FRESH = {"aten::lift_fresh", "aten::lift"}  # data from Python arrives through these as a host tensor
_COPIES = {"aten::copy_", "aten::clone", "aten::_to_copy"}
MAX_SMS = 1024
MIN_MEMORY, MAX_MEMORY = 1 << 22, 1 << 40
_current: Device | None = None


def current_device() -> Device | None:
    """The simulated device that is entered now, or None."""
    return _current


@dataclass(frozen=True)
class AllocationEvent:
    """One thing the allocator did: `action` is alloc, free, segment_alloc or segment_free; address and size in bytes."""

    step: int
    action: str
    address: int
    size: int
    label: str | None
    pool: tuple[int, int]


@dataclass
class Counters:
    """What the host has had the device do; subtract two snapshots for the cost of what lies between."""

    allocations: int = 0
    frees: int = 0
    launches: int = 0
    copies: int = 0
    bytes_copied: int = 0
    replays: int = 0

    def snapshot(self) -> Counters:
        return replace(self)

    def __sub__(self, other: Counters) -> Counters:
        return Counters(**{name: value - getattr(other, name) for name, value in asdict(self).items()})


class _OnDevice(TorchDispatchMode):
    def __init__(self, device):
        super().__init__()
        self.device = device

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # nothing here is compiled; the wrapper that skips Dynamo would cost more than the dispatch

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.device.dispatch(func, args, kwargs or {})


class Device:
    """A simulated GPU of `sm_count` SMs and `memory_bytes` bytes; inside `with Device() as device:` torch runs on it.

    With `strict`, a replay that would read a block freed or reused since capture raises StaleReadError; otherwise it
    reads on as silently as hardware does and notes it in `stale_reads`.
    """

    def __init__(self, sm_count: int = 132, memory_bytes: int = 1 << 30, strict: bool = False):
        for name, value, low, high in (
            ("sm_count", sm_count, 1, MAX_SMS),
            ("memory_bytes", memory_bytes, MIN_MEMORY, MAX_MEMORY),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise UsageError(f"{name} is {value!r}; allowed: an integer from {low} to {high}")
        self.sm_count = sm_count
        self.strict = strict
        self.name = f"simulated GPU with {sm_count} SMs"
        self.torch_device = torch.device("cpu")
        self.memory = Memory(memory_bytes)
        self.pinned = PinnedAllocator()
        self.history: list[AllocationEvent] = []
        self.stale_reads: list[StaleRead] = []
        self.counters = Counters()
        self.allocator = CachingAllocator(self.memory, self._tell)
        self.capturing: CUDAGraph | None = None
        self._graphs = 0
        self._failure: StalegraphError | None = None
        self._closed = False
        self._mode = None

    # life
    def __enter__(self) -> Device:
        global _current
        if _current is not None:
            raise UsageError("a simulated device is entered already; allowed: one at a time")
        if self._closed:
            raise UsageError("this device is closed; allowed: a new Device")
        _current = self
        self._mode = _OnDevice(self)
        self._mode.__enter__()
        return self

    def __exit__(self, *exc) -> None:
        global _current
        self._mode.__exit__(*exc)
        self._mode, _current = None, None
        self.close()

    def close(self) -> None:
        """No graph of this device replays any more; its tensors stay readable as long as they live."""
        self._closed = True

    def check_usable(self) -> None:
        if self._closed:
            raise CaptureError("the device of this graph is closed; allowed: replay inside `with Device()`")
        if self._failure is not None:
            raise type(self._failure)(f"the device failed earlier and stays so until it is closed: {self._failure}")

    def fail(self, error: StalegraphError) -> None:
        """Keep `error`: as on CUDA every later call on this device reports it."""
        self._failure = error

    @property
    def step(self) -> int:
        """The caller's clock: what happens is stamped with it."""
        return self.allocator.step

    @step.setter
    def step(self, value: int) -> None:
        self.allocator.step = value

    def synchronize(self) -> None:
        """Nothing to wait for; reports an earlier failure, and is not permitted while capturing."""
        if self.capturing is not None:
            raise CaptureError("synchronize: operation not permitted when stream is capturing")
        self.check_usable()

    # tensors
    def in_arena(self, address: int) -> bool:
        return self.memory.base <= address < self.memory.end

    def chunk_of(self, tensor: torch.Tensor):
        """The allocator's chunk that `tensor`'s storage owns, or None for a host tensor."""
        return self.allocator.chunks.get(tensor.untyped_storage().data_ptr())

    def raw(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A view on the address of `tensor` that owns nothing; None where the device cannot reach it."""
        address = tensor.data_ptr()
        for memory in (self.memory, self.pinned.memory):
            if memory.base <= address < memory.end:
                return memory.tensor(address, tensor.shape, tensor.stride(), tensor.dtype)
        return None

    def place(self, tensor: torch.Tensor, pool=DEFAULT_POOL, copy: bool = True) -> torch.Tensor:
        """A device tensor of `tensor`'s shape and strides, in a block of its own; with its content if `copy`."""
        if tensor.numel() == 0:
            return tensor
        nbytes = span(tensor)
        chunk = self.allocator.allocate(nbytes, pool)
        self.counters.allocations += 1
        flat = self.memory.owned(chunk.address, nbytes, tensor.dtype, self._died)
        placed = flat.as_strided(tensor.shape, tensor.stride())
        if copy:
            placed.copy_(tensor)
        return placed

    def _died(self, address: int) -> None:
        self.counters.frees += 1
        self.allocator.free(address)

    def dispatch(self, func, args, kwargs):
        """Run one op on the device, or record it while capturing."""
        self._check_alive()
        if self.capturing is not None:
            return self.capturing.record(func, args, kwargs)
        try:
            result = func(*args, **kwargs)
        except (IllegalAddressError, DeviceAssertError) as error:
            self.fail(error)
            raise
        return self._settle(func, args, kwargs, result)

    def _check_alive(self):
        if self._failure is not None:
            self.check_usable()

    def _settle(self, func, args, kwargs, result):
        """Move fresh results of an op to the device; results that alias an input stay where they are."""
        name = func._schema.name
        if isinstance(result, torch.Tensor):
            placed, fresh = self._adopt(result, args, kwargs, name)
        else:
            flat, spec = tree_flatten(result)
            adopted = [self._adopt(one, args, kwargs, name) if isinstance(one, torch.Tensor) else (one, False) for one in flat]
            fresh = any(one[1] for one in adopted)
            placed = tree_unflatten([one[0] for one in adopted], spec)
        if fresh or func._schema.is_mutable:
            self.counters.launches += name != "aten::empty"
            if name in _COPIES:
                self.counters.copies += 1
                first = next(one for one in tree_flatten(result)[0] if isinstance(one, torch.Tensor))
                self.counters.bytes_copied += first.numel() * first.itemsize
        return placed

    def _adopt(self, tensor, args, kwargs, name):
        storage = tensor.untyped_storage().data_ptr()
        if tensor.numel() == 0 or self.in_arena(storage):
            return tensor, False
        if name not in _FRESH:
            for value in tree_flatten((args, kwargs))[0]:
                if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() == storage:
                    return tensor, False
        return self.place(tensor), True

    @contextmanager
    def host(self):
        """Inside, torch runs on the host: nothing is placed on the device, counted or captured."""
        with _disable_current_modes():
            yield

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host copy of a device tensor."""
        self.synchronize()
        with self.host():
            return tensor.detach().clone()

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A pinned host copy of `tensor`, which a captured copy may read: its address is baked in like any other."""
        with self.host():
            return self.pinned.copy(tensor)

    def label(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Name the block of `tensor` in maps, histories and findings; returns `tensor`."""
        chunk = self.chunk_of(tensor)
        if chunk is None:
            raise UsageError(f"tensor at 0x{tensor.data_ptr():x} is not on this device; allowed: a device tensor")
        chunk.label = name
        return tensor

    # graphs
    def graph(self, pool=None) -> CUDAGraph:
        """A graph to capture into; `pool` is another graph's `pool()` to share its memory."""
        return CUDAGraph(self, pool)

    def count_graph(self) -> int:
        self._graphs += 1
        return self._graphs

    def begin_capture(self, graph) -> None:
        if _current is not self:
            raise CaptureError("capture outside of `with Device()`; allowed: capture inside it")
        self.check_usable()
        if self.capturing is not None:
            raise CaptureError("a capture is running already; allowed: one at a time")
        self.capturing = graph

    def end_capture(self) -> None:
        self.capturing = None

    # maps
    def memory_snapshot(self) -> list[dict]:
        """In the form of `torch.cuda.memory_snapshot()`."""
        return self.allocator.snapshot()

    def memory_map(self) -> MemoryMap:
        return MemoryMap.from_snapshot(self.memory_snapshot())

    def empty_cache(self) -> None:
        """Give segments that are wholly free back, as `torch.cuda.empty_cache()` does."""
        if self.capturing is not None:
            raise CaptureError("empty_cache: operation not permitted when stream is capturing")
        self.allocator.empty_cache()

    def _tell(self, action, address, size, label, pool) -> None:
        self.history.append(AllocationEvent(self.allocator.step, action, address, size, label, pool))
