"""The simulated device: where tensors live, what moves them, what it counts, and how it refuses."""

import copy
import gc

import numpy as np
import pytest
import torch

from stalegraph.errors import CaptureError, DeviceAssertError, IllegalAddressError, UsageError
from stalegraph.simulator import Device, current_device


@pytest.fixture
def device():
    with Device(memory_bytes=64 << 20) as device:
        yield device


# -- where tensors live

FACTORIES = {
    "zeros": lambda: torch.zeros(3),
    "empty": lambda: torch.empty(3, 2),
    "empty_strided": lambda: torch.empty_strided((2, 3), (1, 2)),
    "rand": lambda: torch.rand(3),
    "randn with generator": lambda: torch.randn(3, generator=torch.Generator().manual_seed(1)),
    "arange": lambda: torch.arange(5, device="cpu"),
    "full": lambda: torch.full((2,), 1.5, dtype=torch.float64),
    "eye": lambda: torch.eye(3),
    "tensor": lambda: torch.tensor([1, 2, 3]),
    "number": lambda: torch.tensor(3.0),
    "as_tensor": lambda: torch.as_tensor([1.0, 2.0]),
    "ones_like": lambda: torch.ones_like(torch.zeros(2, dtype=torch.int32)),
    "new_empty": lambda: torch.zeros(2).new_empty(4),
    "parameter": lambda: torch.nn.Linear(3, 2).weight,
    "result": lambda: torch.zeros(2) + 1,
    "deep copy": lambda: copy.deepcopy(torch.ones(3)),
    "channels last": lambda: torch.empty(1, 2, 3, 4, memory_format=torch.channels_last),
}  # fmt: skip


@pytest.mark.parametrize("name", FACTORIES)
def test_what_is_made_on_the_device_lives_in_its_memory(device, name):
    before = device.counters
    tensor = FACTORIES[name]()
    assert device.torch_device == torch.device("cpu") == tensor.device
    assert device.memory.base <= tensor.data_ptr() < device.memory.base + device.memory.size
    assert device.memory_map().find(tensor.data_ptr()).address == tensor.untyped_storage().data_ptr()
    assert device.memory.is_mapped(tensor.data_ptr(), tensor.nbytes)
    assert device.counters.allocations > before.allocations


def test_a_deep_copy_of_a_model_is_a_model_on_the_device(device):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    other = copy.deepcopy(model)
    assert all(device.is_device(parameter) and parameter.requires_grad for parameter in other.parameters())
    given = torch.randn(5, 3)
    assert torch.equal(model(given), other(given))


def views(base):
    """Deep copies of a tensor and views of it, with what shows whether they share their bytes."""
    copied = copy.deepcopy({"base": base, "row": base[1], "turned": base.t(), "wide": base[:, :1].expand(3, 5)})
    copied["base"].fill_(7)
    return {
        name: (one.tolist(), one.stride(), one.storage_offset(), one.untyped_storage().nbytes())
        for name, one in copied.items()
    }


def one_view(base):
    row = copy.deepcopy(base[1])
    return row.storage_offset(), row.as_strided((12,), (1,), 0).tolist()


def bytes_beside_numbers(base):
    raw = torch.arange(10, dtype=torch.uint8)
    copied = copy.deepcopy({"header": raw[:8].view(torch.float64), "tail": raw[8:]})
    return copied["tail"].tolist(), copied["header"].untyped_storage().nbytes()


def overlapping(base):
    copied = copy.deepcopy(base.as_strided((4, 3), (1, 1)))
    return copied.tolist(), copied.stride()


def with_gradient(base):
    base.requires_grad_(True).sum().backward()
    copied = copy.deepcopy(base)
    base.grad.zero_()
    return copied.requires_grad, copied.grad.tolist()


def conjugate(base):
    number = torch.complex(base, base).conj()
    return copy.deepcopy(number).tolist(), copy.deepcopy(number.imag).tolist()


@pytest.mark.parametrize(
    "what",
    [views, one_view, bytes_beside_numbers, overlapping, with_gradient, conjugate],
    ids=lambda function: function.__name__,
)
def test_a_deep_copy_is_what_it_is_on_the_host(what):
    want = what(torch.arange(12.0).reshape(3, 4))
    with Device():
        assert what(torch.arange(12.0).reshape(3, 4)) == want


