"""The nodes of a raw CUDA graph and the pointers in their parameters, read through cuda-bindings.

CUDA keeps a copy of each kernel's parameters in the node. Structs are opaque, so every 8-byte aligned word is taken for
a candidate pointer and kept when it falls into memory that the allocator or the driver knows (pytorch #152622).
"""

from __future__ import annotations

import ctypes
import re
import struct
from functools import lru_cache

from stalegraph.blocks import MemoryMap
from stalegraph.errors import RungUnavailable
from stalegraph.nodes import Argument, Node

# Below: small numbers and packed pairs of them; above: no device maps there (57-bit virtual addresses).
LOWEST, HIGHEST = 1 << 16, 1 << 57
MOST_PARAMETERS = 1 << 12  # a kernel has at most 32764 bytes of parameters
PARAM_BUFFER_POINTER, PARAM_BUFFER_SIZE, PARAM_END = 1, 2, 0  # CU_LAUNCH_PARAM_*


def _driver():
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise RungUnavailable(
            "reading a CUDA graph's nodes needs cuda-bindings; install stalegraph[gpu] or cuda-bindings"
        ) from error
    return driver


def read_nodes(raw_graph: int, memory_map: MemoryMap) -> tuple[Node, ...]:
    """Every node of the cudaGraph_t `raw_graph`, child graphs' nodes in their place, indices in order."""
    return _Reader(_driver(), memory_map).read(int(raw_graph))


def simple_name(name: str) -> str:
    """A kernel's name, shortened as far as can be without a demangler: its nested identifiers joined by `::`.

    >>> simple_name("_ZN2at6native29vectorized_elementwise_kernelILi4EEEvi")
    'at::native::vectorized_elementwise_kernel'
    """
    if not name.startswith("_Z"):
        return name
    parts, at = [], 3 if name.startswith("_ZN") else 2
    while match := re.match(r"\d+", name[at:]):
        start = at + match.end()
        at = start + int(match.group())
        parts.append(name[start:at])
        if not name.startswith("_ZN"):
            break
    parts = [part for part in parts if not part.startswith("_GLOBAL__N")]
    return "::".join(parts) or name


