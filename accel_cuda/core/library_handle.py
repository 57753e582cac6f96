"""Handles of NVIDIA's libraries, each bound to one stream: cuBLAS, cuSOLVER, cuSPARSE and cuDSS have such."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_cuda.core.libraries import VendorLibrary
    from accel_cuda.core.stream import CudaStream

__all__ = ["LibraryHandle", "StreamHandles"]


class LibraryHandle:
    """A handle. It is destroyed when the stream ends. To make one may block; the stream's context is current.

    Parameters
    ----------
    library
        The library.
    stream
        Where its calls go.
    workspace, nbytes
        Device memory that its calls may use, in the stream's order; a library without workspaces is given none.

    Attributes
    ----------
    module : module
        The bindings.
    error : type
        What the bindings raise.
    value : int
        The library's handle.

    Raises
    ------
    BackendUnavailableError
        If the library or its bindings are not installed.
    AccelError
        What the library's status stands for.
    """

    __slots__ = ("_library", "_stream", "error", "module", "value")

    def __init__(self, library: VendorLibrary, stream: CudaStream, workspace: int = 0, nbytes: int = 0) -> None:
        self._library = library.name
        self._stream = stream
        self.module: Any = library.load()
        self.error: Any = library.load_error()
        try:
            self.value = int(self.module.create())
        except self.error as error:
            raise self.failure(error, "create") from error
        stream.at_close(self._destroy)
        self.call("set_stream", stream.handle)
        if nbytes:
            # Setting the stream resets the workspace, so ours comes after it.
            self.call("set_workspace", workspace, nbytes)

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the library, given the handle and ``arguments``. Calls of every op go to :attr:`module`, without this step.

        Raises
        ------
        AccelError
            What the library's status stands for.
        """
        try:
            return getattr(self.module, name)(self.value, *arguments)
        except self.error as error:
            raise self.failure(error, name) from error

    def failure(self, error: Any, call: str) -> Exception:
        """Return what an exception of the bindings stands for: the fault of the device, if there is one behind it."""
        return self._stream.failure(int(error.status), call, self._library)

    def _destroy(self) -> None:
        with contextlib.suppress(self.error):  # what else the stream has is given back all the same
            self.module.destroy(self.value)


class StreamHandles:
    """A library in one context, with a handle for each of its streams. Any thread may call it.

    Parameters
    ----------
    library
        The library.

    Raises
    ------
    BackendUnavailableError
        If the library or its bindings are not installed.
    """

    def __init__(self, library: VendorLibrary) -> None:
        self._library = library
        self._bindings: Any = library.load()
        self._error: Any = library.load_error()
        self._handles: dict[int, LibraryHandle] = {}

    def has_handle(self, stream: CudaStream) -> bool:
        """Return whether a stream has its handle. Quick."""
        return stream.handle in self._handles

    def handle(self, stream: CudaStream) -> LibraryHandle:
        """Return the handle of a stream; the context is current. May block where there is none."""
        number = stream.handle
        found = self._handles.get(number)
        if found is None:
            found = LibraryHandle(self._library, stream)
            self._set_up(found, stream)
            self._handles[number] = found
            stream.at_close(lambda: self._handles.pop(number, None))
        return found

    def _set_up(self, handle: LibraryHandle, stream: CudaStream) -> None:
        """Tell the library what else it is to know of a stream."""
