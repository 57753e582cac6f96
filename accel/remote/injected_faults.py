"""Faults of a fault plan in a child: the parent counts ops and decides, the child injects."""

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

__all__ = ["InjectedFaults", "sent_action"]


def sent_action(action: Injection | AccelError | None, link: Link, loop: asyncio.AbstractEventLoop) -> bytes | str | None:
    """Return an action for the child. The parent itself kills the child, and ends hangs."""
    if action is None or isinstance(action, AccelError):
        return None if action is None else encode_error(action)
    if action.kind == "poison":
        error = action.error  # ``None``: the backend's own
        return action.kind if error is None else encode_error(error.clone(scope=max(error.scope, FaultScope.CONTEXT)))
    if action.kind == "kill":
        link.kill()
        return None
    if action.release is not None:
        release, to = action.release, weakref.ref(link)  # a hang may outlive its child by hours

        def wait() -> None:
            release()
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(_released, to)

        try:
            threading.Thread(target=wait, name="accel-hang", daemon=True).start()
        except RuntimeError as error:
            raise no_thread(error, "a planned hang cannot be ended by the plan") from error
    return action.kind


def _released(to: weakref.ref[Link]) -> None:
    link = to()
    if link is not None:
        link.tell(Kind.END_HANGS)


class InjectedFaults:
    """Injects in the child what the parent's plan has decided: an entry for each op."""

    def __init__(self) -> None:
        self.queue: deque[Injection | AccelError | None] = deque()

    def begin(self, actions: Iterable[Injection | AccelError | None]) -> None:
        """Set the entries for the next message; drop those that the last one has left."""
        self.queue.clear()
        self.queue.extend(actions)

    def take(self, kind: str) -> Injection | AccelError | None:
        """Return what to do to the op in hand."""
        return self.queue.popleft() if self.queue else None
