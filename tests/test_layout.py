"""The rooms of the package: what may import what."""

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

SOURCES = {
    "pathcond": Path(__file__).parent.parent / "src" / "pathcond",
    "pathcond_paper": Path(__file__).parent.parent / "paper" / "src" / "pathcond_paper",
}


@cache
def modules() -> dict[str, Path]:
    """Every file of both packages by its dotted name."""
    found = {}
    for folder in SOURCES.values():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder.parent).with_suffix("").parts
            found[".".join(part for part in parts if part != "__init__")] = path
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """The modules that a file imports: at its top, inside functions, for types alone."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            targets = {f"{base}.{alias.name}" for alias in node.names}
            found |= {target if target in known else base for target in targets}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & known.keys()


@cache
def edges() -> dict[str, set[str]]:
    known = modules()
    return {name: imports(name, path, known) for name, path in known.items()}


def room(name: str) -> str:
    """The folder of a module; modules beside ``__init__`` are rooms of their own."""
    parts = name.split(".")
    known = modules()
    is_folder = known.get(name, Path()).name == "__init__.py"
    return name if is_folder or len(parts) < 3 else ".".join(parts[:-1])


def find_circle(graph: dict[str, set[str]]) -> list[str]:
    """The names along one circle; empty if there is none."""
    done: set[str] = set()

    def walk(name: str, trail: list[str]) -> list[str]:
        if name in trail:
            return trail[trail.index(name) :]
        if name in done:
            return []
        for target in sorted(graph.get(name, ())):
            circle = walk(target, [*trail, name])
            if circle:
                return circle
        done.add(name)
        return []

    return next((circle for name in sorted(graph) if (circle := walk(name, []))), [])


def test_a_circle_would_be_found() -> None:
    assert find_circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    assert find_circle({"a": {"b", "c"}, "b": {"c"}}) == []


def test_files_import_each_other_in_one_direction() -> None:
    assert find_circle(edges()) == []


def test_folders_import_each_other_in_one_direction() -> None:
    graph: dict[str, set[str]] = defaultdict(set)
    for name, targets in edges().items():
        if modules()[name].name == "__init__.py":
            continue  # a package may show what is inside it
        graph[room(name)] |= {room(target) for target in targets} - {room(name)}
    assert find_circle(graph) == []


def test_the_core_knows_nothing_of_the_paper() -> None:
    for name, path in modules().items():
        if name.split(".")[0] == "pathcond":
            assert "import pathcond_paper" not in path.read_text(), name
            assert "from pathcond_paper" not in path.read_text(), name


@pytest.mark.parametrize("folder", SOURCES.values(), ids=SOURCES)
def test_few_modules_lie_flat(folder: Path) -> None:
    assert len(list(folder.glob("*.py"))) <= 20
