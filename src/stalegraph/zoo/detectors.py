"""What could find a stale address, ours and others', each put before one form of a replica and asked what it sees."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.utils._pytree import tree_leaves

from stalegraph import zoo
from stalegraph.audit.examine import named
from stalegraph.simulator import CUDAGraph as SimulatedGraph
from stalegraph.zoo.run import run, run_watched

CAUSE, SYMPTOM, NOTHING, FALSE_ALARM = "cause", "symptom", "nothing", "false alarm"
CLEAR = "clear"  # silent on the control, in which nothing is broken
MEMCHECK_TIMEOUT = 60.0  # seconds for one replica


@dataclass(frozen=True)
class Sight:
    """What a detector saw in one form: its `kind` and its own words. A cause is the right tensor or number by name."""

    kind: str
    said: str = ""


def _judge(name: str, form: str, said: str, names_cause: bool) -> Sight:
    if form == "fixed":
        return Sight(FALSE_ALARM if said else NOTHING, said)
    if zoo.load(name).expected is None:
        return Sight(SYMPTOM if said else CLEAR, said)
    return Sight(CAUSE if said and names_cause else SYMPTOM if said else NOTHING, said)


def ours(name: str, form: str, device) -> tuple[Sight, dict]:
    """Our audit under a watch that is told what the replica declares; and a record of the run for the scoreboard."""
    kind = zoo.load(name, form)
    outcome = run_watched(kind, device)
    findings = outcome.report.findings
    said = "; ".join(f"{finding.hazard} {finding.verdict} {finding.name}" for finding in findings)
    record = {
        "right": outcome.right,
        "findings": [finding.to_json() for finding in findings],
        "not_seen": [unseen.line() for unseen in outcome.report.not_seen],
    }
    expected = kind.expected
    if expected is None:  # the control: nothing is broken, and saying so is the right answer
        return Sight(FALSE_ALARM if findings else CLEAR if form == "buggy" else NOTHING, said), record
    fits = len(findings) == 1 and is_expected(findings[0], expected)
    return _judge(name, form, said, fits), record


def is_expected(finding, expected) -> bool:
    """Whether a finding has the class, one of the verdicts and the name that the replica foresees."""
    names = {finding.argument, finding.field, (finding.field or "").rsplit(".", 1)[-1]}
    return finding.hazard == expected.hazard and finding.verdict in expected.verdicts and expected.named in names


def data_ptr_comparison(name: str, form: str, device) -> Sight:
    """Compares each declared tensor's `data_ptr()` with that at capture (as in vLLM #52440, TensorRT-LLM #19306)."""
    kind = zoo.load(name, form)
    captured: dict[str, int] = {}
    moved: list[str] = []

    def look(instance, k):
        declared = instance.declare()
        tensors = {}
        for tree in ("fields", "inputs", "caches"):
            tensors.update(named(declared.get(tree)))
        for path, tensor in tensors.items():
            address = tensor.data_ptr()
            if k < 0:
                captured[path] = address
            elif captured.get(path, address) != address and path not in moved:
                moved.append(path)

    run(kind, device, before_replay=look)
    expected = kind.expected.named if kind.expected else None
    return _judge(
        name, form, f"moved: {', '.join(moved)}" if moved else "", any(path.endswith(expected or "?") for path in moved)
    )


def missing_liveness() -> str | None:
    """Why torch's own input liveness check cannot be run here, or None."""
    if "check_input_liveness" not in inspect.signature(torch.cuda.CUDAGraph.capture_begin).parameters:
        return f"torch {torch.__version__} has no check_input_liveness; 2.13 has"
    return None if torch.cuda.is_available() else "it looks at CUDA tensors only, and there is no CUDA device"


def liveness(name: str, form: str, device) -> Sight:
    """PyTorch's `check_input_liveness`: raises at a replay if a tensor that a dispatched op read at capture is dead."""
    begin = torch.cuda.CUDAGraph.capture_begin

    def checked(self, *args, **kwargs):
        return begin(self, *args, **{**kwargs, "check_input_liveness": True})

    torch.cuda.CUDAGraph.capture_begin = checked
    try:
        run(zoo.load(name, form), device)
        return _judge(name, form, "", False)
    except RuntimeError as error:
        # It shows the address and where the tensor was made: the cause, if not the field.
        return _judge(name, form, str(error).splitlines()[0], "dead tensor" in str(error))
    finally:
        torch.cuda.CUDAGraph.capture_begin = begin


def missing_simulated_liveness() -> str | None:
    found = importlib.util.find_spec("torch.utils._cuda_debug")
    return None if found is not None else f"torch {torch.__version__} has no check_input_liveness; 2.13 has"


