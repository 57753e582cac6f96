"""Compiled programs, kept on disk for all processes of a user; in memory where that cannot be."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

__all__ = ["ProgramCache", "cache_folder"]

_BYTES = 256 << 20
_NOTES = b"/notes"


def cache_folder() -> Path:
    """Return the folder: ``accel/programs`` in ``$XDG_CACHE_HOME``, which is ``~/.cache`` where it is not set.

    Raises
    ------
    RuntimeError
        If the user has no home.
    """
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "accel" / "programs"


class ProgramCache:
    """cuda-core's program cache with two entries a program: its code, and a note. May block; safe in several threads and processes.

    Entries are written beside and moved into place, so that a reader finds a whole one or none. Beyond 256 MiB those that were not read for the
    longest time go. What cannot be read is not there, and what cannot be written is kept in memory.

    Parameters
    ----------
    utils
        The module ``cuda.core.utils``.
    """

    def __init__(self, utils: Any) -> None:
        self._memory: Any = utils.InMemoryProgramCache(max_size_bytes=_BYTES)
        self._disk: Any = None
        try:
            folder = cache_folder()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._disk = utils.FileStreamProgramCache(folder, max_size_bytes=_BYTES)
        except (OSError, RuntimeError):  # a read-only home, or none
            return

    def get(self, key: bytes) -> tuple[bytes, bytes] | None:
        """Return a program's code and note, or ``None``."""
        for cache in (self._memory, self._disk):
            try:
                # The note is written last: with it, the code is there, unless it was evicted since.
                notes = None if cache is None else cache.get(key + _NOTES)
                code = None if notes is None else cache.get(key)
            except OSError:
                continue
            if notes is not None and code is not None:
                return bytes(code), bytes(notes)
        return None

    def put(self, key: bytes, code: bytes, notes: bytes) -> None:
        """Keep a program."""
        try:
            if self._disk is not None:
                self._disk[key] = code
                self._disk[key + _NOTES] = notes
                return
        except OSError:  # a full disk
            pass
        self._memory[key] = code
        self._memory[key + _NOTES] = notes
