"""What `accel serve` is told to serve: found by name, told apart, and opened on a device, or on those of a pool."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from accel import Model, Pool, serve
from accel.device.pool import all_or_nothing, summed
from accel.errors import InvalidArgumentError
from accel.patterns import ModelService

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from accel import Device

__all__ = ["Function", "Served", "Target", "find_target", "opened"]

Kind: TypeAlias = Literal["asgi", "aiohttp", "maker", "function", "model", "onnx"]
Function: TypeAlias = "Callable[[Any], Awaitable[Any]]"
"""Answers the JSON of a request."""
Served: TypeAlias = "ModelService | Function"
OnProgress: TypeAlias = "Callable[[str, int, int], object]"

_ASGI = ("scope", "receive", "send")


@dataclass(frozen=True, slots=True)
class Target:
    """What was named.

    Parameters
    ----------
    text
        As it was written.
    name
        Its last part: the path that it is served at.
    kind
        ``"asgi"`` and ``"aiohttp"``: an application. ``"maker"``: a function of the device, that makes what is served. ``"function"``: one of a request's JSON.
        ``"model"``: what :meth:`accel.Device.load_model` takes by name. ``"onnx"``: the path of a model.
    value
        The object, or the path.
    """

    text: str
    name: str
    kind: Kind
    value: Any

    @property
    def is_application(self) -> bool:
        """Whether it has routes of its own."""
        return self.kind in ("asgi", "aiohttp")


def find_target(text: str) -> Target:
    """Import ``"package.module:name"``, from the current folder too, or look for the file of a model. May block.

    Raises
    ------
    InvalidArgumentError
        There is no such module, name or file, or it cannot be served.
    ImportError
        The module imports what is not installed.
    """
    if text.endswith(".onnx"):
        path = Path(text)
        if not path.is_file():
            raise InvalidArgumentError(f"there is no file {text}", remedy="Name a model's file, or 'package.module:name'.")
        return Target(text, path.stem, "onnx", path)
    module_name, _, name = text.partition(":")
    if not name or not all(part.isidentifier() for part in (*module_name.split("."), *name.split("."))):
        raise InvalidArgumentError(f"{text!r} names nothing to serve", remedy="Give 'package.module:name', or a path that ends in .onnx.")
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise InvalidArgumentError(
            f"{text!r}: there is no module {error.name!r} in {folder} or on Python's path", remedy="Run it in the module's folder."
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise InvalidArgumentError(
                f"{text!r}: {module_name} has no {name!r}", remedy="Name a function or an application of the module."
            )
        found = getattr(found, part)
    return Target(text, name.rpartition(".")[2], _kind(text, found), found)


def _kind(text: str, value: Any) -> Kind:
    web = sys.modules.get("aiohttp.web")
    if web is not None and isinstance(value, web.Application):
        return "aiohttp"
    try:
        parameters = tuple(inspect.signature(value).parameters.values()) if callable(value) else ()
    except ValueError:  # a function of C that does not say
        parameters = ()
    needed = [
        each.name for each in parameters if each.default is each.empty and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    if tuple(needed) == _ASGI:
        return "asgi"
    takes_tensors = any(each.kind is each.KEYWORD_ONLY and each.default is each.empty for each in parameters)
    if needed == ["device"]:
        return "model" if takes_tensors else "maker"
    if callable(value) and not needed and not takes_tensors:
        return "model"
    if len(needed) == 1:
        return "function"
    raise InvalidArgumentError(
        f"{text!r} is a {type(value).__name__} that cannot be served",
        remedy="Name a model, a function of `device` that returns one or a service, a function of a request's JSON, or an ASGI or aiohttp application.",
    )


@contextlib.asynccontextmanager
async def opened(
    target: Target, place: Device | Pool, options: dict[str, Any], load_options: dict[str, Any], on_progress: OnProgress
) -> AsyncIterator[Served]:
    """Open what a target makes on a device, or on each of a pool, until the block ends.

    Parameters
    ----------
    target
        No application.
    place
        Where it runs.
    options
        Of :func:`accel.serve`, for a model. What is ready made takes none.
    load_options
        Of :meth:`accel.Device.load_model`, for a model that is named itself.
    on_progress
        Given to :meth:`accel.Device.load_model`: by this, or by a maker that has a parameter of this name.

    Raises
    ------
    InvalidArgumentError
        What a maker returned cannot be served, or takes no options; or it is no model, for several devices.
    """
    async with contextlib.AsyncExitStack() as stack:
        made = target.value
        if target.kind == "onnx":
            made = await place.load_model(made, on_progress=on_progress, **load_options)
        elif target.kind == "model":
            # By name, so that a child finds it; a function of refs runs in this process, and is taken itself.
            named = made if inspect.iscoroutinefunction(made) else target.text
            made = await place.load_model(named, on_progress=on_progress, **load_options)
        elif target.kind == "maker":
            made = await (_made_on_each(target, place, on_progress) if isinstance(place, Pool) else _made(target, place, on_progress))
            if isinstance(made, contextlib.AbstractAsyncContextManager):  # a service, or what yields one
                made = await stack.enter_async_context(made)
        if isinstance(made, (Model, list)):
            yield await stack.enter_async_context(serve(made, **{"overload": "reject", **options}))
            return
        if options:
            raise InvalidArgumentError(
                f"{target.text!r} is served as it is made, without {', '.join(options)}",
                remedy="Return the model, or set them where it is made.",
            )
        yield made if isinstance(made, ModelService) else _function(target, made)


async def _made(target: Target, device: Device, on_progress: OnProgress) -> Any:
    """Return what a maker makes on a device."""
    maker = target.value
    made = maker(device, on_progress=on_progress) if "on_progress" in inspect.signature(maker).parameters else maker(device)
    return await made if inspect.isawaitable(made) else made


async def _made_on_each(target: Target, pool: Pool, on_progress: OnProgress) -> list[Model]:
    """Return the models that a maker makes on the devices of a pool."""

    async def model(device: Device) -> Model:
        made = await _made(target, device, summed(on_progress, told, device.name))
        if not isinstance(made, Model):
            raise InvalidArgumentError(
                f"{target.text!r} made a {type(made).__name__}, which one device alone can have",
                remedy="Return the model, which is served on all devices, or name one device.",
            )
        return made

    told: dict[tuple[str, str], tuple[int, int]] = {}
    return await all_or_nothing([model(device) for device in pool], Model.aclose)


def _function(target: Target, made: Any) -> Function:
    """Return what answers with the result of ``made``; a function that is not async runs in a thread."""
    if not callable(made):
        raise InvalidArgumentError(
            f"{target.text!r} made a {type(made).__name__}, which cannot be served",
            remedy="Return a Model, a ModelService, or a function of a request's JSON.",
        )
    blocks = inspect.isroutine(made) and not inspect.iscoroutinefunction(made)

    async def answer(body: Any) -> Any:
        found = await asyncio.to_thread(made, body) if blocks else made(body)
        return await found if inspect.isawaitable(found) else found

    return answer
