"""Every error that accel raises: one tree, with fields instead of text to parse.

::

    AccelError
    |- ContextPoisonedError           the context died while (or before) the op ran
    |  `- WorldChangedError           a world lost a rank, and goes on in its next epoch
    |- OutOfMemoryError               (MemoryError) no room for a buffer, or a shortage of the operating system
    |- DeviceLostError                the device is gone for good, or was given up
    |- StaleRefError                  the ref names memory that is no longer there
    |- DriverError                    the backend's driver answered with a status
    |  `- KernelFaultError            a kernel did what ends its context
    |- LibraryError                   a kernel library answered with a status
    |  `- LinAlgError                 (numpy.linalg.LinAlgError) the device found that a matrix has no such solution
    |- CompileError                   a kernel's source did not compile
    |- HostDiedError                  the process that held the context ended
    |- PoisonedInputError             this input makes the context fault, or hang
    |- NonFiniteError                 a result that must be finite has a NaN or an infinity
    |- DeadlineExceededError          (TimeoutError) ``timeout=`` ran out
    |- MailboxFullError               a bounded queue has no room
    |- ActorStoppedError              the actor stopped before it could answer
    |- InvalidArgumentError           (ValueError) the call's arguments are wrong
    |  `- UnknownTenantError          the service has no share for this tenant
    |- UnsupportedError               right arguments, but not on this device or host
    |- NotInitializedError            used outside ``async with``
    |- BackendUnavailableError        the backend or its device is not there
    `- ClosedError                    used after close, or in the wrong loop, thread or process

What to do after an error is decided from its class and its :attr:`AccelError.scope`, never from its text. An error whose scope is more
than :attr:`FaultScope.OP` is a *fault*: the supervisor rebuilds what the scope names.
"""

from __future__ import annotations

import enum
from typing import Any, ClassVar, Literal, Self

import numpy as np

__all__ = [
    "AccelError",
    "ActorStoppedError",
    "BackendUnavailableError",
    "ClosedError",
    "CompileError",
    "ContextPoisonedError",
    "DeadlineExceededError",
    "DeviceLostError",
    "DriverError",
    "FaultScope",
    "HostDiedError",
    "InvalidArgumentError",
    "KernelFaultError",
    "LibraryError",
    "LinAlgError",
    "MailboxFullError",
    "NonFiniteError",
    "NotInitializedError",
    "OutOfMemoryError",
    "PoisonedInputError",
    "StaleRefError",
    "UnknownTenantError",
    "UnsupportedError",
    "WorldChangedError",
]


class FaultScope(enum.IntEnum):
    """How much an error takes with it. Ordered: a larger scope includes the smaller ones."""

    OP = 1
    """Only the op failed; the context goes on."""
    CONTEXT = 2
    """The context is unusable; a new one in the same process works."""
    PROCESS = 3
    """Every context of the process is unusable; a new process works."""
    DEVICE = 4
    """The hardware is gone; nothing on this device works."""


