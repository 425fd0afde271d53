"""The house's floors: who may import whom, and that no module keeps state of its own."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator, MutableMapping, MutableSequence, MutableSet
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
CORE = {
    0: (
        "errors",
        "settings",
        "records",
        "metrics",
        *(f"metrics.{name}" for name in ("counting", "pairing", "speedups", "losses", "grading")),
        "positions",
        "costs",
        "timings",
        "store",
        "provenance",
        "tasks",
        "fetch",
        "skip",
    ),
    1: ("sampling", "kv_cache", "device", "attention", "families"),
    2: (
        *("target", "blocks", "fused", "placement", "hub", "checkpoint", "loading", "deep", "prompting", "texts"),
        *("tiny", "synthetic", "native", "graphs"),
    ),
    3: ("verify", "decoding", "drafting", "divergence"),
    4: ("clasp",),
    5: ("plan", "runner", "progress", "probe", "analysis"),
    6: ("entry", *(f"entry.{name}" for name in ("keys", "building", "manifests"))),
}
"""Modules of clasp_core by floor; `baselines` stands on floor 4. A new module needs a place here."""
ASIDE = ("report", "tracking")
"""They read rows only, so floor 0 is all that they may import of the core."""
FLOORS = {f"clasp_core.{name}": floor for floor, names in CORE.items() for name in names}
MAY_IMPORT_TRANSFORMERS = {f"clasp_core.{name}" for name in ("placement", "checkpoint", "loading", "tiny", "synthetic")}
MAY_IMPORT_IT_LATE = {"baselines.hf_generate"}
MAY_IMPORT_HYDRA = {"run", "clasp_core.entry.keys", "clasp_core.entry.building", "clasp_core.report.__main__"}


def sources() -> list[Path]:
    """Every Python file of the two packages, and the entry script if there is one."""
    found = [path for package in ("clasp_core", "baselines") for path in sorted((ROOT / package).rglob("*.py"))]
    return found + [path for path in (ROOT / "run.py",) if path.exists()]


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sources()}


@cache
def imports(name: str) -> tuple[tuple[str, bool], ...]:
    """What a module imports, by full name, and whether it does so while it is loaded itself."""
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    return tuple(dict.fromkeys(_imports(tree, name, True)))


def _imports(node: ast.AST, name: str, at_load: bool) -> Iterator[tuple[str, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, at_load) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{name} imports relatively; full names only"
            for alias in child.names:
                full = f"{child.module}.{alias.name}"
                yield (full if full in MODULES else str(child.module)), at_load
        else:
            inner = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(child, name, at_load and not inner)


def ours(name: str) -> list[str]:
    """The modules of the two packages that a module imports."""
    return [imported for imported, _ in imports(name) if imported in MODULES and imported.split(".")[0] != "run"]


def is_aside(name: str) -> bool:
    parts = name.split(".")
    return parts[0] == "clasp_core" and len(parts) > 1 and parts[1] in ASIDE


def test_every_module_has_a_floor() -> None:
    placed = [
        name
        for name in MODULES
        if name in FLOORS or is_aside(name) or name.startswith("baselines") or name in ("clasp_core", "run")
    ]
    assert sorted(MODULES) == sorted(placed), "a new module: give it a place in CORE"
    assert len(placed) > 15


@pytest.mark.parametrize("name", sorted(FLOORS))
def test_a_module_imports_its_own_floor_and_lower_ones_only(name: str) -> None:
    if name not in MODULES:
        pytest.skip(f"{name} is not written yet")
    for imported in ours(name):
        assert imported in FLOORS, f"{name} imports {imported}, which has no floor in the core"
        assert FLOORS[imported] <= FLOORS[name], f"{name} (floor {FLOORS[name]}) imports {imported}, above it"


def test_imports_run_in_no_circle() -> None:
    """Also not through imports inside functions."""
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path, name))
        if name not in done:
            for imported in ours(name):
                visit(imported, (*path, name))
            done.add(name)

    for name in MODULES:
        visit(name, ())


@pytest.mark.parametrize("name", [name for name in MODULES if is_aside(name)])
def test_what_stands_aside_reads_rows_only(name: str) -> None:
    for imported in ours(name):
        assert is_aside(imported) or FLOORS.get(imported) == 0, f"{name} imports {imported}"


def test_report_never_imports_torch() -> None:
    """Not by a detour either: a fresh interpreter has no torch after importing all of it."""
    names = [name for name in MODULES if name.startswith("clasp_core.report") and not name.endswith("__main__")]
    heavy = ("torch", "transformers", "accelerate")
    assert not [name for name in names for imported, _ in imports(name) if imported.split(".")[0] in heavy]
    code = (
        f"import importlib, sys\nfor name in {names}: importlib.import_module(name)\n"
        f"print(sorted(set({heavy}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_the_core_never_imports_a_baseline() -> None:
    for name in MODULES:
        if name.startswith("clasp_core"):
            assert not [imported for imported, _ in imports(name) if imported.split(".")[0] == "baselines"], name


def method_of(name: str) -> str:
    """The method that a module of baselines belongs to: `swift_search` is a part of `swift`, if there is a `swift`."""
    return next((other for other in sorted(MODULES) if name.startswith(f"{other}_")), name)


def test_baselines_never_import_each_other_or_the_runner() -> None:
    """Parts of one method may; the core's modules they may use up to floor 4."""
    for name in MODULES:
        if name.startswith("baselines"):
            reached = [imported for imported in ours(name) if imported != "clasp_core"]
            strange = [each for each in reached if FLOORS.get(each, 9) > 4 and method_of(each) != method_of(name)]
            assert not strange, (name, strange)


