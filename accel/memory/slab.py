"""Slabs of ordinary memory, held by a descriptor where the system has such a thing."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import warnings
from typing import Final

from accel.errors import DriverError, InvalidArgumentError, OutOfMemoryError
from accel.fork import close_after_fork
from accel.memory.machine import memory_left, memory_size
from accel.shortage import raise_shortage

__all__ = ["MemfdSlab", "memfd_identity"]

_STEP: Final = 16 << 20
"""Bytes of a control group's memory that are committed at once: less than what is left to others.
"""

_NO_ROOM: Final = frozenset({errno.ENOMEM, errno.ENOSPC, errno.EFBIG, errno.EOVERFLOW, errno.EINVAL, errno.EDQUOT})


class MemfdSlab:
    """A slab of anonymous shared memory: a memfd, sealed against shrinking and growing, and mapped.

    Where there are no memfds it is an anonymous mapping without a descriptor. The pages are zero.
    They are allocated when they are first touched, or at once where a control group bounds this
    process's memory.

    A forked child holds neither the descriptor nor the mapping; only views that exist at the fork
    keep the mapping there, readable.

    Parameters
    ----------
    nbytes
        Size; rounded up to whole pages.
    name
        Shows in ``/proc/self/maps``.
    fd
        Descriptor of such memory, made by another slab, which is mapped instead of making some; it
        is duplicated.

    Attributes
    ----------
    address : int
        Where it starts; page-aligned, so to at least 4096 bytes.
    nbytes : int
        Its size after rounding.
    fd : int
        The descriptor (close-on-exec), or -1 if there is none or the slab is closed. A
        mapping of a duplicate keeps the memory alive.

    Raises
    ------
    OutOfMemoryError
        If the system has no such piece, or no descriptor now.
    DriverError
        If it refused for another reason; ``.code`` is the errno.
    InvalidArgumentError
        If ``fd`` is of less memory than that.
    """

    __slots__ = ("__weakref__", "_map", "address", "fd", "nbytes")

    def __init__(self, nbytes: int, *, name: str = "accel-slab", fd: int | None = None) -> None:
        self.fd = -1
        self._map: mmap.mmap | None = None
        if nbytes <= 0:
            raise InvalidArgumentError(f"a slab has at least one byte, not {nbytes}")
        self.nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if fd is not None:
            _check_size(fd, self.nbytes)
        try:
            self.fd = _sealed_memfd(self.nbytes, name) if fd is None else os.dup(fd)
            self._map = mmap.mmap(self.fd, self.nbytes)
        except (OSError, OverflowError, ValueError) as error:
            self.close()
            code = error.errno if isinstance(error, OSError) else errno.EOVERFLOW
            if code in _NO_ROOM:
                raise OutOfMemoryError(f"the system has no {self.nbytes} bytes for a slab", requested=self.nbytes, code=code) from error
            raise_shortage(error, f"a slab of {self.nbytes} bytes cannot be made")
            raise DriverError(f"a slab of {self.nbytes} bytes cannot be made: {error}", code=code, library="system") from error
        # The exported buffer ends with this expression, so that it does not keep `close` from
        # unmapping.
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        close_after_fork(self)

    def __repr__(self) -> str:
        return f"<MemfdSlab {self.nbytes} bytes{' closed' if self._map is None else ''}>"

    def view(self) -> memoryview:
        """Return the memory as writable bytes.

        The mapping lives as long as any view of it, even if the slab is closed before.

        Raises
        ------
        InvalidArgumentError
            If the slab is closed.
        """
        if self._map is None:
            raise InvalidArgumentError("a closed slab cannot be viewed")
        return memoryview(self._map)

    def close(self) -> None:
        """Close the descriptor and unmap the memory.

        With views of it alive, the mapping goes with the last of them. Idempotent.

        Addresses taken from the slab are invalid from then on.
        """
        mapping, self._map = self._map, None
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
        if mapping is not None:
            try:
                mapping.close()
            except BufferError:
                # Views hold the mapping object; it unmaps itself when they are gone.
                del mapping

    def close_inherited(self) -> None:
        """See :class:`accel.fork.Inherited`."""
        MemfdSlab.close(self)  # not a subclass's, which may take locks

    def __del__(self) -> None:
        if getattr(self, "_map", None) is not None:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=1, source=self)
            self.close()


def memfd_identity(fd: int, nbytes: int) -> tuple[int, int] | None:
    """Return device and inode of a memfd; ``None`` for other memory, such as a GPU's.

    Called for each descriptor of a slab that another process has sent, before it is kept or mapped.

    Raises
    ------
    ValueError
        If it has another size, or can be truncated, which would kill a process that has mapped it.
    """
    import fcntl  # it exists wherever slabs have descriptors

    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return None
    stat = os.fstat(fd)  # of a file with seals it never blocks
    if not seals & fcntl.F_SEAL_SHRINK or stat.st_size != nbytes:
        raise ValueError(f"a slab of {nbytes} bytes is memory of {stat.st_size} bytes, seals {seals:#x}")
    return stat.st_dev, stat.st_ino


def _check_size(fd: int, nbytes: int) -> None:
    """Raise unless a descriptor is of so much memory, for good: touching more would end the process."""
    import fcntl  # it exists wherever slabs have descriptors

    try:
        size, is_sealed = os.fstat(fd).st_size, fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    except OSError as error:
        raise InvalidArgumentError(f"descriptor {fd} is of no memory: {error.strerror}", remedy="Give that of a slab.") from error
    if size < nbytes or not is_sealed:
        what = "sealed" if is_sealed else "not sealed against shrinking"
        raise InvalidArgumentError(
            f"descriptor {fd} is of {size} bytes, {what}, and {nbytes} are to be mapped", remedy="Give that of a slab."
        )


def _sealed_memfd(nbytes: int, name: str) -> int:
    """Return a memfd of ``nbytes`` that keeps its size.

    Where the system has none it is -1, which is an anonymous mapping for `mmap`.
    """
    if not hasattr(os, "memfd_create"):
        return -1
    import fcntl  # it exists wherever memfd_create does

    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        _commit(fd, nbytes)
        # A process that got the descriptor could otherwise shrink the file, and touching the memory
        # here would be SIGBUS.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _commit(fd: int, nbytes: int) -> None:
    """Allocate the pages now, where a control group bounds the memory.

    When they are first touched it is too late: beyond the limit the kernel ends the process then.
    In steps, because other threads and processes of the group allocate at the same time.
    """
    start, step = 0, nbytes  # the first check is for all of it: no page is allocated in vain
    while start < nbytes:
        left = memory_left()
        if left is None:
            return
        if left < step:
            raise OutOfMemoryError(
                f"{nbytes} bytes for a slab are more than this process's control group has left", requested=nbytes, limit=memory_size()
            )
        step = min(_STEP, nbytes - start)
        os.posix_fallocate(fd, start, step)
        start += step
        step = min(_STEP, nbytes - start)
