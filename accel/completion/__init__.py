"""Completion: how a future learns that a stream has reached an event."""

from __future__ import annotations

from typing import Literal, TypeAlias

from accel.completion.adaptive import AdaptiveCompletion, Pacing
from accel.completion.host_fn import HostFnCompletion
from accel.completion.polled import PolledCompletion
from accel.completion.strategy import CompletionStrategy, Mark, Watcher
from accel.completion.sync import SyncCompletion
from accel.errors import InvalidArgumentError

__all__ = [
    "AdaptiveCompletion",
    "CompletionName",
    "CompletionStrategy",
    "HostFnCompletion",
    "Mark",
    "Pacing",
    "PolledCompletion",
    "SyncCompletion",
    "Watcher",
    "resolve_strategy",
]

CompletionName: TypeAlias = Literal["adaptive", "host_fn", "polled", "sync"]

_STRATEGIES: dict[str, type[AdaptiveCompletion | HostFnCompletion | PolledCompletion | SyncCompletion]] = {
    strategy.name: strategy for strategy in (AdaptiveCompletion, HostFnCompletion, PolledCompletion, SyncCompletion)
}


def resolve_strategy(strategy: str | CompletionStrategy) -> CompletionStrategy:
    """Return the strategy that ``open_device(completion=...)`` was given by name or as an object.

    A name gives a new one, with its default options.

    Parameters
    ----------
    strategy
        ``"adaptive"``, ``"host_fn"``, ``"polled"``, ``"sync"``, or a :class:`CompletionStrategy`.

    Raises
    ------
    InvalidArgumentError
        If it is neither.
    """
    if isinstance(strategy, CompletionStrategy):
        return strategy
    strategy_class = _STRATEGIES.get(strategy) if isinstance(strategy, str) else None
    if strategy_class is None:
        raise InvalidArgumentError(
            f"completion={strategy!r} is not a way of waiting", remedy=f"Use one of {sorted(_STRATEGIES)} or a CompletionStrategy."
        )
    return strategy_class()
