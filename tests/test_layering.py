"""Who may import whom: each room of the package, and the rooms it may use."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "vil"
# room -> the rooms it may use; what these may use, it may use too
ABOVE = {
    "utils": [],
    "config": ["utils"],
    "ops": ["utils"],
    "layers": ["ops"],
    "models": ["layers"],
    "pretrained": ["models"],
    "integrations": ["pretrained"],
    "export": ["models"],
    "data": ["utils"],
    "optim": ["utils"],
    "engine": ["utils"],
    "report": ["utils"],
    "bench": ["models"],
    "tasks": ["pretrained", "data", "optim", "engine", "report"],
}
LATER = {"engine": {"tasks"}, "report": {"tasks"}}  # until tasks own their pages
BRIDGES = {"build", "build_backends", "build_data", "build_detection"}
EVERYTHING = BRIDGES | {"cli", "__main__", "__init__"}
CONFIG_READERS = EVERYTHING | {"config"}


def reachable(room: str) -> set[str]:
    """A room and all that it may import."""
    return {room}.union(*map(reachable, ABOVE[room]))


def room_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imports(path: Path) -> set[str]:
    """The dotted names that a file imports, at any depth."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_imports(path):
    room, names = room_of(path), imports(path)
    assert room in ABOVE.keys() | EVERYTHING, f"{room} is a new room: say here what it may import"
    rooms = {name.split(".")[1] for name in names if name.startswith("vil.")}
    if room not in EVERYTHING:
        others = rooms - reachable(room) - {"__version__"} - LATER.get(room, set())
        assert not others, f"{room} may not import {others}"
    if room not in CONFIG_READERS:
        assert not any(name.startswith("yacs") for name in names), (
            "only build and cli see the config"
        )


def test_importing_the_package_is_light():
    import subprocess
    import sys

    code = "import sys, vil, vil.config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