def test_the_runner_imports_no_method() -> None:
    methods = {"clasp_core.clasp", *(name for name in MODULES if name.startswith("baselines"))}
    assert not methods & {*ours("clasp_core.runner"), *ours("clasp_core.plan")}


def test_transformers_is_imported_where_models_are_made_only() -> None:
    for name in MODULES:
        for imported, at_load in imports(name):
            if imported.split(".")[0] == "transformers":
                late = name in MAY_IMPORT_IT_LATE and not at_load
                assert name in MAY_IMPORT_TRANSFORMERS or late, f"{name} imports {imported}"


def test_hydra_is_imported_by_the_entries_only() -> None:
    for name in MODULES:
        if any(imported.split(".")[0] in ("hydra", "omegaconf") for imported, _ in imports(name)):
            assert name in MAY_IMPORT_HYDRA, name


def test_the_timed_loop_imports_no_logger() -> None:
    """P62: nothing between two readings of the clock writes or reports."""
    for name in ("decoding", "drafting", "verify", "sampling", "target", "attention", "kv_cache", "clasp"):
        bad = {"logging", "wandb", "tqdm", "rich", "warnings"}
        assert not bad & {imported.split(".")[0] for imported, _ in imports(f"clasp_core.{name}")}
        calls = [
            node.func.id
            for node in ast.walk(ast.parse(MODULES[f"clasp_core.{name}"].read_text(encoding="utf-8")))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        ]
        assert "print" not in calls


CUDA_ALLOWED = {"clasp_core.device", "clasp_core.attention", "clasp_core.graphs"}


def test_only_the_device_modules_call_cuda() -> None:
    """`torch.cuda...` as code (words in messages and device strings aside)."""
    for name, path in MODULES.items():
        uses = [
            node
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Attribute) and node.attr == "cuda"
        ]
        assert not uses or name in CUDA_ALLOWED, f"{name}, line {uses[0].lineno}"


# ---- no state in modules

MUTABLE = (MutableMapping, MutableSequence, MutableSet, torch.Tensor, torch.Generator, torch.nn.Module)


def globals_of(module: ModuleType, path: Path) -> Iterator[tuple[str, Any]]:
    """The values that a module's own top level assigns."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        assert not isinstance(node, ast.Global), f"{path.name}, line {node.lineno}: a global statement"
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            for each in ast.walk(target) if target is not None else ():
                if isinstance(each, ast.Name) and hasattr(module, each.id) and not each.id.startswith("__"):
                    yield each.id, getattr(module, each.id)


@pytest.mark.parametrize("name", [n for n in MODULES if n.split(".")[0] != "run" and not n.endswith("__main__")])
def test_no_module_holds_a_mutable_global(name: str) -> None:
    """P31: tables are tuples, frozensets or MappingProxyType; two engines in one process cannot meet."""
    for found, value in globals_of(importlib.import_module(name), MODULES[name]):
        assert not isinstance(value, MUTABLE), f"{name}.{found} is a mutable {type(value).__name__}"


@pytest.mark.parametrize("name", [n for n in MODULES if n.split(".")[0] != "run"])
def test_no_class_shares_a_mutable_attribute_and_no_function_a_mutable_default(name: str) -> None:
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            values = [part.value for part in node.body if isinstance(part, ast.Assign | ast.AnnAssign)]
        elif isinstance(node, ast.FunctionDef | ast.Lambda):
            values = [*node.args.defaults, *node.args.kw_defaults]
        else:
            continue
        bad = [v for v in values if isinstance(v, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp)]
        assert not bad, f"{name}, line {bad[0].lineno}"
        cached = [d for d in getattr(node, "decorator_list", []) if "cache" in ast.unparse(d)]
        assert not cached, f"{name}, line {cached[0].lineno}: a cache is a global with another name"


# ---- the walk itself


def test_the_walk_sees_every_kind_of_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (
        "import os.path, torch\nfrom clasp_core import clasp, errors\nfrom clasp_core.skip import LayerSkip\n"
        "def f():\n    from transformers import AutoModel\nclass C:\n    import json\n"
        "if True:\n    try:\n        import hydra\n    except ImportError:\n        pass\n"
    )
    path = tmp_path / "odd.py"
    path.write_text(source)
    monkeypatch.setitem(MODULES, "odd", path)
    assert set(_imports(ast.parse(source), "odd", True)) == {
        ("os.path", True), ("torch", True), ("clasp_core.clasp", True), ("clasp_core.errors", True),
        ("clasp_core.skip", True), ("transformers", False), ("json", True), ("hydra", True),
    }  # fmt: skip
