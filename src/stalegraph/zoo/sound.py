"""Programs with CUDA graphs and no bug, as people write them: an audit that finds something in one is wrong.

Each is plain torch code for "cuda", on a GPU or inside `simulated_cuda()`, and returns whether its output was right.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch

from stalegraph.audit import declare

PROGRAMS = {}
GPU_ONLY: set[str] = set()


def program(function, gpu_only: bool = False):
    PROGRAMS[function.__name__] = function
    if gpu_only:
        GPU_ONLY.add(function.__name__)
    return function


def churn(held: list) -> None:
    """Tensors of odd sizes that stay, so that no fresh one lands where an old one lay."""
    held += [torch.full((count,), 9.0, device="cuda") for count in (256, 77, 1031, 300)]


def capture(function, pool=None):
    """Warm up on a side stream, as torch asks for, then capture; (graph, what `function` returned)."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        out = function()
    return graph, out


def close(left, right) -> bool:
    return torch.allclose(left.float(), right.float(), rtol=1e-3, atol=1e-4)


class Block(torch.nn.Module):
    """One transformer block, 32 wide, 4 heads."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = torch.nn.LayerNorm(32), torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)
        self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

    def forward(self, x):
        batch, tokens, width = x.shape
        q, k, v = (part.view(batch, tokens, 4, 8).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        weights = torch.softmax(q @ k.transpose(-1, -2) * 8**-0.5, -1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


@program
def transformer():
    """A small transformer with a static input, copied into before each replay."""
    held, model = [], torch.nn.Sequential(Block(), Block()).cuda().eval()
    with torch.no_grad():
        static = torch.randn(2, 8, 32, device="cuda")
        graph, out = capture(lambda: model(static))
        right = True
        for _ in range(3):
            fresh = torch.randn(2, 8, 32, device="cuda")
            churn(held)
            static.copy_(fresh)
            graph.replay()
            right &= close(out, model(fresh))
    return right


@program
def graphed_callables():
    """make_graphed_callables around two modules that train, forward and backward graphs in one pool."""
    torch.manual_seed(0)
    first, second = torch.nn.Linear(16, 32).cuda(), torch.nn.Linear(32, 4).cuda()
    twins = copy.deepcopy(first), copy.deepcopy(second)
    graphed = torch.cuda.make_graphed_callables(
        (first, second),
        ((torch.randn(8, 16, device="cuda"),), (torch.randn(8, 32, device="cuda", requires_grad=True),)),
    )
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.05)
    twin = torch.optim.SGD([*twins[0].parameters(), *twins[1].parameters()], lr=0.05)
    held, right = [], True
    for _ in range(4):
        x = torch.randn(8, 16, device="cuda")
        churn(held)
        for modules, update in ((graphed, optimizer), (twins, twin)):
            update.zero_grad()
            loss = modules[1](torch.relu(modules[0](x))).square().mean()
            loss.backward()
            update.step()
        right &= close(first.weight, twins[0].weight)
    return right


@program
def graphed_optimizer():
    """A whole training step, optimizer included, in one graph."""
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 4).cuda()
    twin = copy.deepcopy(model)
    updates = [torch.optim.Adam(one.parameters(), lr=0.01, capturable=True) for one in (model, twin)]
    x, y = torch.randn(8, 16, device="cuda"), torch.randn(8, 4, device="cuda")

    def step(model, update):
        update.zero_grad(set_to_none=False)
        loss = (model(x) - y).square().mean()
        loss.backward()
        update.step()
        return loss

    step(twin, updates[1])
    step(twin, updates[1])
    graph, _ = capture(lambda: step(model, updates[0]))
    held, right = [], True
    for _ in range(4):
        x.copy_(torch.randn(8, 16, device="cuda"))
        churn(held)
        graph.replay()
        step(twin, updates[1])
        right &= close(model.weight, twin.weight)
    return right


@program
def batch_sizes_in_one_pool():
    """Graphs for batches of 8, 4, 2 and 1 that share a pool and slices of the same static buffers, as vLLM has them."""
    weight = torch.randn(16, 16, device="cuda")
    tokens, lengths = torch.zeros(8, 16, device="cuda"), torch.zeros(8, device="cuda")
    graphs, pool = {}, None
    for size in (8, 4, 2, 1):
        graphs[size] = capture(lambda size=size: torch.relu(tokens[:size] @ weight) * lengths[:size, None], pool)
        pool = pool or graphs[size][0].pool()
    held, right = [], True
    for size in (3, 8, 1, 2, 5, 4):
        batch, many = torch.randn(size, 16, device="cuda"), torch.full((size,), float(size), device="cuda")
        churn(held)
        tokens[:size].copy_(batch)
        lengths[:size].copy_(many)
        padded = min(one for one in graphs if one >= size)
        lengths[size:padded].zero_()
        graph, out = graphs[padded]
        graph.replay()
        right &= close(out[:size], torch.relu(batch @ weight) * many[:, None])
    return right


@program
def cache_written_in_place():
    """A decode step that appends to a cache at a position which lives on the device and which the graph advances."""
    cache, position = torch.zeros(16, 4, device="cuda"), torch.zeros(1, dtype=torch.long, device="cuda")
    key = torch.zeros(1, 4, device="cuda")

    def step():
        cache.index_copy_(0, position, key)
        position.add_(1)
        return cache.sum(0)

    graph, out = capture(step)
    cache.zero_()
    position.zero_()
    held, total = [], torch.zeros(4, device="cuda")
    for k in range(5):
        churn(held)
        key.fill_(k + 1.0)
        total += k + 1.0
        graph.replay()
    return close(out, total)


@torch.library.custom_op("stalegraph_zoo::scale_into", mutates_args=("out",))
def scale_into(x: torch.Tensor, factor: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x * factor)


@program
def custom_op():
    """An op of the user's own that writes into a buffer it is given."""
    x, factor = torch.ones(64, device="cuda"), torch.ones(1, device="cuda")
    out = torch.zeros(64, device="cuda")
    graph, _ = capture(lambda: scale_into(x, factor, out))
    held, right = [], True
    for k in range(3):
        churn(held)
        factor.fill_(k + 2.0)
        graph.replay()
        right &= close(out, x * (k + 2.0))
    return right


