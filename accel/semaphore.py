"""A semaphore that a device can post without Python."""

from __future__ import annotations

import ctypes

from accel.errors import UnsupportedError

__all__ = ["Semaphore"]


class Semaphore:
    """A POSIX semaphore, which is also the :class:`~accel.backend.HostFunction` that posts it.

    Attributes
    ----------
    address : int
        Address of the C library's ``sem_post``.
    argument : int
        Address of the semaphore.

    Raises
    ------
    UnsupportedError
        If the system has none without a name.
    """

    def __init__(self) -> None:
        # The C library, called with the GIL kept, and with the GIL released.
        keeping, releasing = ctypes.PyDLL(None, use_errno=True), ctypes.CDLL(None, use_errno=True)
        # The memory of the semaphore: larger than any system's sem_t, and aligned for it.
        self._storage = (ctypes.c_uint64 * 16)()
        self._pointer = ctypes.byref(self._storage)
        self.argument = ctypes.addressof(self._storage)
        # Neither posting nor trying blocks, so they keep the GIL.
        self._post, self._try_wait, self._wait = keeping.sem_post, keeping.sem_trywait, releasing.sem_wait
        self.address = ctypes.cast(self._post, ctypes.c_void_p).value or 0
        if keeping.sem_init(self._pointer, 0, 0) != 0:
            raise UnsupportedError("this system has no unnamed semaphores", code=ctypes.get_errno(), remedy="Use completion='adaptive'.")

    def __call__(self) -> None:
        """Post the semaphore: wakes one thread in :meth:`wait`. Never blocks."""
        self._post(self._pointer)

    def wait(self) -> None:
        """Block this thread, releasing the GIL, until the semaphore has been posted.

        Several posts count as one.
        """
        while self._wait(self._pointer) != 0:  # interrupted by a signal
            pass
        while self.try_acquire():  # clear the other posts
            pass

    def try_acquire(self) -> bool:
        """Decrement the semaphore if it is above 0; return whether it was. Never blocks."""
        acquired: bool = self._try_wait(self._pointer) == 0
        return acquired
