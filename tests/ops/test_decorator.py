"""What ``accel.ops.op`` makes of a class, and docstrings, which overriding methods have from what they override."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import pickle
import pkgutil
from dataclasses import KW_ONLY
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest

import accel
import accel_cuda
from accel.ops import FamilyOp, Plan, op
from accel.ops.fields import to_axis, to_int, unless_none


@op("own")
class RowSum(FamilyOp):
    """A sum."""

    rows: int
    _: KW_ONLY
    shift: float = 0.0

    def plan(self) -> Plan:
        return Plan((), (), ())


@op()
class RowMean(RowSum):
    """A mean."""


@op(kind="mean")
class Renamed(RowMean):
    """Another name."""

    axis: int = 0


def test_the_kind_is_the_name_of_the_class_and_the_library_that_of_the_base() -> None:
    assert [(kind.library, kind.kind) for kind in (RowSum, RowMean, Renamed)] == [("own", "row_sum"), ("own", "row_mean"), ("own", "mean")]


@pytest.mark.parametrize("kind", [RowSum, RowMean, Renamed])
def test_an_op_is_a_frozen_dataclass_with_slots(kind: type[RowSum]) -> None:
    made = kind(3, shift=1.0, timeout=2.0)
    assert (made.rows, made.shift, made.timeout) == (3, 1.0, 2.0)
    assert repr(made) == f"{kind.__name__}(rows=3, shift=1.0{', axis=0' if kind is Renamed else ''})"
    assert not hasattr(made, "__dict__")
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.rows = 4  # type: ignore[misc]
    assert made != kind(3, shift=1.0, timeout=2.0)
    for other in (pickle.loads(pickle.dumps(made)), copy.copy(made), dataclasses.replace(made)):
        assert type(other) is kind
        assert dataclasses.astuple(other) == dataclasses.astuple(made)


def test_an_op_that_is_no_dataclass_is_shown_by_its_name() -> None:
    class Bare(accel.KernelOp):
        def plan(self) -> Plan:
            return Plan((), (), ())

    assert repr(Bare()).endswith("Bare()")


def test_fields_of_a_base_come_first() -> None:
    assert list(inspect.signature(Renamed).parameters) == ["rows", "axis", "timeout", "shift"]


@op("own", convert={"rows": to_int})
class Converted(FamilyOp):
    """A sum of rows that are counted in any way."""

    rows: int

    def plan(self) -> Plan:
        return Plan((), (), ())


@op(convert={"axis": unless_none(to_axis)})
class ConvertedTwice(Converted):
    """One that has a field more."""

    axis: int | None = None


@op(convert={"rows": unless_none(to_int)})
class ConvertedAnew(RowSum):
    """One that has no field of its own."""


def test_fields_are_converted_as_the_class_and_its_bases_say() -> None:
    three: Any = np.int64(3)
    assert [type(made.rows) for made in (Converted(three), ConvertedAnew(three))] == [int, int]
    made = ConvertedTwice(three, three)
    assert (type(made.rows), type(made.axis)) == (int, int)
    assert ConvertedTwice(3).axis is None
    with pytest.raises(accel.InvalidArgumentError, match=r"axis is 1\.5"):
        ConvertedTwice(3, 1.5)  # type: ignore[arg-type]
    assert type(pickle.loads(pickle.dumps(made)).rows) is int


def packages() -> list[ModuleType]:
    names = [found.name for package in (accel, accel_cuda) for found in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
    return [importlib.import_module(name) for name in names if not name.endswith("__main__")]


def methods(kind: type) -> list[tuple[str, Any]]:
    found = {name: getattr(member, "fget", None) or getattr(member, "__func__", member) for name, member in vars(kind).items()}
    return [(name, member) for name, member in found.items() if isinstance(member, FunctionType)]


def test_public_methods_have_docstrings_of_their_own_or_of_what_they_override() -> None:
    silent = {
        f"{kind.__module__}.{kind.__qualname__}.{name}"
        for module in packages()
        for kind in vars(module).values()
        if isinstance(kind, type) and kind.__module__ == module.__name__ and not kind.__name__.startswith("_")
        for name, _ in methods(kind)
        if not name.startswith("_") and not any(inspect.getdoc(vars(base).get(name)) for base in kind.__mro__)
    }
    assert silent == set()
