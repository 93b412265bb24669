"""`stalegraph doctor`: what this machine has, whether its vLLM has #33638, and what to do. It never imports vLLM."""

from __future__ import annotations

import argparse
import getpass
import importlib.metadata
import json
import os
import platform
import re
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tabulate import tabulate

from stalegraph.errors import StalegraphError
from stalegraph.rungs import available
from stalegraph.vllm.affected import installed_source, installed_version
from stalegraph.vllm.releases import ARCHITECTURES, builder_source_verdict, release_of, span

SCHEMA = 1
HEALTHY, AFFECTED, UNKNOWN = "not affected", "affected", "cannot tell"
NO_VLLM = "no vLLM"  # the vote of version and source where there is neither
ISSUE, PADDING = "#33638", "#33664"


@dataclass(frozen=True)
class Diagnosis:
    """`verdict` on the installed vLLM, how version and source vote, whether the hot-fix cures it, and what to do."""

    verdict: str
    by_version: str
    by_source: str
    agree: bool
    cured: bool
    advice: list[str] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="print one JSON object")
    shape.add_argument("--markdown", action="store_true", help="print Markdown to paste into an issue")
    parser.add_argument("--flashmla-lib", metavar="PATH", help="FlashMLA's library, where no vLLM is installed")


def main(args: argparse.Namespace) -> int:
    """Print the findings; 1 where the installed vLLM is affected and nothing cures it, else 0."""
    facts, found = examine(args.flashmla_lib), diagnose()
    if args.json:
        print(redact(json.dumps({"schema": SCHEMA, "facts": facts, "vllm": asdict(found)})))
    else:
        print(redact(markdown(facts, found) if args.markdown else plain(facts, found)))
    return int(found.verdict == AFFECTED and not found.cured)


# ---------------------------------------------------------------------------------------------------- the facts


def _try(question) -> str:
    """What a question about the machine answers; a doctor reports what fails and goes on."""
    try:
        answer = question()
    except (StalegraphError, ImportError, OSError, RuntimeError, ValueError, AssertionError) as error:
        return f"unknown ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
    return "none" if answer is None else str(answer)


def examine(flashmla_lib=None) -> dict[str, str]:
    """Name -> what was found, in reading order."""
    facts = {
        "GPU": _try(gpu),
        "driver": _try(driver),
        "system": f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver()).strip() or 'no libc'}",
        "Python": f"{platform.python_version()} ({sys.executable})",
        "Python of the notebooks' kernel": _try(kernel_python),
        "torch": _try(torch_version),
        "vLLM": installed_version() or "not installed",
        "FlashMLA library": _try(lambda: library(flashmla_lib)),
        "FP8 KV cache with FLASHMLA": _try(lambda: fp8_support(flashmla_lib)),
        "model runner": _try(runner),
        "stalegraph": f"{_try(lambda: importlib.metadata.version('stalegraph'))}, {_try(plugins)}",
    }
    for rung, reason in available(flashmla_lib).items():
        facts[f"rung {rung}"] = "runs here" if reason is None else reason
    return facts


def gpu() -> str:
    import torch

    if not torch.cuda.is_available():
        return "none visible to torch"
    found = []
    for index in range(torch.cuda.device_count()):
        one = torch.cuda.get_device_properties(index)
        sms, memory = one.multi_processor_count, one.total_memory >> 30
        found.append(f"{one.name}, sm_{one.major}{one.minor}, {sms} SMs, {memory} GiB")
    return "; ".join(found)


def driver() -> str:
    from stalegraph.cuda.library import driver_cuda
    from stalegraph.record.provenance import driver_version

    release, cuda = driver_version(), driver_cuda()
    return f"{release}, up to CUDA {cuda // 1000}.{cuda % 1000 // 10}" if cuda else "none"


def torch_version() -> str:
    import torch

    return f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"


def kernel_python() -> str:
    """The Python that Jupyter starts for the kernel "python3", and its version where it is another than this one."""
    try:
        from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel
    except ImportError:
        return "none, Jupyter is not installed"
    try:
        argv = KernelSpecManager().get_kernel_spec("python3").argv
    except NoSuchKernel:
        return "none, no kernel is called python3"
    executable = argv[0]
    # Jupyter itself puts its own interpreter in the place of a bare "python".
    bare = executable in ("python", "python3", f"python{sys.version_info.major}.{sys.version_info.minor}")
    if bare or os.path.realpath(executable) == os.path.realpath(sys.executable):
        return "this one"
    command = [executable, "-c", "import sys; print(*sys.version_info[:3], sep='.')"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return f"{done.stdout.strip() or 'does not start'} ({executable}), another than this one"


def library(path=None) -> str:
    from stalegraph.cuda.elf import read_library
    from stalegraph.cuda.library import build_of, find_library
    from stalegraph.cuda.library import release_of as installed_by

    found = read_library(find_library(path))
    release = installed_by(found)
    build = build_of(found, release)
    origin = f"vLLM {release}" if release else f"as vLLM {build.first} ships it" if build else "of an unknown build"
    return f"{found.path.name}, {found.nbytes} bytes, {origin}, CUDA {found.cuda_major}"


def fp8_support(path=None) -> str:
    reason = available(path)["flashmla"]
    return "supported" if reason is None else f"not here: {reason}"


def runner() -> str:
    """The model runner of each architecture by default, or what VLLM_USE_V2_MODEL_RUNNER says for all."""
    asked = os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "").strip()
    if asked:
        return f"{'v2' if asked == '1' else 'v1'}, by VLLM_USE_V2_MODEL_RUNNER"
    version = installed_version()
    if version is None:
        return "none, vLLM is not installed"
    release = release_of(version)
    if release is None:
        return "unknown, no release of the map is installed"
    return ", ".join(f"{release.runner(name)} for {name}" for name in ARCHITECTURES)


