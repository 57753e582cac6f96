"""The options of ``open_device`` that say where contexts live, checked together: what one host offers another does not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from accel.actors.checks import check_seconds
from accel.device.options import BUSY_TIMEOUT
from accel.errors import InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from accel.backend import AccelBackend

__all__ = ["check_hosting", "check_shareable"]


def check_hosting(host: str, standby: str, hang_timeout: float | None, busy_timeout: float) -> None:
    """See that the options are what :meth:`accel.System.open_device` says, and fit together.

    Raises
    ------
    InvalidArgumentError
        If one is not.
    UnsupportedError
        If the host has no use for one.
    """
    if host not in ("auto", "inline", "process"):
        raise InvalidArgumentError(f"host is {host!r}", remedy="Use 'auto', 'inline' or 'process'.")
    if standby not in ("none", "imports", "context"):
        raise InvalidArgumentError(f"standby is {standby!r}", remedy="Use 'none', 'imports' or 'context'.")
    if hang_timeout is not None:
        check_seconds("hang_timeout", hang_timeout)
        if hang_timeout <= 0:
            raise InvalidArgumentError(f"hang_timeout is {hang_timeout!r}", remedy="Give seconds above 0, or None.")
    check_seconds("busy_timeout", busy_timeout)
    if busy_timeout <= 0:
        raise InvalidArgumentError(f"busy_timeout is {busy_timeout!r}", remedy="Give seconds above 0.")
    if host != "inline":
        return
    if standby != "none":
        raise UnsupportedError(
            f"standby={standby!r} with host='inline': an inline device never goes on in a child", remedy="Use host='auto' or 'process'."
        )
    if hang_timeout is not None:
        raise UnsupportedError(
            "hang_timeout with host='inline': only a process host can end a hang", remedy="Use host='process', and timeout= to end a wait."
        )
    if busy_timeout != BUSY_TIMEOUT:
        raise UnsupportedError(
            "busy_timeout with host='inline': only a process host can end what hangs", remedy="Use host='process', or leave it out."
        )


def check_shareable(backend: AccelBackend, index: int, standby: Literal["none", "imports", "context"]) -> None:
    """See that a spare child may have a context while another process has one. May block.

    Raises
    ------
    UnsupportedError
        If the device is one process's at a time.
    """
    check: Any = getattr(backend, "check_shareable", None)
    if standby == "context" and check is not None:
        check(index)
