"""Fixtures of the tests of memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.memory_support import Source

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def source() -> Iterator[Source]:
    """A device's memory, which is closed in the end."""
    source = Source()
    yield source
    for slab in source.open:
        slab.close()
