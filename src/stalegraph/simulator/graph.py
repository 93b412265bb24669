"""A simulated CUDA graph: what torch code ran under capture, replayed on raw addresses and nothing else."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from stalegraph.errors import CaptureError, DeviceAssertError, IllegalAddressError, StaleReadError
from stalegraph.nodes import Argument, Node

_COPIES = {"aten::copy_", "aten::clone", "aten::_to_copy"}
_FILLS = {"aten::zero_", "aten::fill_"}
_OVERWRITES = _FILLS | {"aten::copy_"}  # what they write does not depend on what was there


def span(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last element of `tensor`, strides included."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return (last + 1) * tensor.itemsize


@dataclass(frozen=True)
class StaleRead:
    """A replayed node read a block that is no longer what it was at capture; addresses in bytes."""

    step: int
    graph: int
    node: int
    argument: str
    address: int
    generation_captured: int
    generation_now: int
    owner_now: str | None


@dataclass
class _Recorded:
    call: object
    args: list
    kwargs: dict
    outputs: list  # (position in the flat result, raw tensor)
    node: Node
    reads: list = field(default_factory=list)  # (argument, address, block address, generation at capture)


class CUDAGraph:
    """Same verbs as `torch.cuda.CUDAGraph`: capture (a context manager here), replay, pool, reset; and `nodes`."""

    def __init__(self, device, pool=None):
        self.device = device
        self.state = "new"  # new, capturing, captured, invalid, reset
        self._pool = pool
        self._recorded: list[_Recorded] = []
        self._mapped_version = -1
        self.index = device.count_graph()

    def pool(self) -> tuple[int, int]:
        """The memory pool that the graph's own results live in; share it by passing it to another graph."""
        if self._pool is None:
            self._pool = self.device.allocator.new_pool()
        return self._pool

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Every recorded node, in order of launch."""
        return tuple(recorded.node for recorded in self._recorded)

    @contextmanager
    def capture(self, pool=None):
        """Record what runs inside; as on CUDA nothing is executed, and results are allocated from the graph's pool."""
        if self.state != "new":
            raise CaptureError(f"this graph is {self.state}; allowed: capture into a new graph, or after reset()")
        if pool is not None:
            self._pool = pool
        gc.collect()  # as torch.cuda.graph does, so that garbage does not keep blocks
        self.device.begin_capture(self)
        self.device.allocator.retain_pool(self.pool())
        self.state = "capturing"
        try:
            yield self
        except BaseException:
            self.state = "invalid"
            raise
        else:
            self.state = "captured"
        finally:
            self.device.end_capture()

    def reset(self) -> None:
        """Forget the nodes and let go of the pool, whose free segments `empty_cache()` may then give back."""
        if self.state == "capturing":
            raise CaptureError("this graph is capturing; allowed: reset() after the capture has ended")
        if self.state in ("captured", "invalid"):
            self.device.allocator.release_pool(self._pool)
        self._recorded, self._pool, self.state = [], None, "new"

    # capture
    def record(self, func, args, kwargs):
        """Note one op; returns what the op would, with results placed in the graph's pool and their content as it lies."""
        device = self.device
        if _needs_a_value(func, args):
            raise CaptureError(f"{func} needs the host to wait for a value: operation not permitted when stream is capturing")
        flat, spec = tree_flatten((list(args), kwargs))
        slots = _slots(func, args, kwargs)
        shadows, originals = list(flat), {}
        for at, value in enumerate(flat):
            if isinstance(value, torch.Tensor) and slots[at][1]:
                shadows[at] = value.clone()
                originals[shadows[at].untyped_storage().data_ptr()] = value
        shadow_args, shadow_kwargs = tree_unflatten(shadows, spec)
        result = func(*shadow_args, **shadow_kwargs)

        results, result_spec = tree_flatten(result)
        inputs = {value.untyped_storage().data_ptr() for value in flat if isinstance(value, torch.Tensor)}
        outputs, placed = [], list(results)
        for at, value in enumerate(results):
            if not isinstance(value, torch.Tensor):
                continue
            storage = value.untyped_storage().data_ptr()
            if storage in originals:
                placed[at] = originals[storage]
            elif storage not in inputs or value.numel() == 0:
                placed[at] = device.place(value, self._pool, copy=False)
                if value.numel():
                    outputs.append((at, placed[at]))
        if outputs or originals:
            self._append(func, flat, spec, slots, outputs)
        return tree_unflatten(placed, result_spec)

    def _append(self, func, flat, spec, slots, outputs):
        device = self.device
        arguments, scalars, reads, raw = [], [], [], list(flat)
        for at, value in enumerate(flat):
            name, write = slots[at]
            if not isinstance(value, torch.Tensor):
                if isinstance(value, (int, float, bool)):
                    scalars.append((name, value))
                continue
            raw[at] = self._bake(func, name, value)
            if raw[at] is None:
                raw[at] = value.clone()
                scalars.append((name, value.item()))
                continue
            access = "read" if not write else "write" if func._schema.name in _OVERWRITES else "read-write"
            arguments.append(_argument(name, value, access))
            chunk = device.chunk_of(value)
            if access != "write" and chunk is not None and chunk.pool != self._pool:
                generation = device.allocator.generations[chunk.address]
                reads.append((name, value.data_ptr(), chunk.address, generation))
        for at, value in outputs:
            arguments.append(_argument(f"result {at}" if len(outputs) > 1 else "result", value, "write"))
        name = func._schema.name
        kind = "memcpy" if name in _COPIES else "memset" if name in _FILLS else "kernel"
        node = Node(len(self._recorded), kind, name, tuple(arguments), None, tuple(scalars))
        raw_args, raw_kwargs = tree_unflatten(raw, spec)
        raw_outputs = [(at, device.raw(value)) for at, value in outputs]
        self._recorded.append(_Recorded(func, raw_args, raw_kwargs, raw_outputs, node, reads))

    def _bake(self, func, name, value):
        """The raw view that stands for `value` in the node; None for a host number, which goes by value."""
        raw = self.device.raw(value)
        if raw is not None:
            return raw
        if value.dim() == 0 or value.numel() == 0:
            return None
        raise CaptureError(
            f"{func}: {name} is a host tensor of shape {tuple(value.shape)}; a capture may read host memory only if it is "
            "pinned (device.pin)"
        )

    # replay
    def replay(self) -> None:
        """Run every node on the addresses that were baked in, whatever lives there now."""
        device = self.device
        device.check_usable()
        if self.state != "captured":
            raise CaptureError(f"this graph is {self.state}; allowed: replay a graph whose capture ended well")
        if device.capturing is not None:
            raise CaptureError("replay while capturing: operation not permitted when stream is capturing")
        if self._mapped_version != device.memory.version:
            self._check_mapped()
        self._note_stale_reads()
        device.counters.replays += 1
        device.counters.launches += 1
        try:
            with device.host():
                for recorded in self._recorded:
                    result = recorded.call(*recorded.args, **recorded.kwargs)
                    for at, output in recorded.outputs:
                        output.copy_(result if isinstance(result, torch.Tensor) else result[at])
        except (IllegalAddressError, DeviceAssertError) as error:
            device.fail(error)
            raise

    def _check_mapped(self):
        for recorded in self._recorded:
            for argument in recorded.node.arguments:
                if self.device.in_arena(argument.address) and not self.device.memory.is_mapped(
                    argument.address, argument.nbytes
                ):
                    error = IllegalAddressError(
                        f"an illegal memory access was encountered: node {recorded.node.index} {recorded.node.name}, "
                        f"{argument.name} at 0x{argument.address:x} is not mapped any more"
                    )
                    self.device.fail(error)
                    raise error
        self._mapped_version = self.device.memory.version

    def _note_stale_reads(self):
        allocator = self.device.allocator
        for recorded in self._recorded:
            for name, address, block, generation in recorded.reads:
                chunk = allocator.chunks.get(block)
                now = allocator.generations[block]
                if now == generation and chunk is not None and chunk.allocated:
                    continue
                owner = allocator.find(address)
                read = StaleRead(
                    self.device.step, self.index, recorded.node.index, name, address, generation, now,
                    None if owner is None or not owner.allocated else owner.label or "an unnamed tensor",
                )  # fmt: skip
                self.device.stale_reads.append(read)
                if self.device.strict:
                    raise StaleReadError(
                        f"node {read.node} {recorded.node.name} reads {name} at 0x{address:x}, captured in generation "
                        f"{generation}, now {read.owner_now or 'free'}"
                    )


def _needs_a_value(func, args) -> bool:
    """Whether the op's result or its shape depends on values, so that the host would have to wait for them."""
    if torch.Tag.data_dependent_output in func.tags:
        return True
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    if func._schema.name == "aten::index":  # only masks have as many results as they have true entries
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return True


def _slots(func, args, kwargs) -> list[tuple[str, bool]]:
    """(name, written) of every leaf of (args, kwargs), in the order in which the tree is flattened."""
    schema = func._schema.arguments
    by_name = {argument.name: argument for argument in schema}
    pairs = list(zip(schema, args)) + [(by_name[name], value) for name, value in kwargs.items()]
    slots = []
    for argument, value in pairs:
        leaves = tree_flatten(value)[0]
        write = argument.alias_info is not None and argument.alias_info.is_write
        slots += [(argument.name if len(leaves) == 1 else f"{argument.name}[{at}]", write) for at in range(len(leaves))]
    return slots


def _argument(name, tensor, access) -> Argument:
    return Argument(
        name, tensor.data_ptr(), span(tensor), tuple(tensor.shape), tuple(tensor.stride()),
        str(tensor.dtype).removeprefix("torch."), access,
    )  # fmt: skip
