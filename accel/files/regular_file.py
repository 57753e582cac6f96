"""A file that is open for reading, of which no more is read than it had when it was opened."""

from __future__ import annotations

import os
import stat
import weakref
from typing import TYPE_CHECKING, BinaryIO, TypeAlias

from accel.errors import InvalidArgumentError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Identity", "RegularFile"]

Identity: TypeAlias = tuple[int, int, int, int]
"""Device, inode, size, and time of the last change in nanoseconds: equal for one file that was not changed."""


class RegularFile:
    """A regular file: no device, pipe, socket or folder, and no link to one. It stays open for as long as this object lives.

    Making one may block, but never waits for another process.

    Parameters
    ----------
    path
        Of the file. Links are followed.

    Raises
    ------
    InvalidArgumentError
        It cannot be opened, or is no regular file.

    Attributes
    ----------
    path : Path
    size : int
        Bytes when it was opened.
    identity : tuple of int
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            is_regular = stat.S_ISREG(os.stat(path).st_mode)  # before it is opened: opening a device can have effects
            # Not blocking, because the file may have become a pipe since.
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY) if is_regular else -1
        except (OSError, ValueError) as error:
            raise self._unreadable(error) from error
        if not is_regular:
            raise self._irregular()
        weakref.finalize(self, os.close, self._fd)
        found = os.fstat(self._fd)
        if not stat.S_ISREG(found.st_mode):
            raise self._irregular()
        self.size = found.st_size
        self.identity: Identity = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)

    def fill(self, start: int, out: memoryview) -> None:
        """Fill ``out`` with the bytes from ``start`` on. May block; several threads may call it at once.

        Raises
        ------
        InvalidArgumentError
            The file cannot be read any more, or was truncated.
        """
        done = 0
        while done < len(out):
            try:
                count = os.preadv(self._fd, [out[done:]], start + done)
            except OSError as error:
                raise self._unreadable(error) from error
            if not count:
                raise InvalidArgumentError(
                    f"{self.path} ends at byte {start + done}: it was truncated after it was opened",
                    remedy="Save or download the file again.",
                )
            done += count

    def read(self, start: int, nbytes: int) -> bytearray:
        """Return bytes; the caller has checked that the file has them."""
        data = bytearray(nbytes)
        self.fill(start, memoryview(data))
        return data

    def stream(self) -> BinaryIO:
        """Return a file object over the same file."""
        return os.fdopen(os.dup(self._fd), "rb")

    def _irregular(self) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"{self.path} is no regular file", remedy="Give the path of a file, not of a device, a pipe or a folder."
        )

    def _unreadable(self, error: Exception) -> InvalidArgumentError:
        return InvalidArgumentError(f"{self.path} cannot be read: {error}", remedy="Give the path of a readable file.")
