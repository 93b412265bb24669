"""What an operator would return, found without running it on the device: as CUDA does, a capture executes nothing."""

from __future__ import annotations

from functools import lru_cache

import torch

from stalegraph.errors import CaptureError
from stalegraph.simulator.memory import Addresses, span

_META = torch.device("meta")
_SCRATCH = 64 << 20  # bytes: larger written arguments are left to the meta kernels


def _each(function, value):
    """`function` of every tensor in an argument, which nest at most two deep."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_each(function, one) for one in value)
    return value


def infer(operator, args, kwargs):
    """The results of `operator` as tensors of no use but for their shape, strides and dtype.

    Three ways, the next one where one fails: running it on zeros, which are valid indices and cost no memory; asking
    its meta kernel, first where it is not PyTorch's own; running it on copies of what lies in its arguments now.
    """
    own = operator.name.startswith("aten::")
    reason = None
    for way in (_on_zeros, _on_meta, _on_copies) if own else (_on_meta, _on_zeros, _on_copies):
        try:
            return way(operator, args, kwargs)
        except Exception as error:  # whatever a kernel raises, another way decides
            reason = reason or (None if isinstance(error, NotImplementedError) else error)
            last = error
    if own:
        raise reason or last
    raise CaptureError(
        f"{operator.name}: its results cannot be known while capturing; it has no meta kernel "
        f"(torch.library.register_fake) and runs neither on zeros nor on what lies in its arguments now: {last}"
    ) from last


@lru_cache(1)
def _void() -> Addresses:
    """Addresses that nobody writes: reading them gives zeros and takes no memory."""
    return Addresses(1 << 32)


def _on_zeros(operator, args, kwargs):
    def zeros(tensor):
        if not tensor.dim():
            return torch.zeros((), dtype=tensor.dtype)
        if span(tensor) > _void().size:
            raise NotImplementedError("too large to be run on zeros")
        return _void().tensor(_void().base, tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def scratch(tensor):
        if span(tensor) > _SCRATCH:
            raise NotImplementedError("too large to be run on zeros")
        flat = torch.zeros(max(1, span(tensor) // tensor.itemsize), dtype=tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride())

    given = {}
    for name, value in operator.named(args, kwargs):
        given[name] = _each(scratch if name in operator.access else zeros, value)
    positional = [given.pop(argument.name) for argument, _ in zip(operator.arguments, args)]
    try:
        return _run(operator, positional, given)
    finally:
        _void().clean()  # some operators write arguments of which their schema does not say so


def _on_meta(operator, args, kwargs):
    def meta(tensor):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)

    given = {name: _each(meta, value) for name, value in kwargs.items()}
    if "device" in operator.names and operator.names["device"].kwarg_only:
        given["device"] = _META
        given.pop("pin_memory", None)
    if "generator" in given:
        given["generator"] = None
    return operator.call(*_each(meta, args), **given)


def _on_copies(operator, args, kwargs):
    return _run(operator, _each(torch.clone, args), {name: _each(torch.clone, value) for name, value in kwargs.items()})


def _run(operator, args, kwargs):
    """Runs it and puts the random generators back to where they were."""
    if not operator.random:
        return operator.call(*args, **kwargs)
    generators = [value for _, value in operator.named(args, kwargs) if isinstance(value, torch.Generator)]
    generators.append(torch.default_generator)
    states = [generator.get_state() for generator in generators]
    try:
        return operator.call(*args, **kwargs)
    finally:
        for generator, state in zip(generators, states):
            generator.set_state(state)
