"""What a captured graph consists of, the same words for a simulated graph and a CUDA graph."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Argument:
    """One pointer baked into a graph node.

    `address` is the raw device address; `offset` is the byte in the kernel's parameter buffer where it sits (CUDA only);
    `access` is "read", "write", "read-write", or "unknown" when a kernel's parameters do not say.
    """

    name: str
    address: int
    nbytes: int | None = None
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None
    dtype: str | None = None
    access: str = "unknown"
    offset: int | None = None


@dataclass(frozen=True)
class Node:
    """One node of a captured graph: `kind` is "kernel", "memcpy", "memset", "host" or "other".

    `opaque` says why the parameters could not be read, where they could not. `scalars` holds what was passed by value.
    """

    index: int
    kind: str
    name: str
    arguments: tuple[Argument, ...] = ()
    opaque: str | None = None
    scalars: tuple[tuple[str, object], ...] = ()
