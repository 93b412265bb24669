"""Where torch's calls reach the simulated device: operators below autograd, and the few calls that move tensors."""

from __future__ import annotations

import torch
from torch._prims_common import suggest_memory_format
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from stalegraph.simulator.inference import infer
from stalegraph.simulator.memory import span
from stalegraph.simulator.operator import Operator
from stalegraph.simulator.recorder import is_memcpy

_CPU = torch.device("cpu")
_DEVICE, _HOST, _NUMBER = 1, 2, 4  # where the tensors of a call live: on the device, on the host, on the host and 0-dim


class Operators(TorchDispatchMode):
    """Runs every operator on the device, or has it recorded while a graph captures."""

    def __init__(self, device):
        super().__init__()
        self.device = device
        self._kinds = {
            "view": self._view,
            "empty": self._empty,
            "metadata": self._metadata,
            "composite": self._composite,
            "host": self._host,
        }

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # nothing here is compiled; the wrapper that skips Dynamo would cost more than the dispatch

    def __torch_dispatch__(self, overload, types, args=(), kwargs=None):
        operator = Operator._known.get(overload) or Operator.of(overload)
        kwargs = kwargs or {}
        if self.device.closed:
            return operator.call(*args, **kwargs)
        if operator.kind == "compute":
            return self._compute(operator, args, kwargs)
        return self._kinds[operator.kind](operator, args, kwargs)

    def _where(self, args, kwargs) -> int:
        found = 0
        memory = self.device.memory
        low, high = memory.base, memory.end
        for value in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(value, torch.Tensor):
                address = value.data_ptr() if value.layout is torch.strided else 1
                if low <= address < high:
                    found |= _DEVICE
                elif address:
                    found |= _HOST if value.dim() else _NUMBER
            elif isinstance(value, (list, tuple)):
                found |= self._where(value, None)
        return found

    def _compute(self, operator, args, kwargs):
        device = self.device
        where = self._where(args, kwargs)
        if not where & _DEVICE:
            if where and not (operator.name == "aten::_to_copy" and kwargs.get("device") is not None):
                return operator.call(*args, **kwargs)  # all on the host, so the result is too
            target = kwargs.get("device")
            if target is not None and target.type != "cpu" or operator.name == "aten::scalar_tensor":
                return operator.call(*args, **kwargs)  # another device, or a number that goes by value
            if kwargs.get("pin_memory"):
                return device.pin(operator.call(*args, **{**kwargs, "pin_memory": False}))
        if device.failure is not None:
            device.check_usable()
        if operator.outs:
            self._fit(operator, args, kwargs)
        if device.capturing is not None:
            return device.capturing.record(operator, args, kwargs)
        try:
            result = operator.call(*args, **kwargs)
        except Exception as error:
            if operator.outs and "resizable" in str(error):
                self._fit(operator, args, kwargs, always=True)
                return self._compute(operator, args, kwargs)
            failure = device.failed(error, operator.name)
            if failure is error:
                raise
            raise failure from error
        if operator.is_copy and is_memcpy(args[1] if operator.name == "aten::copy_" else args[0], result):
            device.count_copy(span(result))
        else:
            device.launches += 1
        if not operator.fresh:
            return result
        if isinstance(result, torch.Tensor):
            return device.adopt(result)
        return type(result)(
            [device.adopt(one) for one in value]
            if isinstance(value, list)
            else device.adopt(value)
            if isinstance(value, torch.Tensor)
            else value
            for value in result
        )

    def _fit(self, operator, args, kwargs, always: bool = False) -> None:
        """Gives `out` tensors the shape and memory that the operator will want of them, as `resize_` would on a GPU."""
        outs = [kwargs[name] for name in operator.outs if isinstance(kwargs.get(name), torch.Tensor)]
        if not always and all(out.numel() for out in outs):
            return
        wanted = infer(operator, args, kwargs)
        for out, like in zip(outs, wanted if isinstance(wanted, tuple) else (wanted,)):
            if out.shape != like.shape:
                self.device.resize(out, like.shape)

    def _view(self, operator, args, kwargs):
        result = operator.call(*args, **kwargs)
        if operator.name != "aten::lift_fresh" or result.numel() == 0 or not self.device.is_host(result):
            return result
        # Data from Python. A number stays on the host and goes by value; memory that NumPy owns stays where it is.
        if result.dim() == 0 or not result.untyped_storage().resizable():
            return result
        return self.device.upload(result)

    def _empty(self, operator, args, kwargs):
        where = self._where(args, kwargs)
        target = kwargs.get("device")
        if (where and not where & _DEVICE) or (target is not None and target.type != "cpu"):
            return operator.call(*args, **kwargs)
        if kwargs.get("pin_memory"):
            like = operator.call(*args, **{**kwargs, "pin_memory": False})
            return self.device.pinned.empty(tuple(like.shape), like.dtype)
        if self.device.failure is not None:
            self.device.check_usable()
        like = operator.call(*args, **kwargs)
        return self.device.allocator.empty(tuple(like.shape), like.stride(), like.dtype)

    def _metadata(self, operator, args, kwargs):
        if operator.name not in ("aten::resize_", "aten::resize_as_") or not self._resizable(args[0]):
            return operator.call(*args, **kwargs)
        shape, form = args[1], kwargs.get("memory_format")
        if operator.name == "aten::resize_as_":
            shape = args[1].shape
            form = suggest_memory_format(args[1]) if form is torch.preserve_format else form
        return self.device.resize(args[0], shape, form)

    def _resizable(self, tensor) -> bool:
        """Whether `tensor` is of device memory, or empty and of none: then it becomes the device's as it grows."""
        if not tensor.is_cpu or tensor.layout is not torch.strided:
            return False
        storage = tensor.untyped_storage()
        return self.device.in_arena(storage.data_ptr()) or storage.nbytes() == 0

    def _composite(self, operator, args, kwargs):
        # Inference mode hands composites over whole; their parts are what a GPU would launch.
        with self:
            return operator.overload.decompose(*args, **kwargs)

    def _host(self, operator, args, kwargs):
        """A number comes back to the host: a copy of a few bytes that it waits for, or a question of shape and type."""
        device = self.device
        if operator.synchronises and self._where(args, kwargs) & _DEVICE:
            if device.failure is not None:
                device.check_usable()
            if device.capturing is not None:
                device.capturing.refuse(f"{operator.name} makes the host wait for a value")
            device.count_copy(args[0].itemsize)
        return operator.call(*args, **kwargs)


