"""The face of one library: what turns a method's arguments into an op, bound to what takes the op."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.ops import KernelOp

__all__ = ["Face"]

T_co = TypeVar("T_co", covariant=True)


class Face(Generic[T_co]):
    """One library, bound to what takes its ops: a device, which gives awaitables, or a batch, which gives refs."""

    __slots__ = ("_submit",)

    def __init__(self, submit: Callable[[KernelOp, float | None], T_co]) -> None:
        self._submit = submit
