"""What a fault plan brings about in a child: decided in the parent, which counts the ops."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from accel.device.remote.messages import Kind
from accel.errors import AccelError, FaultScope
from accel.hosts.error_codec import encode_error

if TYPE_CHECKING:
    import asyncio

    from accel.backend import Injection
    from accel.device.remote.link import Link

__all__ = ["sent_action"]


def sent_action(action: Injection | AccelError | None, link: Link, loop: asyncio.AbstractEventLoop) -> bytes | str | None:
    """Return an action as the child takes it; do here what is not the child's."""
    if action is None or isinstance(action, AccelError):
        return None if action is None else encode_error(action)
    if action.kind == "poison":
        error = action.error  # without one, the backend's own
        return action.kind if error is None else encode_error(error.clone(scope=max(error.scope, FaultScope.CONTEXT)))
    if action.kind == "kill":
        link.kill()
        return None
    if action.release is not None:
        release = action.release

        def wait() -> None:
            release()
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(link.tell, Kind.RELEASE)

        threading.Thread(target=wait, name="accel-hang", daemon=True).start()
    return action.kind
