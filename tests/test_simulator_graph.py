"""Capture and replay: what a graph bakes in, what it refuses, and what it does when its memory has moved on."""

import gc

import pytest
import torch

from stalegraph.errors import (
    CaptureError,
    DeviceAssertError,
    IllegalAddressError,
    StaleReadError,
    UsageError,
)
from stalegraph.simulator import Device

_library = torch.library.Library("stalegraph_test", "DEF")
_library.define("grow(Tensor source, Tensor(a!) state, int by) -> Tensor")
_library.define("into(Tensor source, Tensor(a!) state) -> ()")
RAN = []


@torch.library.impl(_library, "grow", "CPU")
def _grow(source, state, by):
    RAN.append("grow")
    state.add_(source)
    return state * by


@torch.library.impl(_library, "into", "CPU")
def _into(source, state):
    RAN.append("into")
    state.copy_(source * 2)


@pytest.fixture
def device():
    with Device(memory_bytes=64 << 20) as device:
        yield device


def captured(device, function, pool=None):
    """(graph, what `function` returned while it was captured)."""
    graph = device.graph(pool)
    with graph.capture():
        result = function()
    return graph, result


# -- capture


def test_a_capture_runs_nothing(device):
    x, y = torch.ones(3), torch.full((3,), 7.0)
    before = device.memory.read(x.data_ptr(), 12).tolist()
    launches = device.counters.launches
    graph, z = captured(device, lambda: (x.add_(1), y.copy_(x), x * 5)[2])
    assert x.tolist() == [1, 1, 1] and y.tolist() == [7, 7, 7] and z.tolist() == [0, 0, 0]
    assert device.memory.read(x.data_ptr(), 12).tolist() == before and device.counters.launches == launches
    graph.replay()
    assert (x.tolist(), y.tolist(), z.tolist()) == ([2] * 3, [2] * 3, [10] * 3)


def test_results_of_a_capture_hold_what_lay_there(device):
    graph, first = captured(device, lambda: torch.full((4,), 3.0))
    graph.replay()
    pool = graph.pool()
    del first
    _, second = captured(device, lambda: torch.zeros(4) + 1, pool)
    assert second.tolist() != [1, 1, 1, 1]


def test_values_that_would_break_a_kernel_do_not_break_its_capture(device):
    table, index = torch.arange(12.0).view(4, 3), torch.zeros(2, dtype=torch.int64)
    graph, row = captured(device, lambda: torch.nn.functional.embedding(index * 10**6 + 10**9, table))
    assert row.shape == (2, 3)
    with pytest.raises(DeviceAssertError, match=r"node \d aten::embedding"):
        graph.replay()


def test_nodes_name_what_is_baked_in(device):
    x, w = torch.zeros(2, 3), torch.zeros(3, 4)
    graph, y = captured(device, lambda: torch.add(x @ w, 1.5, alpha=2)[:, 1:])
    mm, add = graph.nodes
    assert (mm.index, mm.kind, mm.name, add.index, add.name) == (0, "kernel", "aten::mm", 1, "aten::add")
    assert [(a.name, a.access) for a in mm.arguments] == [("self", "read"), ("mat2", "read"), ("result", "write")]
    first, second, result = mm.arguments
    assert (first.address, second.address) == (x.data_ptr(), w.data_ptr())
    assert (second.shape, second.strides, second.dtype, second.nbytes) == ((3, 4), (4, 1), "float32", 48)
    assert add.arguments[0].address == result.address and add.arguments[1].address == y.data_ptr() - 4
    assert dict(add.scalars) == {"other": 1.5, "alpha": 2}
    assert device.memory_map().find(result.address).pool == graph.pool()


def test_kinds_and_access(device):
    x, y, f = torch.zeros(4), torch.zeros(4), torch.zeros(4, dtype=torch.float16)
    index = torch.tensor([1])

    def body():
        y.copy_(x)
        y.zero_()
        y.add_(x)
        torch.mul(x, 2, out=y)
        y.index_copy_(0, index, x[:1])
        f.copy_(x)
        y[1:].clone()

    graph, _ = captured(device, body)
    assert [(node.name, node.kind, node.arguments[0].access) for node in graph.nodes] == [
        ("aten::copy_", "memcpy", "write"),
        ("aten::zero_", "memset", "write"),
        ("aten::add_", "kernel", "read-write"),
        ("aten::mul", "kernel", "read"),
        ("aten::index_copy_", "kernel", "read-write"),
        ("aten::copy_", "kernel", "write"),
        ("aten::clone", "memcpy", "read"),
    ]
    assert [(a.name, a.access) for a in graph.nodes[3].arguments] == [("self", "read"), ("out", "write")]


