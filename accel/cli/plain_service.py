"""The model of the demo behind a plain asyncio server: ``python plain_service.py DESCRIPTOR < model.npz``.

It runs by path in a process that nothing supervises, and imports nothing of accel.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import socket
import sys

import numpy as np

__all__ = ["serve"]

IMAGE_BYTES = 64 * 4
"""One request: an image as float32. Its answer is one byte, the digit."""


async def serve(connected: socket.socket) -> None:
    """Answer the requests of a connection in order, until it ends."""
    model = np.load(io.BytesIO(sys.stdin.buffer.read()))
    projection, weights = model["projection"], model["weights"]
    reader, writer = await asyncio.open_unix_connection(sock=connected)
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            image = np.frombuffer(await reader.readexactly(IMAGE_BYTES), np.float32)
            hidden = np.maximum(np.append(image, np.float32(1)) @ projection, 0)
            writer.write(bytes([int(np.argmax(hidden @ weights))]))
            await writer.drain()
    writer.close()


if __name__ == "__main__":
    asyncio.run(serve(socket.socket(fileno=int(sys.argv[1]))))
