"""The house: which room may import from which, read from the sources. Imports under TYPE_CHECKING and in functions
count."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EVERYWHERE = {"errors", "files", "units", "console"}  # leaf modules that any room may use
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "files": set(),
    "units": set(),
    "process": set(),
    "crash": set(),
    "console": set(),
    "kernels": set(),
    "engine": {"kernels"},
    "models": {"engine"},
    "backend": {"engine", "kernels"},
    "measure": {"backend", "engine", "kernels"},
    "tools": set(),
    "chat": {"backend", "models", "tools"},
    "server": {"backend"},
    "plain": {"chat", "tools", "backend", "models", "process", "crash"},
    "ui": {"chat", "tools", "backend", "models", "measure", "process", "crash"},
    "commands": {
        "ui",
        "plain",
        "chat",
        "tools",
        "server",
        "measure",
        "backend",
        "models",
        "engine",
        "kernels",
        "process",
    },
    "cli": {"commands", "chat", "process"},
    "__main__": {"cli"},
}


@dataclass
class Source:
    """What the tests ask of a source; its tree is parsed once and not kept."""

    imports: list[ast.Import | ast.ImportFrom]
    defined: list[tuple[str, int]]  # classes and types, and their lines
    changed: set[str]  # x of x.attribute = ...


@cache
def sources() -> dict[Path, Source]:
    """Those of tinychat, by their paths in it."""
    return {p.relative_to(ROOT / "tinychat"): _source(p) for p in (ROOT / "tinychat").rglob("*.py")}


def _source(path: Path) -> Source:
    out = Source([], [], set())
    for node in ast.walk(tree := ast.parse(path.read_text())):
        match node:
            case ast.Import() | ast.ImportFrom():
                out.imports.append(node)
            case ast.ClassDef():
                out.defined.append((node.name, node.lineno))
            case ast.Assign():
                attributes = [t.value for t in node.targets if isinstance(t, ast.Attribute)]
                out.changed |= {value.id for value in attributes if isinstance(value, ast.Name)}
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)]) if re.fullmatch("[A-Z]+[a-z][A-Za-z]*", name):
                out.defined.append((name, statement.lineno))
    return out


def modules() -> dict[str, set[str]]:
    """Every module of tinychat, and the modules it imports (the innermost that exist)."""
    files = {
        ".".join(("tinychat", *p.with_suffix("").parts)).removesuffix(".__init__"): s for p, s in sources().items()
    }
    graph: dict[str, set[str]] = {}
    for name, source in files.items():
        found: set[str] = set()
        for node in source.imports:
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            else:
                assert node.level == 0, f"{name}: imports are written out in full"
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= (inner & files.keys()) or {node.module or ""}
        graph[name] = {f for f in found if f in files and f not in (name, "tinychat")}
    return graph


def room(module: str) -> str:
    """kernels of tinychat.kernels.cpu.executor."""
    return module.split(".")[1] if "." in module else ""


def test_no_arrow_runs_back_up() -> None:
    """A room imports only from the rooms that ROOMS lists for it."""
    wrong = [
        f"{module} -> {target}"
        for module, targets in modules().items()
        for target in targets
        if room(module) and room(target) not in ROOMS[room(module)] | EVERYWHERE | {room(module)}
    ]
    assert not wrong, "\n".join(sorted(wrong))


def test_there_is_no_import_circle() -> None:
    """Not even one behind TYPE_CHECKING or inside a function; a package's __init__ stands for what it imports."""
    try:
        TopologicalSorter(modules()).prepare()
    except CycleError as e:
        pytest.fail(" -> ".join(e.args[1]))


def test_every_room_is_known() -> None:
    found = {room(m) for m in modules()} - {""}
    assert found <= ROOMS.keys(), found - ROOMS.keys()


def test_a_name_has_one_meaning() -> None:
    """No two modules define a class or a type of the same name."""
    where: dict[str, list[str]] = {}
    for path, source in sources().items():
        for name, line in source.defined:
            where.setdefault(name, []).append(f"{path}:{line}")
    twice = {name: places for name, places in where.items() if len(places) > 1}
    assert not twice, twice


CHANGES_THE_PROCESS = re.compile(
    r"os\.environ(\[[^]]+\] *=|\.(setdefault|update|pop)\()|os\.(putenv|umask|chdir|nice)\("
    r"|\bgc\.(freeze|disable|set_\w+)\(|sys\.set\w+\(|sys\.(stdout|stderr|excepthook) *="
    r"|signal\.signal\(|locale\.setlocale\(|resource\.setrlimit\("
)


def test_the_process_is_changed_in_one_place() -> None:
    """process.py says which changes of the whole process (environment, garbage collector, ...) are made elsewhere."""
    found = {
        str(path.relative_to(ROOT / "tinychat"))
        for path in (ROOT / "tinychat").rglob("*.py")
        if CHANGES_THE_PROCESS.search(path.read_text())
    }
    assert found - {"process.py"} == {"kernels/cpu/compiler.py", "engine/devices.py"}


def test_only_a_profile_replaces_what_another_module_defines() -> None:
    """An assignment to an attribute of an imported module or class; process.py says which."""
    found = set()
    for path, source in sources().items():
        aliases = [alias for node in source.imports for alias in node.names]
        imported = {(alias.asname or alias.name).split(".")[0] for alias in aliases}
        found |= {f"{path}: {name}" for name in source.changed & imported}
    assert found == {"kernels/tinygrad/compile_caches.py: realize"}
