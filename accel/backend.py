"""What a vendor's backend implements: four protocols, and how a backend is found.

A backend is a package that registers a class under the entry-point group ``accel.backends``. It adds no line to accel: contexts, refs, memory,
supervision, completion and batches are generic over these protocols. ``docs/writing-a-backend.md`` walks through one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable

from accel.errors import AccelError

if TYPE_CHECKING:
    import threading
    from contextlib import AbstractContextManager

    from accel.dtype import DType
    from accel.telemetry.probe import Probe

__all__ = [
    "AccelBackend",
    "AccelDevice",
    "AccelEvent",
    "AccelStream",
    "ChecksAlive",
    "CountsCommands",
    "DeviceDescription",
    "Diagnosis",
    "HeldSlab",
    "HostFunction",
    "ImportsSlabs",
    "Injection",
    "Kernel",
    "KnowsPeers",
    "KnowsShortages",
    "ObservesWork",
    "PreloadsLibraries",
    "PreparesLibraries",
    "SlabMemory",
    "TakesScratch",
    "TakesWorkspace",
    "TellsFaults",
    "TimesWork",
    "WorkSpan",
]


@dataclass(frozen=True, slots=True)
class DeviceDescription:
    """One device, as a backend lists it before anything is opened.

    Parameters
    ----------
    backend
        Name of the backend.
    index
        Position in the backend's list.
    name
        The vendor's name for the hardware.
    uuid
        What names the same hardware in every process.
    memory
        Bytes of memory it has, or 0 where that is not known.
    """

    backend: str
    index: int
    name: str
    uuid: str
    memory: int = 0

    @property
    def spec(self) -> str:
        """The device as ``open_device`` takes it, such as ``"cpu:0"``."""
        return f"{self.backend}:{self.index}"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One thing that ``accel doctor`` looked at.

    Parameters
    ----------
    name
        What it is.
    state
        ``"ok"``; ``"limited"``: it works, and something is not to be had; ``"missing"``: something optional is not there; ``"unused"``: this release has no
        use for it, there or not; ``"failed"``: what should work does not.
    detail
        Version, size, or what is wrong.
    remedy
        The command, or what else fixes it; empty if nothing is to be done.
    """

    name: str
    state: Literal["ok", "limited", "missing", "unused", "failed"]
    detail: str
    remedy: str = ""


class HostFunction(Protocol):
    """A C function with one pointer argument, which a stream calls. It never enters Python.

    Attributes
    ----------
    address : int
        Address of the function.
    argument : int
        What it is called with.
    """

    address: int
    argument: int

    def __call__(self) -> None:
        """Call it from this thread (for a backend whose streams are themselves threads of this process)."""


class AccelEvent(Protocol):
    """A mark in a stream. It can be recorded again once the stream has passed it, wherever that was seen; before the first record it counts as complete."""

    def query(self) -> bool:
        """Return whether the stream has passed the mark, and so all marks before it, which may never be asked themselves. Never blocks.

        Where the host has a part in what was enqueued before it, such as bringing data to where they were asked for, that is done when this returns ``True``.

        Raises
        ------
        AccelError
            If the context is poisoned and the mark was not passed before: the driver's error, with its code and scope.
        """

    def synchronize(self) -> None:
        """Block this thread until the stream has passed the mark, releasing the GIL; raises as :meth:`query` does."""

    def close(self) -> None:
        """Give the event's resources back. Idempotent."""


class AccelStream(Protocol):
    """An ordered queue of device work. All methods but the named ones only enqueue, and never block."""

    def record(self, event: Any) -> bool:
        """Put a mark after everything enqueued so far; return ``True`` if that has already been passed."""

    def wait(self, event: Any) -> None:
        """Let later work wait for the event's mark as it is recorded now (recording it again changes nothing for this wait)."""

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        """Copy device memory to device memory of the same device; the ranges do not overlap."""

    def fill(self, destination: int, pattern: bytes, count: int) -> None:
        """Write ``pattern`` (1, 2, 4, 8 or 16 bytes) ``count`` times."""

    def copy_htod(self, destination: int, source: memoryview) -> None:
        """Copy host memory (C-contiguous) to device memory. It is kept alive, and may be read until the copy has ended."""

    def copy_dtoh(self, destination: memoryview, source: int) -> None:
        """Copy device memory into writable host memory (C-contiguous), which is kept alive until the copy has ended."""

    def launch_host_function(self, function: HostFunction) -> None:
        """Call ``function`` once everything enqueued so far has ended; after a fault it is never called.

        The stream keeps the function alive until it was called or the stream is closed.
        """

    def synchronize(self) -> None:
        """Block this thread until everything enqueued so far has ended, releasing the GIL; raises the context's fault."""

    def close(self, *, abandon: bool = False) -> None:
        """Give the stream's resources back. May block, up to the end of the running work; with ``abandon`` it waits for nothing. Idempotent."""


