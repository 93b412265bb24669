"""A capture that is going on: turns each operator into a node of raw addresses, and its results into pool memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch

from stalegraph.errors import CaptureError
from stalegraph.nodes import Argument, Node
from stalegraph.simulator.inference import infer
from stalegraph.simulator.memory import span

_BY_VALUE = (bool, int, float, str)
_NOT_PERMITTED = "operation not permitted when stream is capturing"


def is_memcpy(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether a GPU would copy by memcpy: one type, and both sides dense in the same order; else it runs a kernel."""
    return (
        source.dtype == target.dtype
        and source.shape == target.shape
        and source.stride() == target.stride()
        and target.numel() * target.itemsize == span(target)
    )


@dataclass(frozen=True)
class Use:
    """One argument of one node that lies in a block which the graph does not own."""

    node: int
    name: str
    address: int
    nbytes: int
    access: str


@dataclass
class Guard:
    """A block that the graph reads or writes without owning it: `allocation` lived at `start` when it was captured."""

    live: dict
    start: int
    allocation: object
    uses: list[Use] = field(default_factory=list)


class Recorder:
    """Collects `nodes`, the `program` that replays them and the `guards` on the blocks that they use."""

    def __init__(self, device, pool):
        self.device = device
        self.pool = pool
        self.program: list[tuple] = []  # (callable, None or the tensors that its results are copied to)
        self.guards: dict[tuple, Guard] = {}
        self._nodes: list[Node] = []

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(self._nodes)

    def record(self, operator, args, kwargs):
        """Notes one operator; returns what it would, the fresh results with their content as it lies."""
        self._check(operator, args, kwargs)
        # Without fresh results only PyTorch's own operators are worth asking: they refuse shapes that do not fit.
        wanted = infer(operator, args, kwargs) if operator.fresh or operator.name.startswith("aten::") else None
        results, fresh = self._results(operator, args, kwargs, wanted)
        self._append(operator, args, kwargs, fresh)
        return results

    def empty(self, operator, args, kwargs):
        """An allocation and no node."""
        return self._place(operator.call(*args, **kwargs))

    def refuse(self, what: str):
        raise CaptureError(f"{what}: {_NOT_PERMITTED}")

    def _check(self, operator, args, kwargs) -> None:
        if operator.synchronises:
            self.refuse(f"{operator.name} makes the host wait for a value")
        if operator.indexing:
            self._check_indices(operator, args, kwargs)
        for name, value in operator.named(args, kwargs):
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(tensor, torch.Tensor) and tensor.dim() and self.device.is_host(tensor):
                    self._check_host(operator, name, tensor, args, kwargs)

    def _check_indices(self, operator, args, kwargs) -> None:
        masks = [one for one in args[1] if one is not None and one.dtype in (torch.bool, torch.uint8)]
        # One number behind a mask is a masked fill on CUDA too, which needs no count of the mask's entries.
        fill = len(args) > 2 and args[2].numel() == 1 and not (args[3] if len(args) > 3 else kwargs.get("accumulate"))
        if masks and not fill:
            self.refuse(f"{operator.name} with a mask makes the host wait for the number of its entries")

    def _check_host(self, operator, name, tensor, args, kwargs) -> None:
        shape = tuple(tensor.shape)
        if not operator.is_copy:
            raise CaptureError(
                f"{operator.name}: {name} of shape {shape} is on the host; a capture takes device tensors and numbers"
            )
        if tensor.data_ptr() not in self.device.pinned:
            raise CaptureError(
                f"{operator.name}: {name} of shape {shape} is in pageable host memory; {_NOT_PERMITTED} unless it is "
                "pinned (device.pin)"
            )
        blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        if blocking:
            raise CaptureError(
                f"{operator.name}: a copy that the host waits for; {_NOT_PERMITTED}, pass non_blocking=True"
            )

    def _results(self, operator, args, kwargs, wanted):
        """(what the operator returns, for each result its name and the new tensor, None where it is an argument)."""
        returned = wanted if isinstance(wanted, tuple) else (wanted,) * len(operator.returns)
        results, fresh = [], []
        for place, name, value in zip(operator.returns, operator.return_names, returned):
            if place is not None:
                shape = getattr(value, "shape", None)
                value = kwargs[place] if isinstance(place, str) else args[place]
                if isinstance(place, str) and shape is not None and value.shape != shape:
                    self.device.resize(value, shape)
                fresh.append((name, None))
            elif isinstance(value, torch.Tensor):
                value = self._place(value)
                fresh.append((name, value))
            elif isinstance(value, (list, tuple)):
                value = [self._place(one) for one in value]
                fresh += [(f"{name}[{index}]", one) for index, one in enumerate(value)]
            else:
                fresh.append((name, value))
            results.append(value)
        if not operator.returns:
            return None, fresh
        return (results[0] if len(results) == 1 else tuple(results)), fresh

    def _place(self, like: torch.Tensor) -> torch.Tensor:
        return self.device.allocator.empty(tuple(like.shape), like.stride(), like.dtype)

    def _append(self, operator, args, kwargs, fresh) -> None:
        arguments, scalars = [], []
        raw_args, raw_kwargs = [], {}
        for index, (argument, value) in enumerate(zip(operator.arguments, args)):
            raw_args.append(self._bake(operator, argument.name, value, arguments, scalars))
        for name, value in kwargs.items():
            raw_kwargs[name] = self._bake(operator, name, value, arguments, scalars)
        inputs = len(arguments)
        targets = []
        for name, value in fresh:
            if isinstance(value, torch.Tensor) and value.numel():
                targets.append(self.device.raw(value))
                arguments.append(self._argument(name, value, "write"))
            else:
                targets.append(None)
        self.program.append(self._program(operator, raw_args, raw_kwargs, targets, arguments, inputs))
        kind = operator.node_kind
        if operator.is_copy:
            source, target = (args[1], args[0]) if operator.name == "aten::copy_" else (args[0], fresh[0][1])
            over_the_bus = self.device.is_host(source) or self.device.is_host(target)
            kind = "memcpy" if over_the_bus or is_memcpy(source, target) else "kernel"
        self._nodes.append(Node(len(self._nodes), kind, operator.name, tuple(arguments), None, tuple(scalars)))

    def _bake(self, operator, name, value, arguments, scalars):
        """What stands for an argument in the node: raw tensors for tensors, the rest by value."""
        if isinstance(value, torch.Tensor):
            return self._bake_tensor(operator, name, value, arguments, scalars, operator.access.get(name, "read"))
        if isinstance(value, (list, tuple)) and any(isinstance(one, torch.Tensor) for one in value):
            access = operator.access.get(name, "read")
            return [
                self._bake_tensor(operator, f"{name}[{index}]", one, arguments, scalars, access)
                if isinstance(one, torch.Tensor)
                else one
                for index, one in enumerate(value)
            ]
        if isinstance(value, _BY_VALUE):
            scalars.append((name, value))
        elif isinstance(value, (list, tuple)) and all(isinstance(one, _BY_VALUE) for one in value):
            scalars.append((name, tuple(value)))
        return value

    def _bake_tensor(self, operator, name, tensor, arguments, scalars, access):
        if tensor.numel() == 0:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        raw = self.device.raw(tensor)
        if raw is None:  # a number on the host: its value goes into the node
            scalars.append((name, tensor.item()))
            return tensor.clone()
        arguments.append(self._argument(name, tensor, access))
        self._guard(name, tensor, access)
        return raw

    def _argument(self, name, tensor, access) -> Argument:
        return Argument(
            name, tensor.data_ptr(), span(tensor), tuple(tensor.shape), tuple(tensor.stride()),
            str(tensor.dtype).removeprefix("torch."), access,
        )  # fmt: skip

    def _guard(self, name, tensor, access) -> None:
        live, start, allocation = self.device.allocation_of(tensor)
        if allocation is not None and allocation.pool == self.pool:
            return  # the graph's pool keeps it mapped, and what is carved out of it anew is the graphs' own affair
        guard = self.guards.get((id(live), start, id(allocation)))
        if guard is None:
            guard = self.guards[id(live), start, id(allocation)] = Guard(live, start, allocation)
        guard.uses.append(Use(len(self._nodes), name, tensor.data_ptr(), span(tensor), access))

    def _program(self, operator, args, kwargs, targets, arguments, inputs):
        """The cheapest call that does what the node does, and where its results have to be copied to."""
        if operator.name == "aten::copy_":
            return partial(args[0].copy_, args[1]), None
        if operator.is_copy and targets[0] is not None:
            return partial(targets[0].copy_, args[0]), None
        if operator.into is not None and None not in targets and not _overlap(arguments[:inputs], arguments[inputs:]):
            call, outs, names = operator.into
            kwargs = {name: value for name, value in kwargs.items() if name in names}
            return partial(call, *args, **kwargs, **dict(zip(outs, targets))), None
        return partial(operator.call, *args, **kwargs), targets if any(t is not None for t in targets) else None


def _overlap(inputs, outputs) -> bool:
    """Whether a result lies on an input: computed in place it would not be what the kernel makes of its input."""
    return any(
        one.address < other.address + other.nbytes and other.address < one.address + one.nbytes
        for one in inputs
        for other in outputs
    )
