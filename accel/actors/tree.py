"""A snapshot of a system's actors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ActorTree"]


@dataclass(frozen=True, slots=True)
class ActorTree:
    """One actor, an object that it owns, or the system itself, with all below it.

    ``str()`` draws it.

    Attributes
    ----------
    name
        Its name among its siblings.
    state
        Its :class:`~accel.actors.ActorState`, or the system's state.
    depth
        Messages queued in its mailbox.
    oldest_age
        Seconds since the oldest of them was queued; 0 when there is none.
    restarts
        How often it was replaced by a fresh instance.
    children
        The actors that it spawned and that have not stopped, oldest first.
    """

    name: str
    state: str
    depth: int = 0
    oldest_age: float = 0.0
    restarts: int = 0
    children: tuple[ActorTree, ...] = ()

    def __iter__(self) -> Iterator[ActorTree]:
        """Walk over this and all below it, parents first."""
        yield self
        for child in self.children:
            yield from child

    def __str__(self) -> str:
        return "\n".join(_draw(self, "", ""))


def _draw(tree: ActorTree, first: str, rest: str) -> Iterator[str]:
    """Yield the lines of a tree, the first one after ``first`` and the others after ``rest``."""
    yield f"{first}{tree.name} [{tree.state}] mailbox={tree.depth} oldest={tree.oldest_age:.3f}s restarts={tree.restarts}"
    for index, child in enumerate(tree.children):
        last = index == len(tree.children) - 1
        yield from _draw(child, rest + ("`- " if last else "|- "), rest + ("   " if last else "|  "))
