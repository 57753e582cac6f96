"""The example service on FastAPI and uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Annotated, Any

from accel.cli.digits_service import BODY_LIMIT, DigitsService, open_service
from accel.integrations.fastapi import cancel_on_disconnect, get_state, install, lifespan

# After the integration, whose ImportError says what to install.
import uvicorn  # isort: skip
from fastapi import Body, Depends, FastAPI, Request  # isort: skip

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

    from accel.cli.digits import Digits

__all__ = ["make_app", "serve"]

Service = Annotated[DigitsService, Depends(get_state)]


def make_app(digits: Digits, device: str, **options: Any) -> FastAPI:
    """Return the application.

    Parameters
    ----------
    digits
        What to fit, and to offer as samples.
    device, **options
        As for :func:`accel.integrations.fastapi.lifespan`.
    """
    app = FastAPI(title="accel digits", lifespan=lifespan(lambda opened: open_service(opened, digits), device=device, **options))
    install(app, body_limit=BODY_LIMIT)

    @app.post("/digits")
    async def classify(request: Request, image: Annotated[Any, Body()], service: Service) -> dict[str, int]:
        async with cancel_on_disconnect(request):
            return await service.classify(image)

    @app.get("/samples/{number}")
    async def sample(number: int, service: Service) -> dict[str, Any]:
        return service.sample(number)

    return app


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._tell = started

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # they belong to whoever runs this; uvicorn would end the process by the signal that stopped it

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._tell()


async def serve(app: FastAPI, bound: socket.socket, stop: asyncio.Event, started: Callable[[], None]) -> None:
    """Serve on a listening socket until ``stop`` is set, then answer what is in flight and close.

    Parameters
    ----------
    app, bound, stop
        What to serve, where, until when.
    started
        Called once requests are taken.
    """
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="on", ws="none", timeout_graceful_shutdown=10)
    server = _Server(config, started)
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(server.serve([bound]), name="accel-serve")
        waiting = group.create_task(stop.wait(), name="accel-serve-stop")
        await asyncio.wait([serving, waiting], return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        waiting.cancel()