@program
def chain_of_graphs():
    """Three graphs with pools of their own, each reading the last one's result, which is kept."""
    x = torch.ones(64, device="cuda")
    first, a = capture(lambda: x * 2)
    second, b = capture(lambda: a + 1)
    third, c = capture(lambda: (a * b).sum())
    held, right = [], True
    for k in range(3):
        churn(held)
        x.fill_(k + 1.0)
        for graph in (first, second, third):
            graph.replay()
        right &= close(c, (x * 2 * (x * 2 + 1)).sum())
    return right


@program
def chain_in_one_pool():
    """Graphs in one pool, replayed in the order of capture; what lies between is dropped, as cudagraph trees do."""
    x = torch.ones(64, device="cuda")
    first, a = capture(lambda: x * 2)
    pool = first.pool()
    second = torch.cuda.CUDAGraph()
    with torch.cuda.graph(second, pool=pool):
        b = a + 1
    del a
    third = torch.cuda.CUDAGraph()
    with torch.cuda.graph(third, pool=pool):
        c = b * 3
    del b
    held, right = [], True
    for k in range(3):
        churn(held)
        x.fill_(k + 1.0)
        for graph in (first, second, third):
            graph.replay()
        right &= close(c, (x * 2 + 1) * 3)
    return right


@program
def dropout():
    """Random numbers inside the graph; torch keeps their state on the device."""
    x = torch.ones(1024, device="cuda")
    graph, out = capture(lambda: torch.nn.functional.dropout(x, 0.5))
    held = []
    for _ in range(3):
        churn(held)
        graph.replay()
    return bool(((out == 0) | (out == 2)).all())


