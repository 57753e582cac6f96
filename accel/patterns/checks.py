"""The checks of a batcher's options."""

from __future__ import annotations

import math

from accel.errors import InvalidArgumentError

__all__ = ["check_choices", "check_counts", "check_hooks", "check_seconds"]


def check_counts(*, least: int = 1, **values: int) -> None:
    """Raise unless each of ``values`` is an int of at least ``least``."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InvalidArgumentError(f"{name} is {value!r}", remedy=f"Give an int of at least {least}.")


def check_choices(overload: object, idempotent: object) -> None:
    """Raise unless these are one of their choices."""
    if overload not in ("wait", "reject"):
        raise InvalidArgumentError(f"overload is {overload!r}", remedy="Use 'wait' or 'reject'.")
    if not isinstance(idempotent, bool):
        raise InvalidArgumentError(f"idempotent is {idempotent!r}", remedy="Give True or False.")


def check_hooks(handler: object, size: object, device: object, quarantine: object) -> None:
    """Raise unless what is called can be called, and the device is one."""
    if not callable(handler):
        raise InvalidArgumentError(f"handler is {handler!r}", remedy="Give a function defined with 'async def'.")
    if size is not None and not callable(size):
        raise InvalidArgumentError(f"size is {size!r}", remedy="Give a function of one item, or None.")
    if device is not None and not callable(getattr(device, "generations", None)):
        raise InvalidArgumentError(f"device is {device!r}", remedy="Give an accel.Device, or None.")
    if quarantine is None:
        return
    if not callable(quarantine):
        raise InvalidArgumentError(
            f"quarantine is {quarantine!r}",
            remedy="Give a function defined with 'async def' that takes a Device and returns a handler, or None.",
        )
    if not callable(getattr(device, "quarantine", None)):
        raise InvalidArgumentError(f"quarantine= with device={device!r}", remedy="Give the accel.Device that the handler uses, too.")


def check_seconds(**values: float) -> None:
    """Raise unless each of ``values`` is a number of seconds."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise InvalidArgumentError(f"{name} is {value!r}", remedy="Give seconds, at least 0.")
