"""A GPU simulated on the CPU: its tensors are torch CPU tensors at true addresses, its one stream runs at once."""

from __future__ import annotations

import re

import torch

from stalegraph.blocks import MemoryMap
from stalegraph.errors import (
    CaptureError, DeviceAssertError, IllegalAddressError, StalegraphError, UsageError,
)  # fmt: skip
from stalegraph.simulator.allocator import Allocation, CachingAllocator
from stalegraph.simulator.dispatch import Calls, Operators
from stalegraph.simulator.events import AllocationEvent, Counters, StaleRead
from stalegraph.simulator.graph import CUDAGraph
from stalegraph.simulator.memory import Memory, span
from stalegraph.simulator.operator import Operator
from stalegraph.simulator.pinned import PinnedMemory
from stalegraph.simulator.recorder import Recorder

MAX_SMS = 1024
MIN_MEMORY, MAX_MEMORY = 1 << 22, 1 << 40  # bytes
# What PyTorch's CPU kernels say where a GPU's trip an assert: an index in the data, not the call, is out of range.
_ASSERTS = re.compile(r"(?<!Dimension )out of (range|bounds)", re.IGNORECASE)
_current: Device | None = None


def current_device() -> Device | None:
    """The simulated device that is entered now, or None."""
    return _current


class _Host:
    """Inside, torch knows nothing of the device."""

    def __enter__(self):
        self._guards = (torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction())
        for guard in self._guards:
            guard.__enter__()

    def __exit__(self, *exception):
        for guard in reversed(self._guards):
            guard.__exit__(*exception)


