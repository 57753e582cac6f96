"""A device whose context lives in another process: the parent's half, which sends ops, and the child's, which runs them."""

from __future__ import annotations

from accel.device.remote.actor import RemoteContextActor
from accel.device.remote.children import Children
from accel.device.remote.standby import StandbyActor

__all__ = ["Children", "RemoteContextActor", "StandbyActor"]
