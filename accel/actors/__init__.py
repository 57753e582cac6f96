"""Actors: state that one task owns, reached through a bounded mailbox, supervised when it fails.

Nothing here depends on devices.
"""

from __future__ import annotations

from accel.actors.actor import Actor, ActorContext, ActorSystemLike
from accel.actors.mailbox import Mailbox, MailboxStatistics
from accel.actors.portal import Portal
from accel.actors.ref import ActorRef, ActorState, ActorStatistics, Terminated
from accel.actors.supervision import Directive, RestartStrategy, default_decision
from accel.actors.system import ActorSystem
from accel.actors.tree import ActorTree

__all__ = [
    "Actor",
    "ActorContext",
    "ActorRef",
    "ActorState",
    "ActorStatistics",
    "ActorSystem",
    "ActorSystemLike",
    "ActorTree",
    "Directive",
    "Mailbox",
    "MailboxStatistics",
    "Portal",
    "RestartStrategy",
    "Terminated",
    "default_decision",
]
