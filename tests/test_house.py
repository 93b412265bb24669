"""The house has floors: a module imports only from floors below its own; and no file breaks the house rules."""

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "stalegraph"
FLOORS = {
    0: ["errors"],
    1: ["nodes", "blocks", "schedule"],
    2: ["attention", "simulator", "cuda"],
    3: ["ops", "kernels", "rungs"],
    4: ["builders", "reciter", "isolate"],
    5: ["decode", "audit", "recorded"],
    6: ["runs", "zoo", "vllm", "plots", "record", "bench"],
    7: ["walkthrough"],
    8: ["cli"],
    9: ["__main__"],
}
FLOOR = {name: floor for floor, names in FLOORS.items() for name in names}
# Neighbours on one floor that may lean on each other, in this direction only.
BESIDE = {
    ("ops", "kernels"), ("zoo", "vllm"), ("vllm", "zoo"), ("vllm", "runs"), ("bench", "runs"), ("record", "runs"),
    ("zoo", "plots"), ("record", "vllm"), ("vllm", "record"), ("bench", "record"),
}  # fmt: skip


def modules():
    return sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Top-level rooms of stalegraph that a module imports, at its head or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            inside = node.module == "stalegraph"
            names = [f"{node.module}.{alias.name}" if inside else node.module for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "stalegraph" and len(parts) > 1 and parts[1] != "__version__":
                found.add(parts[1])
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_down(path):
    own = room(path)
    assert own in FLOOR, f"{own} has no floor"
    for other in imports(path) - {own}:
        down = FLOOR[other] < FLOOR[own] or (own, other) in BESIDE
        assert down, f"{path.relative_to(SOURCE)} (floor {FLOOR[own]}) imports {other} (floor {FLOOR[other]})"


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


def test_no_file_is_named_for_nothing():
    words = {"utils", "helpers", "common", "misc", "util", "helper"}
    assert [path for path in tracked() if path.stem in words] == []


def test_no_file_holds_a_path_of_a_machine():
    marks = ["/" + word for word in ("root/", "work/main", "home/", "Users/")]
    wrong = []
    for path in tracked():
        if path.suffix in {".py", ".md", ".toml", ".yml", ".json", ".ipynb", ".txt", ".cu"} or path.name == "Makefile":
            text = path.read_text(encoding="utf-8")
            wrong += [f"{path.relative_to(ROOT)}: {mark}" for mark in marks if mark in text]
    allowed = {"tests/test_doctor.py", "src/stalegraph/vllm/doctor.py", "tests/test_house.py"}
    assert [one for one in wrong if one.split(":")[0] not in allowed] == []


def test_no_function_hides_another_of_its_name():
    """Of two tests with one name in a file only the later runs."""
    hidden = []
    for path in [*(ROOT / "tests").glob("*.py"), *modules()]:
        for scope in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            body = scope.body if isinstance(scope, (ast.Module, ast.ClassDef)) else []
            plain = [node.name for node in body if isinstance(node, ast.FunctionDef) and not node.decorator_list]
            every = [node.name for node in body if isinstance(node, ast.FunctionDef)]
            hidden += [f"{path.name}: {name}" for name in sorted(set(plain)) if every.count(name) > 1]
            tests = [name for name in every if name.startswith("test_")]
            hidden += [f"{path.name}: {name}" for name in sorted(set(tests)) if tests.count(name) > 1]
    assert sorted(set(hidden)) == []


def test_notebooks_and_repro_are_not_imported():
    for path in modules():
        assert not imports(path) & {"notebooks", "repro"}