def liveness_simulated(name: str, form: str, device) -> Sight:
    """Torch's own tracker on the simulated GPU: only its questions about CUDA are answered by the device."""
    from torch.utils._cuda_debug import _CUDAGraphInputLivenessTracker, _TensorTrackingMode, _TrackedTensorInfo

    class Mode(_TensorTrackingMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            inputs = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor) and one.numel()]
            if any(device.is_device(one) for one in inputs):
                for one in inputs:
                    if device.is_device(one) or one.data_ptr() in device.pinned:
                        self._tracker.track_external_input(one)
                for one in tree_leaves(out):
                    if isinstance(one, torch.Tensor) and one.numel() and device.is_device(one):
                        self._tracker.mark_internal_output(one)
            return out

    class Tracker(_CUDAGraphInputLivenessTracker):
        def start(self):
            self._dispatch_mode = Mode(self)
            self._dispatch_mode.__enter__()

        def track_external_input(self, tensor):
            super().track_external_input(tensor)
            info = self._external_inputs.get(tensor.data_ptr())
            if isinstance(info, _TrackedTensorInfo) and device.is_device(tensor):
                info.device_index = 0

        def _get_memory_snapshot(self, capture_pool):
            return [one for one in device.memory_snapshot() if one["segment_pool_id"] == tuple(capture_pool)]

    class Graph(SimulatedGraph):
        @contextmanager
        def capture(self, pool=None):
            self.tracker = Tracker()
            with super().capture(pool):
                self.tracker.start()
                try:
                    yield self
                finally:
                    self.tracker.stop()

        def replay(self):
            self.tracker.check_alive(self.pool())
            super().replay()

    make = device.graph
    device.graph = lambda pool=None: Graph(device, pool)
    try:
        run(zoo.load(name, form), device)
        return _judge(name, form, "", False)
    except RuntimeError as error:
        if "dead tensor" not in str(error):
            raise
        return _judge(name, form, str(error).splitlines()[0], True)
    finally:
        device.graph = make


def missing_memcheck() -> str | None:
    if shutil.which("compute-sanitizer") is None:
        return "compute-sanitizer is not on the PATH"
    return None if torch.cuda.is_available() else "there is no CUDA device"


def memcheck(name: str, form: str) -> Sight:
    """compute-sanitizer's memcheck around a process that runs the replica on CUDA."""
    command = ["compute-sanitizer", "--tool", "memcheck", sys.executable, "-m", "stalegraph.zoo.once", name, form]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=MEMCHECK_TIMEOUT, env=dict(os.environ))
    except subprocess.TimeoutExpired:
        return Sight("not run", f"no answer within {MEMCHECK_TIMEOUT:.0f} s")
    summary = re.search(r"ERROR SUMMARY: (\d+) error", done.stdout + done.stderr)
    if summary is None or "steps right" not in done.stdout:
        return Sight(
            "not run", (done.stdout + done.stderr).strip().splitlines()[-1][:200] if done.stdout + done.stderr else ""
        )
    errors = int(summary.group(1))
    return _judge(name, form, f"{errors} errors" if errors else "", False)


def missing_value_probes() -> str | None:
    if importlib.util.find_spec("torch_cudagraph_debug") is None:
        return "torch-cudagraph-debug is not installed; it is built from source against a CUDA torch"
    return None if torch.cuda.is_available() else "there is no CUDA device"


def value_probes(name: str, form: str, device) -> Sight:
    """torch-cudagraph-debug's tensor probe on the step's output, each replay's value compared with the eager one."""
    from torch_cudagraph_debug.tensor_debug import RecordAction, TensorProbe

    kind = zoo.load(name, form)
    probe = TensorProbe("out", [RecordAction()])

    class Probed(kind):
        def observe(self, tensor):
            return probe(tensor, name="out")

        def result(self):
            snapshot = probe.snapshot(synchronize=torch.cuda.current_stream())
            value = snapshot.observations[-1].tensor()
            return value[: self.right(0).shape[0]] if not hasattr(self, "rows") else value[: self.rows]

    Probed.__module__ = kind.__module__
    outcome = run(Probed, device)
    wrong = outcome.first_wrong
    return _judge(name, form, "" if wrong is None else f"out differs from eager at replay {wrong}", False)


@contextmanager
def cuda_device():
    """A CudaDevice without FlashMLA's library, which the zoo does not need."""
    from stalegraph.cuda import CudaDevice

    with CudaDevice() as device:
        yield device
