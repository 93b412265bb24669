"""The caching allocator's rules, one by one, by the addresses they give; recorded traces are in test_recorded.py."""

import gc

import pytest
import torch

from stalegraph.errors import CaptureError, OutOfMemoryError
from stalegraph.simulator import Device
from stalegraph.simulator.allocator import LARGE_SEGMENT, SMALL_SEGMENT, round_size, segment_size

KIB, MIB = 1 << 10, 1 << 20


def new(nbytes):
    return torch.empty(nbytes, dtype=torch.uint8)


@pytest.fixture
def device():
    with Device(memory_bytes=256 * MIB) as device:
        yield device


def segments(device):
    return [(segment["total_size"], segment["segment_type"]) for segment in device.memory_snapshot()]


@pytest.mark.parametrize(
    "nbytes, block, segment",
    [
        (1, 512, SMALL_SEGMENT),
        (512, 512, SMALL_SEGMENT),
        (513, 1024, SMALL_SEGMENT),
        (MIB, MIB, SMALL_SEGMENT),
        (MIB + 1, MIB + 512, LARGE_SEGMENT),
        (10 * MIB - 512, 10 * MIB - 512, LARGE_SEGMENT),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (30 * MIB, 30 * MIB, 30 * MIB),
    ],
)
def test_sizes_are_rounded_as_pytorch_rounds_them(device, nbytes, block, segment):
    assert (round_size(nbytes), segment_size(block)) == (block, segment)
    tensor = new(nbytes)
    found = device.memory_map().find(tensor.data_ptr())
    rest = segment - block
    split = rest >= 512 if segment == SMALL_SEGMENT else rest > MIB
    assert found.address == found.segment == tensor.data_ptr()
    assert (found.size, found.requested) == (block if split else segment, nbytes)
    assert segments(device) == [(segment, "small" if nbytes <= MIB else "large")]


def test_the_smallest_block_that_fits_is_taken_and_the_lowest_of_equals(device):
    tensors = [new(size) for size in (4096, 512, 2048, 512, 2048, 512, 3072, 512)]
    places = [tensor.data_ptr() for tensor in tensors]
    for at in (6, 4, 2, 0):
        tensors[at] = None
    assert new(1600).data_ptr() == places[2]
    first, second = new(2048), new(2048)
    assert (first.data_ptr(), second.data_ptr()) == (places[2], places[4])
    assert new(2049).data_ptr() == places[6]


def test_a_freed_block_comes_back_at_once_for_the_same_size(device):
    tensor, _fence = new(700), new(1)
    address = tensor.data_ptr()
    del tensor
    assert new(900).data_ptr() == address


def test_a_block_that_is_too_large_is_split_and_its_rest_is_used(device):
    hole, _fence = new(4096), new(1)
    address = hole.data_ptr()
    del hole
    one, two = new(512), new(2048)
    assert (one.data_ptr(), two.data_ptr()) == (address, address + 512)
    assert device.memory_map().find(address + 2560).state == "freed"


def test_a_large_block_is_split_only_where_more_than_a_mebibyte_remains(device):
    hole, fence = new(4 * MIB), new(2 * MIB)
    address = hole.data_ptr()
    del hole
    kept = new(3 * MIB)
    assert device.memory_map().find(address).size == 4 * MIB
    del kept
    kept = new(3 * MIB - 512)
    assert device.memory_map().find(address).size == 3 * MIB - 512
    assert fence.data_ptr() == address + 4 * MIB


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1)])
def test_neighbours_that_are_free_become_one_block(device, order):
    tensors, _fence = [new(1024) for _ in range(3)], new(1)
    address = tensors[0].data_ptr()
    for at in order:
        tensors[at] = None
    found = device.memory_map().find(address + 2048)
    assert (found.address, found.size, found.state) == (address, 3072, "freed")
    assert new(3072).data_ptr() == address


def test_small_and_large_blocks_do_not_mix(device):
    large, _fence = new(2 * MIB), new(2 * MIB)
    address = large.data_ptr()
    del large
    small = new(MIB)
    assert small.data_ptr() != address and segments(device) == [(LARGE_SEGMENT, "large"), (SMALL_SEGMENT, "small")]
    assert new(MIB + 1).data_ptr() == address


def test_empty_cache_returns_whole_segments_only(device):
    kept, one, two = new(512), new(12 * MIB), new(512)
    del one, two
    device.empty_cache()
    assert segments(device) == [(SMALL_SEGMENT, "small")]
    address = kept.data_ptr()
    del kept
    device.empty_cache()
    assert segments(device) == [] and not device.memory.is_mapped(address)
    assert device.memory.mapped == 0


