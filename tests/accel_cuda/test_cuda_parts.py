"""What CUDA has of each family agrees with the family, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest

import accel
from accel.memory import HostArena
from accel.ops import ComposedOp
from accel.ops.families import FAMILIES
from accel_cuda.errors import TABLES
from accel_cuda.families.kernels import CODES
from accel_cuda.families.parts import PARTS
from accel_cuda.families.programs import PROGRAMS, Programs, program_of
from tests.cuda_support import Context


def test_every_family_has_one_part() -> None:
    # Collectives are of no family: a device does not offer them, only a world sends them.
    assert list(PARTS) == [*(family.name for family in FAMILIES), "collective"]


def test_a_part_names_ops_of_its_family_and_programs_that_there_are() -> None:
    for family in FAMILIES:
        part, kinds = PARTS[family.name], {op.kind for op in family.ops}
        programs = () if isinstance(part.program, str) else part.program
        assert kinds >= {*part.kernels, *programs, *part.lacks, *part.signatures, *part.commands}, family
        assert all(any(source is each for source, _ in PROGRAMS.values()) for each in part.programs), family


def test_every_op_has_a_kernel() -> None:
    # A sample of an op without one would be skipped by the conformance suite, as one that the backend refuses.
    arena = HostArena(1 << 20, block_bytes=1 << 20)
    context: Any = Context(arena)
    context.multiprocessors = 132
    try:
        for family in FAMILIES:
            part = PARTS[family.name]
            library = None if part.open is None else part.open(context)
            found = {*part.kernels, *family.kernels, *getattr(library, "kernels", ())}
            composed = {op.kind for op in family.ops if issubclass(op, ComposedOp)}
            assert not {op.kind for op in family.ops} - found - composed, family.name
    finally:
        arena.close()


def test_the_program_of_an_op_is_the_one_that_its_kernels_are_in() -> None:
    for code in CODES.values():
        for function, program in (
            (f"unary_relu_{code}", f"unary_{code}"),
            (f"binary_add_{code}", f"binary_{code}"),
            (f"reduce_rows_sum_{code}", f"sum_{code}"),
            (f"attention_any_{code}", f"attention_{code}"),
            ("addresses_apart", "blas"),
            (f"softmax_log_packed_columns_{code}", f"softmax_{code}"),
            (f"norm_rms_single_few_{code}", f"norm_{code}"),
            (f"pool_largest_packed_{code}", f"pool_{code}"),
        ):
            assert program_of(function) == (program if program in PROGRAMS else "memory"), function
    assert {program_of(name) for name in ("philox_uniform_f32", "fft_turn_4", "fill8", "nosuch")} == {"rng", "fft", "memory"}


def test_the_statuses_of_every_library_of_a_part_have_a_table() -> None:
    libraries = {library.name for part in PARTS.values() for library in part.libraries}
    assert libraries >= {"cublas", "cufft"}
    assert libraries <= TABLES.keys()


class Loads:
    """Counts the programs that are compiled; each has one function."""

    def __init__(self) -> None:
        self.count = 0

    def load(self, take: Any, source: str, *_: Any) -> dict[str, int]:
        self.count += 1
        return {"fill8": self.count}


@pytest.mark.parametrize("name", ["nosuch", "unary_nosuch_f32", "reduce_rows_nosuch_f64"])
def test_an_unknown_kernel_is_named_and_nothing_else_is_compiled_for_it(name: str) -> None:
    loads: Any = Loads()
    programs = Programs(None, loads)  # type: ignore[arg-type]
    with pytest.raises(accel.UnsupportedError, match=name):
        programs[name]
    assert loads.count == 1
    assert list(programs) == ["fill8"]


def test_an_unknown_program_is_named() -> None:
    loads: Any = Loads()
    with pytest.raises(accel.UnsupportedError, match="'nosuch'"):
        Programs(None, loads).load("nosuch")  # type: ignore[arg-type]
    assert loads.count == 0
