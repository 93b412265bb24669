"""`torch.cuda` on a machine without a GPU: a program written for CUDA runs on a simulated device, graphs included.

Tensors in the simulated GPU's memory say that they are CUDA tensors, all others are host tensors. Mapped is what
programs with CUDA graphs use: factories and moves by `device=`, `torch.cuda.graph` and `CUDAGraph`,
`make_graphed_callables`, streams and events (which do nothing: the simulated GPU runs in order), memory statistics.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from stalegraph.simulator import Device

_TO_HOST = frozenset(
    ("item", "tolist", "numpy", "__repr__", "__bool__", "__int__", "__float__", "__index__", "__format__")
)


class Stream:
    """A stream of the simulated GPU, on which everything runs at once and in order."""

    device = torch.device("cuda", 0)
    device_index, device_type = 0, 1

    def __init__(self, *args, **kwargs):
        self.cuda_stream = self.stream_id = id(self)

    def wait_stream(self, other) -> None: ...

    def wait_event(self, event) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self):
        return self

    def __exit__(self, *exception) -> None: ...


class Event:
    """A point in time of the host; a simulated GPU has no other."""

    def __init__(self, *args, **kwargs):
        self._at = None

    def record(self, stream=None) -> None:
        self._at = time.perf_counter()

    def wait(self, stream=None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other) -> float:
        return 1000 * (other._at - self._at)


def _graph_class(device: Device):
    class CUDAGraph:
        """`torch.cuda.CUDAGraph` over a graph of the simulated device, which is `simulated`."""

        def __init__(self, keep_graph: bool = False):
            self.simulated = device.graph()
            self._capture = None

        def capture_begin(self, pool=None, capture_error_mode="global", check_input_liveness=False) -> None:
            self._capture = self.simulated.capture(pool)
            self._capture.__enter__()

        def capture_end(self) -> None:
            self._capture.__exit__(None, None, None)

        def replay(self) -> None:
            self.simulated.replay()

        def instantiate(self) -> None: ...

        def reset(self) -> None:
            self.simulated.reset()

        def pool(self):
            return self.simulated.pool()

        @property
        def nodes(self):
            return self.simulated.nodes

        def enable_debug_mode(self) -> None: ...

        def debug_dump(self, path) -> None: ...

    return CUDAGraph


class _CudaNames(TorchFunctionMode):
    """Rewrites device arguments: "cuda" means the simulated GPU, anything else the host."""

    def __init__(self, device: Device):
        super().__init__()
        self.simulated = device

    def on_gpu(self, value) -> bool:
        return isinstance(value, torch.Tensor) and value.numel() > 0 and self.simulated.in_arena(_address(value))

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "__get__":
            answered, value = self._property(func, args)
            if answered:
                return value
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        onto = kwargs.get("device")
        if name == "cuda" and tensors:
            return self._move(args[0], True, {})
        if name == "cpu" and tensors:
            return self._move(args[0], False, {})
        if name == "to" and tensors:
            return self._to(func, args, kwargs)
        if name == "pin_memory" and tensors:
            return self.simulated.pin(args[0])
        if name == "is_pinned" and tensors:
            return args[0].numel() > 0 and _address(args[0]) in self.simulated.pinned
        if name == "record_stream":
            return None
        if name == "get_device" and tensors:
            return 0 if self.on_gpu(args[0]) else -1
        gpu = any(self.on_gpu(tensor) for tensor in tensors)
        if onto is not None:
            gpu = _is_cuda(onto)
            kwargs["device"] = torch.device("cpu")
        pin = kwargs.pop("pin_memory", False)
        if name in _TO_HOST:
            if self.simulated.capturing is not None and gpu:
                self.simulated.synchronize()  # refuses, as CUDA does while a stream captures
            gpu = False
        if gpu:
            return func(*args, **kwargs)
        with self.simulated.host():
            result = func(*args, **kwargs)
        return self.simulated.pin(result) if pin and isinstance(result, torch.Tensor) else result

    def _property(self, func, args):
        name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name not in ("is_cuda", "is_cpu", "device"):
            return False, None
        gpu = self.on_gpu(args[0])
        if name == "device":
            return True, torch.device("cuda", 0) if gpu else torch.device("cpu")
        return True, gpu == (name == "is_cuda")

    def _to(self, func, args, kwargs):
        tensor, rest = args[0], list(args[1:])
        target = kwargs.pop("device", None)
        kept = []
        for value in rest:
            if isinstance(value, (str, torch.device, int)) and not isinstance(value, bool) and target is None:
                target = value
            elif isinstance(value, torch.Tensor):
                target = torch.device("cuda") if self.on_gpu(value) else torch.device("cpu")
                kept.append(value.dtype)
            else:
                kept.append(value)
        kept = [value for value in kept if not isinstance(value, bool)]
        if target is None:
            gpu = self.on_gpu(tensor)
        else:
            gpu = _is_cuda(target)
        kwargs.pop("non_blocking", None)
        copy = kwargs.pop("copy", False)
        moved = self._move(tensor, gpu, {"copy": copy})
        if not kept and not kwargs:
            return moved
        with nullcontext() if gpu else self.simulated.host():
            return torch.Tensor.to(moved, *kept, **kwargs)

    def _move(self, tensor, gpu: bool, options):
        if self.on_gpu(tensor) == gpu or tensor.numel() == 0:
            return tensor.clone() if options.get("copy") else tensor
        if gpu:
            if self.simulated.capturing is not None:
                return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)  # a captured copy, if it is pinned
            return _Moved.apply(tensor, self.simulated, True)
        self.simulated.synchronize()
        return _Moved.apply(tensor, self.simulated, False)


class _Moved(torch.autograd.Function):
    """A copy to the other side that gradients follow back."""

    @staticmethod
    def forward(ctx, tensor, device, gpu):
        ctx.device, ctx.gpu = device, gpu
        return device.upload(tensor.detach()) if gpu else device.to_host(tensor)

    @staticmethod
    def backward(ctx, gradient):
        moved = ctx.device.to_host(gradient) if ctx.gpu else ctx.device.upload(gradient.detach())
        return moved, None, None


def _address(tensor) -> int:
    with torch._C.DisableTorchFunction():
        return tensor.data_ptr()


def _is_cuda(device) -> bool:
    if isinstance(device, int):
        return True
    return torch.device(device).type == "cuda"


@contextmanager
def simulated_cuda(sm_count: int = 132, memory_bytes: int = 1 << 30):
    """Inside, `torch.cuda` is a simulated GPU; gives its `Device`. Random numbers come from the host's generator."""
    device = Device(sm_count=sm_count, memory_bytes=memory_bytes)
    stream = Stream()
    properties = SimpleNamespace(
        name=device.name, multi_processor_count=sm_count, total_memory=memory_bytes, major=9, minor=0, warp_size=32
    )  # fmt: skip
    names = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda index: None,
        "device": lambda index: nullcontext(),
        "get_device_name": lambda index=None: device.name,
        "get_device_capability": lambda index=None: (9, 0),
        "get_device_properties": lambda index=None: properties,
        "synchronize": lambda index=None: device.synchronize(),
        "current_stream": lambda index=None: stream,
        "default_stream": lambda index=None: stream,
        "Stream": Stream,
        "Event": Event,
        "stream": lambda one: nullcontext(one),
        "set_stream": lambda one: None,
        "empty_cache": lambda: None if device.capturing is not None else device.empty_cache(),
        "memory_allocated": lambda index=None: device.allocator.allocated_bytes,
        "max_memory_allocated": lambda index=None: device.allocator.peak_bytes,
        "memory_reserved": lambda index=None: sum(one["total_size"] for one in device.memory_snapshot()),
        "reset_peak_memory_stats": lambda index=None: device.allocator.reset_peak(),
        "memory_snapshot": lambda *args, **kwargs: device.memory_snapshot(),
        "manual_seed": torch.default_generator.manual_seed,
        "manual_seed_all": torch.default_generator.manual_seed,
        "graph_pool_handle": device.allocator.new_pool,
        "is_current_stream_capturing": lambda: device.capturing is not None,
        "CUDAGraph": _graph_class(device),
    }
    with ExitStack() as stack:
        stack.enter_context(device)
        for name, value in names.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
            if hasattr(torch.cuda.graphs, name):
                stack.enter_context(patch.object(torch.cuda.graphs, name, value))
        stack.enter_context(patch.object(torch._C, "_host_emptyCache", lambda: None, create=True))
        stack.enter_context(patch.object(torch.cuda.graph, "default_capture_stream", stream))
        stack.enter_context(_CudaNames(device))
        yield device
