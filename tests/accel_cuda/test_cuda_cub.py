"""What the CUDA parts of sorts and scans work out on the host, and how algorithms of CUB are built, kept and called, without a GPU."""

from __future__ import annotations

import contextlib
import importlib
import itertools
from collections import defaultdict
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from accel import BackendUnavailableError, DType, ops
from accel_cuda.core.cub import Algorithm, Cub, RadixSort, RunningOp
from accel_cuda.families import sort
from tests.cuda_support import ref

if TYPE_CHECKING:
    from pathlib import Path


class Taken:
    """A ``Cub`` that takes down from where to where each call reads and writes."""

    def __init__(self) -> None:
        self.calls: list[list[tuple[int, int]]] = []

    def scratch_nbytes(self, algorithm: Algorithm, count: int, bits: int = 0) -> int:
        return 1000

    def run(self, stream: Any, algorithm: Algorithm, scratch: int, count: int, x: int, y: int, **other: int) -> None:
        if isinstance(algorithm, RadixSort):
            arrays = [(each, algorithm.keys.itemsize) for each in (x, y)]
            if algorithm.has_values:
                arrays += [(other["values"], 4), (other["sorted_values"], 4)]
        else:
            assert x == y
            arrays = [(x, algorithm.dtype.itemsize)]
        self.calls.append(sorted([(scratch, scratch + 1000), *((begin, begin + count * width) for begin, width in arrays)]))


def launched(*arguments: Any) -> None:
    """Take a command, and do nothing."""


@pytest.mark.parametrize("dtype", [DType.BOOL, DType.FLOAT16, DType.FLOAT32, DType.FLOAT64], ids=lambda dtype: dtype.value)
def test_what_an_algorithm_reads_and_writes_is_apart(monkeypatch: pytest.MonkeyPatch, dtype: DType) -> None:
    taken = Taken()
    monkeypatch.setattr(sort, "Cub", lambda context: taken)
    library = sort.SortLibrary(CONTEXT)
    stream = SimpleNamespace(ready=launched, launch=launched, launch_with=launched, fill=launched, functions=defaultdict(int))
    x, lines, start = ref((1001,), dtype), ref((7, 143), dtype), 1 << 20
    todo: tuple[tuple[Any, int], ...] = (
        *((ops.Sort(each), 1) for each in (x, lines)),
        *((ops.Argsort(each), 1) for each in (x, lines)),
        (ops.Topk(ref((7, 100), dtype), 3), 2),
        (ops.Partition(lines, 5), 1),
        (ops.SegmentSort(x, ref((10,), DType.INT64)), 2),
        (ops.Unique(x), 2),
        (ops.UniqueAll(lines), 5),
        (ops.Nonzero(lines), 3),
        (ops.Compress(ref((1001,), DType.BOOL), x), 2),
    )
    for op, results in todo:
        taken.calls.clear()
        library.kernels[op.kind](SimpleNamespace(stream=stream), op, op.plan(), (1, 2), (*range(results), start))
        end = start + (library.scratch_nbytes(op) or 0)
        assert taken.calls, op
        for call in taken.calls:
            edges = [start, *itertools.chain.from_iterable(call), end]
            assert edges == sorted(edges), op
            assert all(begin % 256 == 0 for begin, _ in call), op


class Library:
    """A module such as cuda.compute, whose algorithms take down how they are called."""

    OpKind = SimpleNamespace(PLUS="plus", MULTIPLIES="times")
    SortOrder = SimpleNamespace(ASCENDING="up")

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []
        self.calls: list[dict[str, Any]] = []
        self.fails = False
        self.unloaded = 0

    def make_radix_sort(self, **arguments: Any) -> Any:
        self.made.append(arguments)
        return SimpleNamespace(serialize=lambda: b"radix")

    def make_inclusive_scan(self, **arguments: Any) -> Any:
        self.made.append(arguments)
        return SimpleNamespace(serialize=lambda: b"scan")

    def deserialize(self, blob: bytes) -> Any:
        if blob not in (b"radix", b"scan"):
            raise ValueError(blob)
        return Loaded(self)

    def run(self, **arguments: Any) -> int:
        if self.fails:
            raise RuntimeError("error code: 1")
        self.calls.append(arguments)
        return 1000


class Loaded:
    """An algorithm whose end unloads it."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def __call__(self, **arguments: Any) -> int:
        return self._library.run(**arguments)

    def __del__(self) -> None:
        self._library.unloaded += 1


class Kept(dict[bytes, Any]):
    """The disk."""

    def __getitem__(self, key: bytes) -> Any:
        return dict.__getitem__(self, key)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Library:
    made = Library()
    modules = {
        "cuda.compute": made,
        "cuda.bindings.nvrtc": SimpleNamespace(nvrtcVersion=lambda: (0, 13, 0)),
        "cuda.core.utils": SimpleNamespace(
            InMemoryProgramCache=lambda **_: Kept(), FileStreamProgramCache=lambda folder, **_: DISKS.setdefault(str(folder), Kept())
        ),
        "cuda.pathfinder": SimpleNamespace(load_nvidia_dynamic_lib=lambda name: SimpleNamespace(abs_path=name)),
    }
    real = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda name, package=None: modules.get(name) or real(name, package))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return made


DISKS: dict[str, Kept] = {}
CONTEXT: Any = SimpleNamespace(
    capability=(9, 0), driver=SimpleNamespace(version=13000), section=contextlib.nullcontext(), description=SimpleNamespace(spec="cuda:0")
)
SORT, SUM = RadixSort(DType.UINT64, True), RunningOp("cumsum", DType.BFLOAT16)


def test_an_algorithm_is_built_once_for_all_processes(library: Library) -> None:
    for _ in range(2):
        made = Cub(CONTEXT)
        made.prepare((SORT, SUM))
        made.prepare((SORT, SUM))
        assert not made.is_ready(SORT)  # its first call loads it
    assert len(library.made) == 2
    by_sort, by_sum = sorted(library.made, key=lambda arguments: "op" in arguments)
    assert by_sort["compute_capability"] == 90
    assert by_sort["d_in_values"].data_ptr() != 0, "no address means no values"
    assert by_sum["init_value"].dtype == np.float32


def test_what_was_kept_and_is_of_no_use_is_built_again(library: Library) -> None:
    Cub(CONTEXT).prepare((SORT,))
    (disk,) = [disk for disk in DISKS.values() if disk][-1:]
    for key in disk:
        disk[key] = b"other"
    Cub(CONTEXT).prepare((SORT,))
    assert len(library.made) == 2


def test_nothing_is_unloaded_from_a_dead_context(library: Library) -> None:
    made = Cub(CONTEXT)
    made.prepare((SORT,))
    del made
    assert not library.unloaded


def test_a_wheel_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, library: Library) -> None:
    known = importlib.import_module

    def without(name: str, package: str | None = None) -> Any:
        if name == "cuda.compute":
            raise ImportError(name)
        return known(name, package)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(BackendUnavailableError, match="cuda-cccl"):
        Cub(CONTEXT).measure(SORT, 5, 64)
