"""A handle of one of NVIDIA's libraries, bound to one stream: cuBLAS, cuSOLVER and cuSPARSE have such."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_cuda.core.libraries import VendorLibrary
    from accel_cuda.core.stream import CudaStream

__all__ = ["LibraryHandle"]


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
