"""The rules of the tree, proved from the source text: who may import whom, how long things get, what is public. Nothing of CUDA is imported."""

from __future__ import annotations

import ast
import gc
import json
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from accel.backend import AccelBackend
from accel.registry import load_backend

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("accel", "accel_cuda")
SOURCES = (*PACKAGES, "tests", "benchmarks", "examples")
MAX_MODULE_LINES = 600
MAX_FUNCTION_LINES = 60

VOCABULARY = (
    *("errors", "dtype", "ref", "views", "dlpack", "exchange", "hints", "shortage", "sparse_ref"),
    *("backend", "family", "registry", "compute", "arguments", "values", "fork", "_log", "_startup", "_child"),
)
# A higher number may import a lower one. Rooms of one layer may import each other in one direction only.
LAYERS = {
    **dict.fromkeys(VOCABULARY, 0),
    "actors": 1,
    "completion": 2,
    "ops": 2,
    "memory": 2,
    "expressions": 3,
    "process": 3,
    "solvers": 3,
    "storage": 4,
    "engine": 5,
    "functions": 6,
    "residents": 6,
    "sharing": 6,
    "models": 7,
    "remote": 7,
    "files": 7,
    "device": 8,
    "cpu": 9,  # its own imports are limited below; the number keeps the generic layers from importing it
    "patterns": 10,
    "integrations": 10,
    "testing": 10,
    "cli": 11,
    "__main__": 12,
    "": 13,  # `accel` itself, which gathers the public names
}
CPU_MAY_IMPORT = {*VOCABULARY, "memory", "cpu"}
OUTSIDE_VOCABULARY = {"asyncio", "anyio"}
CUDA_LAYERS = {"errors": 0, "core": 1, "families": 2, "device": 3, "backend": 4, "": 5}
CUDA = {"accel_cuda", "cuda", "cupy", "nvmath"}
# Frameworks of models: imported by adapters, and by what reads a state dict.
FRAMEWORKS = {"torch", "onnx", "onnxruntime", "safetensors"}
MAY_IMPORT_FRAMEWORKS = ("accel.models.adapters.", "accel.models.weights", "accel.files.onnx")
# Without rich: structlog loads it by itself where it is installed.
NOT_WITH_ACCEL = CUDA | FRAMEWORKS | {"aiohttp", "fastapi", "prometheus_client", "pytest", "scipy", "starlette", "uvicorn"}


@dataclass(frozen=True)
class Import:
    """One imported name: ``module`` as written absolutely, ``name`` for ``from module import name``."""

    module: str
    name: str | None
    line: int
    for_typing: bool

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]


@dataclass(frozen=True)
class Module:
    """One source file."""

    name: str
    path: Path
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @property
    def room(self) -> str:
        """The part of its package that the module belongs to: ``device`` for ``accel.engine.lifecycle``."""
        return room(self.name)

    @property
    def is_public(self) -> bool:
        return not any(part.startswith("_") for part in self.name.split("."))

    def at(self, line: int) -> str:
        return f"{self.path.relative_to(ROOT)}:{line}"


