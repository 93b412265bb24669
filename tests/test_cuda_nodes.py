"""Pointers are found in parameter bytes wherever they sit; what cannot be read is said, and the rest is read."""

import ctypes
import enum
import struct
from types import SimpleNamespace

import pytest

from stalegraph.blocks import Block, MemoryMap
from stalegraph.cuda import nodes
from stalegraph.cuda.nodes import _Reader, parameter_buffers, simple_name

BASE = 0x7F00_0000_0000
PINNED = 0x7E00_0000_1000
MAP = MemoryMap([Block(BASE, 4096, 4096, "allocated", segment=BASE)])
OK, INVALID, REFUSED = 0, 1, 801


class Kind(enum.IntEnum):
    CU_GRAPH_NODE_TYPE_KERNEL = 0
    CU_GRAPH_NODE_TYPE_MEMCPY = 1
    CU_GRAPH_NODE_TYPE_MEMSET = 2
    CU_GRAPH_NODE_TYPE_HOST = 3
    CU_GRAPH_NODE_TYPE_GRAPH = 4
    CU_GRAPH_NODE_TYPE_EMPTY = 5
    CU_GRAPH_NODE_TYPE_WAIT_EVENT = 6
    CU_GRAPH_NODE_TYPE_EVENT_RECORD = 7
    CU_GRAPH_NODE_TYPE_CONDITIONAL = 13


class Result(enum.IntEnum):
    CUDA_SUCCESS = OK
    CUDA_ERROR_INVALID_VALUE = INVALID
    CUDA_ERROR_NOT_SUPPORTED = REFUSED


class FakeDriver:
    """A driver whose graphs are lists of (kind, params); functions are names with (offset, bytes) of each parameter."""

    CUgraphNodeType = Kind
    CUresult = Result
    CUmemorytype = SimpleNamespace(CU_MEMORYTYPE_HOST=1, CU_MEMORYTYPE_DEVICE=2, CU_MEMORYTYPE_ARRAY=3)
    CUpointer_attribute = SimpleNamespace(CU_POINTER_ATTRIBUTE_MEMORY_TYPE=2)

    def __init__(self, graphs, functions):
        self.graphs, self.functions, self.asked = graphs, functions, 0

    def CUgraph(self, init_value):
        return init_value

    CUfunction = CUkernel = CUgraph

    def cuGraphGetNodes(self, graph, count):
        return Result.CUDA_SUCCESS, self.graphs[graph][:count], len(self.graphs[graph])

    def cuGraphNodeGetType(self, node):
        return Result.CUDA_SUCCESS, node[0]

    def cuGraphKernelNodeGetParams(self, node):
        return Result.CUDA_SUCCESS, node[1]

    cuGraphMemcpyNodeGetParams = cuGraphMemsetNodeGetParams = cuGraphKernelNodeGetParams
    cuGraphChildGraphNodeGetGraph = cuGraphNodeGetParams = cuGraphKernelNodeGetParams

    def cuFuncGetParamInfo(self, function, index):
        self.asked += 1
        layout = self.functions[function][1]
        if layout is None:
            return Result.CUDA_ERROR_NOT_SUPPORTED, None, None
        return (Result.CUDA_SUCCESS, *layout[index]) if index < len(layout) else (Result.CUDA_ERROR_INVALID_VALUE, 0, 0)

    cuKernelGetParamInfo = cuFuncGetParamInfo

    def cuFuncGetName(self, function):
        return Result.CUDA_SUCCESS, self.functions[function][0].encode()

    cuKernelGetName = cuFuncGetName

    def cuPointerGetAttribute(self, attribute, address):
        return (Result.CUDA_SUCCESS, 1) if address == PINNED else (Result.CUDA_ERROR_INVALID_VALUE, None)


ALIVE = []  # ctypes buffers that "the driver" holds


def kernel(function, *buffers, as_kernel=False, extra=False):
    held = [ctypes.create_string_buffer(data, len(data)) for data in buffers]
    array = (ctypes.c_void_p * max(len(held), 1))(*(ctypes.addressof(buffer) for buffer in held))
    ALIVE.extend([held, array])
    return Kind.CU_GRAPH_NODE_TYPE_KERNEL, SimpleNamespace(
        func=0 if as_kernel else function, kern=function if as_kernel else 0, extra=0,
        kernelParams=ctypes.addressof(array) if buffers else 0,
        gridDimX=132, gridDimY=1, gridDimZ=1, blockDimX=256, blockDimY=1, blockDimZ=1, sharedMemBytes=1024,
    )  # fmt: skip


def read(graph, functions, **graphs):
    return _Reader(FakeDriver({1: graph, **{int(k[1:]): v for k, v in graphs.items()}}, functions), MAP).read(1)


def test_pointers_inside_a_struct_are_found_with_their_byte():
    struct_bytes = struct.pack("<QIIQQ", 7, 1, 2, BASE + 512, BASE + 8192)  # a number, two ints, inside, outside
    (node,) = read([kernel(5, struct_bytes, as_kernel=True)], {5: ("_Z3runI1AEv6Params", [(0, len(struct_bytes))])})
    assert (node.kind, node.name, node.opaque) == ("kernel", "run", None)
    assert [(a.address, a.offset, a.access) for a in node.arguments] == [(BASE + 512, 16, "unknown")]
    assert dict(node.scalars)["grid"] == (132, 1, 1) and dict(node.scalars)["symbol"] == "_Z3runI1AEv6Params"


