"""The only module that calls the CUDA driver.

Two ways lead there. :meth:`Driver.call` goes through ``cuda.bindings``, which gives the GIL up around every call: right for whatever may block. The
attributes of :class:`HotCalls` go through ``ctypes.PyDLL``, which keeps it: with another Python thread busy, getting the GIL back costs 5 ms, a
thousand times what such a call takes. Only calls that cannot block are among them (enqueuing blocks when the driver's launch queue is full, which the
bound on ops in flight prevents).

What these calls need of the thread, and what they leave of it, is measured (``benchmarks/records/driver.md``). Launches and calls on events
take their context from the stream or event that they are given, so any or no context may be current. Copies fail where another GPU's is.
What needs its own runs in a :class:`Section`, which leaves the thread as it was: the thread may be the user's, with torch or cupy on
another device. A query would break a capture that the user has begun (``torch.cuda.graph``), on any thread; in the relaxed mode of this
thread it does not, so every call that could is made in it. The package loads without a GPU, a driver or the bindings; :func:`load_driver`
then says what is missing.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, Protocol

from accel import AccelError, BackendUnavailableError, FaultScope
from accel.fork import close_after_fork
from accel_cuda.core.libraries import load_module
from accel_cuda.errors import error_of

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Driver", "Faultable", "Handle", "HotCalls", "LaunchAttribute", "LaunchConfig", "Section", "load_driver"]

_LIBRARY = "libcuda.so.1"
# By the names of cuda.bindings, which is not loaded when these are needed.
_CU_STREAM_CAPTURE_MODE_RELAXED = 2
_CUDA_ERROR_NOT_INITIALIZED, _CUDA_ERROR_NO_DEVICE = 3, 100

Handle = ctypes.c_void_p
"""A pointer-sized argument. Hot calls declare no argument types, because converting ints costs more than the calls: handles are made once."""


class LaunchConfig(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = (
        ("grid_x", ctypes.c_uint),
        ("grid_y", ctypes.c_uint),
        ("grid_z", ctypes.c_uint),
        ("block_x", ctypes.c_uint),
        ("block_y", ctypes.c_uint),
        ("block_z", ctypes.c_uint),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


class LaunchAttribute(ctypes.Structure):
    """The driver's CUlaunchAttribute, with a value of ints."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int * 16))


class Faultable(Protocol):
    """What is told when the process has lost CUDA.

    Attributes
    ----------
    handle : int
        Its CUcontext.
    """

    handle: int

    def faulted(self, error: AccelError) -> None:
        """Record the fault; the first one stands."""


class HotCalls:
    """Driver calls that keep the GIL and return the status: for calls that cannot block, on addresses and handles as ints.

    Pointers and handles are :data:`Handle` objects, sizes ``ctypes.c_size_t``; small ints go as they are. Copies take pinned host memory only: with
    any other the driver may wait for the stream. ``event_create``, copies, fills and ``graph_launch`` go into a :class:`Section`; the others take
    the context of their stream or event.
    """

    def __init__(self, library: ctypes.PyDLL) -> None:
        self.set_current: Callable[..., int] = library.cuCtxSetCurrent
        self.push: Callable[..., int] = library.cuCtxPushCurrent_v2
        self.pop: Callable[..., int] = library.cuCtxPopCurrent_v2
        self.exchange_mode: Callable[..., int] = library.cuThreadExchangeStreamCaptureMode
        self.context_record: Callable[..., int] = library.cuCtxRecordEvent
        self.event_create: Callable[..., int] = library.cuEventCreate
        self.event_elapsed: Callable[..., int] = library.cuEventElapsedTime
        self.event_query: Callable[..., int] = library.cuEventQuery
        self.event_record: Callable[..., int] = library.cuEventRecord
        self.launch: Callable[..., int] = library.cuLaunchKernelEx
        self.launch_host_function: Callable[..., int] = library.cuLaunchHostFunc
        self.copy: Callable[..., int] = library.cuMemcpyDtoDAsync_v2
        self.copy_to_host: Callable[..., int] = library.cuMemcpyDtoHAsync_v2
        self.copy_from_host: Callable[..., int] = library.cuMemcpyHtoDAsync_v2
        self.graph_launch: Callable[..., int] = library.cuGraphLaunch
        self.fill: dict[int, Callable[..., int]] = {
            1: library.cuMemsetD8Async,
            2: library.cuMemsetD16Async,
            4: library.cuMemsetD32Async,
        }
        self.wait_event: Callable[..., int] = library.cuStreamWaitEvent

    def refuse(self) -> None:
        """Answer every call with NOT_INITIALIZED from now on, without entering the driver."""
        self.fill = dict.fromkeys(self.fill, _refused)
        for name in vars(self).keys() - {"fill"}:
            setattr(self, name, _refused)


