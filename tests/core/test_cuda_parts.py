"""What CUDA has of each family agrees with the family, without a GPU."""

from __future__ import annotations

from accel.ops.families import FAMILIES
from accel_cuda.families.commands import COMMANDS
from accel_cuda.families.kernels import PROGRAMS
from accel_cuda.families.parts import PARTS
from accel_cuda.families.programs import OPS_WITH_PROGRAMS


def test_every_family_has_one_part() -> None:
    assert list(PARTS) == [family.name for family in FAMILIES]


def test_a_part_names_ops_of_its_family_and_programs_that_there_are() -> None:
    for family in FAMILIES:
        part, kinds = PARTS[family.name], {op.kind for op in family.ops}
        assert kinds >= {*part.kernels, *part.compiled, *part.commands}, family
        assert all(any(program.startswith(each) for program in PROGRAMS) for each in part.programs), family
        assert part.kernels.keys() <= kinds, family


def test_the_tables_of_the_device_have_all_parts() -> None:
    assert {"gemm", "reduce", "conv2d", "put", "get"} <= COMMANDS.keys()
    assert {kind for part in PARTS.values() for kind in part.compiled} == set(OPS_WITH_PROGRAMS)
