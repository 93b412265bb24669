"""Each replica is wrong when buggy and right when fixed; the audit finds the one and is silent on the other."""

import ast
import inspect
import re
from pathlib import Path

import pytest
import torch

from stalegraph import zoo
from stalegraph.audit import HAZARDS, watch
from stalegraph.errors import UsageError
from stalegraph.simulator import Device
from stalegraph.vllm.suspects.lineup import SUSPECTS
from stalegraph.vllm.suspects.report import STORIES
from stalegraph.zoo.detectors import is_expected
from stalegraph.zoo.run import Outcome, _steps, run, run_watched

NAMES = list(zoo.REPLICAS)
UNDECLARED = {"baked_scalar", "short_launch"}  # a number on the host is nobody's to see unless it is declared


@pytest.fixture
def device():
    with Device(memory_bytes=1 << 26) as device:
        yield device


def test_the_classes_that_the_map_names_first_are_there():
    assert set(zoo.REPLICAS.values()) == {"A", "B", "C", "E", "F", "G", "H", "I1", "J2", "M"}
    assert {"rebound_kept", "rebound_dropped"} < set(zoo.REPLICAS)
    with pytest.raises(UsageError, match="orphan_cast"):
        zoo.load("orphan")
    with pytest.raises(UsageError, match="fixed"):
        zoo.load("orphan_cast", "broken")


@pytest.mark.parametrize("name", NAMES)
def test_buggy_is_wrong_in_its_output_and_fixed_is_right(name, device):
    buggy = run(zoo.load(name, "buggy"), device)
    assert buggy.failure is None and not buggy.all_right
    assert run(zoo.load(name, "fixed"), device).right == [True] * zoo.load(name, "fixed").steps


@pytest.mark.parametrize("name", NAMES)
def test_the_audit_finds_the_class_and_the_argument_and_nothing_else(name, device):
    outcome = run_watched(zoo.load(name, "buggy"), device)
    expected = zoo.load(name).expected
    if expected is None:
        assert not outcome.report.findings and "no broken invariant" in outcome.report.summary()
        return
    assert expected.hazard == zoo.REPLICAS[name]
    assert len(outcome.report.findings) == 1
    finding = outcome.report.findings[0]
    assert is_expected(finding, expected), finding.line()
    assert finding.advice == HAZARDS[expected.hazard].advice and finding.node == 0
    assert not outcome.report.not_seen


@pytest.mark.parametrize("name", NAMES)
def test_the_audit_is_silent_on_the_fixed_twin(name, device):
    outcome = run_watched(zoo.load(name, "fixed"), device)
    assert not outcome.report.findings and not outcome.report.not_seen and outcome.all_right


@pytest.mark.parametrize("name", NAMES)
def test_what_is_found_with_nothing_declared(name, device):
    """Names come from the program's variables then; two classes cannot be seen, and the twins stay silent."""
    for form in zoo.FORMS:
        outcome = Outcome(name, form)
        with watch(quiet=True) as w:
            _steps(zoo.load(name, form)(device), device, outcome, None)
            found = [finding.hazard for finding in w.report().findings]
        blind = form == "fixed" or name in UNDECLARED or zoo.REPLICAS[name] == "M"
        assert found == ([] if blind else [zoo.REPLICAS[name]])


@pytest.mark.parametrize("name", NAMES)
def test_a_finding_of_another_class_or_name_would_not_pass(name):
    expected = zoo.load(name).expected
    if expected is None:
        return
    from stalegraph.audit import Finding

    right = Finding(expected.verdicts[0], expected.hazard, expected.named, 1, "")
    assert is_expected(right, expected)
    for wrong in (
        Finding("external", expected.hazard, expected.named, 1, ""),
        Finding(expected.verdicts[0], "M", expected.named, 1, ""),
        Finding(expected.verdicts[0], expected.hazard, "another", 1, ""),
    ):
        assert not is_expected(wrong, expected)


@pytest.mark.parametrize("name", NAMES)
def test_bug_and_fix_differ_in_one_member_and_name_their_report(name):
    module = zoo.module(name)
    fixed = next(node for node in ast.parse(inspect.getsource(module)).body if getattr(node, "name", "") == "Fixed")
    members = [node for node in fixed.body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
    assert len(members) == 1
    member = getattr(members[0], "name", None) or members[0].targets[0].id
    assert hasattr(module.Buggy, member)
    assert module.Fixed.__mro__[1] is module.Buggy
    to_file = re.search(r"repro/reports/(\S+)\.md", module.Buggy.report)
    assert to_file or re.search(r"#\d+|control", module.Buggy.report)
    assert module.__doc__.startswith(f"{zoo.REPLICAS[name]}:")


def test_each_confirmed_suspect_has_its_replica_and_each_names_the_other():
    reports = Path(__file__).parents[1] / "repro" / "reports"
    named = {}
    for name in NAMES:
        to_file = re.search(r"repro/reports/(\S+)\.md", zoo.load(name).report)
        if to_file:
            named[to_file.group(1)] = name
    confirmed = {one.report for one in SUSPECTS if "confirmed" in one.expected.values()}
    assert set(named) == confirmed == {path.stem for path in reports.glob("*.md")} == set(STORIES)
    for report, name in named.items():
        assert STORIES[report].replica == name and f"`stalegraph.zoo.{name}`" in (reports / f"{report}.md").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_a_replica_repeats_exactly(name):
    outputs = []
    for _ in range(2):
        with Device(memory_bytes=1 << 26) as device:
            values = []
            run(zoo.load(name), device, before_replay=lambda instance, k: values.append(k))
            outputs.append((run(zoo.load(name), device).right, values))
    assert outputs[0] == outputs[1] and outputs[0][1] == [-1, 0, 1, 2, 3]


def test_the_paged_op_reads_as_the_rule_says(device):
    from stalegraph.zoo.paged import _reads, last_page

    cache = torch.arange(5.0).view(5, 1)  # what lies before the cache, and four pages
    table = torch.tensor([[0, 1], [2, 3], [1, 0]], dtype=torch.int32)
    lengths = torch.tensor([4, 8, 0], dtype=torch.int32)
    assert last_page(cache, table, lengths).flatten().tolist() == [1.0, 4.0, 4.0]  # row 2 looks at row 1's last entry
    assert _reads({"cache": cache, "block_table": table, "seq_lens": lengths}, {}) == []
    table[1, 1] = -1
    found = _reads({"cache": cache, "block_table": table, "seq_lens": lengths}, {})
    assert [one.address for one in found] == [table[1, 1].data_ptr()] * 2 and "row 2 is padding" in found[1].message