def _refused(*arguments: object) -> int:
    return _CUDA_ERROR_NOT_INITIALIZED


class _ThreadState:
    """What a thread is in.

    Attributes
    ----------
    depth : int
        Sections that it is in.
    mode
        The capture mode that it has outside our calls, while it is in them; before and after them, the relaxed one.
    section : Section or None
        The innermost section: its context is current.
    outer : list
        For each section that the thread is in, the one around it.
    """

    __slots__ = ("depth", "mode", "outer", "section")

    def __init__(self) -> None:
        self.depth = 0
        self.mode = ctypes.byref(ctypes.c_int(_CU_STREAM_CAPTURE_MODE_RELAXED))
        self.section: Section | None = None
        self.outer: list[Section | None] = []


class _Thread(threading.local):
    """This thread. Its attributes cost several times those of the state, so each call reads one."""

    def __init__(self) -> None:
        self.state = _ThreadState()


class Section:
    """``with driver.section(context):`` - a context is current and captures go undisturbed, and afterwards the thread is as it was. About 1 us.

    For what needs a current context on a thread that may be the user's, such as calls of a library. Sections nest: in one of the same context the driver is not
    called again.
    """

    __slots__ = ("_context", "_failure", "_hot", "_popped", "_thread")

    def __init__(self, hot: HotCalls, context: int, thread: _Thread, failure: Callable[[int, str], AccelError]) -> None:
        self._hot = hot
        self._failure = failure
        self._context = Handle(context)
        self._thread = thread
        self._popped = ctypes.byref(Handle())

    def __enter__(self) -> None:
        thread = self._thread.state
        outer = thread.section
        if outer is not self:
            status = self._hot.push(self._context)
            if status:
                raise self._failure(status, "cuCtxPushCurrent")
            thread.section = self
            if not thread.depth:
                self._hot.exchange_mode(thread.mode)
        thread.outer.append(outer)
        thread.depth += 1

    def __exit__(self, *_: object) -> None:
        thread = self._thread.state
        thread.depth -= 1
        outer = thread.outer.pop()
        if outer is not self:
            if not thread.depth:
                self._hot.exchange_mode(thread.mode)
            self._hot.pop(self._popped)
            thread.section = outer


class QuerySection:
    """``with driver.query_section:`` - queries of events disturb no capture. Sections nest."""

    __slots__ = ("_hot", "_thread")

    def __init__(self, hot: HotCalls, thread: _Thread) -> None:
        self._hot = hot
        self._thread = thread

    def __enter__(self) -> None:
        thread = self._thread.state
        if not thread.depth:
            self._hot.exchange_mode(thread.mode)
        thread.depth += 1

    def __exit__(self, *_: object) -> None:
        thread = self._thread.state
        thread.depth -= 1
        if not thread.depth:
            self._hot.exchange_mode(thread.mode)


