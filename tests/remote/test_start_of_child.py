"""A child that refuses, ends or cannot be reached while it starts: an error of the start, told once."""

from __future__ import annotations

import asyncio
import errno
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

import accel
from accel.remote import link as link_module
from accel.remote.children import Children
from accel.remote.error_codec import encode_error
from accel.remote.link import Link
from accel.remote.messages import Kind
from tests.child_support import workers
from tests.device_support import failure
from tests.telemetry_support import Recorder

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

pytestmark = pytest.mark.usefixtures("nothing_left")

ONCE = accel.RestartStrategy(max_restarts=0)
REFUSAL = accel.LibraryError("planted refusal", library="planted")


def while_waiting(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[Link], Awaitable[object]]) -> None:
    """Have ``meanwhile`` run with the first child while its actor waits for the end of earlier ones."""
    started: list[Link] = []
    start, wait_ended = Link.start, Children.wait_ended

    async def starting(*arguments: Any) -> Link:
        started.append(link := await start(*arguments))
        return link

    async def waiting(children: Children) -> bool:
        if len(started) == 1:
            started.append(started[0])  # once
            await meanwhile(started[0])
        return await wait_ended(children)

    monkeypatch.setattr(Link, "start", starting)
    monkeypatch.setattr(Children, "wait_ended", waiting)


def refuse(link: Link) -> None:
    link.listener.on_message(Kind.REFUSED, encode_error(REFUSAL), [])


async def end(link: Link) -> None:
    link.child.kill()
    await link.child.aclose(grace=5.0)


@pytest.mark.parametrize("refuses", [False, True])
async def test_a_child_that_ends_meanwhile_is_no_fault_of_a_generation(refuses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def meanwhile(link: Link) -> None:
        if refuses:
            refuse(link)
        await end(link)

    while_waiting(monkeypatch, meanwhile)
    probe = Recorder()
    async with accel.System() as system:
        system.probes.add(probe)
        opening = system.open_device("cpu", host="process", restart=ONCE)
        error = await failure(opening, accel.LibraryError if refuses else accel.HostDiedError)
        assert not refuses or "planted refusal" in str(error)
    assert "fault" not in probe.names, "there was no generation"


async def test_a_new_child_whose_channel_cannot_be_made_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "planted: the selector is full")

    problems: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
    monkeypatch.setattr(link_module, "Channel", refuse)
    async with accel.System() as system:
        opening = system.open_device("cpu", host="process", restart=ONCE)
        error = await failure(opening, accel.BackendUnavailableError)
        assert error.code == "ENOSPC"
        assert not workers()
    assert not problems
