"""A child may abort, assert, raise or hang: the parent goes on, with what happened as data."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stalegraph.errors import UsageError
from stalegraph.isolate import fold, run_isolated


def add(left, right, *, scale=1):
    print("adding")
    return (left + right) * scale


def abort():
    os.abort()


def assert_on_device(lines):
    for thread in range(lines):
        print(f"k.cu:7: run: block: [0,0,0], thread: [{thread},0,0] Assertion `n <= 32` failed.", file=sys.stderr)
    raise RuntimeError("CUDA error: device-side assert triggered\nCompile with ...")


def leave(code):
    sys.exit(code)


def hang(pid_file, detach):
    grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=detach)
    Path(pid_file).write_text(str(grandchild.pid))
    time.sleep(600)


def leave_a_child_behind(pid_file):
    Path(pid_file).write_text(str(subprocess.Popen(["sleep", "600"]).pid))


def unpicklable():
    return lambda: None


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def gone(pid: int) -> bool:
    for _ in range(200):
        if not alive(pid):
            return True
        time.sleep(0.05)
    return False


def test_a_value_comes_back():
    result = run_isolated(add, 2, 3, scale=10)
    assert (result.ok, result.value, result.exit_code, result.stdout) == (True, 50, 0, "adding\n")
    assert result.summary() == "returned"


def test_an_abort_is_a_signal_and_the_parent_goes_on():
    result = run_isolated(abort)
    assert (result.ok, result.signal, result.exit_code, result.value) == (False, "SIGABRT", None, None)
    assert result.summary() == "signal SIGABRT"


def test_equal_asserts_are_folded_and_the_cuda_error_is_found():
    result = run_isolated(assert_on_device, 64)
    assert result.exit_code == 1 and result.signal is None
    assert result.exception.startswith("RuntimeError: CUDA error")
    assert result.cuda_error == "device-side assert triggered"
    (line,) = result.asserts
    assert line.count == 64 and "thread: [0,0,0]" in line.text
    assert "(x64)" in result.summary()
    assert "value" not in result.to_json() and result.to_json()["asserts"][0]["count"] == 64


def test_an_exit_code_is_kept():
    assert run_isolated(leave, 3).exit_code == 3


@pytest.mark.parametrize("detach", [False, True], ids=["same group", "own session"])
def test_a_hanging_child_is_ended_with_its_own(tmp_path, detach):
    result = run_isolated(hang, str(tmp_path / "pid"), detach, timeout=8)
    assert result.timed_out and not result.ok and result.signal == signal.SIGKILL.name
    assert gone(int((tmp_path / "pid").read_text()))


def test_what_a_child_leaves_behind_is_ended(tmp_path):
    assert run_isolated(leave_a_child_behind, str(tmp_path / "pid")).ok
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_value_that_cannot_be_sent_is_an_exception_not_a_crash():
    result = run_isolated(unpicklable)
    assert not result.ok and result.exit_code == 1 and "pickle" in result.exception.lower()


def test_the_environment_reaches_the_child():
    assert run_isolated(os.getenv, "STALEGRAPH_TEST", env={"STALEGRAPH_TEST": "yes"}).value == "yes"


@pytest.mark.parametrize("target", [lambda: None, "not a function"])
def test_a_target_that_no_process_can_import_is_refused(target):
    with pytest.raises(UsageError, match="target is"):
        run_isolated(target)


def test_a_timeout_must_be_positive():
    with pytest.raises(UsageError, match="timeout is 0"):
        run_isolated(add, 1, 2, timeout=0)


def test_folding_counts_lines_that_differ_in_block_and_thread_only():
    lines = fold("a: block: [0,0,0], thread: [1,0,0] x\nother\na: block: [9,0,0], thread: [2, 0, 0] x\n\n")
    assert [(line.text, line.count) for line in lines] == [("a: block: [0,0,0], thread: [1,0,0] x", 2), ("other", 1)]
