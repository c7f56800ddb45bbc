"""Who may import whom: the picture of docs/architecture.md, enforced.

Imports anywhere in a module count, also those inside of functions; those for the type checker alone do not.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import coterie

ROOT = Path(coterie.__file__).parent

# Each layer may import those above it, and its own modules.
LAYERS = [
    ["_version", "checks", "files", "launching", "machine", "timing"],
    ["tables"],
    ["draws", "compiled", "progress"],
    ["backend"],
    ["call"],
    ["exact"],
    ["plan"],
    ["planning", "engine"],  # neither imports the other
    ["mechanisms"],
    ["observe"],
    ["functional"],
    ["sdpa"],
    ["nn", "checking"],
    ["rounds_schedule"],
    ["hf"],
    ["hosts"],
    ["fitting"],
    ["analysis"],
    ["report"],
    ["cli"],
    ["__main__"],
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
# An explicit exception needs a reason.
ALLOWED = {
    ("mechanisms.base", "mechanisms.at_least"): "reading a string that ends in '@1024' makes one",
}


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(name: str) -> Iterator[str]:
    """The modules of ours that a module imports, by their name below `coterie`."""
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    for node in _at_runtime(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports are absolute"
            # `from coterie.plan import tiles` is a module, `from coterie.plan import Plan` is not
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            targets = [x if x.removeprefix("coterie.") in MODULES else str(node.module) for x in inside]
        else:
            continue
        yield from (x.removeprefix("coterie.") for x in targets if x.startswith("coterie."))


def _at_runtime(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _at_runtime(child)


def test_every_module_has_a_layer():
    assert {name.split(".")[0] for name in MODULES if name} == set(LEVEL)


@pytest.mark.parametrize("name", [name for name in MODULES if name])
def test_a_module_imports_only_what_is_above_it(name):
    own = name.split(".")[0]
    for target in imports(name):
        other = target.split(".")[0]
        if other == "_native":
            assert own == "compiled"
        elif other != own and (name, target) not in ALLOWED:
            assert LEVEL[other] < LEVEL[own], f"{name} imports {target}, which is not above it"


@pytest.mark.parametrize("folder", ["engine", "planning"])
def test_backends_never_import_each_other(folder):
    names = {f"{folder}.{backend}" for backend in ("reference", "native", "triton")} & set(MODULES)
    assert len(names) >= 2
    for name in names:
        assert not set(imports(name)) & (names - {name})


def test_nothing_imports_in_a_circle():
    """Within a folder too: each module can be read after those that it imports. Packages' doors do not count."""
    graph = {name: {x for x in imports(name) if x != name and not _is_package(x)} for name in MODULES if name}
    for name, target in ALLOWED:
        graph[name].discard(target)
    done: set[str] = set()
    while len(done) < len(graph):
        ready = {name for name, needs in graph.items() if name not in done and needs <= done}
        assert ready, f"a circle among {sorted(set(graph) - done)}"
        done |= ready


def _is_package(name: str) -> bool:
    return MODULES.get(name, ROOT).name == "__init__.py"