@program
def pinned_input():
    """A captured copy from pinned memory that the host keeps and rewrites before each replay."""
    pinned = torch.zeros(64).pin_memory()
    x = torch.zeros(64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.copy_(pinned, non_blocking=True)
        out = x * 2
    held, right = [], True
    for k in range(3):
        churn(held)
        pinned.fill_(k + 1.0)
        graph.replay()
        torch.cuda.synchronize()
        right &= close(out, torch.full((64,), 2 * (k + 1.0), device="cuda"))
    return right


@program
def padded_batches():
    """Only the front of the static buffer is written; its tail is padding that never changes."""
    static = torch.zeros(8, 16, device="cuda")
    graph, out = capture(lambda: static.sum(1))
    held, right = [], True
    for size in (3, 5, 2):
        batch = torch.randn(size, 16, device="cuda")
        churn(held)
        static[:size].copy_(batch)
        graph.replay()
        right &= close(out[:size], batch.sum(1))
    return right


@dataclass
class StepMetadata:
    seq_lens: torch.Tensor
    plan: torch.Tensor


@program
def declared_metadata():
    """Metadata in a dataclass made anew each step around the same persistent buffers, and told to the watch."""
    lengths, plan = torch.zeros(8, device="cuda"), torch.zeros(64, device="cuda")
    current = {}
    declare(
        inputs=lambda: current,
        scalars={"longest": lambda: int(current["step"].seq_lens[0].item()) if current else None},
    )

    def build(k):
        lengths.copy_(torch.full((8,), 17.0 + k, device="cuda"))
        plan.copy_(torch.full((64,), 0.5 * k, device="cuda"))
        current["step"] = StepMetadata(lengths[:8], plan[:64])

    build(0)
    graph, out = capture(lambda: current["step"].plan * current["step"].seq_lens.sum())
    held, right = [], True
    for k in range(4):
        churn(held)
        build(k)
        graph.replay()
        right &= close(out, torch.full((64,), 0.5 * k * 8 * (17.0 + k), device="cuda"))
    return right


@program
def captured_again():
    """A larger input comes: the old graph and its buffers are thrown away and a new one is captured."""
    right, held = True, []
    for size in (64, 128, 256):
        static = torch.zeros(size, device="cuda")
        graph, out = capture(lambda: torch.sin(static))
        for k in range(2):
            churn(held)
            static.fill_(k + 0.5)
            graph.replay()
            right &= close(out, torch.sin(static))
        graph.reset()
        del graph, out, static
    return right


@program
def eager_in_between():
    """Eager code reads and writes the graph's output between replays, and keeps copies."""
    x = torch.ones(64, device="cuda")
    graph, out = capture(lambda: x * 3)
    held, copies = [], []
    for k in range(3):
        x.fill_(k + 1.0)
        graph.replay()
        copies.append(out.clone())
        out.add_(1)
        churn(held)
        x = x.add_(out.mean() * 0)
    return all(close(one, torch.full((64,), 3 * (k + 1.0), device="cuda")) for k, one in enumerate(copies))


@program
def weights_reloaded():
    """New weights arrive and are copied into the captured parameters."""
    model, other = torch.nn.Linear(16, 4).cuda(), torch.nn.Linear(16, 4).cuda()
    x = torch.randn(2, 16, device="cuda")
    with torch.no_grad():
        graph, out = capture(lambda: model(x))
        graph.replay()
        model.load_state_dict(other.state_dict())
        held = []
        churn(held)
        graph.replay()
        return close(out, other(x))


@program
def reserved_workspace():
    """A workspace reserved for the largest request before capture; smaller ones take a slice."""
    caches = {"workspace": torch.zeros(1024, device="cuda")}
    declare(caches=lambda: caches)
    x = torch.ones(256, device="cuda")

    def step():
        scratch = caches["workspace"][:256]
        scratch.copy_(x)
        scratch.mul_(2)
        return scratch + 0

    graph, out = capture(step)
    held, right = [], True
    for k in range(3):
        churn(held)
        x.fill_(k + 1.0)
        graph.replay()
        caches["workspace"][:512].fill_(-1)  # another user of the same workspace
        right &= close(out, torch.full((256,), 2 * (k + 1.0), device="cuda"))
    return right


@program
def same_names_again():
    """Loop variables and temporaries that once were a graph's inputs stand for other tensors later."""
    layers = [torch.nn.Linear(8, 8).cuda() for _ in range(3)]
    x = torch.randn(2, 8, device="cuda")
    graphs, outs = [], [x]
    with torch.no_grad():
        for layer in layers:
            source = outs[-1]
            graph, out = capture(lambda: torch.tanh(layer(source)))
            graphs.append(graph)
            outs.append(out)
        held, right = [], True
        for _ in range(3):
            fresh = torch.randn(2, 8, device="cuda")
            churn(held)
            x.copy_(fresh)
            for graph in graphs:
                graph.replay()
            for layer in layers:
                fresh = torch.tanh(layer(fresh))
            right &= close(outs[-1], fresh)
    return right


def compiled_reduce_overhead():
    """torch.compile with mode="reduce-overhead": Inductor's kernels in cudagraph trees."""
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)).cuda().eval()
    compiled = torch.compile(model, mode="reduce-overhead")
    held, right = [], True
    with torch.no_grad():
        for _ in range(6):
            x = torch.randn(4, 32, device="cuda")
            churn(held)
            torch.compiler.cudagraph_mark_step_begin()
            right &= close(compiled(x), model(x))
    return right


program(compiled_reduce_overhead, gpu_only=True)


def run(name: str):
    """(right, report) of one program under a watch; on a machine without a GPU inside `simulated_cuda()`."""
    from contextlib import nullcontext

    from stalegraph.audit import watch
    from stalegraph.audit.simulated_cuda import simulated_cuda

    place = nullcontext() if torch.cuda.is_available() else simulated_cuda()
    with watch(quiet=True) as w, place:
        right = PROGRAMS[name]()
        torch.cuda.synchronize()
        return right, w.report()