def test_views_and_empty_tensors_make_no_node(device):
    x = torch.zeros(4, 4)
    graph, (view, empty, like) = captured(device, lambda: (x.t()[1:].unsqueeze(0), torch.empty(3), torch.empty_like(x)))
    assert graph.nodes == () and view.data_ptr() == x.data_ptr() + 4
    assert device.is_device(empty) and like.shape == (4, 4)
    graph.replay()


def test_a_custom_op_is_one_node_with_the_names_of_its_schema(device):
    RAN.clear()
    source, state = torch.ones(3), torch.zeros(3)
    graph, _ = captured(device, lambda: torch.ops.stalegraph_test.into(source, state))
    (node,) = graph.nodes
    assert RAN == [] and node.name == "stalegraph_test::into"
    assert [(a.name, a.address, a.access) for a in node.arguments] == [
        ("source", source.data_ptr(), "read"),
        ("state", state.data_ptr(), "read-write"),
    ]
    graph.replay()
    assert RAN == ["into"] and state.tolist() == [2, 2, 2]


def test_a_custom_op_without_a_meta_kernel_is_tried_on_copies(device):
    source, state = torch.ones(3), torch.zeros(3)
    graph, result = captured(device, lambda: torch.ops.stalegraph_test.grow(source, state, 10))
    assert state.tolist() == [0, 0, 0] and result.shape == (3,)
    assert [a.name for a in graph.nodes[0].arguments] == ["source", "state", "result"]
    assert graph.nodes[0].scalars == (("by", 10),)
    for times in (1, 2):
        graph.replay()
        assert state.tolist() == [times] * 3 and result.tolist() == [10 * times] * 3


def test_numbers_go_by_value(device):
    x, factor = torch.ones(3), torch.tensor(5.0).cpu()
    scale = 2.0
    graph, y = captured(device, lambda: x * factor + scale * torch.tensor(1.0))
    factor.fill_(100.0)
    scale = 100.0
    graph.replay()
    assert y.tolist() == [7, 7, 7]
    assert ("other", 5.0) in graph.nodes[0].scalars


def test_random_numbers_are_drawn_at_each_replay_and_none_by_the_capture(device):
    def draws(generator, function):
        return [function(generator) for _ in range(2)]

    generator = torch.Generator().manual_seed(3)
    want = draws(generator, lambda g: torch.rand(4, generator=g).tolist())
    generator.manual_seed(3)
    graph, y = captured(device, lambda: torch.rand(4, generator=generator))
    got = []
    for _ in range(2):
        graph.replay()
        got.append(y.tolist())
    assert got == want and want[0] != want[1]


def test_dropout_draws_from_the_default_generator(device):
    x = torch.ones(50)
    torch.manual_seed(2)
    want = torch.nn.functional.dropout(x, 0.5).tolist()
    graph, y = captured(device, lambda: torch.nn.functional.dropout(x, 0.5))
    torch.manual_seed(2)
    graph.replay()
    assert y.tolist() == want


# -- what a capture does not permit