class SlabMemory(Protocol):
    """One large piece of device memory, from which buffers are cut.

    Attributes
    ----------
    address : int
        Where it starts; aligned to at least 256 bytes.
    nbytes : int
        Its size.
    """

    address: int
    nbytes: int

    def close(self) -> None:
        """Give the memory back. May block. Idempotent. Nothing on the device uses it any more."""


class HeldSlab(SlabMemory, Protocol):
    """A slab that outlives its context, and its process, as long as a process holds a descriptor of it.

    Attributes
    ----------
    fd : int
        Such a descriptor, the slab's own; -1 where there is none.
    closed : threading.Event
        Set once nothing in this process can reach the memory through this slab any more: with :meth:`close`, or when work that was abandoned has ended.
    """

    fd: int
    closed: threading.Event


Kernel: TypeAlias = Callable[[Any, Any, Any, Sequence[int], Sequence[int]], None]
"""Enqueues one op: ``kernel(lane, op, plan, inputs, outputs)``.

``lane.stream`` is the one to enqueue into. ``plan`` is the op's
:class:`~accel.ops.Plan`, worked out when it was sent. ``inputs`` are the addresses of
``plan.reads``; ``outputs`` are those of ``plan.writes`` and ``plan.creates``, then those of the
status and of scratch memory, if the op has them. Raises an :class:`~accel.AccelError` if the op
was not enqueued."""


@dataclass(frozen=True, slots=True)
class Injection:
    """A fault to bring about for a test.

    Parameters
    ----------
    kind
        ``"poison"``: the context faults once the stream gets here. ``"hang"``: the stream stops here until ``release`` returns. ``"kill"``: the process that
        holds the context is killed; it never reaches a backend.
    error
        The error that a poisoned context reports; ``None`` leaves the choice to the backend.
    release
        For ``"hang"``: blocks until the hang shall end. Called on a thread of the backend's, never on the loop's.
    """

    kind: Literal["poison", "hang", "kill"]
    error: AccelError | None = None
    release: Callable[[], None] | None = None


class AccelDevice(Protocol):
    """The context of one generation: what owns streams, events, memory and library handles until it is closed.

    Attributes
    ----------
    description : DeviceDescription
    granularity : int
        The size of a slab in bytes is a multiple of it; it is a multiple of 256.
    shares_processor : bool
        Whether its work runs on threads of this process. Its streams then call host functions as Python objects, and waiting for it must not spin.
    capabilities : mapping
        The dtypes of each call of :data:`accel.enums.CAPABILITIES`, which may be fewer or more. Ops outside it are rejected before any work.

    Where page-locked host memory is copied faster, it is a :class:`accel.memory.HostRegistrar` too.
    """

    description: DeviceDescription
    granularity: int
    shares_processor: bool
    capabilities: Mapping[str, frozenset[DType]]

    def create_stream(self, *, library: str = "") -> AccelStream:
        """Create a stream. May block: it may load libraries.

        Parameters
        ----------
        library
            Name of the library that the stream is opened for (``"memory"``, ``"graph"``, ...), or ``"batch"`` for ops of any. A hint of what to make ready
            now: streams are shared, so that kernels of other libraries must work too. :meth:`may_block` says ``True`` while the first of them would have to
            make something.
        """

    def create_event(self) -> AccelEvent:
        """Create an event without timing. Never blocks."""

    def kernels(self, library: str) -> Mapping[str, Kernel]:
        """Return the kernels of ``library`` by op kind. A device of :class:`~accel.ComputeBackend` calls gets them by :func:`accel.compute.kernels_of`."""

    def may_block(self, lane: Any, op: Any) -> bool:
        """Return whether enqueuing ``op`` may block this time; it is then enqueued on a thread beside the loop, in its place in line.

        Enqueuing blocks, for example, where a library loads a function at its first use, or where pageable memory is staged. Called before each launch,
        on the loop's thread, so it must be quick. A kernel is never called in two threads at once for one lane.
        """

    def create_slab(self, nbytes: int) -> SlabMemory:
        """Take a slab of at least ``nbytes`` from the device. May block.

        Raises
        ------
        OutOfMemoryError
            If the device has no such piece.
        """

    def inject(self, injection: Injection, stream: Any) -> None:
        """Bring a fault about in ``stream`` (for tests).

        Raises
        ------
        UnsupportedError
            If this backend cannot.
        """

    def close(self, *, abandon: bool = False) -> None:
        """Give everything back that the context owns. May block; with ``abandon`` (after a fault) it waits for no stream. Idempotent."""