def test_offsets_count_from_the_start_of_the_parameter_buffer():
    four, eight = struct.pack("<i", 3), struct.pack("<Q", BASE)
    tail = struct.pack("<iQ", 1, BASE + 64)  # a packed struct that starts at byte 20: its pointer sits at byte 24
    (node,) = read([kernel(5, four, eight, tail)], {5: ("f", [(0, 4), (8, 8), (20, 12)])})
    assert [(a.name, a.address, a.offset) for a in node.arguments] == [("p1+0", BASE, 8), ("p2+4", BASE + 64, 24)]


def test_memory_that_the_allocator_does_not_own_is_asked_of_the_driver():
    (node,) = read([kernel(5, struct.pack("<QQ", PINNED, PINNED + 1))], {5: ("f", [(0, 16)])})
    assert [a.address for a in node.arguments] == [PINNED]


def test_copies_and_fills_say_what_they_read_and_write():
    copy = SimpleNamespace(
        WidthInBytes=100, Height=1, Depth=1, srcXInBytes=4, dstXInBytes=0,
        srcMemoryType=1, srcHost=PINNED, srcDevice=0, dstMemoryType=2, dstHost=0, dstDevice=BASE,
    )  # fmt: skip
    fill = SimpleNamespace(elementSize=4, width=8, height=1, dst=BASE + 64, value=0)
    first, second = read([(Kind.CU_GRAPH_NODE_TYPE_MEMCPY, copy), (Kind.CU_GRAPH_NODE_TYPE_MEMSET, fill)], {})
    told = [(a.address, a.access, a.nbytes) for a in first.arguments]
    assert told == [(PINNED + 4, "read", 100), (BASE, "write", 100)]
    assert [(a.address, a.access, a.nbytes) for a in second.arguments] == [(BASE + 64, "write", 32)]


def test_child_and_conditional_graphs_are_descended_in_place():
    functions = {5: ("f", [(0, 8)])}
    one = kernel(5, struct.pack("<Q", BASE))
    conditional = SimpleNamespace(conditional=SimpleNamespace(phGraph_out=[3]))
    graph = [
        (Kind.CU_GRAPH_NODE_TYPE_GRAPH, 2),
        (Kind.CU_GRAPH_NODE_TYPE_CONDITIONAL, conditional),
        (Kind.CU_GRAPH_NODE_TYPE_EMPTY, None),
    ]
    found = read(graph, functions, g2=[one, one], g3=[one])
    assert [(node.index, node.name) for node in found] == [
        (0, "f"), (1, "f"), (2, "conditional"), (3, "f"), (4, "empty"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "node, functions, reason",
    [
        (kernel(5, bytes(8)), {5: ("f", None)}, "CUDA_ERROR_NOT_SUPPORTED"),
        (kernel(5), {5: ("f", [(0, 8)])}, "no copy of this kernel's parameters"),
        ((Kind.CU_GRAPH_NODE_TYPE_HOST, None), {}, "host function"),
    ],
)
def test_what_cannot_be_read_is_opaque_with_its_reason(node, functions, reason):
    graph = [node, kernel(6, struct.pack("<Q", BASE))]
    first, second = read(graph, {**functions, 6: ("g", [(0, 8)])})
    assert reason in first.opaque and first.arguments == ()
    assert second.opaque is None and len(second.arguments) == 1


def test_a_kernel_without_parameters_is_not_opaque():
    (node,) = read([kernel(5)], {5: ("f", [])})
    assert node.opaque is None and node.arguments == ()


def test_a_packed_parameter_buffer_is_read_too():
    data = struct.pack("<iiQ", 1, 2, BASE)
    buffer, size = ctypes.create_string_buffer(data, len(data)), ctypes.c_size_t(len(data))
    extra = (ctypes.c_size_t * 5)(1, ctypes.addressof(buffer), 2, ctypes.addressof(size), 0)
    assert parameter_buffers(0, ctypes.addressof(extra), [(0, 4), (8, 8)]) == [data[:4], data[8:]]


def test_each_function_is_asked_once():
    driver = FakeDriver({1: [kernel(5, struct.pack("<Q", BASE))] * 10_000}, {5: ("f", [(0, 8)])})
    found = _Reader(driver, MAP).read(1)
    assert len(found) == 10_000 and found[-1].index == 9_999 and driver.asked == 2


@pytest.mark.parametrize(
    "symbol, name",
    [
        ("_ZN2at6native29vectorized_elementwise_kernelILi4EEEvi", "at::native::vectorized_elementwise_kernel"),
        ("_Z28flash_fwd_splitkv_mla_kernelI6TraitsEv6Params", "flash_fwd_splitkv_mla_kernel"),
        ("triton_poi_fused_add_0", "triton_poi_fused_add_0"),
        ("_ZN12_GLOBAL__N_13runEv", "run"),
    ],
)
def test_kernel_names_are_shortened(symbol, name):
    assert simple_name(symbol) == name


def test_without_cuda_bindings_the_error_says_what_to_install(monkeypatch):
    import builtins

    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("cuda"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(nodes.RungUnavailable, match="cuda-bindings"):
        nodes._driver()