class Calls(TorchFunctionMode):
    """The calls that move tensors between host and device, which on one torch device would otherwise do nothing."""

    def __init__(self, device):
        super().__init__()
        self.device = device
        self._calls = {
            torch.Tensor.to: self._to,
            torch.Tensor.cpu: self._cpu,
            torch.Tensor.pin_memory: self._pin,
            torch.Tensor.is_pinned: self._is_pinned,
            torch.Tensor.tolist: self._read,
            torch.Tensor.numpy: self._read,
            torch.Tensor.__array__: self._read,
            torch.Tensor.__repr__: self._print,
            torch.Tensor.__deepcopy__: self._deepcopy,
            torch.tensor: self._data,
            torch.as_tensor: self._data,
            torch.asarray: self._data,
        }

    def __torch_function__(self, call, types, args=(), kwargs=None):
        own = self._calls.get(call)
        if own is not None and not self.device.closed:
            return own(call, args, kwargs or {})
        return call(*args, **kwargs) if kwargs else call(*args)

    def _to(self, call, args, kwargs):
        tensor = args[0]
        if not self.device.is_host(tensor):
            return call(*args, **kwargs)
        other = args[1] if len(args) > 1 else kwargs.get("other")
        if isinstance(other, torch.Tensor):
            if self.device.is_host(other):
                return call(*args, **kwargs)
            target, dtype, non_blocking, layout = other.device, other.dtype, bool(kwargs.get("non_blocking")), None
        else:
            named = {name: value for name, value in kwargs.items() if name != "copy"}
            target, dtype, non_blocking, layout = torch._C._nn._parse_to(*args[1:], **named)
        if target is None or target.type != "cpu":
            return call(*args, **kwargs)
        return torch.ops.aten._to_copy.default(
            tensor, dtype=dtype or tensor.dtype, device=_CPU, non_blocking=non_blocking, memory_format=layout
        )  # fmt: skip

    def _cpu(self, call, args, kwargs):
        tensor = args[0]
        if not self.device.is_device(tensor):
            return call(*args, **kwargs)
        self.device.check_download("Tensor.cpu()")
        self.device.count_copy(span(tensor))
        with self.device.host():
            return tensor.clone()

    def _pin(self, call, args, kwargs):
        return self.device.pin(args[0])

    def _is_pinned(self, call, args, kwargs):
        return args[0].numel() > 0 and args[0].data_ptr() in self.device.pinned

    def _read(self, call, args, kwargs):
        if self.device.is_device(args[0]):
            self.device.check_download(f"Tensor.{call.__name__}()")
        return call(*args, **kwargs)

    def _print(self, call, args, kwargs):
        """On the host, so that looking at a tensor allocates nothing and launches nothing."""
        if self.device.is_device(args[0]):
            self.device.check_download("printing a tensor")
        with self.device.host():
            return call(*args, **kwargs)

    def _deepcopy(self, call, args, kwargs):
        """torch copies whole storages, which views share; on the way there it finds those that are on the device."""
        tensor, memo = args
        if tensor.is_leaf and id(tensor) not in memo:
            for one in (tensor, tensor.grad):
                if one is not None:
                    self._copy_storage(one, memo.setdefault("torch", {}))
        return call(*args, **kwargs)

    def _copy_storage(self, tensor, copied) -> None:
        if not self.device.is_device(tensor):
            return
        storage = tensor.untyped_storage()
        if storage._cdata in copied or storage.data_ptr() not in self.device.allocator.live:
            return
        source = self.device.bytes_of(storage)
        # By ops that everyone who looks at the dispatcher sees.
        copied[storage._cdata] = torch.empty_like(source).copy_(source).untyped_storage()

    def _data(self, call, args, kwargs):
        result = call(*args, **kwargs)
        if result.dim() or not self.device.is_host(result) or result.dtype is None:
            return result
        if self.device.capturing is not None and kwargs.get("device") is None:
            return result  # a number without a device stays on the host in CUDA code too
        if isinstance(args[0] if args else kwargs.get("data"), torch.Tensor):
            return result
        requires_grad = result.requires_grad
        return self.device.upload(result.detach()).requires_grad_(requires_grad)
