"""What cuFFT is given of views, without a GPU: real arrays begin where complex ones could lie, and what was copied is given back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from accel import DType, LibraryError, ops
from accel_cuda.families.fft import FftLibrary, Work
from accel_cuda.families.fft_layout import Layout, passes
from accel_cuda.families.fft_plans import Rehearsal, WorkMemory
from tests.cuda_support import ref

if TYPE_CHECKING:
    import numpy as np


BASE = 1 << 20
WORK = 1 << 30


class Plans:
    def __init__(self, log: list[Any]) -> None:
        self.log = log
        self.sizes: dict[Layout, int] = {}

    def execute(self, stream: Any, layout: Any, source: int, destination: int, memory: WorkMemory, **options: Any) -> None:
        self.log.append(("plan", source, destination))


class Stream:
    """Writes down what is enqueued."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.functions = {name: name for name in ("fft_ends_c64", "fft_ends_c128", "fft_scale_f32", "fft_scale_f64")}
        self.context = SimpleNamespace(section=self)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def ready(self) -> Any:
        return self.context

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        self.log.append(("copy", destination, source, nbytes))

    def launch(self, function: str, blocks: int, threads: int, *arguments: int) -> None:
        self.log.append((function, arguments[0]))


def run(op: ops.KernelOp, source: int, destination: int) -> list[Any]:
    op.plan()
    library, stream = FftLibrary(None), Stream()  # type: ignore[arg-type]  # nothing is made in the context
    library.library = Plans(stream.log)  # type: ignore[assignment]
    library.kernels[op.kind](SimpleNamespace(stream=stream), op, op.plan(), [source], [destination, WORK])
    return stream.log


@pytest.mark.parametrize(("real", "size"), [(DType.FLOAT32, 4), (DType.FLOAT64, 8)])
def test_a_real_signal_that_begins_in_between_is_copied(real: DType, size: int) -> None:
    op = ops.Rfft(ref((16,), real))
    assert run(op, BASE, 2 * BASE) == [("plan", BASE, 2 * BASE)]
    copy, plan = run(op, BASE + size, 2 * BASE)
    assert copy == ("copy", plan[1], BASE + size, 16 * size)
    assert plan[1] % (2 * size) == 0
    assert plan[2] == 2 * BASE


@pytest.mark.parametrize(("spectrum", "size"), [(DType.COMPLEX64, 4), (DType.COMPLEX128, 8)])
def test_a_real_result_that_begins_in_between_is_scaled_and_copied_there(spectrum: DType, size: int) -> None:
    op = ops.Irfft(ref((9,), spectrum))
    *_, plan, scale = run(op, BASE, 2 * BASE)
    assert (plan[2], scale[1]) == (2 * BASE, 2 * BASE)
    *_, plan, scale, copy = run(op, BASE, 2 * BASE + size)
    assert plan[2] % (2 * size) == 0
    assert scale[1] == plan[2]
    assert copy == ("copy", 2 * BASE + size, plan[2], 16 * size)


def test_memory_is_a_stack_that_says_how_high_it_was() -> None:
    memory = WorkMemory(WORK, 1024)
    first = memory.alloc(1)
    second = memory.alloc(300)
    assert (first, second, memory.most) == (WORK, WORK + 256, 768)
    memory.free(second)
    assert memory.alloc(512) == second
    memory.free(first)
    assert memory.alloc(1024) == first
    assert (memory.alloc(0), memory.most) == (0, 1024)
    memory.free(0)
    with pytest.raises(LibraryError, match="expected"):
        memory.alloc(1)


class Sizes(dict[Layout, int]):
    """What plans work in: some number of bytes for each layout."""

    def __missing__(self, layout: Layout) -> int:
        return self.setdefault(layout, hash(layout) % 5000)


class Stage(Rehearsal):
    """Counts as the real thing does, and looks whether each part lies within what was measured and apart from the others."""

    __slots__ = ("log",)

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.log: list[tuple[int, int]] = []

    def execute(self, stream: Any, layout: Layout, source: int, destination: int, memory: WorkMemory, **options: Any) -> None:
        area = memory.alloc(self._sizes[layout])
        assert not self._sizes[layout] or area not in (source, destination)
        self.log.append((source, destination))
        memory.free(area)


@pytest.mark.parametrize("kind", ["fft", "ifft", "rfft", "irfft"])
def test_what_is_rehearsed_is_enough_wherever_memory_begins(kind: str, rng: np.random.Generator) -> None:
    for _ in range(200):
        shape = tuple(int(n) for n in rng.integers(1, 9, rng.integers(1, 5)))
        axes = tuple(int(axis) for axis in rng.permutation(len(shape))[: rng.integers(1, min(3, len(shape)) + 1)])
        dtype = DType.FLOAT32 if kind == "rfft" else DType.COMPLEX64
        if kind == "irfft" and shape[axes[-1]] == 1:
            continue
        made = {"fft": ops.Fft, "ifft": ops.Ifft, "rfft": ops.Rfft, "irfft": ops.Irfft}[kind]
        op: Any = made(ref(shape, dtype), axes=axes)
        out = ref(op.plan().creates[0].shape, op.plan().creates[0].dtype)
        for between in ({"x"}, {"out"}, {"x", "out"}, set()):
            op = made(ref(shape, dtype), axes=axes, out=out)
            op.plan()
            for name in between & ({"x"} if kind == "rfft" else {"out"} if kind == "irfft" else set()):
                getattr(op, name).offset = 4
            library, sizes = FftLibrary(None), Sizes()  # type: ignore[arg-type]
            library.library = SimpleNamespace(sizes=sizes)  # type: ignore[assignment]
            assert library.scratch_nbytes(op) is None or not _layouts(op)
            for layout in _layouts(op):
                _ = sizes[layout]
            nbytes = library.scratch_nbytes(op)
            assert nbytes is not None
            memory = WorkMemory(WORK, nbytes)
            Work(Stage(sizes), memory, Stage(sizes), op).run(BASE + op.x.offset, 2 * BASE + out.offset, 1)
            assert memory.most == nbytes, (shape, axes, between)


def _layouts(op: Any) -> list[Layout]:
    shape = op.x.shape if op.kind == "rfft" else op.spec().shape
    return [each.layout for each in passes(op.kind, shape, op.axes, op.lengths()[-1], False)]


def test_adjacent_axes_are_one_call() -> None:
    assert len(passes("fft", (8, 16, 32), (0, 1, 2), 32, False)) == 1
    assert len(passes("rfft", (8, 16, 32), (1, 2), 32, False)) == 1
    assert passes("fft", (8, 16, 32), (0,), 8, False)[0].layout.stride == 16 * 32
    assert passes("fft", (1, 1), (0, 1), 1, False) == ()