class Device:
    """A simulated GPU of `sm_count` SMs and `memory_bytes` bytes; inside `with Device() as device:` torch runs on it.

    With `strict`, a replay that would read a block freed or handed out again since capture raises StaleReadError;
    otherwise it reads on as silently as hardware does and notes it in `stale_reads`. After an illegal access or a
    device assert every further call raises that error, as on CUDA, until the device is closed.
    """

    def __init__(self, sm_count: int = 132, memory_bytes: int = 1 << 30, strict: bool = False):
        for name, value, low, high in (
            ("sm_count", sm_count, 1, MAX_SMS),
            ("memory_bytes", memory_bytes, MIN_MEMORY, MAX_MEMORY),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise UsageError(f"{name} is {value!r}; allowed: an integer from {low} to {high}")
        if not isinstance(strict, bool):
            raise UsageError(f"strict is {strict!r}; allowed: True or False")
        self.sm_count = sm_count
        self.strict = strict
        self.name = f"simulated GPU with {sm_count} SMs"
        self.torch_device = torch.device("cpu")
        self.memory = Memory(memory_bytes)
        self.pinned = PinnedMemory()
        self.allocator = CachingAllocator(self.memory)
        self.stale_reads: list[StaleRead] = []
        self.capturing: Recorder | None = None
        self.failure: StalegraphError | None = None
        self.closed = False
        self.launches = self.copies = self.bytes_copied = self.replays = 0
        self._graphs = 0
        self._modes = None

    # -- life

    def __enter__(self) -> Device:
        global _current
        if self.closed:
            raise UsageError("this device is closed; allowed: a new Device")
        if _current is not None:
            raise UsageError("a simulated device is entered already; allowed: one at a time")
        _current = self
        self._modes = (Operators(self), Calls(self))
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        global _current
        for mode in reversed(self._modes):
            mode.__exit__(*exception)
        self._modes, _current = None, None
        self.close()

    def close(self) -> None:
        """Ends the device: no graph of it replays any more, its tensors stay readable as long as they live."""
        self.closed = True

    def synchronize(self) -> None:
        """There is nothing to wait for; raises what the device has failed with."""
        self._check_idle("synchronize()")

    # -- what is permitted now

    def check_usable(self) -> None:
        """Raises where the device is closed or has failed."""
        if self.closed:
            raise UsageError("this device is closed; allowed: use inside `with Device()`")
        if self.failure is not None:
            raise type(self.failure)(f"the device failed earlier and stays so until it is closed: {self.failure}")

    def _check_idle(self, what: str) -> None:
        self.check_usable()
        if self.capturing is not None:
            self.capturing.refuse(what)

    def check_capture(self) -> None:
        if self.closed:
            raise CaptureError("capture() on a closed device; allowed: inside `with Device()`")
        self.check_usable()
        if _current is not self:
            raise CaptureError("capture() on a device that is not entered; allowed: inside `with Device()`")
        if self.capturing is not None:
            raise CaptureError("capture() while another graph captures; allowed: one at a time")

    def check_replay(self) -> None:
        if self.closed:
            raise CaptureError("replay() after its device was closed; allowed: inside `with Device()`")
        self._check_idle("replay()")

    def check_download(self, what: str) -> None:
        """Raises where the host may not wait for data of the device."""
        self._check_idle(what)

    def check_pool(self, pool):
        """`pool` where it is None or a private pool of this device."""
        if pool is not None and not self.allocator.is_pool(pool):
            raise UsageError(f"pool is {pool!r}; allowed: the pool() of a graph of this device")
        return pool

    def failed(self, error: Exception, where: str = "") -> Exception:
        """What to raise for `error` out of a kernel; illegal accesses and device asserts stay with the device."""
        if isinstance(error, (IllegalAddressError, DeviceAssertError)):
            self.failure = error
        elif isinstance(error, (IndexError, RuntimeError)) and not isinstance(error, StalegraphError):
            if _ASSERTS.search(str(error)):
                self.failure = error = DeviceAssertError(f"device-side assert triggered in {where}: {error}")
        return error

    # -- tensors

    def in_arena(self, address: int) -> bool:
        """Whether `address` is one of device memory, mapped or not."""
        return address in self.memory

    def is_device(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in device memory; one without elements lies nowhere."""
        return tensor.layout is torch.strided and self.memory.base <= tensor.data_ptr() < self.memory.end

    def is_host(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` has elements and they lie in host memory, pinned or not."""
        if not tensor.is_cpu or tensor.layout is not torch.strided or not tensor.numel():
            return False
        return not self.memory.base <= tensor.data_ptr() < self.memory.end

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fresh result, moved to a block of its own; what lies on the device already stays."""
        if not self.is_host(tensor):
            return tensor
        placed = self.allocator.empty(tuple(tensor.shape), tensor.stride(), tensor.dtype)
        placed.copy_(tensor)
        return placed

    def resize(self, tensor: torch.Tensor, shape, memory_format=None) -> torch.Tensor:
        """`tensor` with another shape, as `resize_` gives it: dense, at the same offset of its storage.

        A storage that is too small is replaced by a larger one, to which its bytes are copied. Other views of it stay
        with the old one, which on a GPU would move along.
        """
        if memory_format is None and tuple(tensor.shape) == tuple(shape):
            return tensor
        with self.host():
            wanted = torch.empty(tuple(shape), dtype=tensor.dtype, device="meta")
            if memory_format is not None:
                wanted = wanted.contiguous(memory_format=memory_format)
            offset, storage = tensor.storage_offset(), tensor.untyped_storage()
            needed = span(wanted) + offset * tensor.itemsize if wanted.numel() else 0
            if needed <= storage.nbytes():
                return tensor.as_strided_(wanted.shape, wanted.stride(), offset)
            old = self.bytes_of(storage) if storage.nbytes() else None
            grown = self.allocator.empty((needed,), (1,), torch.uint8)
            if old is not None:
                start = grown[: old.numel()]
                if self.capturing is not None:
                    self.capturing.record(Operator.of(torch.ops.aten.copy_.default), (start, old, True), {})
                else:
                    start.copy_(old)
                    self.count_copy(old.numel())
            return tensor.set_(grown.untyped_storage(), offset, wanted.shape, wanted.stride())

    def bytes_of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The whole of `storage` as a tensor of bytes, made where nobody sees it."""
        with self.host():
            return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """A device copy of pageable host data, for which the host waits."""
        self._check_idle("a copy from pageable host memory")
        self.count_copy(span(tensor))
        with self.host():
            return self.adopt(tensor)

    def raw(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A view of `tensor`'s address that owns nothing; None where the device cannot reach it."""
        address = tensor.data_ptr()
        memory = self.memory if address in self.memory else self.pinned if address in self.pinned else None
        if memory is None:
            return None
        raw = memory.tensor(address, tuple(tensor.shape), tensor.stride(), tensor.dtype)
        raw = raw.conj() if tensor.is_conj() else raw
        return raw._neg_view() if tensor.is_neg() else raw

    def allocation_of(self, tensor: torch.Tensor) -> tuple[dict, int, Allocation | None]:
        """(the allocations of the memory that `tensor` lies in, where its own starts, that allocation or None)."""
        start = tensor.untyped_storage().data_ptr()
        live = self.pinned.live if start in self.pinned else self.allocator.live
        allocation = live.get(start)
        if allocation is None:  # a raw view: its storage is the whole range
            start = tensor.data_ptr()
            block = self.pinned.find(start) if start in self.pinned else self.allocator.find(start)
            allocation = live.get(block["address"]) if block is not None else None
            start = allocation.address if allocation is not None else start
        return live, start, allocation

    def ownership(self, address: int, nbytes: int) -> tuple[str, int, str | None]:
        """("allocated", "freed" or "unmapped", generation, owner or None) of what lies at `address` now."""
        block = self.pinned.find(address) if address in self.pinned else self.allocator.find(address)
        if block is None or (address in self.memory and not self.memory.is_mapped(address, nbytes)):
            return "unmapped", 0, None
        if block["state"] != "active_allocated":
            return "freed", block["generation"], None
        return "allocated", block["generation"], block["label"] or "an unnamed tensor"

    def host(self) -> _Host:
        """A context in which torch runs on the host: nothing is placed on the device, counted or captured."""
        return _Host()

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host copy of `tensor`, for which the host waits."""
        self._check_idle("to_host()")
        if self.is_device(tensor):
            self.count_copy(span(tensor))
        with self.host():
            return tensor.detach().clone()

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A pinned host copy of `tensor` (contiguous), which a captured copy reads again at every replay."""
        if self.is_device(tensor):
            self.check_download("pin() of a device tensor")
        with self.host():
            return self.pinned.empty(tuple(tensor.shape), tensor.dtype).copy_(tensor.detach())

    def label(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Names the block that `tensor` lives in, for tables and plots; returns the tensor. Does not keep it alive."""
        if not tensor.numel():
            return tensor
        live, _, allocation = self.allocation_of(tensor)
        if allocation is None:
            raise UsageError(
                f"tensor at 0x{tensor.data_ptr():x} is in pageable host memory; allowed: a device or pinned tensor"
            )
        (self.pinned if live is self.pinned.live else self.allocator).name(allocation, name)
        return tensor

    # -- graphs

    def graph(self, pool=None) -> CUDAGraph:
        """A graph to capture into; `pool` is another graph's `pool()`, to share its memory."""
        return CUDAGraph(self, pool)

    def count_graph(self) -> int:
        self._graphs += 1
        return self._graphs

    # -- records

    @property
    def step(self) -> int:
        """The decode step that is running: the decode loop sets it, everything that happens is dated by it."""
        return self.allocator.step

    @step.setter
    def step(self, value: int) -> None:
        self.allocator.step = self.pinned.step = value

    @property
    def counters(self) -> Counters:
        """What has been done so far; it does not change any more once taken."""
        allocator = self.allocator
        return Counters(
            allocator.allocations, allocator.frees, self.launches, self.copies, self.bytes_copied, self.replays
        )

    def count_copy(self, nbytes: int) -> None:
        self.copies += 1
        self.bytes_copied += nbytes

    def count_replay(self) -> None:
        self.replays += 1
        self.launches += 1

    @property
    def history(self) -> list[AllocationEvent]:
        """What the allocator did, oldest first."""
        return self.allocator.history

    def memory_snapshot(self) -> list[dict]:
        """Segments and blocks in the form of `torch.cuda.memory_snapshot()`, with generation, label and since."""
        return self.allocator.snapshot()

    def memory_map(self) -> MemoryMap:
        """The blocks now, with generations, labels and the step at which their state began."""
        return MemoryMap.from_snapshot(self.memory_snapshot())

    def pinned_map(self) -> MemoryMap:
        """The blocks of pinned host memory, the same way; their pool is `simulator.pinned.HOST_POOL`."""
        return MemoryMap(self.pinned.blocks())

    def empty_cache(self) -> None:
        """Gives segments that are free as a whole back, as `torch.cuda.empty_cache()` does."""
        self._check_idle("empty_cache()")
        self.allocator.empty_cache()
