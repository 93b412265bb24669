"""Finds the tensors in whatever a caller keeps metadata in: dataclasses, dicts, sequences, objects, nested."""

from __future__ import annotations

import dataclasses
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

import torch

MAX_DEPTH = 12
MAX_TENSORS = 100_000
# Objects of these packages are tensors, plain values or wrappers with buffers of their own, not metadata.
OPAQUE = ("numpy", "builtins", "functools", "logging", "weakref", "threading", "enum", "_thread")
CODE = (type, FunctionType, MethodType, BuiltinFunctionType, ModuleType)


def walk(value, path: str = "", most_depth: int = MAX_DEPTH, budget: int = 1_000_000) -> list[tuple[str, torch.Tensor]]:
    """(name, tensor) of each tensor below `value`, e.g. "decode.num_splits" or "by_size[4].indices"; each object once.

    A tensor itself has the name `path`. Modules give their parameters and buffers. At most `budget` objects are opened,
    none deeper than `most_depth`.
    """
    found: list[tuple[str, torch.Tensor]] = []
    seen: set[int] = set()
    waiting = [(path, value, 0)]
    while waiting and len(found) < MAX_TENSORS:
        name, value, depth = waiting.pop()
        if isinstance(value, torch.Tensor):
            found.append((name, value))
            continue
        if depth >= most_depth or id(value) in seen or budget <= 0:
            continue
        budget -= 1
        below = _below(value)
        if below:
            seen.add(id(value))
            # Reversed: the stack gives the first back first.
            waiting.extend((_join(name, step), one, depth + 1) for step, one in reversed(below))
    return found


def _below(value) -> list[tuple[str, object]]:
    if isinstance(value, dict):
        return [(f"[{key}]" if not isinstance(key, str) else key, one) for key, one in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value))
    if isinstance(value, (list, tuple)):
        return [(f"[{at}]", one) for at, one in enumerate(value)]
    if isinstance(value, torch.nn.Module):
        return [*value.named_parameters(), *value.named_buffers()]
    module = type(value).__module__.split(".")[0]
    if module in OPAQUE or module == "torch" or isinstance(value, CODE):
        return []
    if dataclasses.is_dataclass(value) and not hasattr(value, "__dict__"):
        return [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    below = list(getattr(value, "__dict__", {}).items())
    for slot in _slots(type(value)):
        one = getattr(value, slot, None)
        if one is not None:
            below.append((slot, one))
    return below


def _slots(kind) -> list[str]:
    names = []
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if not name.startswith("__")]


def _join(path: str, step: str) -> str:
    return f"{path}{step}" if step.startswith("[") or not path else f"{path}.{step}"
