"""Charges the death of a context to the restart budget, or to work that is found to cause it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

__all__ = ["Attribution", "attribute"]


class _Death:
    """The death of one context, until all work that was in flight at it has been examined.

    Attributes
    ----------
    unexamined : int
        How many attributions of that work are not examined yet.
    is_explained : bool
        Whether some of the work was found to be the cause.
    charge : callable
        Counts the death in the restart budget; called if nothing was found.
    """

    __slots__ = ("charge", "is_explained", "unexamined")

    def __init__(self, unexamined: int, charge: Callable[[], None]) -> None:
        self.unexamined = unexamined
        self.is_explained = False
        self.charge = charge


class Attribution:
    """Work that is examined if a context dies while it is on the device.

    ``with device.attribution() as attribution`` is around its time there.

    A context that dies meanwhile is rebuilt at once and free of charge. The death counts in the
    restart budget only when all that was in flight at it is examined, and none of it was found to
    be the cause.

    Parameters
    ----------
    *in_flight
        Of each device that the work is on, the attributions whose block runs.

    Attributes
    ----------
    deaths : int
        How many contexts have died under the work so far.
    """

    __slots__ = ("_deaths", "_in_flight", "_parts_left", "deaths")

    def __init__(self, *in_flight: set[Attribution]) -> None:
        self._in_flight = in_flight
        self._deaths: list[_Death] = []
        self.deaths = 0
        self._parts_left = 1  # the block itself

    def __enter__(self) -> Self:
        for attributions in self._in_flight:
            attributions.add(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for attributions in self._in_flight:
            attributions.discard(self)
        if self._deaths:  # else there is nothing to charge
            self.release()

    def hold(self) -> None:
        """Require one more :meth:`release`: a part of the work is examined after the block."""
        self._parts_left += 1

    def release(self, *, found: bool = False) -> None:
        """Count a part as examined, and note whether it was ``found`` to be the cause.

        With the last part of the last work that a context died under, its death is charged to the
        restart budget, unless a cause was found.
        """
        self._parts_left -= 1
        for death in self._deaths:
            death.is_explained |= found
            if not self._parts_left:
                death.unexamined -= 1
                if not (death.unexamined or death.is_explained):
                    death.charge()

    def on_death(self, death: _Death) -> None:
        """Record the death of a context that the work was on."""
        self._deaths.append(death)
        self.deaths += 1


def attribute(in_flight: set[Attribution], charge: Callable[[], None]) -> bool:
    """Attribute a context's death to work in flight that will be examined.

    Return whether there is any; if not, the caller charges the death at once.

    Parameters
    ----------
    in_flight
        The attributions whose block runs.
    charge
        Called later, if nothing was found to be the cause.
    """
    if in_flight:
        death = _Death(len(in_flight), charge)
        for attribution in in_flight:
            attribution.on_death(death)
    return bool(in_flight)