def plugins() -> str:
    """Whether vLLM would load the hot-fix in this environment."""
    return "hot-fix plugin on" if hotfix_is_on() else "hot-fix plugin off"


def hotfix_is_on() -> bool:
    """The entry point is installed, VLLM_PLUGINS lets it through, and STALEGRAPH_HOTFIX does not switch it off."""
    points = {point.name for point in importlib.metadata.entry_points(group="vllm.general_plugins")}
    allowed = os.environ.get("VLLM_PLUGINS")
    mode = os.environ.get("STALEGRAPH_HOTFIX", "").strip().lower() or "auto"
    named = allowed is None or "stalegraph_hotfix" in [one.strip() for one in allowed.split(",")]
    return "stalegraph_hotfix" in points and named and mode in ("auto", "copying", "inplace", "ingraph")


# -------------------------------------------------------------------------------------------------- the diagnosis


def diagnose() -> Diagnosis:
    """Whether the installed vLLM has #33638: by its version and by its builder's source, which must agree."""
    version = installed_version()
    if version is None:
        advice = ["`stalegraph walkthrough` shows the bug on a simulated GPU"]
        return Diagnosis(UNKNOWN, NO_VLLM, NO_VLLM, True, False, advice)
    release, source = release_of(version), installed_source()
    said = {True: AFFECTED, False: HEALTHY, None: UNKNOWN}
    by_version = said[release.affected] if release else UNKNOWN
    read = builder_source_verdict(source) if source is not None else "unknown"
    by_source = {"affected": AFFECTED, "copies": HEALTHY}.get(read, UNKNOWN)
    agree = by_version == by_source or UNKNOWN in (by_version, by_source)
    verdict = next((one for one in (by_source, by_version) if one != UNKNOWN), UNKNOWN) if agree else UNKNOWN
    cured = verdict == AFFECTED and by_version == by_source and hotfix_is_on()
    advice = advise(version, release, verdict, agree, cured, source)
    return Diagnosis(verdict, by_version, by_source, agree, cured, advice)


def advise(version, release, verdict, agree, cured, source) -> list[str]:
    """What to do, most urgent first."""
    advice = []
    if not agree:
        advice.append(
            f"version and source disagree: this vLLM {version} is not what was released under that name; "
            "trust neither, and run `stalegraph reproduce --rung vllm`"
        )
    if release is None:
        advice.append(f"vLLM {version} is outside the release map ({span()}); the hot-fix leaves it alone")
    if source is None:
        advice.append("its FlashMLA builder's source was not found, so only the version speaks")
    if verdict == AFFECTED and cured:
        advice.append(f"it has {ISSUE}; the hot-fix plugin cures it at each start (STALEGRAPH_HOTFIX=off shows it)")
    elif verdict == AFFECTED and release is None:
        advice.append(f"its builder has {ISSUE}: take vLLM 0.20.0 or newer, or run without full graphs")
    elif verdict == AFFECTED:
        advice.append(
            f"it has {ISSUE}: take vLLM 0.20.0 or newer; or install stalegraph beside it, whose plugin cures it; "
            "or run without full graphs (--enforce-eager, or cudagraph_mode PIECEWISE)"
        )
    if verdict == HEALTHY and release is not None and not release.padding_is_safe:
        advice.append(
            f"its padded block-table rows are -1 ({PADDING}): illegal accesses at some batches; take 0.20.0 or newer"
        )
    if not advice:
        advice.append("nothing to do")
    return advice


# ---------------------------------------------------------------------------------------------------- the words


def summary(found: Diagnosis) -> str:
    """The verdict in one line."""
    if found.by_version == NO_VLLM:
        return f"{ISSUE}: no vLLM is installed here, so there is none to judge"
    cured = ", cured by the hot-fix" if found.cured else ""
    votes = f"by its version {found.by_version}, by its builder's source {found.by_source}"
    return f"{ISSUE}: {found.verdict}{cured} ({votes}{'' if found.agree else '; they disagree'})"


def plain(facts, found: Diagnosis) -> str:
    lines = [tabulate(facts.items(), tablefmt="plain", disable_numparse=True), "", summary(found)]
    return "\n".join(lines + [f"- {one}" for one in found.advice])


def markdown(facts, found: Diagnosis) -> str:
    """Two lists under headings; no table, since cells would need escaping."""
    lines = ["### Environment", ""] + [f"- {name}: `{value.replace('`', '')}`" for name, value in facts.items()]
    return "\n".join(lines + ["", "### Diagnosis", "", summary(found), ""] + [f"- {one}" for one in found.advice])


def redact(text: str) -> str:
    """`text` without the home folder, the user's name and the machine's name."""
    home = str(Path.home())
    if len(home) > 1:
        text = text.replace(home, "~")
    names = {}
    for placeholder, ask in (("<user>", getpass.getuser), ("<host>", socket.gethostname)):
        try:
            names[ask()] = placeholder
        except (OSError, KeyError, ImportError):
            continue
    for name, placeholder in names.items():
        if len(name) > 2:
            text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])", placeholder, text)
    return text
