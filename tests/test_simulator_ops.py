"""Any torch code can be captured: each case gives, replayed on new inputs, bit for bit what it gives run eagerly."""

import pytest
import torch
import torch.nn.functional as F
from torch import arange, cat, einsum, empty, full, ones, ones_like, randint, randn, randperm, stack, where, zeros

from stalegraph.simulator import Device

F8 = torch.float8_e4m3fn

# name -> (inputs, function of them): the function returns a tensor or several, or changes its inputs in place.
CASES = {
    "linear": (lambda: (randn(3, 8), randn(5, 8), randn(5)), F.linear),
    "matmul": (lambda: (randn(2, 3, 8), randn(8, 5)), torch.matmul),
    "bmm_transposed": (lambda: (randn(2, 3, 8), randn(2, 5, 8)), lambda a, b: torch.bmm(a, b.transpose(1, 2))),
    "softmax": (lambda: (randn(4, 9),), lambda a: a.softmax(-1)),
    "bfloat16": (lambda: (randn(4, 9),), lambda a: (a.bfloat16() * 3).float()),
    "float8": (lambda: (randn(4, 8),), lambda a: a.to(F8).float() + 1),
    "float8_bytes": (lambda: (randn(4, 8),), lambda a: a.to(F8).view(torch.uint8)[1:].to(torch.int32) * 2),
    "embedding": (lambda: (randint(0, 6, (5,)), randn(6, 3)), F.embedding),
    "argmax": (lambda: (randn(4, 9),), lambda a: a.argmax(-1)),
    "topk": (lambda: (randn(4, 9),), lambda a: a.topk(3)),
    "sort": (lambda: (randn(4, 9),), lambda a: a.sort(-1, descending=True)),
    "max_dim": (lambda: (randn(4, 9),), lambda a: a.max(-1)),
    "sum": (lambda: (randn(4, 9),), lambda a: (a.sum(), a.sum(0), a.sum(-1, keepdim=True), a.mean())),
    "cat": (lambda: (randn(4), randn(3)), lambda a, b: cat([a, b, a])),
    "stack": (lambda: (randn(4), randn(4)), lambda a, b: stack([a, b], 1)),
    "split": (lambda: (randn(6, 2),), lambda a: [part * 2 for part in a.split([1, 5])]),
    "where": (lambda: (randn(4, 4),), lambda a: where(a > 0, a, 0.0)),
    "masked_fill": (lambda: (randn(4, 4),), lambda a: a.masked_fill(a > 0, -1.0)),
    "clamp": (lambda: (randn(9),), lambda a: a.clamp(-0.5, 0.5)),
    "integers": (lambda: (randint(0, 99, (7,)),), lambda a: (a // 4, a % 5, -(-a // 3), a.cumsum(0))),
    "index": (lambda: (randn(6, 3), randint(0, 6, (4,))), lambda a, i: a[i]),
    "index_two": (lambda: (randn(6, 3), randint(0, 3, (4,))), lambda a, i: a[i, i]),
    "gather": (lambda: (randn(6, 3), randint(0, 3, (6, 2))), lambda a, i: a.gather(1, i)),
    "index_put_": (lambda: (randn(6, 3), randint(0, 6, (4,)), randn(4, 3)), lambda a, i, b: a.index_put_((i,), b)),
    "index_copy_": (lambda: (randn(6, 3), randperm(6)[:2], randn(2, 3)), lambda a, i, b: a.index_copy_(0, i, b)),
    "index_add_": (lambda: (randn(6, 3), randperm(6)[:2], randn(2, 3)), lambda a, i, b: a.index_add_(0, i, b)),
    "scatter": (lambda: (randn(6, 3), randint(0, 3, (6, 1))), lambda a, i: a.scatter(1, i, 7.0)),
    "scatter_add_": (
        lambda: (randn(6, 3), randint(0, 3, (6, 1)), randn(6, 1)),
        lambda a, i, b: a.scatter_add_(1, i, b),
    ),
    "slice_assignment": (lambda: (randn(6, 3), randn(2, 3)), lambda a, b: a[1:3].copy_(b)),
    "number_assignment": (lambda: (randn(6, 3),), lambda a: (a.__setitem__((slice(0, 2), 1), 5.0), a)[1]),
    "mask_assignment": (lambda: (randn(6),), lambda a: (a.__setitem__(a > 0, 5.0), a)[1]),
    "fill": (lambda: (randn(6),), lambda a: (a[:2].zero_(), a[2:4].fill_(3), a)[2]),
    "out": (lambda: (randn(6), randn(6), empty(6)), lambda a, b, c: torch.add(a, b, out=c)),
    "empty_out": (lambda: (randn(6), randn(6)), lambda a, b: torch.add(a, b, out=empty(0))),
    "noncontiguous": (lambda: (randn(4, 6),), lambda a: (a.t()[::2] + 1, a.t().contiguous(), a[:, ::3].clone())),
    "expand": (lambda: (randn(4, 1),), lambda a: a.expand(4, 5) * 2 + a),
    "reshape_copies": (lambda: (randn(4, 6),), lambda a: a.t().reshape(-1) + 1),
    "zero_size": (lambda: (randn(4, 6),), lambda a: (a[:0] + 1, cat([a[:0], a]), empty(0, 3).sum())),
    "factories": (lambda: (randn(3),), lambda a: (arange(3) + a, zeros(3) + a, full((3,), 2.0) * a, ones_like(a))),
    "norms": (lambda: (randn(4, 8), randn(8)), lambda a, w: (F.layer_norm(a, (8,), w), F.rms_norm(a, (8,), w))),
    "silu_gelu": (lambda: (randn(4, 8),), lambda a: F.silu(a) * F.gelu(a)),
    "attention": (lambda: (randn(1, 2, 5, 8),), lambda a: F.scaled_dot_product_attention(a, a, a, is_causal=True)),
    "convolution": (lambda: (randn(1, 2, 7, 7), randn(3, 2, 3, 3)), lambda a, w: F.conv2d(a, w, padding=1)),
    "complex": (lambda: (randn(5, 2),), lambda a: torch.view_as_real(torch.view_as_complex(a).conj() * 2j)),
    "foreach": (lambda: (randn(5), randn(3)), lambda a, b: torch._foreach_add([a, b], 2.0)),
    "foreach_": (lambda: (randn(5), randn(3)), lambda a, b: (torch._foreach_mul_([a, b], 2.0), a, b)[1:]),
    "scan": (lambda: (randn(5, 5),), lambda a: (a.cumsum(-1), a.tril(), a.logsumexp(-1), a.std(), a.roll(1, 0))),
    "repeat": (lambda: (randn(5),), lambda a: (a.repeat(2, 2), a.repeat_interleave(3), einsum("i,j->ij", a, a))),
    "batch_norm": (
        lambda: (randn(4, 3), zeros(3), ones(3)),
        lambda a, m, v: (F.batch_norm(a, m, v, training=True), m, v),
    ),
    "vectors": (
        lambda: (randn(4), randn(4, 3), randn(3, 4), randn(3)),
        lambda v, a, w, b: (v @ a, w @ v, v @ v, F.linear(v, w), F.linear(v, w, b)),
    ),
    "views_in_place": (
        lambda: (randn(2, 3),),
        lambda a: (
            (a * 2).unsqueeze_(0), (a * 2).t_(), (a * 2).transpose_(0, 1), (a * 2)[:1].squeeze_(0) + 1,
            (a * 2).as_strided_((2,), (3,)), (a * 2).swapaxes_(0, 1) @ a, (a * 2).resize_as_(a[:1]),
        ),
    ),
    "resize_": (
        lambda: (randn(6),),
        lambda a: (
            a.view(2, 3).t().resize_(3, 2), a.view(2, 3).t().resize_as_(a.view(3, 2)), a[2:].resize_(3),
            (a * 2).view(2, 3).t().resize_(10)[:6], (a * 2)[2:].resize_(10)[:4], (a * 2).resize_(0).resize_(12)[:6],
            (a * 2)[:0].resize_as_(zeros(30))[:6], empty(0).set_(a * 2).resize_(0).resize_(7)[:6],
            (a * 2)[:4].resize_(1, 2, 1, 2, memory_format=torch.channels_last),
        ),
    ),
    "number_on_the_host": (lambda: (randn(5),), lambda a: a * torch.tensor(2.0)),
}  # fmt: skip


def flat(result):
    if isinstance(result, torch.Tensor):
        return [result]
    return [one for part in result for one in flat(part)]


def values(tensors):
    return [tensor.clone() for tensor in tensors]


def same(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def laid_out(tensor):
    return tensor.stride(), tensor.storage_offset()


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("name", ["views_in_place", "resize_"])
def test_what_changes_in_place_is_laid_out_as_on_the_host(name, captured):
    function = CASES[name][1]
    given = CASES[name][0]()
    want = list(map(laid_out, function(*values(given))))
    with Device() as device:
        static = [tensor.to(device.torch_device) for tensor in given]
        if captured:
            with device.graph().capture():
                got = function(*static)
        else:
            got = function(*static)
        assert list(map(laid_out, got)) == want


@pytest.mark.parametrize("inference", [False, True], ids=["normal", "inference"])
@pytest.mark.parametrize("name", CASES)
def test_a_replay_gives_what_eager_code_gives(name, inference):
    make, function = CASES[name]
    torch.manual_seed(5)
    first, second = make(), make()
    with torch.inference_mode(inference):
        want, want_inputs = [], []
        for given in (first, second):
            inputs = values(given)
            want.append(values(flat(function(*inputs))))
            want_inputs.append(inputs)
        with Device() as device:
            static = [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in first]
            held = [torch.empty(size, dtype=torch.uint8) for size in (40, 3000, 70000)]
            graph = device.graph()
            with graph.capture():
                results = flat(function(*static))
            for number, given in enumerate((first, second, first)):
                for to, tensor in zip(static, given):
                    to.copy_(tensor)
                graph.replay()
                for got, wanted in zip(results, want[number % 2], strict=True):
                    assert same(got, wanted)
                    assert got.numel() == 0 or device.is_device(got)
                assert all(map(same, static, want_inputs[number % 2]))
            assert not all(map(same, want[0], want[1])), "the inputs do not tell one replay from another"
            del held


@pytest.mark.parametrize("name", CASES)
def test_eager_code_gives_the_same_on_the_device_and_on_the_host(name):
    make, function = CASES[name]
    torch.manual_seed(5)
    given = make()
    want = flat(function(*values(given)))
    with Device() as device:
        got = flat(function(*[tensor.to(device.torch_device) for tensor in given]))
        assert all(map(same, got, want)) and len(got) == len(want)
        assert all(device.is_device(tensor) for tensor in got if tensor.numel())