def room(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


def parse(path: Path) -> Module:
    relative = path.relative_to(ROOT).with_suffix("")
    parts = relative.parts[:-1] if relative.name == "__init__" else relative.parts
    return Module(".".join(parts), path, ast.parse(path.read_text(encoding="utf-8"), str(path)))


@cache
def modules_of(top: str) -> list[Module]:
    return [parse(path) for path in sorted((ROOT / top).rglob("*.py"))]


def modules(*tops: str) -> dict[str, Module]:
    return {module.name: module for top in tops for module in modules_of(top)}


@pytest.fixture(scope="module", autouse=True)
def syntax_trees() -> Iterator[None]:
    """Keep the trees, of millions of objects, from garbage collections: during the tests of this file there are none, after them no trees."""
    gc.disable()
    yield
    modules_of.cache_clear()
    gc.enable()


def is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING")


def imports(tree: ast.AST, *, name: str, is_package: bool, for_typing: bool = False) -> Iterator[Import]:
    """Yield every import of module ``name``, also those inside functions, with relative ones made absolute."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, None, node.lineno, for_typing)
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                parts = name.split(".")
                base = parts[: len(parts) - node.level + is_package]
                source = ".".join([*base, source] if source else base)
            for alias in node.names:
                yield Import(source, alias.name, node.lineno, for_typing)
        elif isinstance(node, ast.If) and is_type_checking(node.test):
            for part in node.body:
                yield from imports(ast.Module([part], []), name=name, is_package=is_package, for_typing=True)
            for part in node.orelse:
                yield from imports(ast.Module([part], []), name=name, is_package=is_package, for_typing=for_typing)
        else:
            yield from imports(node, name=name, is_package=is_package, for_typing=for_typing)


def imports_of(module: Module) -> Iterator[Import]:
    return imports(module.tree, name=module.name, is_package=module.is_package)


def target(found: Import, known: dict[str, Module]) -> str:
    """Name the module that the import reaches: ``from accel import errors`` reaches ``accel.errors``, ``from accel import Device`` reaches ``accel``."""
    submodule = f"{found.module}.{found.name}"
    return submodule if submodule in known else found.module


def room_edges() -> Iterator[tuple[Module, Import, str, str]]:
    """Yield each import of one room of ``accel`` by another that happens when the program runs."""
    known = modules("accel")
    for module in known.values():
        for found in imports_of(module):
            if found.top == "accel" and not found.for_typing:
                source, destination = module.room, room(target(found, known))
                if source != destination:
                    yield module, found, source, destination


def circles_of(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that reach each other, in order."""

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        pending = [start]
        while pending:
            new = graph.get(pending.pop(), set()) - found
            found |= new
            pending += new
        return found

    reach = {name: reached(name) for name in graph}
    groups = {tuple(sorted(other for other in reach[name] if name in reach.get(other, ()))) for name in graph}
    return [list(group) for group in sorted(groups) if group]


def bound_names(module: Module) -> set[str]:
    """Collect what the module's top level binds, in any branch."""
    names: set[str] = set()
    pending: list[ast.stmt] = list(module.tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(part.id for item in targets for part in ast.walk(item) if isinstance(part, ast.Name))
        else:
            pending.extend(part for part in ast.walk(node) if isinstance(part, ast.stmt) and part is not node)
    return names


def public_names(module: Module) -> list[str] | None:
    """Return ``__all__`` as written, or ``None`` where the module has none."""
    for node in module.tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        if any(isinstance(item, ast.Name) and item.id == "__all__" for item in targets):
            assert isinstance(node, ast.Assign | ast.AnnAssign)
            assert node.value is not None
            return [str(name) for name in ast.literal_eval(node.value)]
    return None


def function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count a function's lines from ``def`` to its end, without its docstring."""
    total = (node.end_lineno or node.lineno) - node.lineno + 1
    if ast.get_docstring(node, clean=False) is None:
        return total
    docstring = node.body[0]
    return total - ((docstring.end_lineno or docstring.lineno) - docstring.lineno + 1)


def project() -> dict[str, dict[str, dict[str, dict[str, str]]]]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_relative_imports_are_resolved_from_modules_and_from_packages() -> None:
    source = "from . import a\nfrom .. import b\nfrom ..errors import C\nimport x.y\ndef f():\n    from .d import e\n"
    tree = ast.parse(source)
    in_module = [(found.module, found.name) for found in imports(tree, name="accel.device.batch", is_package=False)]
    in_package = [(found.module, found.name) for found in imports(tree, name="accel.device", is_package=True)]
    expected = [("accel.device", "a"), ("accel", "b"), ("accel.errors", "C"), ("x.y", None), ("accel.device.d", "e")]
    assert in_module == expected
    assert in_package == expected


def test_only_the_body_of_a_type_checking_block_counts_as_typing() -> None:
    block = "if TYPE_CHECKING:\n    import a\nelse:\n    import b\nif typing.TYPE_CHECKING:\n    import c\n"
    source = block + "try:\n    import d\nexcept ImportError:\n    import e\n"
    found = {entry.module: entry.for_typing for entry in imports(ast.parse(source), name="m", is_package=False)}
    assert found == {"a": True, "b": False, "c": True, "d": False, "e": False}


def test_function_lines_leave_the_docstring_out() -> None:
    source = 'def f(\n    x,\n):\n    """One.\n\n    Two.\n    """\n    return x\n\n\nasync def g():\n    return 1\n'
    first, second = ast.parse(source).body
    assert isinstance(first, ast.FunctionDef)
    assert isinstance(second, ast.AsyncFunctionDef)
    assert function_lines(first) == 4
    assert function_lines(second) == 2


def test_the_tree_is_found() -> None:
    assert {"accel", "accel.errors", "accel.backend", "accel_cuda", "accel_cuda.backend"} <= modules(*PACKAGES).keys()


def test_every_module_of_accel_belongs_to_a_layer() -> None:
    homeless = [name for name, module in modules("accel").items() if module.room not in LAYERS]
    assert homeless == [], f"put them into one of {sorted(LAYERS)}, or extend LAYERS here and the layers of docs/design.md"


def test_imports_go_down_only() -> None:
    upward = [
        f"{module.at(found.line)}: {source or 'accel'} imports {destination or 'accel'}"
        for module, found, source, destination in room_edges()
        if LAYERS.get(source, 0) < LAYERS.get(destination, 0)
        # What users run and test with is written against the public names of `accel`, like a user's own code.
        and not (destination == "" and LAYERS.get(source, 0) >= LAYERS["patterns"])
    ]
    assert upward == []


def test_rooms_of_one_layer_import_each_other_in_one_direction_only() -> None:
    level = {(source, destination) for _, _, source, destination in room_edges() if LAYERS.get(source) == LAYERS.get(destination)}
    circles = {tuple(sorted(edge)) for edge in level if edge[::-1] in level}
    assert circles == set()


def test_no_modules_import_each_other_in_a_circle_not_even_for_typing() -> None:
    known = modules("accel")
    graph = {
        name: {target(found, known) for found in imports_of(module)} & known.keys()
        for name, module in known.items()
        if not module.is_package  # what a package gathers from its modules is no circle
    }
    assert circles_of(graph) == []


def test_a_circle_is_found_also_through_a_third_module() -> None:
    assert circles_of({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == [["a", "b", "c"]]
    assert circles_of({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_the_cpu_backend_imports_the_vocabulary_and_memory_only() -> None:
    wrong = [
        f"{module.at(found.line)}: imports {destination or 'accel'}"
        for module, found, source, destination in room_edges()
        if source == "cpu" and destination not in CPU_MAY_IMPORT
    ]
    assert wrong == []


def test_generic_code_imports_no_backend() -> None:
    wrong = [
        f"{module.at(found.line)}: {source} imports cpu"
        for module, found, source, destination in room_edges()
        if destination == "cpu" and source not in {"", "testing", "cli"}
    ]
    assert wrong == []


def test_the_vocabulary_knows_nothing_of_event_loops() -> None:
    wrong = [
        f"{module.at(found.line)}: imports {found.module}"
        for module in modules("accel").values()
        if module.room in VOCABULARY
        for found in imports_of(module)
        if found.top in OUTSIDE_VOCABULARY and not found.for_typing
    ]
    assert wrong == []


def test_accel_imports_nothing_of_cuda_not_even_for_typing() -> None:
    wrong = [
        f"{module.at(found.line)}: imports {found.module}"
        for module in modules("accel").values()
        for found in imports_of(module)
        if found.top in CUDA
    ]
    assert wrong == []


def test_frameworks_of_models_are_imported_for_models_only() -> None:
    wrong = [
        f"{module.at(found.line)}: imports {found.module}"
        for module in modules("accel").values()
        if not module.name.startswith(MAY_IMPORT_FRAMEWORKS)
        for found in imports_of(module)
        if found.top in FRAMEWORKS
    ]
    assert wrong == []


def test_rooms_use_no_private_name_of_each_other() -> None:
    wrong = [
        f"{module.at(found.line)}: imports {found.name} of {found.module}"
        for module, found, _, destination in room_edges()
        if found.name is not None
        and found.name.startswith("_")
        and not found.name.endswith("__")
        and not {destination, found.name} & {"_log", "_startup", "_child"}
    ]
    assert wrong == []


def test_accel_cuda_imports_only_public_names_of_accel() -> None:
    known = modules("accel")
    wrong = []
    for module in modules("accel_cuda").values():
        for found in imports_of(module):
            if found.top != "accel":
                continue
            reached = known.get(target(found, known))
            submodule = reached is not None and reached.name != found.module
            public = (
                reached is not None
                and reached.is_public
                and (found.name is None or submodule or found.name in (public_names(reached) or ()))
            )
            if not public:
                wrong.append(f"{module.at(found.line)}: {found.module} has no public {found.name or 'module'}")
    assert wrong == []


def test_imports_of_accel_cuda_go_down_only_and_in_no_circle_not_even_for_typing() -> None:
    known = {name: module for name, module in modules("accel_cuda").items() if module.room in CUDA_LAYERS}
    edges = {
        (name, destination): module.at(found.line)
        for name, module in known.items()
        for found in imports_of(module)
        if (destination := target(found, known)) in known and destination != name
    }
    upward = [place for (source, destination), place in edges.items() if CUDA_LAYERS[room(source)] < CUDA_LAYERS[room(destination)]]
    assert upward == []
    below: dict[str, set[str]] = {name: set() for name in known}
    for source, destination in edges:
        below[source].add(destination)
    TopologicalSorter(below).prepare()  # raises CycleError, with the circle


def test_importing_accel_loads_no_extra_and_nothing_of_cuda() -> None:
    program = "import sys, json, accel; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30)
    loaded = set(json.loads(done.stdout))
    assert "accel" in loaded
    assert loaded & NOT_WITH_ACCEL == set()


def test_files_of_tests_have_names_of_their_own() -> None:
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == [], "pytest imports them by these names"


def test_modules_are_short() -> None:
    lengths = {
        str(module.path.relative_to(ROOT)): len(module.path.read_text(encoding="utf-8").splitlines())
        for module in modules(*SOURCES).values()
    }
    long = {path: lines for path, lines in lengths.items() if lines > MAX_MODULE_LINES}
    assert long == {}, f"split them by responsibility; the limit is {MAX_MODULE_LINES} lines"


def test_functions_are_short() -> None:
    long = [
        f"{module.at(node.lineno)}: {node.name} has {function_lines(node)} lines"
        for module in modules(*SOURCES).values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and function_lines(node) > MAX_FUNCTION_LINES
    ]
    assert long == [], f"the limit is {MAX_FUNCTION_LINES} lines without the docstring"


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        str(module.path.relative_to(ROOT)) for module in modules(*PACKAGES).values() if not (ast.get_docstring(module.tree) or "").strip()
    ]
    assert silent == []


def test_every_public_module_has_all() -> None:
    without = [
        name
        for name, module in modules(*PACKAGES).items()
        # A package's docstring alone offers nothing, so it has nothing to list; `__main__` is run, not imported.
        if module.is_public and bound_names(module) - {"annotations"} and public_names(module) is None
    ]
    assert without == []


def test_the_names_in_all_exist_and_are_given_once() -> None:
    known = modules(*PACKAGES)
    wrong = []
    for module in known.values():
        names = public_names(module) or []
        there = bound_names(module)
        wrong += [f"{module.name}.{name} is not there" for name in names if name not in there and f"{module.name}.{name}" not in known]
        wrong += [f"{module.name}.{name} is listed twice" for name in set(names) if names.count(name) > 1]
    assert wrong == []


@pytest.mark.parametrize("package", PACKAGES)
def test_the_package_says_that_it_is_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()


def test_the_entry_points_name_what_is_there() -> None:
    known = modules(*PACKAGES)
    backends = project()["project"]["entry-points"]["accel.backends"]
    assert backends.keys() == {"cpu", "cuda"}
    wrong = []
    for value in (*backends.values(), *project()["project"]["scripts"].values()):
        name, _, attribute = str(value).partition(":")
        if name not in known or attribute not in bound_names(known[name]):
            wrong.append(value)
    assert wrong == []


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_each_backend_loads_without_its_libraries(name: str) -> None:
    backend = load_backend(name)
    assert isinstance(backend, AccelBackend)
    assert backend.name == name
