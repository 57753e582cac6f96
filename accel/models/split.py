"""Which part of each weight each of several ranks has: ``split={"*.qkv.weight": 0}`` gives each an equal part of its rows."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from accel.errors import InvalidArgumentError
from accel.models.weights import Collected

if TYPE_CHECKING:
    from accel.models.weights import Weight

__all__ = ["Split"]


class Split:
    """Divides weights among ranks.

    Parameters
    ----------
    axes
        By pattern of names, as the shell knows them (``*`` matches dots too), the dimension along which the weights are divided into equal parts, in the order
        of the ranks; a negative one counts from the last. Each rank has all of the weights that no pattern matches.
    ranks
        How many there are.

    Raises
    ------
    InvalidArgumentError
        It is no mapping of strings to ints.

    Attributes
    ----------
    axes : dict
    """

    def __init__(self, axes: Mapping[str, int] | None, ranks: int) -> None:
        given: Any = {} if axes is None else axes
        if not isinstance(given, Mapping) or not all(isinstance(name, str) and type(axis) is int for name, axis in given.items()):
            raise _error(f"split is {given!r:.200}", 'Give a dict: pattern of names -> dimension, such as {"*.up.weight": 0}.')
        self.axes: dict[str, int] = dict(given)
        self._ranks = ranks

    def parts(self, collected: Collected) -> list[Collected]:
        """Return what each rank reads of the weights; of copies, which are divided already, those of each. Reads no elements.

        Raises
        ------
        InvalidArgumentError
            A pattern matches no weight, two say different things of one, or a weight cannot be divided so: the message names it.
        """
        if collected.ranks:
            if len(collected.ranks) != self._ranks:
                raise InvalidArgumentError(
                    f"the weights are those of {len(collected.ranks)} ranks, and here are {self._ranks}",
                    remedy="Use a world of as many ranks, or load the model there from its file.",
                )
            return collected.ranks
        axes = {weight.name: self._axis(weight) for weight in collected.weights}
        for pattern in self.axes:
            if not any(fnmatchcase(name, pattern) for name in axes):
                raise _error(f"the pattern {pattern!r} of split matches no weight", f"The weights are {_some(list(axes))}.")
        return [Collected([self._part(weight, axes[weight.name], rank) for weight in collected.weights]) for rank in range(self._ranks)]

    def _axis(self, weight: Weight) -> int | None:
        """Return the dimension along which a weight is divided, if it is."""
        found = {pattern: axis for pattern, axis in self.axes.items() if fnmatchcase(weight.name, pattern)}
        if not found:
            return None
        named = f"weight {weight.name!r} of shape {weight.shape}"
        rank = len(weight.shape)
        for pattern, axis in found.items():
            if not -rank <= axis < rank:
                raise _error(f"{named} has no dimension {axis}, along which {pattern!r} divides it", f"Give one of its {rank} dimensions.")
        if len({axis % rank for axis in found.values()}) > 1:
            raise _error(f"{named} is divided in two ways: {found}", "Give patterns of which one matches it.")
        axis = next(iter(found.values())) % rank
        if weight.shape[axis] % self._ranks:
            raise _error(
                f"{named} cannot be divided among {self._ranks} ranks along dimension {axis}",
                f"Open a world with as many ranks as divide {weight.shape[axis]}, or leave it out of split: all ranks have it then.",
            )
        return axis

    def _part(self, weight: Weight, axis: int | None, rank: int) -> Weight:
        if axis is None:
            return weight
        length = weight.shape[axis] // self._ranks
        return weight.part(axis, rank * length, (rank + 1) * length)


def _error(message: str, remedy: str) -> InvalidArgumentError:
    return InvalidArgumentError(message, argument="split", remedy=remedy)


def _some(names: list[str]) -> str:
    """Return a few of the names, as a part of a sentence."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return (", ".join(map(repr, names[:5])) or "none") + more
