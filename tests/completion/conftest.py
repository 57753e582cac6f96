"""Fixtures of the tests of completion."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.completion_support import STRATEGIES, open_watcher, threads_gone

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from accel.completion import CompletionStrategy, Watcher


@pytest.fixture(params=STRATEGIES, ids=repr)
def strategy(request: pytest.FixtureRequest) -> CompletionStrategy:
    """Each of the strategies."""
    chosen: CompletionStrategy = request.param
    return chosen


@pytest.fixture
async def watcher(strategy: CompletionStrategy) -> AsyncIterator[Watcher]:
    """What a strategy watches a device with, which leaves nothing behind."""
    shared: dict[Any, Any] = {}
    opened = open_watcher(strategy, shared=shared)
    yield opened
    await opened.aclose(abandon=True)
    assert shared == {}
    await threads_gone()