def test_memory_that_was_given_back_and_taken_again_holds_nothing_old(device):
    tensor = torch.full((12 * MIB,), 7, dtype=torch.uint8)
    address = tensor.data_ptr()
    del tensor
    assert new(12 * MIB)[5] == 7, "a cached block keeps what lay in it"
    device.empty_cache()
    again = new(12 * MIB)
    assert again.data_ptr() == address and int(again.max()) == 0


def test_a_full_device_first_gives_back_its_cache(device):
    held = [new(30 * MIB) for _ in range(8)]
    held.clear()
    whole = new(200 * MIB)
    assert segments(device) == [(200 * MIB, "large")] and whole.numel() == 200 * MIB


def test_out_of_memory_names_what_was_asked_for_and_what_there_is(device):
    held = new(200 * MIB)
    message = f"{100 * MIB} bytes.*{56 * MIB} of the device's {256 * MIB} bytes are free"
    with pytest.raises(OutOfMemoryError, match=message):
        new(100 * MIB)
    assert new(50 * MIB).numel() == 50 * MIB and held.numel()


def test_a_capture_may_not_give_back_the_cache(device):
    held = new(200 * MIB)
    del held
    graph = device.graph()
    with pytest.raises(OutOfMemoryError), graph.capture():
        new(100 * MIB)
    with pytest.raises(CaptureError, match="empty_cache"), device.graph().capture():
        device.empty_cache()
    assert new(100 * MIB).numel() == 100 * MIB


def test_a_graph_allocates_from_a_pool_of_its_own(device):
    hole, _fence = new(1024), new(512)
    address = hole.data_ptr()
    del hole
    graph = device.graph()
    with graph.capture():
        inside = new(1024)
    outside = new(1024)
    assert outside.data_ptr() == address
    assert device.memory_map().find(inside.data_ptr()).pool == graph.pool() != (0, 0)
    assert [segment["segment_pool_id"] for segment in device.memory_snapshot()] == [(0, 0), graph.pool()]


def test_blocks_freed_during_a_capture_are_carved_again_by_it_and_by_graphs_that_share_the_pool(device):
    graph, other, stranger = device.graph(), None, device.graph()
    with graph.capture():
        one = new(1024)
        address = one.data_ptr()
        del one
        two = new(1024)
        assert two.data_ptr() == address
        del two
    other = device.graph(pool=graph.pool())
    with other.capture():
        three = new(1024)
    with stranger.capture():
        four = new(1024)
    assert three.data_ptr() == address != four.data_ptr()
    assert [block.generation for block in graph.blocks] == [1, 2]
    assert [(block.address, block.generation) for block in other.blocks] == [(address, 3)]


def test_a_pool_goes_when_its_last_graph_and_tensor_are_gone(device):
    graph = device.graph()
    with graph.capture():
        inside = new(1024)
    other = device.graph(pool=graph.pool())
    with other.capture():
        new(5)
    device.empty_cache()
    assert len(segments(device)) == 1
    graph.reset()
    del inside
    device.empty_cache()
    assert len(segments(device)) == 1, "the other graph still holds the pool"
    del other
    gc.collect()
    device.empty_cache()
    assert segments(device) == []


def test_a_pool_that_lost_its_last_graph_is_refused(device):
    graph = device.graph()
    with graph.capture():
        new(1024)
    pool = graph.pool()
    graph.reset()
    other = device.graph(pool=pool)
    with pytest.raises(CaptureError, match="lost its last graph"), other.capture():
        pass
    with device.graph().capture():
        new(1024)
    assert graph.pool() != pool


def test_a_tensor_of_a_pool_outlives_its_graph(device):
    graph = device.graph()
    with graph.capture():
        inside = torch.ones(4)
    graph.replay()
    graph.reset()
    device.empty_cache()
    assert inside.tolist() == [1, 1, 1, 1] and device.memory.is_mapped(inside.data_ptr(), 16)


def test_a_views_storage_keeps_the_block_and_its_death_frees_it(device):
    tensor = torch.zeros(100)
    address, view = tensor.data_ptr(), tensor[50:].view(5, 10)
    del tensor
    assert device.memory_map().find(address).state == "allocated"
    storage = view.untyped_storage()
    del view
    assert device.memory_map().find(address).state == "allocated"
    del storage
    assert device.memory_map().find(address).state == "freed"


