"""Code that knows nothing of the simulator runs on it: a transformer with a KV cache, training steps."""

import gc

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from stalegraph.errors import CaptureError
from stalegraph.simulator import Device

WIDTH, HEADS, CONTEXT, VOCABULARY = 32, 4, 48, 50


class Block(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH, device=device), nn.RMSNorm(WIDTH, device=device)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, device=device)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False, device=device)
        self.up, self.down = nn.Linear(WIDTH, 64, device=device), nn.Linear(64, WIDTH, device=device)

    def forward(self, x, cache, position):
        batch = x.shape[0]
        q, k, v = self.qkv(self.norm(x)).view(batch, 3, HEADS, -1).unbind(1)
        cache[0].index_copy_(1, position, k.unsqueeze(1))
        cache[1].index_copy_(1, position, v.unsqueeze(1))
        scores = torch.einsum("bhd,bthd->bht", q, cache[0]) / 8**0.5
        scores = scores.masked_fill(torch.arange(CONTEXT, device=x.device) > position, float("-inf"))
        mixed = torch.einsum("bht,bthd->bhd", scores.softmax(-1), cache[1]).reshape(batch, -1)
        x = x + self.out(mixed)
        return x + self.down(F.silu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Written for CUDA: the device is passed in, the decode step works on static buffers."""

    def __init__(self, batch, device):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, device=device)
        self.head = nn.Linear(WIDTH, VOCABULARY, device=device)
        self.blocks = nn.ModuleList(Block(device) for _ in range(2))
        self.caches = [torch.zeros(2, batch, CONTEXT, HEADS, WIDTH // HEADS, device=device) for _ in range(2)]
        self.token = torch.zeros(batch, dtype=torch.int64, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)

    @torch.no_grad()
    def step(self):
        x = self.embed(self.token)
        for block, cache in zip(self.blocks, self.caches):
            x = block(x, cache, self.position)
        logits = self.head(x)
        self.token.copy_(logits.argmax(-1))
        self.position.add_(1)
        return logits


def decode(device, steps, use_graph):
    torch.manual_seed(0)
    where = device.torch_device if device else torch.device("cpu")
    model = Transformer(3, where)
    model.token.copy_(torch.tensor([1, 2, 3]))
    said = []
    run = model.step
    if use_graph:
        graph = device.graph()
        with graph.capture():
            logits = model.step()
        run = graph.replay
    for _ in range(steps):
        churn = [torch.zeros(17 + 100 * n) for n in range(3)] if device else None
        run()
        said.append(model.token.tolist())
        del churn
    return said, (logits.clone() if use_graph else None)


def test_a_transformer_says_the_same_on_the_host_on_the_device_and_captured():
    host, _ = decode(None, 30, use_graph=False)
    with Device(memory_bytes=64 << 20) as device:
        eager, _ = decode(device, 30, use_graph=False)
    with Device(memory_bytes=64 << 20) as device:
        graph, logits = decode(device, 30, use_graph=True)
        assert device.stale_reads == [] and logits.shape == (3, VOCABULARY)
    assert host == eager == graph
    assert len({tuple(tokens) for tokens in host}) > 3, "the text has to vary for the comparison to mean something"


@pytest.mark.parametrize("kind", ["sgd", "momentum", "foreach", "adamw by hand"])
def test_a_captured_training_step_equals_eager_training(kind):
    def train(captured):
        with Device(memory_bytes=64 << 20) as device:
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 3))
            x, y = torch.empty(8, 6), torch.empty(8, dtype=torch.int64)
            step = make_step(kind, model, x, y)
            batches = [(torch.randn(8, 6), torch.randint(0, 3, (8,))) for _ in range(6)]
            x.copy_(batches[0][0])
            y.copy_(batches[0][1])
            step()  # warm-up: gradients and momentum come to be outside of the capture
            run, losses = step, []
            if captured:
                graph = device.graph()
                with graph.capture():
                    loss = step()
                run = graph.replay
            for given, wanted in batches:
                x.copy_(given)
                y.copy_(wanted)
                got = run()
                losses.append((loss if captured else got).item())
            return losses, [device.to_host(parameter) for parameter in model.parameters()]

    eager, captured = train(False), train(True)
    assert eager[0] == captured[0] and len(set(eager[0])) == 6
    assert all(torch.equal(one, other) for one, other in zip(eager[1], captured[1]))


def make_step(kind, model, x, y):
    if kind == "adamw by hand":
        parameters = list(model.parameters())
        means = [torch.zeros_like(p) for p in parameters]

        def update():
            with torch.no_grad():
                for p, m in zip(parameters, means):
                    m.lerp_(p.grad, 0.1)
                    p.mul_(0.999).sub_(m.sign(), alpha=0.01)

        clear = model.zero_grad
    else:
        optimizer = torch.optim.SGD(
            model.parameters(), lr=0.1, momentum=0.9 if kind == "momentum" else 0.0, foreach=kind == "foreach"
        )
        update, clear = optimizer.step, optimizer.zero_grad

    def step():
        clear(set_to_none=False)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        update()
        return loss.detach()

    return step


def test_gradients_live_on_the_device():
    with Device(memory_bytes=64 << 20) as device:
        weight = torch.randn(4, 4, requires_grad=True)
        loss = (torch.randn(2, 4) @ weight).pow(2).sum()
        loss.backward()
        assert device.is_device(weight.grad) and weight.grad.shape == (4, 4)
        with pytest.raises(CaptureError), device.graph().capture():
            torch.nn.utils.clip_grad_norm_([weight], 1.0, error_if_nonfinite=True)


def test_a_model_built_on_the_host_is_moved_and_captured():
    torch.manual_seed(4)
    model, given = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3)), torch.randn(2, 6)
    want = model(given)
    with Device(memory_bytes=64 << 20) as device, torch.inference_mode():
        model.to(device.torch_device)
        static, graph = given.to(device.torch_device), device.graph()
        with graph.capture():
            got = model(static)
        graph.replay()
        assert torch.equal(got, want) and all(device.is_device(parameter) for parameter in model.parameters())
        assert [node.name for node in graph.nodes] == ["aten::addmm", "aten::gelu", "aten::addmm"]


def test_a_capture_without_moving_the_model_says_which_tensor_is_on_the_host():
    model = nn.Linear(6, 3)
    with Device(memory_bytes=64 << 20) as device:
        x = torch.zeros(2, 6)
        message = r"aten::addmm: self of shape \(3,\) is on the host"
        with pytest.raises(CaptureError, match=message), device.graph().capture():
            model(x)


def test_a_long_run_leaves_nothing_behind():
    """As many blocks live after 300 steps as after 30: neither tensors nor nodes are kept."""
    with Device(memory_bytes=64 << 20) as device:
        torch.manual_seed(0)
        model = Transformer(1, device.torch_device)

        def live(steps):
            for _ in range(steps):
                model.position.zero_()
                model.step()
            gc.collect()
            counted = device.counters
            return counted.allocations - counted.frees, device.memory.mapped

        assert live(30) == live(100)
