"""What an operator would return, found without running it on the device: as CUDA does, a capture executes nothing."""

from __future__ import annotations

import torch

from stalegraph.errors import CaptureError

_META = torch.device("meta")


def _each(function, value):
    """`function` of every tensor in an argument or result, which nest at most two deep."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_each(function, one) for one in value)
    return value


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)


def infer(operator, args, kwargs):
    """The results of `operator` as tensors without use but for shape, strides and dtype.

    PyTorch's meta kernels say so for nearly every operator. One that has none, as a custom op without a fake, is run on
    copies of what lies in its arguments now, with the states of the random generators put back.
    """
    given = {name: _each(_meta, value) for name, value in kwargs.items()}
    if "device" in operator.names and operator.names["device"].kwarg_only:
        given["device"] = _META
        given.pop("pin_memory", None)
    if "generator" in given:
        given["generator"] = None
    try:
        return operator.call(*_each(_meta, args), **given)
    except Exception as error:  # whatever a meta kernel raises, running it decides
        reason = error
    try:
        return _rehearse(operator, args, kwargs)
    except Exception as error:
        if not isinstance(reason, NotImplementedError):
            raise reason from None
        raise CaptureError(
            f"{operator.name}: its results cannot be known while capturing, as it has no meta kernel (torch.library."
            f"register_fake) and does not run on what lies in its arguments now: {error}"
        ) from error


def _rehearse(operator, args, kwargs):
    generators = [value for _, value in operator.named(args, kwargs) if isinstance(value, torch.Generator)]
    generators.append(torch.default_generator)
    states = [generator.get_state() for generator in generators]
    try:
        return operator.call(*_each(torch.clone, args), **{name: _each(torch.clone, value) for name, value in kwargs.items()})
    finally:
        for generator, state in zip(generators, states):
            generator.set_state(state)
