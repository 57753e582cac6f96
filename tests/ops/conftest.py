"""The device of the tests of ops."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.device_support import opened

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import accel


@pytest.fixture
async def device() -> AsyncIterator[accel.Device]:
    """A CPU device in this process."""
    async with opened() as device:
        yield device
