"""Checks of what devices and worlds are opened with: hosts, spare children, importing modules, ranks."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from accel.device.peers import peers_of
from accel.engine.options import InlineHost, ProcessHost
from accel.errors import InvalidArgumentError, UnsupportedError
from accel.values import check_choice, check_count, check_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from accel.backend import AccelBackend
    from accel.device.device import Device
    from accel.engine.options import HostOption

__all__ = ["check_hosting", "check_not_importing", "check_ranks", "check_shareable"]

_HOSTS: Mapping[str, InlineHost | ProcessHost] = {
    "auto": ProcessHost(after_fault=True),
    "inline": InlineHost(),
    "process": ProcessHost(),
}


def check_hosting(
    host: HostOption, standby: str, spares: int, hang_timeout: float | None, *, is_here: bool = True
) -> tuple[str, dict[str, Any]]:
    """Return where contexts are made, and the fields of :class:`DeviceOptions` that depend on it.

    Parameters
    ----------
    host, standby, spares, hang_timeout
        As in :meth:`System.open_device`.
    is_here
        Whether the device is on this machine.

    Returns
    -------
    str
        ``"inline"``, ``"process"`` or ``"auto"``; on another machine always ``"process"``.
    dict
        The fields.

    Raises
    ------
    InvalidArgumentError
        If an option is wrong, or they do not go together.
    UnsupportedError
        If the host cannot honour an option.
    """
    chosen = _HOSTS.get(host) if isinstance(host, str) else host
    if not isinstance(chosen, (InlineHost, ProcessHost)):
        raise InvalidArgumentError(
            f"host is {host!r}", remedy=f"Use one of {', '.join(map(repr, _HOSTS))}, an accel.InlineHost or an accel.ProcessHost."
        )
    # The options by themselves, and then with the host.
    check_choice("standby", standby, "none", "imports", "context", "model")
    check_count("spares", spares, remedy="Give how many spare children there are, from 1; standby='none' is for none.")
    if standby == "none" and spares > 1:
        raise InvalidArgumentError(
            f"spares is {spares} with standby='none'", remedy="Say what they make ready: standby='context', for example."
        )
    if hang_timeout is not None:
        check_seconds("hang_timeout", hang_timeout, or_zero=False, or_endless=True)
    options = {"standby": standby, "spares": spares, "hang_timeout": hang_timeout}
    if isinstance(chosen, ProcessHost):
        return "auto" if chosen.after_fault and is_here else "process", {**options, "limits": chosen}
    if not is_here:
        raise UnsupportedError("an inline host on another machine", remedy="Leave host out, or use host='process' with node=.")
    if standby != "none":
        raise UnsupportedError(
            f"standby={standby!r} with an inline host: an inline device never goes on in a child", remedy="Use host='auto' or 'process'."
        )
    if hang_timeout is not None:
        raise UnsupportedError(
            "hang_timeout with an inline host: only a process host can end a hang",
            remedy="Use host='process', and timeout= to end a wait.",
        )
    # The core reads limits of one class; inline, only ``stall_after`` can be chosen.
    return "inline", {**options, "limits": ProcessHost(stall_after=chosen.stall_after)}


def check_not_importing() -> None:
    """Raise if a module opens a device while accel imports it for a model, library or server.

    Such a module is a program without a main guard: the child of its device would import it, and
    start a child that imports it, and so on.

    Raises
    ------
    UnsupportedError
        If one does; its remedy says what to write in the module.
    """
    # Go outwards over the callers. The first module body that is not accel's runs this call. If a
    # frame of accel is further out, accel is importing that module.
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


def check_shareable(backend: AccelBackend, index: int) -> None:
    """Raise if only one process at a time can have a context on the device. May block.

    Raises
    ------
    UnsupportedError
        If the device is in exclusive-process mode.
    """
    check: Any = getattr(backend, "check_shareable", None)
    if check is not None:
        check(index)


def check_ranks(devices: Sequence[Device]) -> None:
    """Raise unless devices can be ranks of one world.

    Raises
    ------
    InvalidArgumentError
        If they are of several backends.
    UnsupportedError
        If they are on several machines, and their backend's groups are within one.
    """
    if len({device.info().backend for device in devices}) > 1:
        raise InvalidArgumentError("the devices of a world are of several backends", remedy="Give devices of one backend, extra ones too.")
    if len({device.info().node for device in devices}) == 1:
        return
    for device in devices:
        core = peers_of(device).core
        if not getattr(core.backend, "groups_span_machines", False):
            raise UnsupportedError(
                f"ranks of {core.description.backend} devices meet in memory of one machine, and these are on several",
                device=core.name,
                remedy="Open the world on the devices of one node.",
            )
