"""Who may import whom: each room of the package, and the rooms it may use; and no circle."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.smoke

PACKAGE = Path(__file__).parent.parent / "vil"
FILES = sorted(PACKAGE.rglob("*.py"))
# room -> the rooms it may use; what these may use, it may use too
BELOW = {
    "utils": [],
    "config": ["utils"],
    "ops": ["utils"],
    "layers": ["ops"],
    "models": ["layers"],
    "pretrained": ["models"],
    "integrations": ["pretrained"],
    "export": ["models"],
    "streaming": ["models"],
    "data": ["utils"],
    "optim": ["utils"],
    "engine": ["utils"],
    "report": ["utils"],
    "tasks": ["config", "integrations", "export", "streaming", "data", "optim", "engine", "report"],
    "workflows": ["tasks"],
}
ONLY = {"cli": {"cli", "workflows", "config", "utils"}}
PUBLIC = {"__init__", "__main__", "errors", "plugins"}  # modules of the package itself
SEE_THE_CONFIG = {"config", "workflows", "cli"}  # and every build.py


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def rooms_below(room: str) -> set[str]:
    """A room and all that it may import."""
    return {room}.union(*map(rooms_below, BELOW[room]))


@cache
def imports(path: Path) -> set[str]:
    """The dotted names that a file imports, at any depth, but for type checking."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def violations(path: Path) -> Iterator[str]:
    """What is wrong with the imports of a file."""
    room, names = room_of(path), imports(path)
    if room in PUBLIC:
        return
    if room not in BELOW and room not in ONLY:
        yield f"{room} is a new room: say here what it may import"
        return
    is_build = path.name == "build.py"
    allowed = (ONLY.get(room) or rooms_below(room)) | ({"config"} if is_build else set())
    rooms = {name.split(".")[1] for name in names if name.startswith("vil.")}
    if others := rooms - allowed - {"__version__"}:
        yield f"{room} may not import {others}"
    is_task_base = room == "tasks" and path.parent.name == "tasks"
    reads_config = room in SEE_THE_CONFIG or is_build or is_task_base
    if not reads_config and any(name.startswith("yacs") for name in names):
        yield "the config stops above"


def test_imports():
    found = {str(path.relative_to(PACKAGE)): [*violations(path)] for path in FILES}
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_import_circle():
    modules = {module_of(path): path for path in FILES}
    graph = {}
    for name, path in modules.items():
        targets = {n if n in modules else n.rpartition(".")[0] for n in imports(path)}
        graph[name] = {t for t in targets if t in modules and t not in (name, "vil")}
    done, stack = set(), []

    def visit(name):
        assert name not in stack, " -> ".join([*stack[stack.index(name) :], name])
        if name in done:
            return
        stack.append(name)
        for target in sorted(graph[name]):
            visit(target)
        done.add(stack.pop())

    for name in graph:
        visit(name)


def test_importing_the_package_is_light():
    code = (
        "import sys, vil, vil.config, vil.tasks, vil.optim, vil.data\n"
        "from vil.config import registries\n"
        "assert all(registries.registry(kind).kind for kind in registries.HOMES)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
