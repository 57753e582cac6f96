"""The options of ``open_device`` that say where contexts live, checked together: what one host offers another does not."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Literal

from accel.actors.checks import check_seconds
from accel.engine.options import BUSY_TIMEOUT, HEARTBEAT_INTERVAL, HEARTBEAT_TIMEOUT
from accel.errors import InvalidArgumentError, UnsupportedError
from accel.values import check_choice

if TYPE_CHECKING:
    from accel.backend import AccelBackend

__all__ = ["check_hosting", "check_not_importing", "check_shareable"]


def check_hosting(
    host: str,
    standby: str,
    spares: int,
    hang_timeout: float | None,
    busy_timeout: float,
    heartbeat_interval: float,
    heartbeat_timeout: float,
    stall_after: float | None,
) -> dict[str, Any]:
    """Return the options but ``host`` by name, if they are what :meth:`accel.System.open_device` says and fit together.

    Raises
    ------
    InvalidArgumentError
        If one is not.
    UnsupportedError
        If the host has no use for one.
    """
    check_choice("host", host, "auto", "inline", "process")
    check_choice("standby", standby, "none", "imports", "context", "model")
    if type(spares) is not int or spares < 1:
        raise InvalidArgumentError(
            f"spares is {spares!r}", remedy="Give how many spare children there are, from 1; standby='none' is for none."
        )
    if standby == "none" and spares > 1:
        raise InvalidArgumentError(
            f"spares is {spares} with standby='none'", remedy="Say what they make ready: standby='context', for example."
        )
    if hang_timeout is not None:
        _check_above_zero("hang_timeout", hang_timeout, "Give seconds above 0, or None.")
    if stall_after is not None:
        _check_above_zero("stall_after", stall_after, "Give seconds above 0, or None.")
    _check_above_zero("busy_timeout", busy_timeout)
    _check_above_zero("heartbeat_interval", heartbeat_interval)
    _check_above_zero("heartbeat_timeout", heartbeat_timeout)
    if heartbeat_timeout < heartbeat_interval:
        raise InvalidArgumentError(
            f"heartbeat_timeout is {heartbeat_timeout!r} and heartbeat_interval {heartbeat_interval!r}",
            remedy="Allow at least one interval of silence.",
        )
    if host == "inline":
        _check_inline(standby, hang_timeout, busy_timeout, heartbeat=(heartbeat_interval, heartbeat_timeout))
    return {
        "standby": standby,
        "spares": spares,
        "hang_timeout": hang_timeout,
        "busy_timeout": busy_timeout,
        "heartbeat_interval": heartbeat_interval,
        "heartbeat_timeout": heartbeat_timeout,
        "stall_after": stall_after,
    }


def _check_above_zero(name: str, seconds: float, remedy: str = "Give seconds above 0.") -> None:
    check_seconds(name, seconds)
    if seconds <= 0:
        raise InvalidArgumentError(f"{name} is {seconds!r}", remedy=remedy)


def _check_inline(standby: str, hang_timeout: float | None, busy_timeout: float, heartbeat: tuple[float, float]) -> None:
    """Refuse what there is no child for."""
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
    if heartbeat != (HEARTBEAT_INTERVAL, HEARTBEAT_TIMEOUT):
        raise UnsupportedError(
            "heartbeat_interval or heartbeat_timeout with host='inline': there is no child to ask",
            remedy="Use host='process', or leave them out.",
        )


def check_not_importing() -> None:
    """See that no module opens a device while accel imports it to find a model, a library or an application there.

    Such a module is a program without a main guard. Its child would import it, and start a child that imports it, and so on.

    Raises
    ------
    UnsupportedError
        If one does; it says what to write.
    """
    frame, module = inspect.currentframe(), None
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name.partition(".")[0] != "accel":
            if frame.f_code.co_name == "<module>":
                module = frame
        elif module is not None:
            where = str(module.f_globals.get("__name__"))
            raise UnsupportedError(
                f"a device is opened while accel imports module {where}, which runs the whole program once more",
                remedy=f"In {module.f_code.co_filename}, put what starts the program (asyncio.run(main()), a server's run()) behind "
                '`if __name__ == "__main__":`, or move what accel imports to a module of its own.',
            )
        frame = frame.f_back


def check_shareable(backend: AccelBackend, index: int, standby: Literal["none", "imports", "context", "model"]) -> None:
    """See that a spare child may have a context while another process has one. May block.

    Raises
    ------
    UnsupportedError
        If the device is one process's at a time.
    """
    check: Any = getattr(backend, "check_shareable", None)
    if standby in ("context", "model") and check is not None:
        check(index)