REFUSED = {
    "item": lambda d, x: x[0].item(),
    "bool": lambda d, x: bool(x[0] > 0),
    "if": lambda d, x: 1 if (x > 0).any() else 2,
    "float": lambda d, x: float(x.sum()),
    "tolist": lambda d, x: x.tolist(),
    "cpu": lambda d, x: x.cpu(),
    "print": lambda d, x: repr(x),
    "numpy": lambda d, x: x.numpy(),
    "to_host": lambda d, x: d.to_host(x),
    "nonzero": lambda d, x: x.nonzero(),
    "mask": lambda d, x: x[x > 0],
    "masked_select": lambda d, x: x.masked_select(x > 0),
    "mask_put": lambda d, x: x.__setitem__(x > 0, torch.ones(3)),
    "unique": lambda d, x: x.unique(),
    "equal": lambda d, x: torch.equal(x, x),
    "allclose": lambda d, x: torch.allclose(x, x),
    "repeat_interleave": lambda d, x: torch.repeat_interleave(torch.ones_like(x, dtype=torch.int64)),
    "data": lambda d, x: torch.tensor([1.0, 2.0]),
    "list index": lambda d, x: x[[0, 1]],
    "synchronize": lambda d, x: d.synchronize(),
    "empty_cache": lambda d, x: d.empty_cache(),
    "number on the device": lambda d, x: torch.tensor(1.0, device=d.torch_device),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_the_host_wait_is_refused(device, name):
    x = torch.ones(3)
    graph = device.graph()
    with pytest.raises(CaptureError, match="not permitted when stream is capturing"), graph.capture():
        REFUSED[name](device, x)
    with pytest.raises(CaptureError, match="invalid"):
        graph.replay()
    assert x.sum().item() == 3, "the device stays usable"


def test_shapes_that_do_not_fit_are_refused_at_capture(device):
    x, y = torch.zeros(3), torch.zeros(4)
    for body in (lambda: x + y, lambda: x.add_(y), lambda: torch.add(x, y, out=x), lambda: x @ y):
        graph = device.graph()
        with pytest.raises(RuntimeError), graph.capture():
            body()
        assert graph.state == "invalid"


def test_host_tensors_in_a_capture(device):
    x = torch.zeros(3)
    with device.host():
        pageable = torch.ones(3)
    pinned = device.pin(pageable)
    for body, message in (
        (lambda: x + pageable, "other of shape .3,. is on the host"),
        (lambda: x + pinned, "other of shape .3,. is on the host"),
        (lambda: x.copy_(pageable, non_blocking=True), "pageable host memory"),
        (lambda: pageable.copy_(x, non_blocking=True), "pageable host memory"),
        (lambda: x.copy_(pinned), "non_blocking=True"),
        (lambda: pageable.to(device.torch_device, non_blocking=True), "pageable host memory"),
    ):
        with pytest.raises(CaptureError, match=message), device.graph().capture():
            body()
    graph, _ = captured(device, lambda: pageable.add_(1))
    assert graph.nodes == () and pageable.tolist() == [2, 2, 2], "what is all on the host is not the device's affair"


def test_a_captured_copy_reads_pinned_memory_again_at_every_replay(device):
    x, pinned = torch.zeros(3), device.pin(torch.ones(3))
    graph, _ = captured(device, lambda: x.copy_(pinned, non_blocking=True))
    (node,) = graph.nodes
    assert node.kind == "memcpy" and {a.name: a.address for a in node.arguments}["src"] == pinned.data_ptr()
    pinned.fill_(4)
    graph.replay()
    assert x.tolist() == [4, 4, 4] and device.stale_reads == []


def test_a_captured_copy_out_writes_pinned_memory(device):
    x, pinned = torch.ones(3), device.pin(torch.zeros(3))
    graph, _ = captured(device, lambda: (pinned.copy_(x + 1, non_blocking=True), None)[1])
    graph.replay()
    assert pinned.tolist() == [2, 2, 2] and graph.nodes[1].kind == "memcpy"


def test_host_to_device_inside_a_capture_is_a_node(device):
    pinned = device.pin(torch.arange(3))
    graph, moved = captured(device, lambda: pinned.to(device.torch_device, non_blocking=True))
    pinned.mul_(2)
    graph.replay()
    assert moved.tolist() == [0, 2, 4] and device.is_device(moved) and len(graph.nodes) == 1


# -- states


def test_states(device):
    graph = device.graph()
    with pytest.raises(CaptureError, match="this graph is new"):
        graph.replay()
    with pytest.raises(CaptureError, match="this graph is new"):
        graph.nodes
    x = torch.zeros(3)
    with graph.capture():
        x.add_(1)
        with pytest.raises(CaptureError, match="capturing"):
            graph.replay()
        with pytest.raises(CaptureError, match="capturing"):
            graph.reset()
        with pytest.raises(CaptureError, match="another graph captures"), device.graph().capture():
            pass
        with pytest.raises(CaptureError, match="capturing"), graph.capture():
            pass
    with pytest.raises(CaptureError, match="this graph is captured; allowed"), graph.capture():
        pass
    graph.replay()
    graph.reset()
    with pytest.raises(CaptureError, match="this graph is new"):
        graph.replay()
    with graph.capture():
        x.add_(10)
    graph.replay()
    assert x.tolist() == [11, 11, 11]


def test_another_graph_cannot_replay_during_a_capture(device):
    x = torch.zeros(3)
    graph, _ = captured(device, lambda: x.add_(1))
    with pytest.raises(CaptureError, match="not permitted"), device.graph().capture():
        graph.replay()


def test_an_error_in_the_body_leaves_the_device_usable_and_the_graph_invalid(device):
    x, graph = torch.zeros(3), device.graph()
    with pytest.raises(ZeroDivisionError), graph.capture():
        x.add_(1)
        1 / 0
    with pytest.raises(CaptureError, match="invalid"):
        graph.replay()
    with pytest.raises(CaptureError, match="invalid"), graph.capture():
        pass
    assert device.memory_map().find(torch.ones(3).data_ptr()).pool == (0, 0)
    graph.reset()
    with graph.capture():
        x.add_(1)
    graph.replay()
    assert x.tolist() == [1, 1, 1]


def test_a_graph_whose_device_is_closed_is_refused():
    with Device(memory_bytes=8 << 20) as device:
        x = torch.zeros(3)
        graph, _ = captured(device, lambda: x.add_(1))
    with pytest.raises(CaptureError, match="closed"):
        graph.replay()
    with pytest.raises(CaptureError, match="closed"), device.graph().capture():
        pass
    graph.reset()


def test_capture_needs_the_device_entered():
    device = Device(memory_bytes=8 << 20)
    with pytest.raises(CaptureError, match="not entered"), device.graph().capture():
        pass


@pytest.mark.parametrize("pool", [(0, 99), (0, 0), (1, 1), "pool", 3])
def test_an_unknown_pool_is_refused(device, pool):
    with pytest.raises(UsageError, match="pool is"):
        device.graph(pool=pool)
    with pytest.raises(UsageError, match="pool is"), device.graph().capture(pool=pool):
        pass


# -- stale addresses


def stale_setup(device, keep):
    """A graph that reads a tensor which is freed after capture, and whose block another tensor takes."""
    source = device.label(torch.full((300,), 1.0), "plan at capture")
    address = source.data_ptr()
    out = torch.zeros(300)
    graph, _ = captured(device, lambda: out.copy_(source))
    device.step = 1
    graph.replay()
    assert out[0] == 1 and device.stale_reads == []
    del source
    taken = device.label(torch.full((300,), 2.0), "somebody else") if keep else None
    assert taken is None or taken.data_ptr() == address
    return graph, out, address, taken


def test_a_replay_reads_what_lies_at_the_address_now(device):
    graph, out, address, taken = stale_setup(device, keep=True)
    device.step = 2
    graph.replay()
    assert out.tolist() == [2] * 300
    taken.fill_(3)
    graph.replay()
    assert out.tolist() == [3] * 300
    first, second = device.stale_reads
    assert (first.step, first.graph, first.node, first.argument, first.address) == (2, graph.index, 0, "src", address)
    assert (first.generation_captured, first.generation_now, first.owner_now) == (1, 2, "somebody else")
    assert first.state_now == "allocated" and second == first


def test_a_freed_block_keeps_its_bytes_until_somebody_takes_it(device):
    graph, out, _, _ = stale_setup(device, keep=False)
    out.zero_()
    graph.replay()
    assert out[0] == 1, "the bytes are still there: the bug hides"
    (read,) = device.stale_reads
    assert (read.state_now, read.owner_now, read.generation_captured, read.generation_now) == ("freed", None, 1, 1)


def test_the_same_address_in_a_later_generation_is_stale_too(device):
    graph, out, address, taken = stale_setup(device, keep=True)
    device.label(taken, "plan at capture")
    graph.replay()
    assert [(r.address, r.generation_now) for r in device.stale_reads] == [(address, 2)]


def test_strict_raises_instead(device):
    with pytest.raises(UsageError):
        Device(strict=None)
    device.strict = True
    graph, out, address, taken = stale_setup(device, keep=True)
    out.fill_(9)
    message = "node 0 aten::copy_ reads src .* generation 1, now generation 2.*somebody else"
    with pytest.raises(StaleReadError, match=message):
        graph.replay()
    assert out[0] == 9, "nothing has run"
    assert (taken + 1)[0] == 3, "and the device stays usable"


def test_a_block_split_or_merged_since_is_found(device):
    source, fence = torch.full((300,), 1.0), torch.zeros(1)
    out = torch.zeros(100)
    graph, _ = captured(device, lambda: out.copy_(source[200:]))
    del source, fence
    small = device.label(torch.full((200,), 5.0), "first part")
    rest = device.label(torch.full((100,), 6.0), "second part")
    graph.replay()
    (read,) = device.stale_reads
    assert read.owner_now in ("first part", "second part") and out[-1] in (5.0, 6.0) and small[0] == 5 and rest[0] == 6


def test_writes_to_a_freed_block_are_no_reads_but_hit_their_new_owner(device):
    target, source = torch.zeros(300), torch.full((300,), 4.0)
    graph, _ = captured(device, lambda: (target.copy_(source), None)[1])
    del target
    victim = torch.zeros(300)
    graph.replay()
    assert victim[0] == 4 and device.stale_reads == []


def test_an_update_in_place_of_a_freed_block_is_a_read(device):
    target = torch.zeros(300)
    graph, _ = captured(device, lambda: (target.add_(1), None)[1])
    del target
    graph.replay()
    assert [read.argument for read in device.stale_reads] == ["self"]


def test_memory_of_the_graphs_own_pool_is_never_stale(device):
    x = torch.ones(300)

    def body():
        y = x + 1
        z = y * 2
        del y
        return (z + torch.ones(300)).sum()

    graph, total = captured(device, body)
    torch.zeros(300)
    graph.replay()
    assert total == 300 * 5 and device.stale_reads == []


def test_graphs_that_share_a_pool_overwrite_each_other_and_show_their_blocks(device):
    x = torch.ones(300)
    first, y = captured(device, lambda: x + 1)
    address, kept = y.data_ptr(), None
    first.replay()
    raw = device.raw(y)
    del y
    second, z = captured(device, lambda: x + 10, first.pool())
    second.replay()
    assert z.data_ptr() == address and raw[0] == 11 and device.stale_reads == [] and kept is None
    assert first.blocks[0].address == second.blocks[0].address and second.blocks[0].generation == 2


def test_an_address_that_is_unmapped_is_an_illegal_access_that_stays(device):
    source, out = torch.ones(3 << 20), torch.zeros(3)
    graph, _ = captured(device, lambda: (out.add_(1), out.copy_(source[:3]))[1])
    del source
    device.empty_cache()
    with pytest.raises(IllegalAddressError, match="node 1 aten::copy_, src, 12 bytes at 0x"):
        graph.replay()
    with device.host():
        assert out.tolist() == [1, 1, 1], "what came before the access has run"
    for call in (lambda: out + 1, graph.replay, device.synchronize):
        with pytest.raises(IllegalAddressError, match="failed earlier"):
            call()


def test_a_write_to_an_unmapped_address_is_illegal_too(device):
    target = torch.ones(3 << 20)
    graph, _ = captured(device, lambda: (target.zero_(), None)[1])
    del target
    device.empty_cache()
    with pytest.raises(IllegalAddressError):
        graph.replay()


def test_a_segment_that_came_back_elsewhere_sized_is_read_as_it_lies(device):
    out, source = torch.zeros(3), torch.ones(3 << 20)
    address = source.data_ptr()
    graph, _ = captured(device, lambda: out.copy_(source[:3]))
    del source
    device.empty_cache()
    taken = device.label(torch.full((4 << 20,), 8.0), "larger")
    assert taken.data_ptr() == address
    graph.replay()
    assert out.tolist() == [8, 8, 8] and device.stale_reads[0].owner_now == "larger"


def test_a_recycled_pinned_block_is_read_by_a_captured_copy(device):
    x, pinned = torch.zeros(3), device.pin(torch.ones(3))
    address = pinned.data_ptr()
    graph, _ = captured(device, lambda: x.copy_(pinned, non_blocking=True))
    del pinned
    other = device.label(device.pin(torch.full((3,), 5.0)), "next request")
    assert other.data_ptr() == address
    graph.replay()
    assert x.tolist() == [5, 5, 5]
    (read,) = device.stale_reads
    assert (read.owner_now, read.generation_captured, read.generation_now) == ("next request", 1, 2)


def test_generations_of_captured_reads(device):
    x = torch.zeros(3)
    y = torch.zeros(3)
    graph, _ = captured(device, lambda: y.copy_(x + 1))
    assert graph.generations == {(0, "self"): (x.data_ptr(), 1)}


def test_replays_cost_the_same_however_long_the_run(device):
    """What is kept for each replay does not grow: no allocation, no event, no stale read without a stale address."""
    x, graph = torch.zeros(3), device.graph()
    with graph.capture():
        y = x
        for _ in range(5):
            y = y + 1
    events, before = len(device.history), device.counters
    for _ in range(500):
        graph.replay()
    spent = device.counters - before
    assert (spent.allocations, spent.frees, spent.replays, spent.launches) == (0, 0, 500, 500)
    assert len(device.history) == events and device.stale_reads == []


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_an_out_tensor_of_another_shape_is_resized(device):
    x, y, z = torch.ones(5), torch.zeros(8), torch.zeros(2)
    want = torch.add(x, 1, out=y[:2])
    assert want.shape == (5,) and y.tolist() == [2] * 5 + [0] * 3
    graph, got = captured(device, lambda: torch.add(x, 2, out=y[:2]))
    large, _ = captured(device, lambda: torch.add(x, 3, out=z))
    assert got.shape == z.shape == (5,)
    graph.replay()
    large.replay()
    assert y.tolist() == [3] * 5 + [0] * 3 and z.tolist() == [4] * 5


def test_a_graph_that_nobody_holds_lets_go_of_its_pool(device):
    graph, y = captured(device, lambda: torch.zeros(3) + 1)
    del graph, y
    gc.collect()
    device.empty_cache()
    assert device.memory_snapshot() == []
