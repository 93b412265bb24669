"""Whether an installed vLLM has bug #33638, by its version and by the source of its builder, without importing it."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
from pathlib import Path

# Read release by release from the wheels: FP8 FlashMLA decode metadata is not copied to the persistent buffers.
FIRST_AFFECTED, LAST_AFFECTED = (0, 15, 0), (0, 18, 1)
FIRST_READ, LAST_READ = (0, 13, 0), (0, 33, 0)
LAST_BEFORE, FIRST_FIXED = (0, 14, 1), (0, 19, 0)  # between these and the bounds above nothing was read
FIRST_SAFE_PADDING = (0, 20, 0)  # padded block-table rows hold page 0 and not -1 (vLLM #35431)
BUILDER = ("FlashMLAMetadataBuilder", "_build_decode", "cg_buf_tile_scheduler_metadata")
SOURCE = Path("v1", "attention", "backends", "mla", "flashmla.py")


def installed_version() -> str | None:
    """The version of the installed vLLM, or None."""
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return None


def installed_source() -> str | None:
    """The source of the installed vLLM's FlashMLA backend, or None; `find_spec` of a top-level name imports nothing."""
    try:
        spec = importlib.util.find_spec("vllm")
    except ValueError:  # something put a module "vllm" without a spec in sys.modules
        return None
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(place) / SOURCE).is_file():
            return (Path(place) / SOURCE).read_text(encoding="utf-8")
    return None


def release_of(version: str) -> tuple[int, int, int] | None:
    """(0, 15, 0) for "0.15.0" or "0.15.0+cu129"; None for pre-releases and builds from a checkout."""
    match = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(\.post\d+)?(\+[\w.]+)?", version)
    return tuple(int(part) for part in match.groups()[:3]) if match else None


def by_version(version: str) -> bool | None:
    """Whether a release is affected; None for one that the map does not tell of."""
    release = release_of(version)
    if release is None or not FIRST_READ <= release <= LAST_READ:
        return None
    if LAST_BEFORE < release < FIRST_AFFECTED or LAST_AFFECTED < release < FIRST_FIXED:
        return None
    return FIRST_AFFECTED <= release <= LAST_AFFECTED


def by_source(source: str) -> bool | None:
    """Whether `_build_decode` leaves the builder's persistent buffers unused; None where there is no such method."""
    kind, method, buffer = BUILDER
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and node.name == kind:
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and item.name == method:
                    return not any(isinstance(at, ast.Attribute) and at.attr == buffer for at in ast.walk(item))
    return None


def diagnose() -> tuple[bool | None, str]:
    """(affected, why): True or False where version and source agree, None where they leave it open."""
    version = installed_version()
    if version is None:
        return None, "vLLM is not installed"
    expected = by_version(version)
    if expected is None:
        first, last = (".".join(map(str, bound)) for bound in (FIRST_READ, LAST_READ))
        return None, f"vLLM {version} is outside the release map, {first} to {last}"
    source = installed_source()
    found = None if source is None else by_source(source)
    if found is None:
        return None, f"vLLM {version} has no {'.'.join(BUILDER[:2])} to read"
    if found != expected:
        said = {True: "affected by #33638", False: "not affected by #33638"}
        return None, f"vLLM {version} is {said[expected]} by its version and {said[found]} by its source"
    if found:
        return True, f"vLLM {version} has bug #33638"
    if release_of(version) < FIRST_SAFE_PADDING:
        return False, f"vLLM {version} keeps its decode metadata in place; its padded block-table rows are -1 (#33664)"
    return False, f"vLLM {version} keeps its decode metadata in place"
