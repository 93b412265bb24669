"""Runs what may assert, fault or hang in a process of its own, and hands back what became of it as data."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from stalegraph.errors import UsageError

# Asserts of one cause differ in the block and the thread that they name, nothing else.
WHERE = re.compile(r"(block|thread): \[\d+,\s*\d+,\s*\d+\]")
ASSERT = re.compile(r"[Aa]ssert(ion)?\b.*fail")
CUDA_ERROR = re.compile(r"CUDA error:? ?([^\n]+)|(CUDA_ERROR_[A-Z_]+)|(cudaError[A-Za-z]+)")
STDERR_KEPT = 20_000  # bytes of the child's stderr, from its end
GRACE = 30.0  # seconds that the kernel may take to reap a killed child
BOOTSTRAP = (  # the path first: the target's module and its arguments' classes are found on it
    "import pickle, sys; sys.path[:] = pickle.load(open(sys.argv[1], 'rb')); "
    "from stalegraph.isolate import child; child(*sys.argv[2:])"
)


@dataclass(frozen=True)
class FoldedLine:
    """A line of stderr as it first came, and how many lines equal it but for the block and thread that they name."""

    text: str
    count: int


@dataclass(frozen=True)
class Isolated:
    """What became of a child: its value, or how it ended. `exit_code` is None where a signal ended it.

    `exception` is "Type: message" of what the target raised; `cuda_error` CUDA's own words, from there or from stderr;
    `asserts` are the device asserts that failed, equal ones folded; `stderr` and `stdout` end what it wrote.
    """

    value: object = None
    exit_code: int | None = 0
    signal: str | None = None
    timed_out: bool = False
    exception: str | None = None
    cuda_error: str | None = None
    asserts: tuple[FoldedLine, ...] = ()
    seconds: float = 0.0
    stderr: str = ""
    stdout: str = ""

    @property
    def ok(self) -> bool:
        """The target returned, and the child ended of its own accord."""
        return self.exit_code == 0 and not self.timed_out and self.exception is None

    def summary(self) -> str:
        """One line for a notebook: how it ended, CUDA's error, the first assert and how many equal it."""
        if self.ok:
            return "returned"
        ended = f"signal {self.signal}" if self.signal else f"exit code {self.exit_code}"
        how = "timed out" if self.timed_out else ended
        parts = [how]
        if self.cuda_error or self.exception:
            parts.append(self.cuda_error or self.exception)
        parts += [f"{line.text} (x{line.count})" for line in self.asserts[:1]]
        return "; ".join(parts)

    def to_json(self) -> dict:
        """Everything but the value, which need not be JSON."""
        record = asdict(self)
        record.pop("value")
        return record


def fold(text: str) -> tuple[FoldedLine, ...]:
    """The lines of `text` in order of first appearance, equal ones (but for block and thread) counted.

    >>> fold("block: [0,0,0] no\\nblock: [1,0,0] no")
    (FoldedLine(text='block: [0,0,0] no', count=2),)
    """
    first: dict[str, str] = {}
    counts: dict[str, int] = {}
    for line in text.splitlines():
        if line.strip():
            key = WHERE.sub(r"\1: [...]", line)
            first.setdefault(key, line)
            counts[key] = counts.get(key, 0) + 1
    return tuple(FoldedLine(first[key], counts[key]) for key in first)


def _address(target) -> str:
    """`module:name` of a function that a fresh process can import."""
    name, module = getattr(target, "__qualname__", ""), getattr(target, "__module__", "")
    if not name or not name.replace(".", "").isidentifier() or module in ("", "__main__"):
        raise UsageError(f"target is {target!r}; allowed: a function that a fresh process can import from its module")
    return f"{module}:{name}"


def _descendants(pid: int) -> list[int]:
    """The processes that `pid` started, and theirs; empty where /proc is missing."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The command's name stands in brackets and may hold anything; the parent is the second field after it.
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        children.setdefault(parent, []).append(int(entry.parent.name))
    found, waiting = [], [pid]
    while waiting:
        for child in children.get(waiting.pop(), ()):
            found.append(child)
            waiting.append(child)
    return found


def _end(process: subprocess.Popen) -> None:
    """Ends `process`, its process group and whatever it started that left the group."""
    others = _descendants(process.pid) if process.poll() is None else []
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    for pid in others:
        try:
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass


def run_isolated(target, *args, timeout: float = 120.0, env: dict[str, str] | None = None, **kwargs) -> Isolated:
    """`target(*args, **kwargs)` in a fresh interpreter; never raises for what happens in there.

    `target` is a module's function, its arguments and value are pickled. After `timeout` seconds the child is ended,
    and whatever it started with it; nothing that it started outlives the call. `env` adds to the child's environment.
    """
    if timeout <= 0:
        raise UsageError(f"timeout is {timeout}; allowed: more than 0 seconds")
    address = _address(target)
    with tempfile.TemporaryDirectory(prefix="stalegraph-") as folder:
        path, request, reply = Path(folder, "path"), Path(folder, "request"), Path(folder, "reply")
        path.write_bytes(pickle.dumps(sys.path))
        request.write_bytes(pickle.dumps((address, args, kwargs)))
        with open(Path(folder, "stdout"), "w+b") as out, open(Path(folder, "stderr"), "w+b") as err:
            began = time.monotonic()
            process = subprocess.Popen(
                [sys.executable, "-c", BOOTSTRAP, str(path), str(request), str(reply)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,  # its own process group, so that all of it can be ended
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
            )
            try:
                process.wait(timeout)
                timed_out = False
            except subprocess.TimeoutExpired:
                timed_out = True
            finally:
                _end(process)
                process.wait(GRACE)
            seconds = time.monotonic() - began
            stdout, stderr = _read(out), _read(err)
        value = exception = None
        if reply.exists():
            value, exception = pickle.loads(reply.read_bytes())
    return _result(process.returncode, timed_out, value, exception, seconds, stdout, stderr)


def _read(file) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _result(code: int, timed_out: bool, value, exception, seconds: float, stdout: str, stderr: str) -> Isolated:
    found = CUDA_ERROR.search(exception or "") or CUDA_ERROR.search(stderr)
    ended_by = signal.Signals(-code).name if code < 0 else None
    return Isolated(
        value=value,
        exit_code=None if code < 0 else code,
        signal=ended_by,
        timed_out=timed_out,
        exception=exception,
        cuda_error=next(group for group in found.groups() if group).strip() if found else None,
        asserts=tuple(line for line in fold(stderr) if ASSERT.search(line.text)),
        seconds=seconds,
        stderr=stderr[-STDERR_KEPT:],
        stdout=stdout[-STDERR_KEPT:],
    )


def child(request: str, reply: str) -> None:
    """The child's side: runs the target and writes what it returned or raised."""
    import importlib

    exception, code = None, 0
    try:
        address, args, kwargs = pickle.loads(Path(request).read_bytes())
        module, name = address.split(":")
        target = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
        pickled = pickle.dumps((target(*args, **kwargs), None))
    except BaseException as error:
        traceback.print_exc()
        exception = f"{type(error).__name__}: {error}"
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
        pickled = pickle.dumps((None, exception))
    Path(reply + ".part").write_bytes(pickled)
    os.replace(reply + ".part", reply)
    sys.stdout.flush()
    sys.stderr.flush()
    # Past a sticky CUDA error, tearing the interpreter down would abort and hide what happened.
    os._exit(code)
