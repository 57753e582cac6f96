"""Which streams the libraries of a device run in: the ``streams=`` option of ``open_device``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, cast

from accel.engine.kernels import LIBRARIES
from accel.errors import InvalidArgumentError
from accel.values import check_choice

__all__ = ["BATCH", "POOLED", "StreamStrategy", "resolve_streams"]

BATCH = "batch"
"""Name of the kernel actor that enqueues the ops of batches, whatever their libraries."""

POOLED = frozenset(LIBRARIES) - {"memory", "graph", "capture", "compiler"} | {BATCH}
"""Libraries that a pool of lanes serves.

Transfers and replays each keep one stream. So do kernels of users, whose modules may have state in device memory, unless their library says that it takes
several streams. Captures share their stream with nothing.
"""

_LANES = 8
"""How many lanes a pool has at most."""


@dataclass(frozen=True)
class StreamStrategy:
    """Which library runs in which stream, and which streams go first.

    Parameters
    ----------
    kind
        ``"balanced"``: independent ops of the built-in libraries run on up to ``n`` streams. ``"per_actor"``: each library has a stream of its own.
        ``"single"``: all share one. ``"pooled"``: they share ``n``, each library one of them.
    n
        How many streams; for ``"pooled"`` and ``"balanced"``, which has 8 if this is left out.
    priorities
        Library -> priority of its stream, for ``"per_actor"`` alone: a stream that libraries share has one. Lower numbers run first, 0 is what the others
        have, and the device says which it offers. ``"batch"`` is the stream of batches. Libraries with a priority are made ready when the device is opened.

    Raises
    ------
    InvalidArgumentError
        If these do not go together, or there is no such library.
    """

    kind: Literal["balanced", "per_actor", "single", "pooled"] = "per_actor"
    n: int | None = None
    priorities: Mapping[str, int] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, "balanced", "per_actor", "single", "pooled")
        if self.kind == "balanced" and self.n is None:
            object.__setattr__(self, "n", _LANES)
        if self.kind in ("balanced", "pooled"):
            if isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < 1:
                raise InvalidArgumentError(f"n is {self.n!r}", remedy="Say how many streams the libraries share: a positive int.")
        elif self.n is not None:
            raise InvalidArgumentError(
                f"n is {self.n!r} with kind={self.kind!r}", remedy="Leave n out, or use kind='balanced' or 'pooled'."
            )
        object.__setattr__(self, "priorities", _priorities(self.priorities))
        if self.priorities and self.kind != "per_actor":
            raise InvalidArgumentError(
                f"priorities with kind={self.kind!r}: libraries share streams there",
                remedy="Use kind='per_actor', or leave priorities out.",
            )

    @property
    def lanes(self) -> int | None:
        """How many streams the libraries share; ``None`` gives each its own."""
        return {"single": 1, "pooled": self.n}.get(self.kind)

    @property
    def pool(self) -> int | None:
        """Over how many streams independent ops are spread; ``None`` spreads none."""
        return self.n if self.kind == "balanced" else None


def resolve_streams(streams: str | StreamStrategy) -> StreamStrategy:
    """Return the strategy that ``streams`` is or names: ``"balanced"``, ``"balanced(n)"``, ``"per_actor"``, ``"single"`` or ``"pooled(n)"``.

    Raises
    ------
    InvalidArgumentError
        If it is neither.
    """
    if isinstance(streams, StreamStrategy):
        return streams
    if isinstance(streams, str) and streams in ("balanced", "per_actor", "single"):
        return StreamStrategy(cast("Literal['balanced', 'per_actor', 'single']", streams))
    match = re.fullmatch(r"(balanced|pooled)\(([1-9]\d{0,8})\)", streams) if isinstance(streams, str) else None
    if match is None:
        raise InvalidArgumentError(
            f"streams is {streams!r}",
            remedy="Use 'balanced', 'per_actor', 'single', 'balanced(n)' or 'pooled(n)' with an n of 1 or more, or an accel.StreamStrategy.",
        )
    return StreamStrategy("balanced" if match[1] == "balanced" else "pooled", int(match[2]))


def _priorities(given: Mapping[str, int]) -> dict[str, int]:
    if not isinstance(given, Mapping):
        raise InvalidArgumentError(f"priorities is {given!r}", remedy="Give a dict: library -> priority.")
    for library, priority in given.items():
        if library not in LIBRARIES and library != BATCH:
            raise InvalidArgumentError(f"there is no library {library!r}", remedy=f"Use some of {', '.join((*LIBRARIES, BATCH))}.")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise InvalidArgumentError(f"the priority of {library!r} is {priority!r}", remedy="Give an int; lower numbers run first.")
    return dict(given)
