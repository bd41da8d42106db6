"""Imports point down only, between packages and between overlap's rooms, without circles; files stay small."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.harness import ROOT

STRATEGIES = ("dear", "wfbp", "mgwfbp", "bytescheduler_adapter", "co2", "oss", "fsdp", "osdp")
OURS = ("comm_core", "overlap", "dearrun", *STRATEGIES, "pipe", "model_parallel", "bench", "examples", "tests")
ALLOWED = {
    "comm_core": (),
    "overlap": ("comm_core",),
    "dearrun": ("comm_core", "overlap"),
    **dict.fromkeys(STRATEGIES, ("comm_core", "overlap")),
    "dear": ("comm_core", "overlap", "dearrun"),  # dear.run
    "pipe": ("overlap",),
    "model_parallel": ("overlap",),
}
TUNING = ("bayes", "campaign", "options", "space", "window")
PURE = (
    "overlap/plan/partition.py",
    "overlap/state/boxes.py",
    "overlap/job/cores.py",
    "overlap/job/launch.py",
    "overlap/job/settings.py",
    "overlap/health/deadlock.py",
    "dearrun/hosts.py",
    "dearrun/inherited.py",
    "dearrun/command.py",
    "dearrun/options.py",
    "dearrun/reports.py",
    "dearrun/transport.py",
    "dearrun/worker.py",
    "overlap/plan/assignment.py",
    "overlap/plan/cost_model.py",
    *(f"overlap/horovod/controller/{name}.py" for name in ("coordinator", "request")),
    "overlap/plan/plan.py",
    *(f"overlap/plan/tuning/{name}.py" for name in TUNING),
    "co2/fragments/layers.py",
    "co2/schedule.py",
    "dear/schedule.py",
    "oss/fairscale.py",
    "pipe/schedule.py",
    *(f"osdp/{name}.py" for name in ("choice", "job", "memory_plan", "published", "search")),
    "mgwfbp/merge.py",
    "bytescheduler_adapter/credit.py",
    "bytescheduler_adapter/schedule.py",
    "tests/compare_horovod/judgement.py",
    "tests/compare_horovod/documented.py",
)
LIBRARY_FILES = sorted(path for package in ALLOWED for path in (ROOT / package).rglob("*.py"))


def _imports(path: Path, inside_functions: bool) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    lazy = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for child in ast.walk(node)
        if child is not node
    }
    for node in ast.walk(tree):
        if node in lazy and not inside_functions:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            yield from {f"{module}.{alias.name}" if _is_module(module, alias.name) else module for alias in node.names}


def _is_module(package: str, name: str) -> bool:
    """Whether ``from package import name`` gives a module of ours and not something defined in `package`."""
    place = ROOT.joinpath(*package.split("."))
    return name in ("_C", "_mpi", "_nccl") or (place / f"{name}.py").exists() or (place / name / "__init__.py").exists()


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", LIBRARY_FILES, ids=_name)
def test_imports_point_down(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    lazily_allowed = STRATEGIES if package == "dear" else ()
    for name in _imports(path, inside_functions=True):
        top = name.split(".")[0]
        if top in OURS and top != package:
            assert top in (*ALLOWED[package], *lazily_allowed), f"{_name(path)} imports {name}"
        if package == "comm_core":
            assert top != "torch", f"{_name(path)} imports torch"
    for name in _imports(path, inside_functions=False):
        top = name.split(".")[0]
        assert top == package or top not in STRATEGIES, f"{_name(path)} imports {name} at its top"


IMPORTERS = sorted(
    path for folder in ("tests", "bench", "examples", "scripts") for path in (ROOT / folder).rglob("*.py")
)


@pytest.mark.parametrize("path", IMPORTERS, ids=_name)
def test_what_is_imported_is_there(path: Path) -> None:
    """A file that is run elsewhere only, inside ranks or by a second tier, names nothing that has moved."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ALLOWED:
            module = importlib.import_module(node.module)
            for name in (alias.name for alias in node.names):
                there = hasattr(module, name) or importlib.util.find_spec(f"{node.module}.{name}")
                assert there, f"{_name(path)}:{node.lineno} imports {name} from {node.module}"


@pytest.mark.parametrize("path", PURE)
def test_pure_files_know_neither_torch_nor_communicators(path: str) -> None:
    for name in _imports(ROOT / path, inside_functions=True):
        assert name.split(".")[0] not in ("torch", "comm_core"), f"{path} imports {name}"


def test_rooms_import_one_way() -> None:
    order = _rooms()
    upward = set()
    for path in sorted((ROOT / "overlap").rglob("*.py")):
        here = path.relative_to(ROOT / "overlap").with_suffix("").parts
        for name in _imports(path, inside_functions=True):
            there = name.split(".")[1:]
            if name.startswith("overlap.") and order.index(there[0]) > order.index(here[0]):
                upward.add(f"{'.'.join(here)} -> {'.'.join(there)}")
    assert upward == set()


def _rooms() -> list[str]:
    """From the lowest up, as docs/architecture.md has them; what lies beside them in overlap/ is the top."""
    found = re.search(r"^    (transport < .*)$", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    assert found, "docs/architecture.md has the order of the rooms"
    rooms = found[1].split(" < ")
    folders = {path.parent.name for path in (ROOT / "overlap").glob("*/__init__.py")}
    assert folders == set(rooms) - {"api"}
    return [*rooms, "__init__"]


def test_rooms_of_bench_import_one_way_and_nobody_imports_a_command() -> None:
    found = re.search(
        r"^    (program < .*?)\n\n", (ROOT / "bench" / "__init__.py").read_text(), re.MULTILINE | re.DOTALL
    )
    assert found, "bench/__init__.py has the order of the rooms"
    order = re.split(r"\s+<\s+", found[1])
    assert {"program", *(path.parent.name for path in (ROOT / "bench").glob("*/__init__.py"))} == set(order)
    graph = {}
    for path in sorted((ROOT / "bench").rglob("*.py")):
        here = path.relative_to(ROOT / "bench").with_suffix("").parts
        below = order[: order.index(here[0]) + 1] if here[0] in order else order
        for name in _imports(path, inside_functions=True):
            if name.startswith("bench."):
                assert name.split(".")[1] in below, f"{_name(path)} imports {name}"
            # The kernels are built with the compiler of the tests; nothing else of tests is needed.
            assert name.split(".")[0] != "tests" or here == ("kernels",), f"{_name(path)} imports {name}"
        module = ".".join(("bench", *here)).removesuffix(".__init__")
        graph[module] = set(_imports(path, inside_functions=False)) - {module}
    TopologicalSorter(graph).prepare()  # raises where modules go in a circle


def test_modules_do_not_go_in_circles() -> None:
    graph = {}
    for path in LIBRARY_FILES:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        graph[name] = set(_imports(path, inside_functions=False))
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"circle: {' -> '.join((*trail, name))}"
        if name in done:
            return
        for other in graph.get(name, ()):
            if other in graph and other != name:
                visit(other, (*trail, name))
        done.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("path", LIBRARY_FILES, ids=_name)
def test_libraries_do_not_print(path: Path) -> None:
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    assert not any(isinstance(call.func, ast.Name) and call.func.id == "print" for call in calls)