def test_what_hangs_on_a_deep_copy_is_on_the_device_too(device):
    source = torch.ones(3, requires_grad=True)
    source.sum().backward()
    assert all(device.is_device(one) for copied in [copy.deepcopy(source)] for one in (copied, copied.grad))


def test_a_deep_copy_can_be_captured(device):
    source = torch.ones(3)
    graph = device.graph()
    with graph.capture():
        doubled = copy.deepcopy(source) * 2
    source.fill_(5)
    graph.replay()
    assert doubled.tolist() == [10, 10, 10]


def test_each_allocation_has_a_storage_of_its_own_and_views_share_it(device):
    one, two = torch.zeros(8), torch.zeros(8)
    assert one.untyped_storage().data_ptr() != two.untyped_storage().data_ptr()
    assert one.untyped_storage().nbytes() == 32
    view = one[2:].view(3, 2).t()
    view.fill_(5)
    assert one.tolist() == [0, 0, 5, 5, 5, 5, 5, 5] and view.untyped_storage()._cdata == one.untyped_storage()._cdata


def test_what_is_empty_takes_no_memory(device):
    before = device.counters
    for tensor in (torch.empty(0), torch.zeros(3, 0) + 1, torch.tensor([])):
        assert tensor.numel() == 0 and tensor.sum() == 0
    after = device.counters - before
    assert after.allocations == 2 * 3, "the sums and the comparisons allocate, the empty tensors do not"


def test_an_empty_tensor_holds_what_lay_there(device):
    tensor, _fence = torch.full((50,), 7.0), torch.zeros(1)
    address = tensor.data_ptr()
    del tensor
    again = torch.empty(50)
    assert again.data_ptr() == address and again.tolist() == [7.0] * 50


def test_dtypes_all_fit(device):
    for dtype in (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
        torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64,
    ):  # fmt: skip
        tensor = torch.tensor([[1, 0], [0, 1]]).to(dtype)
        assert tensor.dtype == dtype and device.is_device(tensor)
        assert tensor.float().tolist() == [[1, 0], [0, 1]] if not dtype.is_complex else True


def test_other_devices_are_left_alone(device):
    tensor = torch.empty(3, device="meta")
    assert (tensor + 1).device.type == "meta" and device.counters.allocations == 0


def test_resize_moves_a_tensor_that_outgrows_its_block(device):
    tensor = torch.arange(4.0)
    address = tensor.data_ptr()
    tensor.resize_(2)
    assert tensor.data_ptr() == address and tensor.tolist() == [0, 1]
    tensor.resize_(400)
    assert tensor.data_ptr() != address and tensor[:2].tolist() == [0, 1] and device.is_device(tensor)
    assert device.memory_map().find(address).state == "freed"


# -- host and device


def test_code_in_host_runs_on_the_host(device):
    given = torch.arange(3)
    before = device.counters
    with device.host():
        tensor = torch.tensor([1, 2]) + 1
        assert not device.is_device(tensor) and tensor.tolist() == [2, 3]
        assert (given + 1).tolist() == [1, 2, 3]
    assert device.counters == before and device.is_device(torch.zeros(1))
    assert not device.is_device(tensor * 2), "what is all on the host stays there"


def test_to_host_and_cpu_give_copies_on_the_host(device):
    tensor = torch.arange(4)
    for copied in (device.to_host(tensor), tensor.cpu()):
        tensor.fill_(9)
        assert copied.tolist() == [0, 1, 2, 3] and not device.is_device(copied)
        tensor.copy_(torch.arange(4))


def test_to_the_device_moves_host_tensors(device):
    with device.host():
        given, model = torch.randn(3), torch.nn.Linear(3, 2)
    moved = given.to(device.torch_device)
    assert device.is_device(moved) and torch.equal(moved, given) and not device.is_device(given)
    assert device.is_device(given.to(device.torch_device, torch.float16))
    assert device.is_device(given.to(moved))
    assert not device.is_device(given.to(torch.float16)), "a type alone moves nothing"
    model.to(device.torch_device)
    assert device.is_device(model.weight) and device.is_device(model(moved))
    assert moved.to(device.torch_device) is moved


def test_numpy_memory_stays_where_numpy_has_it(device):
    array = np.arange(3.0)
    tensor = torch.from_numpy(array)
    array[0] = 5
    assert tensor[0] == 5 and not device.is_device(tensor) and device.is_device(tensor.to(device.torch_device))


