"""Several functions of elements as one op: what is refused, what is computed block by block, and what CUDA's kernels are made of."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel import ops
from accel.cpu.families.fused import values_of
from accel.dtype import DType
from accel.ops.fused import FUNCTIONS, types_of
from accel_cuda.families import fused as cuda
from accel_cuda.families.elementwise import PART
from tests.device_support import failure

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("nothing_left")


async def test_what_is_no_program_is_refused(device: accel.Device) -> None:
    x, n, flag = await device.zeros(3), await device.zeros(3, "int32"), await device.zeros(3, "bool")
    for program, operands, error in (
        ((), (x,), accel.InvalidArgumentError),
        ("relu", (x,), accel.InvalidArgumentError),
        ((("nosuch", 0),), (x,), accel.InvalidArgumentError),
        ((("relu", 1),), (x,), accel.InvalidArgumentError),
        ((("relu", -1),), (x,), accel.InvalidArgumentError),
        ((("relu", 0, 0),), (x,), accel.InvalidArgumentError),
        ((("add", 0, 1),), (x, n), accel.InvalidArgumentError),
        ((("where", 0, 1, 1),), (n, x), accel.InvalidArgumentError),
        ((("add", 0, 1),), (x, 1.0), accel.InvalidArgumentError),
        ((("exp", 0),), (np.float32(1),), accel.InvalidArgumentError),
        ((("exp", 0),), (n,), accel.UnsupportedError),
        ((("add", 0, 0),), (flag,), accel.UnsupportedError),
        ((("relu", 0),), (x,) * 17, accel.InvalidArgumentError),
        ((("relu", 0),), x, accel.InvalidArgumentError),
    ):
        await failure(device.elementwise.fused(program, operands), error)  # type: ignore[arg-type]
    c = await device.zeros(3, "complex64")
    await failure(device.elementwise.fused((("float32", 0),), (c,)), accel.InvalidArgumentError)
    await failure(device.elementwise.fused((("add", 0, 1),), (x[:2], x[1:].reshape(2, 1)), out=x[1:]), accel.InvalidArgumentError)


async def test_many_rows_are_computed_in_blocks(device: accel.Device, rng: np.random.Generator) -> None:
    x, row, column = rng.standard_normal((3000, 70)), rng.standard_normal(70), rng.standard_normal((3000, 1))
    refs = [await device.put(each) for each in (x, row, column)]
    program: Any = [["mul", 0, 1], ["sub", 4, 2], ["less", 5, 3], ["where", 6, 3, 5]]
    made = await device.elementwise.fused(program, [*refs, np.float64(0.25)])
    value = x * row - column
    np.testing.assert_array_equal(await device.get(made), np.where(value < 0.25, 0.25, value))
    assert await device.elementwise.fused((("neg", 0),), (refs[0],), out=refs[0]) is refs[0]
    np.testing.assert_array_equal(await device.get(refs[0]), -x)


async def test_half_precision_is_rounded_once_and_where_it_is_asked_for(device: accel.Device, rng: np.random.Generator) -> None:
    x = rng.standard_normal(1000).astype(np.float16)
    ref = await device.put(x)
    wide = x.astype(np.float32)
    once = await device.elementwise.fused((("mul", 0, 0), ("mul", 1, 0)), (ref,))
    np.testing.assert_array_equal(await device.get(once), (wide * wide * wide).astype(np.float16))
    twice = await device.elementwise.fused((("mul", 0, 0), ("float16", 1), ("mul", 2, 0)), (ref,))
    np.testing.assert_array_equal(await device.get(twice), ((wide * wide).astype(np.float16).astype(np.float32) * wide).astype(np.float16))


def operands_of(name: str, dtype: DType, rng: np.random.Generator) -> list[Any]:
    values = rng.integers(0, 2 if dtype is DType.BOOL else 7, (3, 5)).astype(dtype.numpy)
    return [values] * FUNCTIONS[name].arity if name != "where" else [values.astype(bool), values, values]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_has_a_kernel_for_each_of_its_dtypes(name: str, rng: np.random.Generator) -> None:
    for dtype in FUNCTIONS[name].dtypes:
        operands = operands_of(name, dtype, rng)
        program = ((name, *range(len(operands))),)
        types = types_of(program, tuple(DType.of(each.dtype) for each in operands))
        with np.errstate(all="ignore"):
            made = values_of(program, types, operands)
        assert DType.of(made.dtype) is types[-1] or types[-1].itemsize == 2, (name, dtype)
        source = cuda.source_of(program, types[:-1])
        structure = cuda.structure_of(name, dtype)
        assert f"struct {structure} {{" in source, (name, dtype)


class Functions(dict[str, int]):
    """Kernels that are compiled, and their sources."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: dict[str, str] = {}

    def made(self, name: str, source: Callable[[], str]) -> int:
        if name not in self:
            self[name], self.sources[name] = 7, source()
        return self[name]


def test_cuda_compiles_a_program_once_and_launches_it() -> None:
    owner: Any = SimpleNamespace(dropped=deque())
    x = accel.AccelRef(owner, 1, (64, 64), DType.FLOAT32, 1)
    row = accel.AccelRef(owner, 2, (64,), DType.FLOAT32, 1)
    op = ops.Fused((("mul", 0, 1), ("add", 3, 2), ("isnan", 4)), (x, row, np.float32(2)))
    launches: list[tuple[Any, ...]] = []
    functions = Functions()
    stream = SimpleNamespace(functions=functions, ready=lambda: None, launch_with=lambda *arguments: launches.append(arguments[:2]))
    lane = SimpleNamespace(stream=stream)
    assert PART.lacks["fused"](lane, op)
    for _ in range(2):
        PART.kernels["fused"](lane, op, op.plan(), (1 << 20, 1 << 21), (1 << 22,))
    assert not PART.lacks["fused"](lane, op)
    assert launches == [(7, (4, 1))] * 2
    ((name, source),) = functions.sources.items()
    assert f"KERNEL({name})" in source
    assert "strided<Program, b8, f32, f32, f32>(w, Places<0, 1, 2>())" in source


def test_kernels_of_different_programs_have_different_names() -> None:
    programs = [(("add", 0, 1),), (("sub", 0, 1),), (("add", 1, 0),), (("add", 0, 1), ("relu", 2))]
    dtypes = [(DType.FLOAT32,) * 2, (DType.FLOAT64,) * 2]
    assert len({cuda.name_of(program, each) for program in programs for each in dtypes}) == 8