def test_a_block_in_a_cycle_is_freed_by_the_collector_even_while_the_allocator_works(device):
    gc.disable()
    try:
        class Node:
            pass

        for _ in range(50):
            node = Node()
            node.me, node.tensor = node, torch.zeros(300)
        del node
        busy = device.counters
        assert busy.allocations - busy.frees == 50
        with device.allocator._lock:
            gc.collect()
        assert device.counters.frees == busy.frees
        kept = torch.zeros(3)
        assert device.counters.frees == busy.frees + 50 and kept.sum() == 0
    finally:
        gc.enable()


def test_generation_label_and_step_tell_who_was_at_an_address(device):
    device.step = 3
    tensor, _fence = device.label(torch.zeros(64), "logits"), new(1)
    address = tensor.data_ptr()
    block = device.memory_map().find(address + 8)
    assert (block.generation, block.label, block.since, block.state) == (1, "logits", 3, "allocated")
    device.step = 5
    del tensor
    block = device.memory_map().find(address)
    assert (block.generation, block.label, block.since, block.state) == (1, "logits", 5, "freed")
    device.step = 6
    again = torch.zeros(64)
    block = device.memory_map().find(again.data_ptr())
    assert again.data_ptr() == address
    assert (block.generation, block.label, block.since, block.state) == (2, None, 6, "allocated")


def test_the_history_tells_every_event_in_order_with_labels_given_later(device):
    device.step = 1
    tensor = new(700)
    device.step = 2
    device.label(tensor, "late")
    address = tensor.data_ptr()
    del tensor
    device.step = 3
    device.empty_cache()
    assert [(e.step, e.action, e.address, e.size, e.label, e.pool) for e in device.history] == [
        (1, "segment_alloc", address, SMALL_SEGMENT, None, (0, 0)),
        (1, "alloc", address, 700, "late", (0, 0)),
        (2, "free", address, 700, "late", (0, 0)),
        (3, "segment_free", address, SMALL_SEGMENT, None, (0, 0)),
    ]


def test_the_snapshot_has_pytorchs_shape_and_adds_up(device):
    tensors = [new(size) for size in (5, 3000, 2 * MIB, 11 * MIB)]
    del tensors[1]
    snapshot = device.memory_snapshot()
    want = {"device", "address", "total_size", "allocated_size", "active_size", "requested_size", "stream"}
    for segment in snapshot:
        assert want | {"segment_type", "segment_pool_id", "is_expandable", "frames", "blocks"} == set(segment)
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
        at = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == at
            at += block["size"]
    blocks = [block for segment in snapshot for block in segment["blocks"]]
    live = [block for block in blocks if block["state"] == "active_allocated"]
    assert sorted(block["address"] for block in live) == sorted(tensor.data_ptr() for tensor in tensors)
    assert {block["state"] for block in blocks} == {"active_allocated", "inactive"}
    assert sum(segment["requested_size"] for segment in snapshot) == 5 + 13 * MIB


def test_the_same_program_gets_the_same_addresses_on_every_device():
    def program():
        with Device(memory_bytes=64 * MIB) as device:
            torch.manual_seed(1)
            held = [torch.randn(size) for size in torch.randint(1, 70000, (60,)).tolist()]
            del held[::3]
            held += [torch.randn(size, size).softmax(-1) for size in (5, 50, 200)]
            return [tensor.data_ptr() - device.memory.base for tensor in held]

    assert program() == program()


def test_a_segment_is_no_neighbour_of_another(device):
    tensors = [new(12 * MIB), new(12 * MIB), new(512)]
    assert all(not device.memory.is_mapped(tensor.data_ptr() - 1) for tensor in tensors)


def test_random_traffic_keeps_the_books(device):
    """Blocks tile their segments, free neighbours are merged, and the free lists hold exactly the free blocks."""
    import random

    draw = random.Random(4)
    held = []
    for _ in range(3000):
        if held and draw.random() < 0.5:
            held.pop(draw.randrange(len(held)))
        elif device.memory.mapped < 150 * MIB:
            held.append(new(int(4 * 2 ** (draw.random() * 20))))
    allocator = device.allocator
    free = []
    for segment in device.memory_snapshot():
        before = None
        for block in segment["blocks"]:
            assert not (before == block["state"] == "inactive")
            before = block["state"]
            if before == "inactive":
                free.append((block["size"], block["address"]))
    listed = [entry for pool in allocator._pools.values() for entry in (*pool.small, *pool.large)]
    assert sorted(listed) == sorted(free)
    assert sorted(allocator.live) == sorted(tensor.data_ptr() for tensor in held)
    assert all(entries == sorted(entries) for pool in allocator._pools.values() for entries in (pool.small, pool.large))
