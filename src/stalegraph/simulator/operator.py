"""What an operator's schema says of it: which arguments it writes, and whether its results are fresh."""

from __future__ import annotations

import torch

_VIEWS = {"aten::_unsafe_view", "aten::_reshape_alias", "aten::unsafe_split", "aten::unsafe_split_with_sizes"}
_EMPTY = {
    "aten::empty", "aten::empty_strided", "aten::empty_like", "aten::empty_permuted", "aten::new_empty",
    "aten::new_empty_strided",
}  # fmt: skip
_METADATA = {"aten::set_", "aten::resize_", "aten::resize_as_", "aten::record_stream"}
_COPIES = {"aten::copy_", "aten::clone", "aten::_to_copy"}
_FILLS = {"aten::zero_", "aten::fill_"}
# What these write into their first argument does not depend on what was there.
_OVERWRITES = _FILLS | {
    "aten::copy_", "aten::normal_", "aten::uniform_", "aten::random_", "aten::bernoulli_", "aten::exponential_",
}  # fmt: skip
# These need a value on the host that the device has yet to compute; others are known by PyTorch's own tags.
_SYNCHRONISES = {
    "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::bincount", "aten::unique_dim",
    "aten::unique_consecutive", "aten::_unique2",
}  # fmt: skip
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"}
_FACTORY = ("dtype", "layout", "device", "pin_memory")


class Operator:
    """One overload, looked at once. `kind` is "composite", "view", "empty", "metadata", "host" or "compute".

    `returns` holds for each result the place of the argument that it is (an index, or a name if keyword-only), None for
    a fresh one. `access` holds "write" or "read-write" for the arguments that are written. `into` is how to compute the
    results in given tensors: (callable, names of the results, names of its arguments), None where PyTorch has no way.
    """

    _known: dict = {}

    def __init__(self, overload):
        schema = overload._schema
        self.overload, self.call = overload, overload._op
        self.name = schema.name
        self.arguments = schema.arguments
        self.names = {argument.name: argument for argument in schema.arguments}
        self.access: dict[str, str] = {}
        places = {}
        for index, argument in enumerate(schema.arguments):
            info = argument.alias_info
            if info is not None and info.is_write:
                overwritten = argument.kwarg_only or (index == 0 and self.name in _OVERWRITES)
                self.access[argument.name] = "write" if overwritten else "read-write"
                for alias in info.before_set:
                    places[alias] = argument.name if argument.kwarg_only else index
        self.returns = []
        for result in schema.returns:
            aliases = result.alias_info.before_set if result.alias_info is not None else ()
            self.returns.append(next((places[alias] for alias in aliases if alias in places), None))
        several = len(schema.returns) > 1
        self.return_names = [
            result.name or (f"result {index}" if several else "result") for index, result in enumerate(schema.returns)
        ]
        self.outs = [a.name for a in schema.arguments if a.kwarg_only and a.name in self.access]
        self.indexing = self.name in _INDEXING
        self.synchronises = not self.indexing and (
            self.name in _SYNCHRONISES
            or torch.Tag.data_dependent_output in overload.tags
            or torch.Tag.dynamic_output_shape in overload.tags
        )
        # An operator that is not PyTorch's own may draw without saying so.
        self.random = torch.Tag.nondeterministic_seeded in overload.tags or not self.name.startswith("aten::")
        self.is_copy = self.name in _COPIES
        self.node_kind = "memset" if self.name in _FILLS else "kernel"
        self.kind = self._kind(schema)
        self.fresh = self.kind == "compute" and any(place is None for place in self.returns)
        plain = all(str(result.type) == "Tensor" for result in schema.returns)
        self.into = _into(schema) if self.fresh and plain and not self.access else None

    def _kind(self, schema) -> str:
        name = self.overload.name()
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        if self.name in _METADATA:
            return "metadata"
        if has(name, "CompositeImplicitAutograd") and not has(name, "CPU"):
            return "composite"
        if torch.Tag.inplace_view in self.overload.tags:
            return "view"  # such as unsqueeze_: it turns the tensor itself into another view of its bytes
        aliased = [result.alias_info is not None for result in schema.returns]
        if self.name in _VIEWS or (aliased and all(aliased) and not self.access):
            return "view"
        if self.name in _EMPTY and not self.access:
            return "empty"
        if schema.returns and not self.access and not any("Tensor" in str(result.type) for result in schema.returns):
            return "host"  # gives a number, a device or the like
        return "compute"

    @classmethod
    def of(cls, overload) -> Operator:
        operator = cls._known.get(overload)
        if operator is None:
            operator = cls._known[overload] = cls(overload)
        return operator

    def named(self, args, kwargs):
        """(name, value) of every argument that was given."""
        for argument, value in zip(self.arguments, args):
            yield argument.name, value
        yield from kwargs.items()


def _into(schema):
    """The overload that has the same arguments and one more for each result."""
    space, name = schema.name.split("::")
    packet = getattr(torch.ops.aten, name, None) if space == "aten" else None
    if packet is None:
        return None
    wanted = [(a.name, str(a.type)) for a in schema.arguments if a.name not in _FACTORY]
    for overload in packet.overloads():
        other = getattr(packet, overload)
        outs = [a.name for a in other._schema.arguments if a.kwarg_only and a.alias_info and a.alias_info.is_write]
        given = [(a.name, str(a.type)) for a in other._schema.arguments if a.name not in (*outs, *_FACTORY)]
        if len(outs) == len(schema.returns) and given == wanted:
            return other._op, outs, {a.name for a in other._schema.arguments}
    return None