def test_host_operands_of_eager_code_are_accepted(device):
    with device.host():
        host = torch.arange(3)
    result = torch.zeros(3) + host
    assert device.is_device(result) and result.tolist() == [0, 1, 2]
    target = torch.zeros(3, dtype=torch.int64)
    target.copy_(host)
    assert target.tolist() == [0, 1, 2]


def test_pinned_memory_comes_from_a_cache_by_powers_of_two(device):
    first = device.pin(torch.arange(300))
    address = first.data_ptr()
    assert first.is_pinned() and not torch.zeros(2).is_pinned() and address in device.pinned
    assert device.pinned_map().find(address).size == 4096 and not device.is_device(first)
    assert first.tolist() == list(range(300))
    del first
    assert device.pinned_map().find(address).state == "freed"
    second = device.pin(torch.zeros(500, dtype=torch.float64))
    assert second.data_ptr() == address and device.pinned_map().find(address).generation == 2
    third = torch.zeros(3).cpu().pin_memory()
    fourth = torch.empty(3, pin_memory=True)
    assert third.is_pinned() and fourth.is_pinned() and third.data_ptr() != fourth.data_ptr()


# -- what it counts


def test_counters_count_what_the_host_has_the_device_do(device):
    def cost(action):
        before = device.counters
        kept = action()
        spent = device.counters - before
        del kept
        return spent.allocations, spent.launches, spent.copies, spent.bytes_copied

    x, y = torch.zeros(4, 8), torch.zeros(8)
    assert cost(lambda: x + 1) == (1, 1, 0, 0)
    assert cost(lambda: x.add_(1)) == (0, 1, 0, 0)
    assert cost(lambda: x.view(-1)[3:].t()) == (0, 0, 0, 0)
    assert cost(lambda: torch.empty(4)) == (1, 0, 0, 0)
    assert cost(lambda: x[0].copy_(y)) == (0, 0, 1, 32)
    assert cost(lambda: x[:, 0].copy_(y[:4])) == (0, 1, 0, 0), "strided copies are kernels"
    assert cost(lambda: x.clone()) == (1, 0, 1, 128)
    assert cost(lambda: x.half()) == (1, 1, 0, 0), "a change of type is a kernel"
    assert cost(lambda: y[0].item()) == (0, 0, 1, 4)
    assert cost(lambda: torch.tensor([1.0, 2.0])) == (1, 0, 1, 8)
    assert cost(lambda: device.to_host(y)) == (0, 0, 1, 32)
    frees = device.counters
    del y
    assert (device.counters - frees).frees == 1


def test_counters_of_a_replay_are_one_launch(device):
    x, graph = torch.zeros(3), device.graph()
    with graph.capture():
        y = (x + 1) * 2
    before = device.counters
    graph.replay()
    spent = device.counters - before
    assert (spent.launches, spent.replays, spent.allocations, spent.frees) == (1, 1, 0, 0) and y[0] == 2


def test_counters_do_not_change_once_taken(device):
    before = device.counters
    torch.zeros(3)
    assert before.allocations == 0 and before.snapshot() == before


def test_looking_at_a_tensor_costs_nothing(device):
    tensor, before = torch.arange(3), device.counters
    assert repr(tensor) == "tensor([0, 1, 2])" and device.counters == before


# -- memory by address


def test_memory_is_read_and_written_by_address(device):
    tensor = torch.arange(4, dtype=torch.int32)
    assert device.memory.read(tensor.data_ptr() + 4, 8).view(torch.int32).tolist() == [1, 2]
    device.memory.write(tensor.data_ptr() + 8, torch.tensor([7, 8], dtype=torch.int32))
    assert tensor.tolist() == [0, 1, 7, 8]
    kept = device.memory.read(tensor.data_ptr(), 4)
    tensor.fill_(3)
    assert kept.view(torch.int32).tolist() == [0]


@pytest.mark.parametrize("offset", [-1, 2 << 20, 1 << 40], ids=["before", "behind", "far"])
def test_addresses_outside_of_segments_are_illegal(device, offset):
    tensor = torch.zeros(4)
    for action in (
        lambda at: device.memory.read(at, 4),
        lambda at: device.memory.write(at, torch.zeros(1)),
    ):
        with pytest.raises(IllegalAddressError, match=f"0x{tensor.data_ptr() + offset:x}"):
            action(tensor.data_ptr() + offset)
    with pytest.raises(IllegalAddressError):
        device.memory.read(tensor.data_ptr(), 3 << 20)


