"""`python -m stalegraph.zoo.record JOB FILE`: puts the zoo before one detector on a GPU; `merge` makes the record.

One job a process: a detector that fails, or a tool that is missing, takes nothing else with it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

import torch

from stalegraph import zoo
from stalegraph.zoo import detectors

FORMS = [(name, form) for name in zoo.REPLICAS for form in zoo.FORMS]


def ours() -> dict:
    sights, records = {}, {}
    with detectors.cuda_device() as device:
        for name, form in FORMS:
            key = f"{name}/{form}"
            try:
                sight, records[key] = detectors.ours(name, form, device)
                sights[key] = asdict(sight)
            except Exception as error:
                sights[key] = {"kind": "not run", "said": f"{type(error).__name__}: {error}"[:300]}
    return {"sights": sights, "records": records}


def _each(look) -> dict:
    sights = {}
    with detectors.cuda_device() as device:
        for name, form in FORMS:
            try:
                sights[f"{name}/{form}"] = asdict(look(name, form, device))
            except Exception as error:
                sights[f"{name}/{form}"] = {"kind": "not run", "said": f"{type(error).__name__}: {error}"[:300]}
    return {"sights": sights}


def data_ptr() -> dict:
    return _each(detectors.data_ptr_comparison)


def liveness() -> dict:
    missing = detectors.missing_liveness()
    return {"missing": missing} if missing else _each(detectors.liveness)


def value_probes() -> dict:
    missing = detectors.missing_value_probes()
    return {"missing": missing} if missing else _each(detectors.value_probes)


def memcheck() -> dict:
    missing = detectors.missing_memcheck()
    if missing:
        return {"missing": missing}
    forms = [(name, "buggy") for name in zoo.REPLICAS]
    with ThreadPoolExecutor(len(forms)) as pool:
        found = pool.map(lambda pair: detectors.memcheck(*pair), forms)
        return {"sights": {f"{name}/{form}": asdict(sight) for (name, form), sight in zip(forms, found)}}


def sound(names=None) -> dict:
    from stalegraph.zoo.sound import GPU_ONLY, PROGRAMS, run

    results = {}
    for name in names or [name for name in PROGRAMS if name not in GPU_ONLY]:
        try:
            right, report = run(name)
            results[name] = {
                "right": right, "summary": report.summary(), "findings": [one.line() for one in report.findings],
                "not_seen": [one.line() for one in report.not_seen],
            }  # fmt: skip
        except Exception as error:
            results[name] = {
                "right": None,
                "summary": f"{type(error).__name__}: {error}"[:300],
                "findings": [],
                "not_seen": [],
            }
    return results


def compiled() -> dict:
    from stalegraph.zoo.sound import GPU_ONLY

    return sound(sorted(GPU_ONLY))


JOBS = {
    "ours": ours, "data_ptr": data_ptr, "liveness": liveness, "value_probes": value_probes, "memcheck": memcheck,
    "sound": sound, "compiled": compiled,
}  # fmt: skip
APART = ("value_probes",)  # in a record of its own: building that tool takes longer than all else


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip() or "unknown"
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"


def portable(text: str) -> str:
    """`text` with files named from the package on, and others by their last name: no machine's folders."""
    text = text.replace(f"{Path(zoo.__file__).parents[2]}/", "")
    return re.sub(r"(?<![\w.-])/(?:[^\s\":/]+/)+([^\s\":/]+\.py)", r"\1", text)


def merge(folder: str, out: str) -> None:
    """The partial results in `folder` as one record with its provenance, `out`/zoo.json."""
    from stalegraph.recorded import Provenance
    from stalegraph.recorded.store import write

    data = {}
    for job in JOBS:
        path = Path(folder) / f"{job}.json"
        if path.is_file():
            data[job] = json.loads(path.read_text())
        elif job not in APART:
            data[job] = {"missing": "the job did not end"}
    properties = torch.cuda.get_device_properties(0)
    provenance = Provenance(
        device=properties.name, sm_count=properties.multi_processor_count, driver=_driver(), torch=torch.__version__,
        vllm="not used", flashmla="not used", cuda=torch.version.cuda,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"), command="python -m stalegraph.zoo.record",
    )  # fmt: skip
    apart = {job: data.pop(job) for job in APART if job in data}
    write(out, "zoo", data, provenance)
    if apart:
        write(out, "zoo_probes", apart, provenance)


def main(argv: list[str]) -> int:
    if argv[0] == "merge":
        merge(argv[1], argv[2])
    else:
        Path(argv[1]).write_text(portable(json.dumps(JOBS[argv[0]]())))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
