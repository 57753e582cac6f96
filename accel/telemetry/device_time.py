"""Device time: how long a device has worked for what was sent."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Self

from accel.errors import InvalidArgumentError

if TYPE_CHECKING:
    from contextvars import Token
    from types import TracebackType

__all__ = ["CHARGED", "DeviceTime"]


class DeviceTime:
    """Measures the device time of what is sent in its block, by the task and by tasks that it starts there.

    ::

        with accel.DeviceTime() as spent:
            y = await device.blas.gemm(a, b)
        print(spent.seconds)

    An op or a batch is charged once it has ended, so the sum is whole when all that was sent has
    been awaited. It is charged the time from the begin of its first command in its stream to the
    end of its last one; on the CPU, and in a child on the CPU, the time in which its work ran. Ops
    in different streams overlap, and each is charged its own time: so sums may exceed the clock.

    Blocks may be nested: work is charged to the innermost one.

    Attributes
    ----------
    seconds : float or None
        Charged so far; ``None`` where nothing was measured: nothing was sent or has ended, or the
        device cannot measure.
    """

    __slots__ = ("_token", "seconds")

    def __init__(self) -> None:
        self.seconds: float | None = None
        self._token: Token[DeviceTime | None] | None = None

    def __repr__(self) -> str:
        return f"<DeviceTime {'not measured' if self.seconds is None else f'{self.seconds:.6f} s'}>"

    def __enter__(self) -> Self:
        if self._token is not None:
            raise InvalidArgumentError("a DeviceTime is entered once at a time", remedy="Make one for each block.")
        self._token = CHARGED.set(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        token, self._token = self._token, None
        if token is not None:
            CHARGED.reset(token)


CHARGED: ContextVar[DeviceTime | None] = ContextVar("accel_device_time", default=None)
"""What the work of the present task is charged to."""
