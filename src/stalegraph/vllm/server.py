"""`vllm serve` with an exported checkpoint: started, asked one completion over HTTP as curl would, and ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

HOST = "127.0.0.1"
OPTIONS = {
    "--kv-cache-dtype": "fp8",
    "--max-model-len": "4096",
    "--max-num-seqs": "8",
    "--gpu-memory-utilization": "0.1",
    "--kv-cache-memory-bytes": str(256 << 20),  # a server beside others cannot profile its memory
}
FULL = {"--compilation-config": '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}'}
STEP = 0.5  # seconds between two looks at whether the server is up


def free_port() -> int:
    with socket.socket() as one:
        one.bind((HOST, 0))
        return one.getsockname()[1]


def command(model: str, port: int, options: dict[str, str]) -> list[str]:
    """The server's command line; all that is not named is vLLM's own choice, graphs and compilation included."""
    found = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, "--host", HOST, "--port", str(port)]
    return found + [word for pair in (OPTIONS | options).items() for word in pair]


def complete(model: str, port: int, prompt: str, tokens: int, timeout: float = 60.0) -> str:
    """The text of one greedy completion of `tokens` tokens."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://{HOST}:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout) as reply:
        return json.loads(reply.read())["choices"][0]["text"]


def is_up(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=5) as reply:
            return reply.status == 200
    except (urllib.error.URLError, OSError):
        return False


def serve_once(model: str, prompt: str, tokens: int, log: Path, *, hotfix: str, options=None, timeout=240.0) -> dict:
    """Serve `model` with STALEGRAPH_HOTFIX=`hotfix` and complete `prompt`: {"text", "why"}, text None where it failed.

    `options` are more of the command line, option -> value; the server's output goes to the file `log`.

    The engine core is a process of its own here, so the plugin has to reach it by itself.
    """
    port = free_port()
    environment = {**os.environ, "STALEGRAPH_HOTFIX": hotfix, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
                   "VLLM_DISABLE_COMPILE_CACHE": "1", "PYTHONUNBUFFERED": "1"}  # fmt: skip
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    with open(log, "wb") as out:
        child = subprocess.Popen(
            command(model, port, options or {}),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=environment,
            start_new_session=True,
        )
        try:
            ends = time.monotonic() + timeout
            while not is_up(port):
                if child.poll() is not None:
                    return {"text": None, "why": f"the server ended with code {child.returncode}"}
                if time.monotonic() > ends:
                    return {"text": None, "why": f"the server was not up after {timeout:.0f} s"}
                time.sleep(STEP)
            return {"text": complete(model, port, prompt, tokens), "why": ""}
        except (OSError, KeyError, ValueError) as error:
            return {"text": None, "why": f"{type(error).__name__}: {error}"}
        finally:
            try:
                os.killpg(child.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            child.wait()
