#!/usr/bin/env python3
"""Writes the pinned requirement sets of this folder anew, or with --check asks that each still resolves. Needs `uv`.

Old releases left most of what they need unpinned and do not run with the newest of it, so each set is resolved as of a
day in the weeks after its release. torch is pinned by vLLM itself.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
PYTHON = "3.12"  # 0.20.2 ships its DeepGEMM for CPython 3.12 only
# release: (resolved as of the end of this day, platform of its wheel, Pythons that it allows)
RELEASES = {
    "0.15.0": ("2026-02-10", "x86_64-manylinux_2_31", ">=3.10,<3.14"),
    "0.18.1": ("2026-04-10", "x86_64-manylinux_2_31", ">=3.10,<3.14"),
    "0.19.1": ("2026-04-30", "x86_64-manylinux_2_31", ">=3.10,<3.14"),
    "0.20.2": ("2026-05-20", "x86_64-manylinux_2_35", ">=3.10,<3.15"),
}


def path_of(release: str) -> Path:
    return FOLDER / f"vllm-{release}.txt"


def resolve(uv: str, release: str, requirements: str, *options: str) -> str:
    """What `requirements` resolve to on the release's platform, one pinned package a line."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "requirements.in")
        source.write_text(requirements)
        command = [uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--python-version", PYTHON,
                   "--python-platform", RELEASES[release][1], *options, str(source)]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"vllm {release} does not resolve:\n{done.stderr.strip()}")
    return done.stdout


def header(release: str) -> str:
    day, platform, pythons = RELEASES[release]
    return (
        f"# vllm {release} and all that it needs, as of {day}. Python {PYTHON} (the release allows {pythons}),\n"
        f"# Linux {platform}. In a fresh environment: pip install -r repro/locks/vllm-{release}.txt\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("release", nargs="*", metavar="RELEASE", help=f"of {', '.join(RELEASES)}; default: all")
    parser.add_argument("--check", action="store_true", help="write nothing; each set must resolve to itself today")
    parser.add_argument("--uv", default=shutil.which("uv"), help="path of uv")
    args = parser.parse_args()
    if args.uv is None:
        parser.error("uv is not installed: pip install uv")
    for release in args.release or RELEASES:
        if release not in RELEASES:
            parser.error(f"release is {release!r}; allowed: {', '.join(RELEASES)}")
        path = path_of(release)
        if not args.check:
            found = resolve(args.uv, release, f"vllm=={release}\n", "--exclude-newer", RELEASES[release][0])
            path.write_text(header(release) + found)
            print(f"{path.name}: written")
            continue
        pinned = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
        again = resolve(args.uv, release, "\n".join(pinned)).split()
        if sorted(again) != sorted(pinned):
            print(f"{path.name}: resolves to something else: {sorted(set(again) ^ set(pinned))}")
            return 1
        print(f"{path.name}: {len(pinned)} packages resolve")
    return 0


if __name__ == "__main__":
    sys.exit(main())