@runtime_checkable
class ImportsSlabs(Protocol):
    """What an :class:`AccelDevice` has besides if its memory can outlive it: durable buffers. Its ``create_slab`` then returns a :class:`HeldSlab`."""

    def import_slab(self, fd: int, nbytes: int) -> HeldSlab:
        """Map the memory of a slab of ``nbytes`` that another context made, here or in another process, with its contents. May block.

        ``fd`` is a descriptor of it, which is duplicated where it is kept. Raises an :class:`~accel.AccelError` if it cannot be mapped.
        """


@runtime_checkable
class ChecksAlive(Protocol):
    """What an :class:`AccelDevice` has besides if it can be asked whether its context is alive, without waiting for work.

    A kernel's library may find a fault of the device before anything of accel's does, and raise it as an error of its own. So the device is asked after
    whatever a kernel, or the ``open`` of a library, has raised.
    """

    def check_alive(self, stream: Any) -> None:
        """Raise the fault, with the driver's code, if the context is dead. Never blocks, synchronizes nothing; called on the loop's thread.

        ``stream`` is the one that the work went to: one of this device's.
        """


@runtime_checkable
class KnowsShortages(Protocol):
    """What an :class:`AccelDevice` has besides if it knows how other libraries say that the device has no memory."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether a library's own exception says so, told by its class. Quick; called on any thread."""


@runtime_checkable
class ObservesWork(Protocol):
    """What an :class:`AccelDevice` has besides if a tool of its vendor can be told what is on the device.

    Attributes
    ----------
    probe : Probe or None
        Told, in the process of the context, from the first generation on; one for all devices there. ``None`` where no tool asks.
    """

    probe: Probe | None


@runtime_checkable
class ReportsFailures(Protocol):
    """What an :class:`AccelStream` has besides if its work can fail without a fault of the context, because it is Python code of this process.

    Such work is over once it has failed: the stream goes on, and marks behind it are passed. So the op that it belongs to has to be told otherwise.
    """

    def report_failures(self, number: Callable[[], int], tell: Callable[[int, BaseException], object]) -> None:
        """Tell what work raises that is no fault. Called once, before anything is enqueued.

        Parameters
        ----------
        number
            Returns the number of the op that enqueues. Called where the work is enqueued, or where it is run at once.
        tell
            Takes that number and what was raised, on any thread, before the work counts as over.
        """


class WorkSpan(Protocol):
    """Work of one stream whose device time is measured."""

    def seconds(self) -> float:
        """Return the device time. Called once, on the loop's thread, after a mark behind the end was passed. Never blocks.

        Raises
        ------
        AccelError
            The context's fault.
        """


@runtime_checkable
class TimesWork(Protocol):
    """What an :class:`AccelStream` has besides if it can measure how long the device works for what is enqueued.

    A device with a clock of its own measures from the begin of the first command to the end of the last one; one that runs Python sums up its work.
    """

    def begin_span(self) -> WorkSpan:
        """Measure what is enqueued from now on. Never blocks; called on the loop's thread, and not again before the span has ended."""

    def end_span(self, span: WorkSpan) -> None:
        """End the span behind everything enqueued so far. Never blocks. After an error a span may never be ended."""


@runtime_checkable
class PreparesLibraries(Protocol):
    """What an :class:`AccelDevice` has besides if the first ops of a library would have to wait, for kernels that are compiled or loaded."""

    def prepare(self, library: str, stream: Any) -> None:
        """Make everything ready that the library's ops need in one stream. May block; called for each library that ``open_device`` is asked to warm.

        Parameters
        ----------
        library
            The library.
        stream
            Where its ops go.
        """


@runtime_checkable
class PreloadsLibraries(Protocol):
    """What an :class:`~accel.AccelBackend` has besides if a child process can make something ready without a context: imports, shared libraries."""

    def preload(self, libraries: Sequence[str]) -> None:
        """Load what contexts need, and what ``libraries`` do. May block.

        It initializes no driver and leaves no thread running: children may be forked of the process afterwards.

        Raises
        ------
        BackendUnavailableError
            If something is missing.
        """


@runtime_checkable
class TellsFaults(Protocol):
    """What an :class:`~accel.AccelDevice` has besides if a fault that surfaces elsewhere in the process ends it too.

    Attributes
    ----------
    on_fault : callable
        Called with the fault, on any thread, as soon as the device is known to be dead; perhaps more than once.
    """

    on_fault: Callable[[AccelError], object]


