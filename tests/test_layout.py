"""The rules of the tree, checked in the source text: which module may import which, how long things get, what is public. Nothing of CUDA is imported."""

from __future__ import annotations

import ast
import gc
import json
import subprocess
import sys
import tomllib
from dataclasses import dataclass, replace
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from accel.backend import AccelBackend
from accel.registry import load_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("accel", "accel_cuda")
SOURCES = (*PACKAGES, "tests", "benchmarks", "examples")
MAX_MODULE_LINES = 600
MAX_FUNCTION_LINES = 60

VOCABULARY = (
    *("errors", "dtype", "ref", "views", "dlpack", "exchange", "hints", "shortage", "sparse_ref"),
    *("backend", "family", "registry", "enums", "values", "rendezvous", "semaphore", "fork"),
    *("_log", "_startup", "_child", "_version", "telemetry"),
)
# A higher number may import a lower one, for typing too. Rooms of one layer may import each other in one direction only.
LAYERS = {
    **dict.fromkeys(VOCABULARY, 0),
    "actors": 1,
    "completion": 2,
    "ops": 2,
    "memory": 2,
    "compute": 3,
    "expressions": 3,
    "libraries": 3,
    "solvers": 3,
    "world": 3,  # below the engine, which has its members; ranks are known to it by a protocol
    "storage": 4,
    "engine": 5,
    "functions": 6,
    "process": 6,  # above storage and engine: they know of no processes
    "residents": 6,
    "sharing": 6,
    "models": 7,
    "node": 7,
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
BACKENDS_MAY_IMPORT = {*VOCABULARY, "ops", "memory"}
BACKENDS_ARE_KNOWN_TO = {"", "testing", "cli"}
OUTSIDE_VOCABULARY = {"asyncio", "anyio"}
CUDA_LAYERS = {"errors": 0, "core": 1, "families": 2, "device": 3, "backend": 4, "": 5}
# What each tree may import of the others.
BELOW = {"accel": set(), "accel_cuda": {"accel"}, "examples": {"accel"}, "benchmarks": {*PACKAGES, "examples"}, "tests": {*SOURCES}}
CUDA = {"accel_cuda", "cuda", "cupy", "nccl", "nvmath", "nvtx", "pynvml"}
# Frameworks of models: imported by adapters, and by what reads a state dict.
FRAMEWORKS = {"torch", "onnx", "onnxruntime", "safetensors"}
MAY_IMPORT_FRAMEWORKS = ("accel.models.adapters.", "accel.models.weights", "accel.files.onnx")
# Without rich: structlog loads it by itself where it is installed.
NOT_WITH_ACCEL = (
    CUDA | FRAMEWORKS | {"aiohttp", "fastapi", "opentelemetry", "prometheus_client", "pytest", "ray", "scipy", "starlette", "uvicorn"}
)


@dataclass(frozen=True)
class Import:
    """One imported name: ``module`` as written absolutely, ``name`` for ``from module import name``."""

    module: str
    name: str | None
    line: int
    for_typing: bool

    @property
    def top(self) -> str:
        return top(self.module)


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
    def top(self) -> str:
        return top(self.name)

    @property
    def room(self) -> str:
        """The part of its package that the module belongs to: ``device`` for ``accel.engine.lifecycle``."""
        return room(self.name)

    @property
    def is_public(self) -> bool:
        return not any(part.startswith("_") for part in self.name.split("."))

    def at(self, line: int) -> str:
        return f"{self.path.relative_to(ROOT)}:{line}"


def top(name: str) -> str:
    return name.partition(".")[0]


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
    imports_of.cache_clear()
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


@cache
def imports_of(module: Module) -> tuple[Import, ...]:
    return tuple(imports(module.tree, name=module.name, is_package=module.is_package))


def defining(found: Import, known: dict[str, Module]) -> str | None:
    """Name the module that an import reaches, through the packages that pass its name on; ``None`` for one of another project.

    ``from accel import errors`` reaches ``accel.errors``, ``from accel.ops import Gemm`` the module that has the class. A name that a package makes itself
    reaches the package, and so all that this imports.
    """
    submodule = f"{found.module}.{found.name}"
    if submodule in known:
        return submodule
    if found.module not in known:
        return None
    package = known[found.module]
    if found.name is not None and package.is_package:
        for passed in imports_of(package):
            if passed.module not in known:
                continue
            offers = passed.name == "*" and found.name in (public_names(known[passed.module]) or bound_names(known[passed.module]))
            if passed.name == found.name or offers:
                return defining(replace(passed, name=found.name), known)
    return found.module


@dataclass(frozen=True)
class Edge:
    """One import of a module of this repository by another one: ``target`` is the module that has the imported name."""

    source: Module
    found: Import
    target: str

    @property
    def rooms(self) -> tuple[str, str]:
        return self.source.room, room(self.target)

    @property
    def is_inside(self) -> bool:
        """Whether both are of one tree."""
        return self.source.top == top(self.target)

    def __str__(self) -> str:
        return f"{self.source.at(self.found.line)}: {self.source.name} imports {self.target}"


def edges(known: dict[str, Module]) -> list[Edge]:
    reached = [(module, found, defining(found, known)) for module in known.values() for found in imports_of(module)]
    return [Edge(module, found, name) for module, found, name in reached if name is not None and name != module.name]


def upward(known: dict[str, Module]) -> list[Edge]:
    """Return the imports of a higher layer."""
    layers = {"accel": LAYERS, "accel_cuda": CUDA_LAYERS}
    found = []
    for edge in edges(known):
        (source, target), numbers = edge.rooms, layers.get(edge.source.top)
        # What users run and test with asks for the version, which is the root's own.
        is_version = target == "" and numbers is LAYERS and numbers[source] >= LAYERS["patterns"]
        if numbers is not None and edge.is_inside and not is_version and numbers[source] < numbers[target]:
            found.append(edge)
    return found


def sideways(known: dict[str, Module]) -> list[Edge]:
    """Return what a backend imports besides the vocabulary, ops and memory, what generic code imports of a backend, and imports of trees that are not below."""
    found = []
    for edge in edges(known):
        source, target = edge.rooms
        of_backend = edge.source.top == "accel_cuda" or (edge.source.top == "accel" and source == "cpu")
        if of_backend and top(edge.target) == "accel":
            is_wrong = target not in BACKENDS_MAY_IMPORT | ({"cpu"} if edge.is_inside else set())
        elif edge.is_inside:
            is_wrong = edge.source.top == "accel" and target == "cpu" and source not in BACKENDS_ARE_KNOWN_TO
        else:
            is_wrong = top(edge.target) not in BELOW[edge.source.top]
        if is_wrong:
            found.append(edge)
    return found


def circle(known: dict[str, Module]) -> list[str]:
    """Return the modules of one circle of imports, if there is any."""
    below: dict[str, set[str]] = {}
    for edge in edges(known):
        below.setdefault(edge.source.name, set()).add(edge.target)
    try:
        TopologicalSorter(below).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


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
            if node.names[0].name == "*":
                names.update(public_names(module) or ())
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(part.id for item in targets for part in ast.walk(item) if isinstance(part, ast.Name))
        else:
            pending.extend(part for part in ast.walk(node) if isinstance(part, ast.stmt) and part is not node)
    return names


def public_names(module: Module) -> list[str] | None:
    """Return ``__all__`` as written, or ``None`` where the module has none. A package that imports ``*`` has what its modules have, and what it names."""
    stars = [node for node in module.tree.body if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"]
    if stars:
        named = [
            alias.name
            for node in module.tree.body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if alias.asname == alias.name
        ]
        return named + [name for node in stars for name in public_names(modules("accel")[str(node.module)]) or ()]
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


def test_every_module_belongs_to_a_layer() -> None:
    layers = {"accel": LAYERS, "accel_cuda": CUDA_LAYERS}
    homeless = [name for name, module in modules(*PACKAGES).items() if module.room not in layers[module.top]]
    assert homeless == [], "put them into a room that is there, or extend the layers here and those of docs/design.md"


def test_imports_go_down_only() -> None:
    assert [*map(str, upward(modules(*SOURCES)))] == []


def test_backends_and_trees_import_what_they_may() -> None:
    assert [*map(str, sideways(modules(*SOURCES)))] == []


def test_no_modules_import_each_other_in_a_circle_not_even_for_typing() -> None:
    assert circle(modules(*SOURCES)) == []


def test_rooms_of_one_layer_import_each_other_in_one_direction_only() -> None:
    level = {
        edge.rooms for edge in edges(modules("accel")) if edge.rooms[0] != edge.rooms[1] and LAYERS[edge.rooms[0]] == LAYERS[edge.rooms[1]]
    }
    assert {tuple(sorted(pair)) for pair in level if pair[::-1] in level} == set()


@pytest.mark.parametrize(
    ("name", "line", "check"),
    [
        ("accel.backend", "from accel.ops import CompiledKernel", circle),
        ("accel.backend", "from accel.ops import CompiledKernel", upward),
        ("accel_cuda.backend", "from accel.cli.bench.suite import Suite", sideways),
        ("accel_cuda.core.driver", "from accel import System", sideways),
        ("accel_cuda.core.driver", "from accel_cuda import CudaBackend", upward),
        ("accel.cpu.families.pooling", "from accel.device.device import Device", sideways),
        ("accel.cpu.families.pooling", "from accel import Batch", sideways),
        ("accel.storage.durable", "from accel.process.channel import Channel", upward),
        ("accel.engine.core", "from accel.cpu.backend import CpuBackend", sideways),
        ("accel.engine.core", "import benchmarks.run", sideways),
        ("benchmarks.cuda_cases.raw", "from benchmarks.cuda_cases.rig import Rig", circle),
    ],
)
def test_an_import_for_typing_or_through_a_package_is_seen(
    name: str, line: str, check: Callable[[dict[str, Module]], list[object]]
) -> None:
    known = modules(*SOURCES)
    module = known[name]
    typed = ast.parse(f"if TYPE_CHECKING:\n    {line}\n").body
    holed = replace(module, tree=ast.Module([*module.tree.body, *typed], []))
    assert check(known | {name: holed})


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
        f"{edge}: {edge.found.name}"
        for edge in edges(modules("accel"))
        if edge.rooms[0] != edge.rooms[1]
        and edge.found.name is not None
        and edge.found.name.startswith("_")
        and not edge.found.name.endswith("__")
        and not {edge.rooms[1], edge.found.name} & {"_log", "_startup", "_child"}
    ]
    assert wrong == []


def test_accel_cuda_imports_only_public_names_of_accel() -> None:
    known = modules("accel")
    wrong = []
    for module in modules("accel_cuda").values():
        for found in imports_of(module):
            if found.top != "accel":
                continue
            submodule = f"{found.module}.{found.name}" in known
            reached = known.get(f"{found.module}.{found.name}" if submodule else found.module)
            public = (
                reached is not None
                and reached.is_public
                and (found.name is None or submodule or found.name in (public_names(reached) or ()))
            )
            if not public:
                wrong.append(f"{module.at(found.line)}: {found.module} has no public {found.name or 'module'}")
    assert wrong == []


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