class Driver:
    """The driver of this process. Made by :func:`load_driver`.

    Attributes
    ----------
    hot : HotCalls
        Calls that keep the GIL.
    version : int
        CUDA version that the driver supports, as 1000 * major + 10 * minor.
    fault : AccelError or None
        What ended CUDA for this process. Raise a clone of it.
    query_section : QuerySection
    planned : AccelError or None
        What a fault plan wants the next such fault to be reported as.
    """

    def __init__(self, bindings: Any, library: ctypes.PyDLL, version: int) -> None:
        self.hot = HotCalls(library)
        self.version = version
        self.fault: AccelError | None = None
        self.planned: AccelError | None = None
        self._bindings = bindings
        self._thread = _Thread()
        self.query_section = QuerySection(self.hot, self._thread)
        self._lock = threading.Lock()
        self._contexts: weakref.WeakSet[Any] = weakref.WeakSet()
        self._is_inherited = False
        close_after_fork(self)

    def close_inherited(self) -> None:
        """Call the driver no more: CUDA does not work in a forked child, and a thread that is not here may hold its locks."""
        self._is_inherited = True
        self._lock = threading.Lock()
        self.hot.refuse()

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a driver function, giving the GIL up, and return what it gives besides its status: nothing, one value, or a tuple.

        Raises
        ------
        AccelError
            What the status stands for; see :mod:`accel_cuda.errors`.
        """
        status, given = self.answer(name, *arguments)
        if status:
            raise self.failure(status, name)
        return given

    def answer(self, name: str, *arguments: Any) -> tuple[int, Any]:
        """Call a driver function, giving the GIL up, and return its status, whatever that stands for, and what :meth:`call` returns."""
        status, *values = self._undisturbing(name, arguments)
        return int(status), values[0] if len(values) == 1 else tuple(values)

    def ignore(self, name: str, *arguments: Any) -> None:
        """Call a driver function that gives something back, whatever it answers: after a fault, that is always the fault."""
        self._undisturbing(name, arguments)

    def status(self, name: str, *arguments: Any) -> int:
        """Call a driver function, giving the GIL up, and return its status alone."""
        return int(self._undisturbing(name, arguments)[0])

    def _undisturbing(self, name: str, arguments: tuple[Any, ...]) -> Any:
        if self._is_inherited:
            return (_CUDA_ERROR_NOT_INITIALIZED,)
        with self.query_section:
            return getattr(self._bindings, name)(*arguments)

    def __getattr__(self, name: str) -> Any:
        """Return an enum or structure of the bindings, such as ``CUmemAllocationProp``."""
        if name.startswith("CU"):
            return getattr(self._bindings, name)
        raise AttributeError(name)

    def device_attribute(self, device: Any, name: str) -> int:
        """Return an attribute of a CUdevice by the driver's name, without ``CU_DEVICE_ATTRIBUTE_``."""
        return int(self.call("cuDeviceGetAttribute", getattr(self.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), device))

    def query(self, event: Handle) -> int:
        """Return the status of an event, keeping the GIL, and disturbing no capture."""
        if self._thread.state.depth:
            return self.hot.event_query(event)
        with self.query_section:
            return self.hot.event_query(event)

    def section(self, context: int, failure: Callable[[int, str], AccelError] | None = None) -> Section:
        """Return what makes ``context`` current on whichever thread enters it, and leaves that thread as it was.

        ``failure`` makes the error where that cannot be done: the context's own records that it was destroyed.
        """
        return Section(self.hot, context, self._thread, failure or self.failure)

    def watch(self, context: Faultable) -> None:
        """Tell ``context`` when the process loses CUDA; at once if it has."""
        with self._lock:
            self._contexts.add(context)
        if self.fault is not None:
            context.faulted(self.fault)

    def unwatch(self, context: Faultable) -> None:
        """Forget a context that is closed."""
        with self._lock:
            self._contexts.discard(context)

    def failure(self, status: int, call: str, **fields: Any) -> AccelError:
        """Return the error for a status; if it ends CUDA for this process, record it and tell every context."""
        error = error_of(status, call, **fields)
        if error.scope < FaultScope.PROCESS:
            return error
        with self._lock:
            if self.fault is None:
                planned = self.planned
                self.fault = error if planned is None else planned.clone(scope=max(planned.scope, error.scope), library="driver")
            contexts = list(self._contexts)
        for context in contexts:
            context.faulted(self.fault)
        return self.fault.clone(**{name: value for name, value in fields.items() if getattr(self.fault, name, None) is None})


_loading = threading.Lock()
_loaded: list[Driver] = []


def load_driver() -> Driver:
    """Load the bindings and the driver, and initialize it; the same instance for the whole process. May block.

    Raises
    ------
    BackendUnavailableError
        If something is missing; it says what, and what to do. Tried again by the next call.
    """
    # Two instances would not know of each other's faults.
    with _loading:
        if not _loaded:
            _loaded.append(_load())
        return _loaded[0]


def _load() -> Driver:
    bindings = load_module("cuda.bindings.driver", "cuda-bindings")
    release: str = load_module("cuda.bindings", "cuda-bindings").__version__
    try:
        library = ctypes.PyDLL(_LIBRARY)
    except OSError as error:
        raise BackendUnavailableError(
            f"there is no NVIDIA driver: {error}",
            remedy="Install the driver (580 or later); in a container, run it with `--gpus all` and the NVIDIA container toolkit.",
        ) from error
    version = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    needed = int(release.partition(".")[0])
    if version.value // 1000 < needed:
        raise BackendUnavailableError(
            f"the NVIDIA driver supports CUDA {_dotted(version.value)}, cuda-bindings {release} needs {needed}.0",
            remedy="Install driver 580 or later.",
        )
    status = int(bindings.cuInit(0)[0])
    if status:
        raise _refusal(status)
    return Driver(bindings, library, version.value)


def _refusal(status: int) -> BackendUnavailableError:
    """Return what to say where the driver does not start."""
    found = error_of(status, "cuInit")
    message, remedy = found.message, found.remedy
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if status == _CUDA_ERROR_NO_DEVICE and visible is not None:
        message = f"CUDA_VISIBLE_DEVICES is {visible!r}, which hides every GPU"
        remedy = "Unset CUDA_VISIBLE_DEVICES, or name a GPU that `nvidia-smi -L` lists."
    elif status == _CUDA_ERROR_NO_DEVICE:
        message = "the NVIDIA driver finds no GPU"
    return BackendUnavailableError(message, code=status, library="driver", remedy=remedy)


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
