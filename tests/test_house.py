"""The house of DESIGN.md holds: imports point down, torch stays where it belongs, the CLI starts light."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from data_tables import ROOT

SOURCE = ROOT / "src" / "meshwise"

# Top to bottom; a module may import from its own layer and from those below.
LAYERS = (
    "__main__ > cli > web > api > report sweep > runtime > trace calibrate published > rl > search serve > "
    "launch > estimate > program > plan > cost > model machine > core"
)
LEVEL = {name: level for level, names in enumerate(LAYERS.split(" > ")) for name in names.split()}
TORCH_ROOMS = ("runtime",)


def modules() -> list[Path]:
    return sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports_of(path: Path) -> set[str]:
    """Full names of the modules that `path` imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return names


def test_imports_point_down() -> None:
    """To the room of a module or to those below it; torch is imported only where programs run."""
    offenders = []
    for path in modules():
        room = room_of(path)
        assert room in LEVEL, f"{room} has no place in the house; give it one in LAYERS"
        for name in sorted(imports_of(path)):
            root, _, rest = name.partition(".")
            above = root == "meshwise" and LEVEL.get(rest.partition(".")[0], LEVEL[room]) < LEVEL[room]
            if above or (root == "torch" and room not in TORCH_ROOMS):
                offenders.append(f"{path.relative_to(SOURCE)} imports {name}")
    assert not offenders


def import_graph() -> dict[str, set[str]]:
    """The modules of the package that each of them imports, late imports and those for types included."""
    names = {path: ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts) for path in modules()}
    paths = {name.removesuffix(".__init__"): path for path, name in names.items()}
    return {name: (imports_of(path) & set(paths)) - {name} for name, path in paths.items()}


def test_published_models_are_known_by_their_faces_alone() -> None:
    """Outside `published/`, only its registry and the three folders' own faces are imported."""
    faces = {"convention", "frontier", "moe_inference", "nersc"}
    inside = {name for path in (SOURCE / "published").rglob("*.py") for name in [path.stem]}
    for path in modules():
        if room_of(path) != "published":
            for parts in (name.split(".")[2:] for name in imports_of(path) if "meshwise.published." in name):
                assert parts[0] in faces, f"{path} imports {parts[0]} of published/"
                assert parts[1:2] == [] or parts[1] not in inside or parts[1] == parts[0], f"{path}: {parts}"


def test_no_class_name_stands_in_two_files() -> None:
    places: dict[str, list[str]] = {}
    for path in modules():
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(path.name)
    assert not {name: files for name, files in places.items() if len(files) > 1}


def reachable(graph: dict[str, set[str]], name: str) -> set[str]:
    """All that `name` imports, directly or not."""
    found: set[str] = set()
    queue = [name]
    while queue:
        new = graph[queue.pop()] - found
        found |= new
        queue += new
    return found


def test_no_modules_import_each_other() -> None:
    """Neither two nor a ring of more: a module is never among those that its own imports reach."""
    graph = import_graph()
    below = {name: reachable(graph, name) for name in graph}
    cycles = {
        frozenset(other for other in below[name] if name in below[other])
        for name in graph
        if name in below[name]
    }
    assert not cycles, [sorted(cycle) for cycle in cycles]


@pytest.mark.parametrize("words", [["--help"], ["list", "models"]])
def test_heavy_packages_are_imported_late(words: list[str]) -> None:
    code = (
        "import sys; from meshwise.cli import app; app(sys.argv[1:], standalone_mode=False);"
        "heavy = {'torch', 'pandas', 'polars', 'matplotlib', 'scipy'}; print(heavy & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