class _Reader:
    """What is the same for all nodes: functions' parameter layouts, names, and what an address turned out to be."""

    def __init__(self, driver, memory_map: MemoryMap):
        self.driver = driver
        self.memory_map = memory_map
        self.layouts: dict[tuple[str, int], tuple[tuple[int, int], ...] | str] = {}
        self.names: dict[tuple[str, int], str] = {}
        self.known: dict[int, bool] = {}
        self.nodes: list[Node] = []
        types = driver.CUgraphNodeType
        self.readers = {
            int(types.CU_GRAPH_NODE_TYPE_KERNEL): self._kernel,
            int(types.CU_GRAPH_NODE_TYPE_MEMCPY): self._memcpy,
            int(types.CU_GRAPH_NODE_TYPE_MEMSET): self._memset,
            int(types.CU_GRAPH_NODE_TYPE_GRAPH): self._child,
            int(types.CU_GRAPH_NODE_TYPE_CONDITIONAL): self._conditional,
        }
        self.kinds = {
            int(types.CU_GRAPH_NODE_TYPE_HOST): ("host", "host function", "a host function's data is its own"),
            int(types.CU_GRAPH_NODE_TYPE_EMPTY): ("other", "empty", None),
            int(types.CU_GRAPH_NODE_TYPE_WAIT_EVENT): ("other", "wait for event", None),
            int(types.CU_GRAPH_NODE_TYPE_EVENT_RECORD): ("other", "record event", None),
        }

    def check(self, result):
        """The values of a driver call, or RuntimeError with the driver's name for what went wrong."""
        error, *values = result
        if int(error) != 0:
            raise RuntimeError(getattr(error, "name", str(error)))
        return values[0] if len(values) == 1 else tuple(values)

    def read(self, raw_graph: int) -> tuple[Node, ...]:
        self._graph(self.driver.CUgraph(init_value=raw_graph))
        return tuple(self.nodes)

    def _graph(self, graph) -> None:
        _, count = self.check(self.driver.cuGraphGetNodes(graph, 0))
        if count == 0:
            return
        handles, count = self.check(self.driver.cuGraphGetNodes(graph, count))
        for handle in handles[:count]:
            kind = int(self.check(self.driver.cuGraphNodeGetType(handle)))
            reader = self.readers.get(kind)
            if reader is None:
                self._add(*self.kinds.get(kind, ("other", f"node type {kind}", f"node type {kind} is not read")))
                continue
            try:
                reader(handle)
            except (RuntimeError, ValueError) as error:  # the rest of the graph can be read all the same
                self._add({0: "kernel", 1: "memcpy", 2: "memset"}.get(kind, "other"), f"node type {kind}", str(error))

    def _add(self, kind, name, opaque=None, arguments=(), scalars=()) -> None:
        self.nodes.append(Node(len(self.nodes), kind, name, tuple(arguments), opaque, tuple(scalars)))

    def is_pointer(self, word: int) -> bool:
        """Whether `word` is an address that the allocator or, for memory it does not own, the driver knows."""
        if not LOWEST <= word < HIGHEST:
            return False
        if self.memory_map.find(word) is not None:
            return True
        known = self.known.get(word)
        if known is None:
            attribute = self.driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
            error, _ = self.driver.cuPointerGetAttribute(attribute, word)
            known = self.known[word] = int(error) == 0
        return known

    def _function(self, parameters) -> tuple[str, int]:
        function = int(parameters.func)
        return ("func", function) if function else ("kern", int(parameters.kern))

    def _layout(self, key: tuple[str, int]) -> tuple[tuple[int, int], ...] | str:
        """(offset, bytes) of each parameter, or the reason why the driver does not say."""
        if key in self.layouts:
            return self.layouts[key]
        kind, handle = key
        if kind == "func":
            function, ask = self.driver.CUfunction(init_value=handle), self.driver.cuFuncGetParamInfo
        else:
            function, ask = self.driver.CUkernel(init_value=handle), self.driver.cuKernelGetParamInfo
        layout, reason = [], None
        while len(layout) < MOST_PARAMETERS:
            error, offset, nbytes = ask(function, len(layout))
            if int(error) != 0:
                if error != self.driver.CUresult.CUDA_ERROR_INVALID_VALUE:
                    reason = f"the driver does not give this kernel's parameters: {error.name}"
                break
            layout.append((int(offset), int(nbytes)))
        self.layouts[key] = reason or tuple(layout)
        return self.layouts[key]

    def _name(self, key: tuple[str, int]) -> str:
        if key not in self.names:
            kind, handle = key
            if kind == "func":
                error, name = self.driver.cuFuncGetName(self.driver.CUfunction(init_value=handle))
            else:
                error, name = self.driver.cuKernelGetName(self.driver.CUkernel(init_value=handle))
            name = "" if int(error) or name is None else name.decode() if isinstance(name, bytes) else str(name)
            self.names[key] = name or f"kernel at {handle:#x}"
        return self.names[key]

    def _kernel(self, handle) -> None:
        parameters = self.check(self.driver.cuGraphKernelNodeGetParams(handle))
        key = self._function(parameters)
        symbol, layout = self._name(key), self._layout(key)
        name = simple_name(symbol)
        launch = (
            ("symbol", symbol),
            ("grid", (parameters.gridDimX, parameters.gridDimY, parameters.gridDimZ)),
            ("block", (parameters.blockDimX, parameters.blockDimY, parameters.blockDimZ)),
            ("shared_bytes", parameters.sharedMemBytes),
        )
        if isinstance(layout, str):
            self._add("kernel", name, layout, scalars=launch)
            return
        buffers = parameter_buffers(int(parameters.kernelParams or 0), int(parameters.extra or 0), layout)
        if buffers is None and layout:
            self._add("kernel", name, "the node holds no copy of this kernel's parameters", scalars=launch)
            return
        arguments = []
        for index, ((offset, _), data) in enumerate(zip(layout, buffers or ())):
            first = -offset % 8
            count = (len(data) - first) // 8
            if count <= 0:
                continue
            for place, word in enumerate(_words(count).unpack_from(data, first)):
                if self.is_pointer(word):
                    inside = first + 8 * place
                    arguments.append(Argument(f"p{index}+{inside}", word, offset=offset + inside))
        self._add("kernel", name, None, arguments, launch)

    def _memcpy(self, handle) -> None:
        copy = self.check(self.driver.cuGraphMemcpyNodeGetParams(handle))
        nbytes = copy.WidthInBytes * max(copy.Height, 1) * max(copy.Depth, 1)
        host = self.driver.CUmemorytype.CU_MEMORYTYPE_HOST
        array = self.driver.CUmemorytype.CU_MEMORYTYPE_ARRAY
        arguments = []
        for side, access in (("src", "read"), ("dst", "write")):
            where = getattr(copy, f"{side}MemoryType")
            if where == array:
                continue
            address = int(getattr(copy, f"{side}Host" if where == host else f"{side}Device") or 0)
            address += getattr(copy, f"{side}XInBytes")
            arguments.append(Argument(side, address, nbytes=nbytes, access=access))
        self._add("memcpy", "memcpy", None, arguments, (("bytes", nbytes),))

    def _memset(self, handle) -> None:
        fill = self.check(self.driver.cuGraphMemsetNodeGetParams(handle))
        nbytes = fill.elementSize * fill.width * max(fill.height, 1)
        self._add(
            "memset",
            "memset",
            None,
            (Argument("dst", int(fill.dst), nbytes=nbytes, access="write"),),
            (("value", fill.value), ("bytes", nbytes)),
        )

    def _child(self, handle) -> None:
        self._graph(self.check(self.driver.cuGraphChildGraphNodeGetGraph(handle)))

    def _conditional(self, handle) -> None:
        parameters = self.check(self.driver.cuGraphNodeGetParams(handle)).conditional
        self._add("other", "conditional")
        for graph in parameters.phGraph_out or ():
            self._graph(graph)


@lru_cache(maxsize=None)
def _words(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}Q")


def parameter_buffers(kernel_params: int, extra: int, layout) -> list[bytes] | None:
    """The bytes of each parameter, from an array of pointers (`kernelParams`) or one packed buffer (`extra`)."""
    if kernel_params and layout:
        pointers = (ctypes.c_void_p * len(layout)).from_address(kernel_params)
        return [ctypes.string_at(pointer, nbytes) for pointer, (_, nbytes) in zip(pointers, layout)]
    if extra:
        at, buffer, nbytes = extra, 0, 0
        while (tag := ctypes.c_size_t.from_address(at).value) != PARAM_END:
            value = ctypes.c_size_t.from_address(at + 8).value
            if tag == PARAM_BUFFER_POINTER:
                buffer = value
            elif tag == PARAM_BUFFER_SIZE:
                nbytes = ctypes.c_size_t.from_address(value).value
            at += 16
        data = ctypes.string_at(buffer, nbytes)
        return [data[offset : offset + size] for offset, size in layout]
    return None
