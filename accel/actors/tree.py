"""A picture of a system's actors, taken at one moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ActorTree"]


@dataclass(frozen=True, slots=True)
class ActorTree:
    """One actor, or the system itself, with all below it. ``str()`` draws it.

    Attributes
    ----------
    name
        Its name among its siblings.
    state
        Where it is in its life, in a word.
    depth
        Messages waiting in its mailbox.
    oldest_age
        Seconds for which the oldest of them has been waiting; 0 when there is none.
    restarts
        How often it was replaced by a fresh instance.
    children
        What it spawned that has not stopped, oldest first.
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
        return "\n".join(self._lines("", ""))

    def _lines(self, first: str, rest: str) -> Iterator[str]:
        yield f"{first}{self.name} [{self.state}] mailbox={self.depth} oldest={self.oldest_age:.3f}s restarts={self.restarts}"
        for index, child in enumerate(self.children):
            last = index == len(self.children) - 1
            yield from child._lines(rest + ("`- " if last else "|- "), rest + ("   " if last else "|  "))
