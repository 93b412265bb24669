"""Random programs: sound ones are never faulted; let go of one tensor that the graph reads, and it alone is named."""

import random

import pytest
import torch

from stalegraph.audit import audit, watch
from stalegraph.simulator import Device

COUNT = 64


class Program:
    """Random tensors, and random steps over them and over what the steps make."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.inputs = {f"t{at}": torch.full((COUNT,), 1.0 + at) for at in range(self.random.randint(3, 8))}
        self.plan = [self.random.random() for _ in range(self.random.randint(3, 14))]

    def pick(self, made):
        names = list(self.inputs)
        if made and self.random.random() < 0.5:
            return self.random.choice(made)
        return self.inputs[self.random.choice(names)]

    def body(self):
        made = []
        for kind in self.plan:
            a, b = self.pick(made), self.pick(made)
            if kind < 0.4:
                made.append(a * b)
            elif kind < 0.6:
                made.append(a + 0.5)
            elif kind < 0.7:
                made.append(torch.stack((a, b)).sum(0))
            elif kind < 0.8:
                made.append(a[: COUNT // 2].repeat(2))
            elif kind < 0.9:
                made.append(torch.zeros_like(a).add_(b))
            elif made:
                made.pop(self.random.randrange(len(made)))
        return made or [self.pick(made) * 2]


def replays(program, graphs, held):
    for _ in range(4):
        held += [torch.full((program.random.choice((COUNT, 33, 500)),), 9.0) for _ in range(5)]
        name = program.random.choice(list(program.inputs))
        program.inputs[name][program.random.randrange(COUNT) :].fill_(program.random.random())
        program.inputs[name].sum()
        for graph in graphs:
            graph.replay()


@pytest.mark.parametrize("seed", range(25))
def test_a_sound_random_program_has_no_finding(seed):
    with watch(quiet=True) as w, Device(memory_bytes=1 << 26) as device:
        program = Program(seed)
        graphs, outs, pool = [], [], None
        for _ in range(program.random.randint(1, 3)):
            graph = device.graph(pool if program.random.random() < 0.5 else None)
            with graph.capture():
                outs.append(program.body())
            pool = pool or graph.pool()
            graphs.append(graph)
        replays(program, graphs, [])
        assert not w.report().findings and not w.report().not_seen, w.report().table()
        for graph in graphs:
            report = audit(graph, fields=lambda: program.inputs)
            assert not report.findings
            assert {pointer.verdict for pointer in report.pointers} <= {"live", "graph-owned"}


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("watched", [True, False])
def test_the_one_tensor_that_was_let_go_of_is_the_one_that_is_named(seed, watched):
    with Device(memory_bytes=1 << 26) as device:
        program = Program(seed)
        if watched:
            with watch(quiet=True) as w:
                finding, address = let_go(program, device, lambda graph: w.report().findings)
            # Churn makes other tensors of its size under other names, so the class is that of an orphan.
            assert finding.field in program.gone
        else:
            finding, address = let_go(program, device, lambda graph: audit(graph).findings)
        assert (finding.hazard, finding.address) == ("B", address)
        assert finding.verdict in ("freed", "reused")


def let_go(program, device, findings):
    graph = device.graph()
    with graph.capture():
        out = program.body()
    read = {one.address for node in graph.nodes if node.name != "aten::zeros_like" for one in node.arguments}
    name = program.random.choice(sorted(name for name, one in program.inputs.items() if one.data_ptr() in read))
    address = program.inputs[name].data_ptr()
    del program.inputs[name]
    program.gone = (f"program.inputs.{name}", f"inputs.{name}", name)
    program.inputs.setdefault("other", torch.full((COUNT,), 3.0))
    replays(program, [graph], [])
    found = findings(graph)
    assert len(found) == 1 and out, [one.line() for one in found]
    return found[0], address
