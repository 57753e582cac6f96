"""What CUDA has of each family agrees with the family, without a GPU."""

from __future__ import annotations

from accel.ops.families import FAMILIES
from accel_cuda.errors import TABLES
from accel_cuda.families.kernels import PROGRAMS
from accel_cuda.families.parts import PARTS


def test_every_family_has_one_part() -> None:
    assert list(PARTS) == [family.name for family in FAMILIES]


def test_a_part_names_ops_of_its_family_and_programs_that_there_are() -> None:
    for family in FAMILIES:
        part, kinds = PARTS[family.name], {op.kind for op in family.ops}
        assert kinds >= {*part.kernels, *part.program, *part.lacks, *part.signatures, *part.commands}, family
        assert all(any(program.partition("_")[0] == each for program in PROGRAMS) for each in part.programs), family


def test_the_statuses_of_every_library_of_a_part_have_a_table() -> None:
    libraries = {library.name for part in PARTS.values() for library in part.libraries}
    assert libraries >= {"cublas", "cufft"}
    assert libraries <= TABLES.keys()