@runtime_checkable
class TakesScratch(Protocol):
    """What an :class:`AccelDevice` has besides if kernels of its own work in device memory that is neither an operand nor a result.

    That memory is the context's, for the time of the op and in its stream's order: it counts against the limit, and the next op has it.

    Attributes
    ----------
    scratch : mapping
        Library and kind of an op -> what says how many bytes its kernel works in, at least, given the op. The kernel finds their address, a multiple
        of 256, behind those of its results; for 0 bytes it means nothing. ``None`` asks for :meth:`measure_scratch` first. Quick; called on the loop's
        thread, perhaps several times for one op.
    """

    scratch: Mapping[tuple[str, str], Callable[[Any], int | None]]

    def measure_scratch(self, op: Any) -> None:
        """See that :attr:`scratch` knows of an op. May block; called on any thread, several at once."""


@runtime_checkable
class CountsCommands(Protocol):
    """What an :class:`AccelDevice` has besides if its queues are bounded, so that enqueuing blocks when they are full.

    Attributes
    ----------
    queue_limit : int
        Commands in flight at which no further op is sent, if that is less than ``max_in_flight``.
    commands : mapping
        Library and kind of an op -> how many commands its kernel enqueues at most, or what counts them for one op, quickly; 1 for all others.
    """

    queue_limit: int
    commands: Mapping[tuple[str, str], int | Callable[[Any], int]]


@runtime_checkable
class QueriesInSection(Protocol):
    """What an :class:`AccelDevice` has besides if querying an event changes the state of the thread, and changes it back.

    Attributes
    ----------
    query_section : AbstractContextManager
        Several queries of events in it change the state once. It may be entered on any thread, and sections nest.
    """

    query_section: AbstractContextManager[object]


@runtime_checkable
class TakesWorkspace(Protocol):
    """What an :class:`AccelStream` has besides if its kernels work in device memory that stays theirs, as a library's workspace does.

    It is the context's memory, under its limit, and given back with the context.
    """

    def workspace_wanted(self, library: str) -> int:
        """Return the bytes of the next workspace that ops of ``library`` need in this stream, or 0 if they have all. Quick."""

    def use_workspace(self, address: int, nbytes: int) -> None:
        """Use this memory from now on. Called on the loop's thread, before the first op of the library that asked for it. Never blocks."""

    def release_workspaces(self) -> None:
        """Use none of the workspaces any more: the context is short of memory, and nothing runs in the stream.

        :meth:`workspace_wanted` asks for them again, and no op comes that needs them before they are there. Called on the loop's thread. Never blocks.
        """


@runtime_checkable
class LaunchesEmptyKernels(Protocol):
    """What an :class:`AccelBackend` has besides if ``accel bench`` can measure its smallest op beside the driver's own launch."""

    def empty_op(self, out: Any) -> Any:
        """Return an op that launches a kernel which does nothing, as a writer of the array ``out``."""

    def raw_launch(self, index: int) -> AbstractContextManager[Callable[[], object]]:
        """Lend a call that launches the same kernel by the driver alone, and blocks until it has ended."""


@runtime_checkable
class KnowsPeers(Protocol):
    """What an :class:`AccelBackend` has besides if one of its devices may reach the memory of another without the host."""

    def can_access_peer(self, index: int, other: int) -> bool:
        """Return whether device ``index`` can reach the memory of device ``other``. May block."""


@runtime_checkable
class AccelBackend(Protocol):
    """A vendor's family of devices; the entry point names a class that is called without arguments.

    A backend may have a method ``checks()`` besides, which returns :class:`Diagnosis` objects: what it needs of this machine, one by one, found or missing. The
    doctor prints them. It never raises, and may block.

    One whose devices are all lost to the process when one of them faults says so with ``shares_fate = True``, and has that fault as ``fault`` from then on,
    which is ``None`` before.

    One whose devices form groups with those of other machines (:class:`accel.world.group.FormsGroups`) says so with ``groups_span_machines = True``.

    One on which a second process may be forbidden to have a context has a method ``check_shareable(index)``, which raises
    :class:`~accel.UnsupportedError` where that is so.

    One whose driver holds devices by open files names them in ``device_files``, a tuple of what their names begin with: in a device's child process these are
    closed in what a library forks there, because the device's memory would stay taken when the child has died.

    Attributes
    ----------
    name : str
        Short name, used in device specs: ``"cpu"``, ``"cuda"``.
    preference : int
        ``open_device("auto")`` takes the first device of the available backend with the highest number.
    """

    name: str
    preference: int

    def devices(self) -> Sequence[DeviceDescription]:
        """List the devices. May block.

        Raises
        ------
        BackendUnavailableError
            If the backend cannot be used here; the message says what is missing and the command that fixes it.
        """

    def open(self, index: int) -> AccelDevice:
        """Create a context on a device. May block."""
