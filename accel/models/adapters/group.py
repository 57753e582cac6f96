"""The ranks that run one model together, as the model on one of them sees them: collectives of arrays of torch and numpy, within a forward."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol, get_args

import numpy as np

from accel.dtype import DType
from accel.errors import InvalidArgumentError, UnsupportedError
from accel.ops.collective import REDUCED_DTYPES, Call, Reduction, check_rank
from accel.values import check_choice

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Launcher", "ModelGroup"]


class Launcher(Protocol):
    """A rank's place in a communicator: :class:`accel.world.member.Member`."""

    def launch(self, stream: Any, call: Call, source: int, target: int) -> None:
        """See :meth:`accel.world.group.Group.launch`."""


class ModelGroup:
    """The ranks of a world that run one model; ``build(group)`` gets it.

    Collectives are for forwards: all ranks call the same ones, in the same order, with arrays of
    the same shapes and dtypes. They take tensors of torch, on the device, or arrays of numpy, on
    the CPU, change none of them, and return new ones. On a GPU they are enqueued into the stream of
    the forward, and captured into its graph.

    Before all ranks are there, as when the model is built or a spare prepares itself, they are only
    rehearsed: each rank gets what it would if the others had its own arrays, and sums are not made.

    Attributes
    ----------
    rank, size : int
        The number of this rank, from 0, and how many there are.
    launcher : Launcher or None
        This rank's place in the communicator, once all ranks are there. The model's library sets it.
    stream
        Where it enqueues; the model's library sets it too.
    number : int
        Of the forward, among the collectives of the world: reports of hangs name it. The library sets it.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.launcher: Launcher | None = None
        self.stream: Any = None
        self.number = 0

    def __repr__(self) -> str:
        return f"<ModelGroup rank {self.rank} of {self.size}>"

    def all_reduce(self, array: Any, op: Reduction = "sum") -> Any:
        """Return the arrays of all ranks, reduced element by element: the same on every rank."""
        source = _Array(array)
        self._check_reduction(op, source)
        target = source.made(source.shape)
        self._launch(Call("all_reduce", source.elements, source.dtype, op), source, target, lambda: target.fill(source))
        return target.array

    def reduce_scatter(self, array: Any, axis: int = 0, op: Reduction = "sum") -> Any:
        """Return this rank's part, along a dimension, of the arrays of all ranks, reduced."""
        source = self._parts(array, axis)
        self._check_reduction(op, source)
        target = source.made(source.shape[1:])
        call = Call("reduce_scatter", target.elements, source.dtype, op)
        self._launch(call, source, target, lambda: target.fill(source, self.rank))
        return target.array

    def all_gather(self, array: Any, axis: int = 0) -> Any:
        """Return the arrays of all ranks, one behind the other along a dimension."""
        source = _Array(array)
        axis = _checked_axis(axis, source.shape)
        target = source.made((self.size, *source.shape))
        self._launch(Call("all_gather", source.elements, source.dtype), source, target, lambda: target.fill(source))
        return target.joined(axis)

    def all_to_all(self, array: Any, axis: int = 0) -> Any:
        """Return, of each rank's array, the part along a dimension that has this rank's number, in the order of the ranks."""
        source = self._parts(array, axis)
        target = source.made(source.shape)
        call = Call("all_to_all", source.elements // self.size, source.dtype)
        self._launch(call, source, target, lambda: target.fill(source))
        return target.joined(axis % (len(source.shape) - 1))

    def broadcast(self, array: Any, root: int = 0) -> Any:
        """Return the array of one rank. The others give one of its shape and dtype."""
        source = _Array(array)
        check_rank("root", root, self.size)
        target = source.made(source.shape)
        call = Call("broadcast", source.elements, source.dtype, root=root)
        self._launch(call, source if self.rank == root else None, target, lambda: target.fill(source))
        return target.array

    def send(self, array: Any, to: int) -> None:
        """Give another rank an array, which it receives."""
        source = _Array(array)
        self._check_other("to", to)
        self._launch(Call("send", source.elements, source.dtype, root=to), source, None, lambda: None)

    def receive(self, like: Any, source: int) -> Any:
        """Return the array that another rank sends: of the shape and dtype of ``like``."""
        template = _Array(like)
        self._check_other("source", source)
        target = template.made(template.shape)
        call = Call("receive", target.elements, target.dtype, root=source)
        self._launch(call, None, target, lambda: target.fill(template))
        return target.array

    def mark(self) -> None:
        """Tell that this rank has come to the forward: a graph's collectives do not. The adapter calls it."""
        if self.launcher is not None:
            self.launcher.launch(self.stream, Call("all_reduce", 0, DType.UINT8, "sum", number=self.number), 0, 0)

    def _launch(self, call: Call, source: _Array | None, target: _Array | None, rehearse: Callable[[], None]) -> None:
        if self.launcher is None:
            rehearse()
            return
        given, wanted = (0 if array is None else array.address for array in (source, target))
        self.launcher.launch(self.stream, call._replace(number=self.number), given, wanted)

    def _parts(self, array: Any, axis: int) -> _Array:
        """Return an array in equal parts along a dimension, one a rank, which is the first one."""
        given = _Array(array)
        axis = _checked_axis(axis, given.shape)
        if given.shape[axis] % self.size:
            raise InvalidArgumentError(
                f"an array of shape {list(given.shape)} cannot be cut into {self.size} equal parts along dimension {axis}",
                argument="axis",
                remedy="Give a dimension that is a multiple of the number of ranks.",
            )
        return given.cut(axis, self.size)

    def _check_other(self, name: str, rank: int) -> None:
        check_rank(name, rank, self.size)
        if rank == self.rank:
            raise InvalidArgumentError(f"{name} is {rank}, which is this rank", remedy="Give another rank: this one has the array.")

    def _check_reduction(self, op: Reduction, source: _Array) -> None:
        check_choice("op", op, *get_args(Reduction))
        if source.dtype not in REDUCED_DTYPES:
            known = ", ".join(sorted(known.value for known in REDUCED_DTYPES))
            raise UnsupportedError(f"{source.dtype.value} cannot be reduced over ranks", remedy=f"It takes {known}.")


class _Array:
    """A contiguous tensor of torch, or array of numpy."""

    def __init__(self, array: Any) -> None:
        self._is_torch = type(array).__module__.partition(".")[0] == "torch"
        if not (self._is_torch or isinstance(array, np.ndarray)):
            raise InvalidArgumentError(f"{array!r:.80} is no array", remedy="Give a tensor of torch, or an array of numpy.")
        self.array: Any = array.detach().contiguous() if self._is_torch else np.require(array, requirements="C")
        self.shape = tuple(array.shape)
        self.dtype = DType.of(str(array.dtype).removeprefix("torch."))

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def address(self) -> int:
        return int(self.array.data_ptr() if self._is_torch else self.array.ctypes.data)

    def made(self, shape: tuple[int, ...]) -> _Array:
        """Return a new array of this dtype, in memory of the same device."""
        return _Array(self.array.new_empty(shape) if self._is_torch else np.empty(shape, self.array.dtype))

    def cut(self, axis: int, parts: int) -> _Array:
        """Return the parts along a dimension, one behind the other."""
        length = self.shape[axis] // parts
        shape = (*self.shape[:axis], parts, length, *self.shape[axis + 1 :])
        return _Array(self._moved(self.array.reshape(shape), axis, 0))

    def joined(self, axis: int) -> Any:
        """Return the parts, which are along the first dimension, joined along another one."""
        parts, *shape = self.shape
        shape[axis] *= parts
        return self._moved(self.array, 0, axis).reshape(tuple(shape))

    def fill(self, source: _Array, part: int | None = None) -> None:
        """Copy another array, or a part of it, into this one: as often as there is room."""
        self.array[...] = source.array if part is None else source.array[part]

    def _moved(self, array: Any, axis: int, to: int) -> Any:
        return array.moveaxis(axis, to) if self._is_torch else np.moveaxis(array, axis, to)


def _checked_axis(axis: int, shape: tuple[int, ...]) -> int:
    if type(axis) is not int or not -len(shape) <= axis < len(shape):
        raise InvalidArgumentError(
            f"axis is {axis!r}, and the array has {len(shape)} dimensions", argument="axis", remedy="Give the number of one of them."
        )
    return axis % len(shape)
