"""The layout: arrows go flows -> tasks -> kivi, no two files import each other, none is longer than 400 lines."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROOMS = ("kivi", "tasks", "flows")  # each may import from those before it
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for room in ROOMS
    for path in (ROOT / room).rglob("*.py")
}


def imports(module: str) -> set[str]:
    """Return the project's modules that one imports, within functions too."""
    found = set()
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {name if (name := f"{node.module}.{alias.name}") in FILES else str(node.module) for alias in node.names}
    return (found & FILES.keys()) - {module}


def test_arrows_go_one_way() -> None:
    level = {module: ROOMS.index(module.partition(".")[0]) for module in FILES}
    assert [(one, other) for one in FILES for other in imports(one) if level[other] > level[one]] == []


def test_no_files_import_each_other_in_a_circle() -> None:
    TopologicalSorter({module: imports(module) for module in FILES}).prepare()  # raises CycleError with the circle


def test_no_file_is_longer_than_400_lines() -> None:
    lengths = {module: len(path.read_text().splitlines()) for module, path in FILES.items()}
    assert len(FILES) > 80 and [(module, length) for module, length in lengths.items() if length > 400] == []


def test_the_librarys_tests_run_where_only_its_dependencies_are() -> None:
    """What a test function imports is its own: only what importing the file imports must be there."""
    tests = [ROOT / "tests" / "conftest.py", *(ROOT / "tests" / "kivi").rglob("*.py")]
    imported = {
        (path.name, name)
        for path in tests
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [str(node.module)])
    }
    foreign = {"tasks", "flows", "prefect", "mlflow", "datasets"}
    assert [pair for pair in imported if pair[1].partition(".")[0] in foreign] == []
