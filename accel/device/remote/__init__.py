"""A device whose context lives in another process: the parent's half, which sends ops, and the child's, which runs them."""

from __future__ import annotations

from accel.device.remote.actor import RemoteContextActor

__all__ = ["RemoteContextActor"]
