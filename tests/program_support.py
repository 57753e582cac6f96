"""Programs that run in processes of their own and listen on a port of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

ROOT = Path(__file__).resolve().parents[1]
URL = r"http://127\.0\.0\.1:(\d+)"


class Program:
    """A service in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.output = ""
        self.port = 0

    async def listening(self, pattern: str) -> None:
        """Wait for the line that names the port."""
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.output += line.decode()
            if found := re.search(pattern, line.decode()):
                self.port = int(found[1])
                return
        raise AssertionError(self.output)

    async def ended(self) -> int:
        """Wait for the end, and return the exit status."""
        assert self.process.stdout is not None
        self.output += (await self.process.stdout.read()).decode()
        return await self.process.wait()


@contextlib.asynccontextmanager
async def started(command: Sequence[str], *, pattern: str = URL, **variables: str) -> AsyncIterator[Program]:
    """Run a program that prints a line with its port, until the end of the block."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "default"} | variables
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        program = Program(process)
        await program.listening(pattern)
        yield program
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


def python(*arguments: str) -> list[str]:
    """Return the command that runs this interpreter."""
    return [sys.executable, *arguments]