# -- errors that stay


def embedding(device):
    return torch.nn.functional.embedding(torch.tensor([9]), torch.zeros(3, 2))


def indexing(device):
    return torch.zeros(3)[torch.tensor([1, 5])]


def gathering(device):
    return torch.zeros(3).gather(0, torch.tensor([4]))


def copying(device):
    return torch.zeros(3).index_copy_(0, torch.tensor([4]), torch.zeros(1))


@pytest.mark.parametrize("kernel", [embedding, indexing, gathering, copying])
def test_an_index_out_of_range_in_the_data_is_a_device_assert_that_stays(device, kernel):
    tensor = torch.zeros(2)
    with pytest.raises(DeviceAssertError, match="device-side assert"):
        kernel(device)
    for call in (lambda: tensor + 1, device.synchronize, lambda: device.to_host(tensor), lambda: torch.empty(3)):
        with pytest.raises(DeviceAssertError, match="failed earlier"):
            call()
    with pytest.raises(DeviceAssertError), device.graph().capture():
        pass
    device.close()
    assert tensor.tolist() == [0, 0]


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.zeros(3)[5],
        lambda: torch.zeros(3).sum(4),
        lambda: torch.zeros(3) + torch.zeros(4),
        lambda: torch.zeros(3).view(5),
        lambda: torch.zeros(3, 2) @ torch.zeros(3, 2),
    ],
)
def test_a_mistake_in_the_call_is_an_ordinary_error(device, call):
    with pytest.raises((RuntimeError, IndexError)) as caught:
        call()
    assert not isinstance(caught.value, DeviceAssertError)
    device.synchronize()
    assert torch.ones(3).sum() == 3


# -- life


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"sm_count": 0}, "sm_count is 0; allowed: an integer from 1 to"),
        ({"sm_count": 132.0}, "sm_count is 132.0"),
        ({"sm_count": True}, "sm_count is True"),
        ({"memory_bytes": 100}, "memory_bytes is 100; allowed: an integer from 4194304 to"),
        ({"memory_bytes": 1 << 50}, "memory_bytes is"),
        ({"memory_bytes": "1G"}, "memory_bytes is '1G'"),
        ({"strict": 1}, "strict is 1"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(UsageError, match=message):
        Device(**arguments)


def test_one_device_at_a_time(device):
    with pytest.raises(UsageError, match="one at a time"), Device():
        pass
    with pytest.raises(UsageError, match="one at a time"), device:
        pass
    assert current_device() is device and device.is_device(torch.zeros(1))


def test_a_device_ends_with_its_block():
    with Device(memory_bytes=8 << 20) as device:
        tensor = torch.arange(3)
    assert current_device() is None and not device.is_device(torch.zeros(1))
    assert tensor.tolist() == [0, 1, 2] and (tensor + 1).tolist() == [1, 2, 3]
    with pytest.raises(UsageError, match="closed"), device:
        pass
    del tensor
    with pytest.raises(UsageError, match="closed"):
        device.synchronize()


def test_a_device_ends_with_an_error_too():
    with pytest.raises(ZeroDivisionError), Device():
        1 / 0
    with Device() as device:
        assert current_device() is device


def test_tensors_outlive_their_device():
    with Device(memory_bytes=8 << 20) as device:
        tensors = [torch.full((1000,), float(i)) for i in range(20)]
    del device
    gc.collect()
    assert [tensor[999].item() for tensor in tensors] == list(range(20))
    del tensors[::2]
    gc.collect()
    assert tensors[0].sum() == 1000


def test_names(device):
    tensor = torch.zeros(4)
    assert device.label(tensor[2:], "mask") is not None
    assert device.memory_map().find(tensor.data_ptr()).label == "mask"
    pinned = device.label(device.pin(tensor), "staging")
    assert device.pinned_map().find(pinned.data_ptr()).label == "staging"
    with device.host():
        host = torch.zeros(4)
    with pytest.raises(UsageError, match="pageable host memory"):
        device.label(host, "nothing")


def test_closing_inside_the_block_ends_the_simulation(device):
    tensor = torch.zeros(3)
    device.close()
    assert not device.is_device(torch.zeros(3)) and (tensor + 1).tolist() == [1, 1, 1]
    with pytest.raises(UsageError, match="closed"):
        device.empty_cache()
    with pytest.raises(CaptureError, match="closed"), device.graph().capture():
        pass
