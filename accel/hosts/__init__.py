"""Where a context lives: in this process, or in one of our own."""

from __future__ import annotations

from accel.hosts.failover import FailoverHost
from accel.hosts.host import KEEPER, Host
from accel.hosts.inline import InlineHost
from accel.hosts.process import ProcessHost

__all__ = ["KEEPER", "FailoverHost", "Host", "InlineHost", "ProcessHost"]
