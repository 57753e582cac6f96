"""``device.xp`` of a CPU device as the module ``xp`` of the array API's test suite, which knows no ``await``: conversions compute, on a loop of their own."""

from __future__ import annotations

import asyncio
import atexit
from typing import Any

import numpy as np

import accel
from accel.expressions import Array, Namespace

__all__ = ["xp"]


class Eager(Array):
    """An array that computes itself where the suite needs its values, its shape or its elements."""

    __slots__ = ()

    __hash__ = Array.__hash__

    def _values(self) -> Any:
        return _loop.run_until_complete(self.numpy())

    def __bool__(self) -> bool:
        return bool(self._values())

    def __int__(self) -> int:
        return int(self._values())

    def __float__(self) -> float:
        return float(self._values())

    def __complex__(self) -> complex:
        return complex(self._values())

    def __index__(self) -> int:
        values = self._values()
        if not self.dtype.is_integer:
            raise TypeError(f"{self!r} is not an integer")
        return int(values.__index__())

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray[Any, Any]:
        return np.asarray(self._values(), *args, **kwargs)

    def __dlpack__(
        self,
        /,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        async def exported() -> Any:
            return (await self).ref.__dlpack__(stream=stream, max_version=max_version, dl_device=dl_device, copy=copy)

        return _loop.run_until_complete(exported())

    def __dlpack_device__(self) -> tuple[int, int]:
        async def named() -> tuple[int, int]:
            return (await self).ref.__dlpack_device__()

        return _loop.run_until_complete(named())

    def __iter__(self) -> Any:
        return iter(self.xp.unstack(self))

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name == "shape" and None in found:
            _loop.run_until_complete(self._awaited())
            found = super().__getattribute__(name)
        return found


class EagerNamespace(Namespace):
    """``device.xp`` with arrays that compute themselves."""

    __name__ = "accel"
    array_type = Eager


async def _opened() -> tuple[accel.System, accel.Device]:
    system = await accel.System().__aenter__()
    return system, await system.open_device("cpu")


_loop = asyncio.new_event_loop()
_system, _device = _loop.run_until_complete(_opened())
xp: Any = EagerNamespace(_device)


@atexit.register
def _close() -> None:
    _loop.run_until_complete(_system.aclose())
    _loop.close()
