"""What is made of several transforms on a GPU, without one: the plans that are measured are those that are used, and arrays in use lie apart."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from accel import DType, ops
from accel_cuda.families.fft import FftLibrary, enqueue
from accel_cuda.families.fft_plans import WorkMemory
from tests.cuda_support import Names, ref

if TYPE_CHECKING:
    from accel_cuda.families.fft_layout import Layout

WORK = 1 << 40
AREA = 512


class Plans:
    """Plans that work in little memory, and take down what they are used for."""

    def __init__(self) -> None:
        self.used: list[Layout] = []
        self.sizes: dict[Layout, int] = {}
        self.cache = SimpleNamespace(is_ready=lambda layout: layout in self.sizes)

    def measure(self, layout: Layout) -> None:
        self.sizes[layout] = AREA

    def execute(self, stream: Any, layout: Layout, source: int, destination: int, memory: WorkMemory, **options: Any) -> None:
        area = memory.alloc(self.sizes[layout])
        double = 2 if layout.is_double else 1
        sides = []
        for address, is_real in ((source, layout.transform == "real"), (destination, layout.transform == "back")):
            nbytes = layout.batch * math.prod(layout.embed(is_real=is_real)) * (4 if is_real else 8) * double
            sides.append((address, address + nbytes))
        assert source == destination or apart([*sides, (area, area + AREA)]), "cuFFT works in what it reads or writes"
        assert apart([sides[0], (area, area + AREA)])
        memory.free(area)
        self.used.append(layout)


def apart(parts: list[tuple[int, int]]) -> bool:
    return all(end <= begin for (_, end), (begin, _) in itertools.pairwise(sorted(parts)))


class Stream:
    """Counts launches."""

    def __init__(self) -> None:
        self.launched: list[str] = []
        self.functions = Names()

    def launch(self, function: str, blocks: int, threads: int, *arguments: int) -> None:
        assert blocks > 0
        assert all(isinstance(argument, int) for argument in arguments), function
        self.launched.append(function)


def made() -> list[Any]:
    found: list[Any] = []
    types: tuple[Any, ...] = (1, 2, 3, 4)
    for dtype, shape in itertools.product((DType.FLOAT32, DType.FLOAT64), ((2,), (3, 7), (2, 8, 5), (4, 2, 3))):
        for kind, number in itertools.product((ops.Dct, ops.Idct, ops.Dst, ops.Idst), types):
            found.append(kind(ref(shape, dtype), number, axis=len(shape) // 2))
    shapes: tuple[Any, ...] = (
        ((1,), (1,), None),
        ((9,), (4,), None),
        ((3, 20), (1, 5), 1),
        ((1, 20), (3, 5), 1),
        ((4, 5, 6), (2, 3, 1), None),
    )
    for dtype, (a, b, axes) in itertools.product((DType.FLOAT32, DType.COMPLEX128), shapes):
        found += [ops.Convolve(ref(a, dtype), ref(b, dtype), axes=axes), ops.Correlate(ref(a, dtype), ref(b, dtype), "same", axes=axes)]
    return found


@pytest.mark.parametrize("op", made(), ids=lambda op: f"{op.kind}")
def test_an_op_uses_the_plans_and_the_memory_that_were_measured(op: Any) -> None:
    op.plan()
    library, plans, stream = FftLibrary(None), Plans(), Stream()  # type: ignore[arg-type]  # nothing is made in the context
    library.library = plans  # type: ignore[assignment]
    assert library.scratch_nbytes(op) is None or not plans.sizes
    library.measure(op)
    assert not library.may_block(None, op)
    nbytes = library.scratch_nbytes(op)
    assert nbytes is not None
    memory = WorkMemory(WORK, nbytes)
    enqueue(stream, memory, plans, op, (1 << 20, 1 << 30), (1 << 35,))
    assert set(plans.used) == set(plans.sizes)
    assert memory.most == nbytes
    assert memory.alloc(nbytes) in (WORK, 0), "memory was not given back"
    assert len(stream.launched) + len(plans.used) <= library.commands(op)


def test_transforms_of_no_elements_work_in_no_memory() -> None:
    library = FftLibrary(None)  # type: ignore[arg-type]
    assert library.scratch_nbytes(ops.Dct(ref((0, 4), DType.FLOAT32))) == 0