class AccelError(Exception):
    """Root of the tree.

    Parameters
    ----------
    message
        What happened, and on what. The remedy is added from the class unless ``remedy`` says something better.
    code
        The driver's or library's own status, if there was one (a number, or its name).
    library
        Which library answered: ``"driver"``, ``"blas"``, ...
    device
        Name of the device, such as ``"cpu:0"``.
    generation
        Generation of the context that was in use.
    scope
        How much failed; see :class:`FaultScope`.
    retryable
        Whether the same call, sent again, can succeed.
    op
        Name of the operation, such as ``"gemm"``.
    op_index
        Position of the failed op in its batch, counted from 0; ``None`` outside a batch.
    remedy
        One sentence that says what to do.

    Notes
    -----
    Errors pickle with all their fields. Several waiters of one failure each get an instance of their own (:meth:`clone`), so a
    traceback or note added by one is not seen by another.
    """

    default_scope: ClassVar[FaultScope] = FaultScope.OP
    default_retryable: ClassVar[bool] = False
    default_remedy: ClassVar[str] = "See the fields of this error for what failed."

    def __init__(
        self,
        message: str = "",
        *,
        code: int | str | None = None,
        library: str | None = None,
        device: str | None = None,
        generation: int | None = None,
        scope: FaultScope | None = None,
        retryable: bool | None = None,
        op: str | None = None,
        op_index: int | None = None,
        remedy: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.library = library
        self.device = device
        self.generation = generation
        self.scope = self.default_scope if scope is None else FaultScope(scope)
        self.retryable = self.default_retryable if retryable is None else retryable
        self.op = op
        self.op_index = op_index
        self.remedy = self.default_remedy if remedy is None else remedy

    @property
    def is_fault(self) -> bool:
        """Whether more than the op failed, so that something must be rebuilt."""
        return self.scope > FaultScope.OP

    def _where(self) -> str:
        parts = [
            f"{name}={value}"
            for name, value in (
                ("op", self.op),
                ("op_index", self.op_index),
                ("library", self.library),
                ("code", self.code),
                ("device", self.device),
                ("generation", self.generation),
            )
            if value is not None
        ]
        return f" [{', '.join(parts)}]" if parts else ""

    def __str__(self) -> str:
        text = self.message or (type(self).__doc__ or "").partition("\n")[0].rstrip(".")
        return f"{text.rstrip('.')}{self._where()}. {self.remedy}"

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions rebuild themselves by calling the class with `args`, which keyword-only fields do not survive.
        return _rebuild, (type(self), self.args, self.__dict__.copy())

    def clone(self, **fields: Any) -> Self:
        """Return a fresh instance of the same error, with ``fields`` replaced, caused by what this one was caused by.

        Parameters
        ----------
        **fields
            Attributes to set on the new instance, such as ``op="gemm"``. Notes and tracebacks are not taken along.
        """
        new: Self = _rebuild(type(self), self.args, self.__dict__)
        new.__dict__.pop("__notes__", None)
        new.__cause__ = self.__cause__
        for name, value in fields.items():
            if name not in new.__dict__:
                raise TypeError(f"{type(self).__name__} has no field {name!r}")
            setattr(new, name, value)
        return new


def _rebuild(cls: type[Any], args: tuple[Any, ...], state: dict[str, Any]) -> Any:
    try:
        error = cls(*args)
    except Exception:  # the constructor of a user's subclass takes other arguments
        try:
            error = Exception.__new__(cls, *args)
        except TypeError:  # it is not laid out as one: then the nearest class of this module stands for it
            error = next(each for each in cls.__mro__ if each.__module__ == __name__)(*args)
    error.__dict__.update(state)
    return error


def said(error: BaseException) -> str:
    """Return what an exception says of itself. Never raises, although its own text may."""
    try:
        return str(error)
    except BaseException:
        return "(it cannot be printed)"


class ContextPoisonedError(AccelError):
    """The device's context faulted.

    Attributes
    ----------
    executed : {"no", "unknown"}
        ``"no"``: the op had not reached the device, so sending it again cannot do its work twice. ``"unknown"``: it was on the device.
    suspects : tuple of str
        Names of the ops that were on the device when the fault surfaced; one of them most likely caused it.
    """

    default_scope = FaultScope.CONTEXT
    default_retryable = True
    default_remedy = "The context is being rebuilt: make the inputs anew (or use durable ones) and send the op again."

    def __init__(
        self, message: str = "", *, executed: Literal["no", "unknown"] = "unknown", suspects: tuple[str, ...] = (), **fields: Any
    ) -> None:
        super().__init__(message, **fields)
        self.executed = executed
        self.suspects = suspects


class WorldChangedError(ContextPoisonedError):
    """A world has lost a rank, or its communicator, so that a collective did not run, or not on all ranks.

    The world goes on in its next epoch; devices that were not lost keep their generation and their refs.

    Attributes
    ----------
    ranks : tuple of int
        The ranks that were lost or have failed; empty where that is not known.
    epoch : int or None
        The epoch that has ended.
    """

    default_remedy = "The world forms anew: make again what was on the lost ranks, and send the collective again."

    def __init__(self, message: str = "", *, ranks: tuple[int, ...] = (), epoch: int | None = None, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.ranks = ranks
        self.epoch = epoch


class OutOfMemoryError(AccelError, MemoryError):
    """The device has no room for the buffer, or this machine has no descriptor, thread or memory for the op now: then ``.library`` is ``"os"``.

    Attributes
    ----------
    requested, used, reserved, limit : int or None
        Bytes asked for, held by live buffers, held from the device, and allowed by ``memory_limit``.
    """

    default_retryable = True
    default_remedy = "Free or drop refs, send smaller work, or raise memory_limit."

    def __init__(
        self,
        message: str = "",
        *,
        requested: int | None = None,
        used: int | None = None,
        reserved: int | None = None,
        limit: int | None = None,
        **fields: Any,
    ) -> None:
        super().__init__(message, **fields)
        self.requested = requested
        self.used = used
        self.reserved = reserved
        self.limit = limit


class DeviceLostError(AccelError):
    """The device is lost: nothing could follow a fault, or it faulted more often than its restart budget allows. ``Device.reopen()`` brings it back."""

    default_scope = FaultScope.DEVICE
    default_remedy = "Call `await device.reopen()`, use another device, or allow more restarts with restart=RestartStrategy(...)."


class StaleRefError(AccelError):
    """The ref's memory is gone.

    Attributes
    ----------
    reason : {"generation", "freed", "torn"}
        The context was rebuilt since, the buffer was freed, or a durable buffer was half written when the context faulted.
    """

    default_remedy = "Put the data on the device again."

    def __init__(self, message: str = "", *, reason: Literal["generation", "freed", "torn"] = "generation", **fields: Any) -> None:
        super().__init__(message, **fields)
        self.reason = reason


class DriverError(AccelError):
    """The backend's driver answered with an error status."""

    default_remedy = "Look the code up in the vendor's documentation; `python -m accel doctor` checks the installation."


class KernelFaultError(DriverError):
    """A kernel did what ends its context, such as a read of an illegal address or an assertion that failed. The same work does it again."""


class LibraryError(AccelError):
    """A kernel library answered with an error status."""

    default_remedy = "Look the code up in the library's documentation."


class LinAlgError(LibraryError, np.linalg.LinAlgError):
    """The device found that a matrix is singular, not positive definite, or that an iteration does not converge.

    Only this op failed. What it, and ops behind it in its batch or graph, were to write must not be read.

    Attributes
    ----------
    info : int or tuple of int
        The status that the kernel wrote, as LAPACK defines it for the op: 0 is success. A tuple with one value for each matrix of a stack.
    """

    default_remedy = "Look at .info and at the matrix; check=False, where the op has it, returns the status instead of raising."

    def __init__(self, message: str = "", *, info: int | tuple[int, ...] = 0, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.info = info


class CompileError(AccelError):
    """A kernel's source did not compile.

    Attributes
    ----------
    log : str
        The compiler's whole log.
    """

    default_remedy = "Read the compiler's log in .log."

    def __init__(self, message: str = "", *, log: str = "", **fields: Any) -> None:
        super().__init__(message, **fields)
        self.log = log


class HostDiedError(AccelError):
    """The process that held the context ended.

    Attributes
    ----------
    exit_code, signal : int or None
        How the process ended; one of the two is set once it is known.
    hung : bool
        Whether this process killed it, because it had not answered in time: an op that does not end, a process that is stopped. ``False`` if it was on a
        node and is not heard at all, because the machine may be gone.
    """

    default_scope = FaultScope.PROCESS
    default_retryable = True
    default_remedy = (
        "Once the device is ready, make the inputs anew (or use durable ones) and send the op again; device.state says how it is."
    )

    def __init__(
        self, message: str = "", *, exit_code: int | None = None, signal: int | None = None, hung: bool = False, **fields: Any
    ) -> None:
        super().__init__(message, **fields)
        self.exit_code = exit_code
        self.signal = signal
        self.hung = hung


class PoisonedInputError(AccelError):
    """This input faults the context whenever it is run.

    Attributes
    ----------
    item : object
        The input itself.
    kind : {"fault", "hang"}
        ``"fault"``: the context or its process died of it; ``.code`` is the driver's code, where there is one. ``"hang"``: it did not end in time.
    remembered : bool
        Whether the input was recognized as one that was found earlier, and has not run again.
    """

    default_remedy = "Do not send this input again; its siblings were answered."

    def __init__(
        self, message: str = "", *, item: Any = None, kind: Literal["fault", "hang"] = "fault", remembered: bool = False, **fields: Any
    ) -> None:
        super().__init__(message, **fields)
        self.item = item
        self.kind = kind
        self.remembered = remembered


class NonFiniteError(AccelError):
    """A result that was to be finite has a NaN or an infinity.

    Attributes
    ----------
    output : str or None
        Name of the result, where it has one.
    """

    default_remedy = "Look for what makes it in the inputs, then in the weights; the device goes on."

    def __init__(self, message: str = "", *, output: str | None = None, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.output = output


class DeadlineExceededError(AccelError, TimeoutError):
    """The answer did not come within ``timeout=``."""

    default_retryable = True
    default_remedy = "Allow more time, or send less work at once."


class MailboxFullError(AccelError):
    """A bounded queue has no room.

    Attributes
    ----------
    retry_after : float or None
        Seconds after which room can be expected, where that is known.
    """

    default_retryable = True
    default_remedy = "Try again later, or wait for room (overload='wait', or `await ref.send(...)`)."

    def __init__(self, message: str = "", *, retry_after: float | None = None, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.retry_after = retry_after


class ActorStoppedError(AccelError):
    """The actor stopped before it answered."""

    default_remedy = "Spawn it again, or watch it to learn when it stops."


class InvalidArgumentError(AccelError, ValueError):
    """An argument is wrong.

    Parameters
    ----------
    argument
        Its name, where the caller chose it: the input of a model, a field of a request.
    """

    default_remedy = "The documentation of what was called says what it takes."

    def __init__(self, message: str = "", *, argument: str | None = None, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.argument = argument


class UnknownTenantError(InvalidArgumentError):
    """The service has no share of device time for this tenant."""

    default_remedy = "Name a tenant of the service's shares."


class UnsupportedError(AccelError):
    """This device, host or backend does not offer what was asked for."""

    default_remedy = "Use another dtype, device or host."


class NotInitializedError(AccelError):
    """The system, batcher, device or compute interface was used before it was entered or initialized."""

    default_remedy = "Use it inside `async with accel.System()`."


class BackendUnavailableError(AccelError):
    """The backend cannot be used on this machine."""

    default_remedy = "Run `python -m accel doctor` to see what is missing and how to install it."


class ClosedError(AccelError):
    """It was closed, or is used from a loop, thread or process that does not own it."""

    default_remedy = "Open it (again) where it is used."
