"""Faults of a fault plan in a child: the parent counts ops and decides, and the child injects."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING

from accel.errors import AccelError, FaultScope
from accel.remote.error_codec import encode_error
from accel.remote.messages import Kind
from accel.shortage import no_thread

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable

    from accel.backend import Injection
    from accel.remote.link import Link

__all__ = ["InjectedFaults", "begin_action"]


def begin_action(action: Injection | AccelError | None, link: Link, loop: asyncio.AbstractEventLoop) -> bytes | str | None:
    """Begin a fault plan's action, and return the child's part of it, as a message has it.

    The child raises an encoded error, or poisons its context if that is a fault; ``"poison"`` and
    ``"hang"`` are by name; ``None``: no part. An action that kills, kills the child here; for a
    hang, a thread is started that waits until the plan ends it.
    """
    if action is None:
        return None
    if isinstance(action, AccelError):
        return encode_error(action)
    if action.kind == "poison":
        error = action.error  # ``None``: the backend's own
        return action.kind if error is None else encode_error(error.clone(scope=max(error.scope, FaultScope.CONTEXT)))
    if action.kind == "kill":
        link.kill()
        return None
    if action.release is not None:
        release, link_ref = action.release, weakref.ref(link)  # a hang may outlive its child by hours

        def wait() -> None:
            """Wait until the plan ends the hang, and tell the child. The body of the thread."""
            release()
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(_end_hang, link_ref)

        try:
            threading.Thread(target=wait, name="accel-hang", daemon=True).start()
        except RuntimeError as error:
            raise no_thread(error, "a planned hang cannot be ended by the plan") from error
    return action.kind


def _end_hang(link_ref: weakref.ref[Link]) -> None:
    """Have the child end its hangs, if it is there still. On the loop."""
    link = link_ref()
    if link is not None:
        link.tell(Kind.END_HANGS)


class InjectedFaults:
    """The child's fault plan: the actions of the parent's plan for the ops of a message."""

    def __init__(self) -> None:
        self._actions: deque[Injection | AccelError | None] = deque()

    def set_actions(self, actions: Iterable[Injection | AccelError | None]) -> None:
        """Set the actions for the next message's ops; drop those that the last one has left."""
        self._actions.clear()
        self._actions.extend(actions)

    def take(self, kind: str) -> Injection | AccelError | None:
        """Return the action for the next op. The context calls this before each launch."""
        return self._actions.popleft() if self._actions else None
