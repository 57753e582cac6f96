"""A user's library: its registration, for an instance per generation, and the instance in one context."""

from __future__ import annotations

import pickle
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from accel._log import get_logger
from accel.dtype import DType
from accel.engine.by_value import dumps
from accel.engine.launches import OpSubmission
from accel.engine.op_error import op_error
from accel.errors import InvalidArgumentError
from accel.family import BackendPart
from accel.libraries.kernel_library import Operand, kernels_of
from accel.ops import KernelOp, Plan
from accel.ref import AccelRef

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping, Sequence

    from accel.backend import DeviceDescription, Kernel
    from accel.engine.stream_clock import StreamClock
    from accel.engine.submission import Chunk
    from accel.libraries.kernel_library import KernelLibrary, Ranks
    from accel.ops import Spec
    from accel.storage.refs import Refs

    Call: TypeAlias = tuple[type[KernelLibrary], tuple[Any, ...], dict[str, Any]]

__all__ = ["DurableArgument", "RegisteredLibrary", "Registration", "Unregistration"]

logger = get_logger()


@dataclass(frozen=True, slots=True)
class DurableArgument:
    """Replaces a durable ref among the arguments of a registration; it can be pickled.

    Attributes
    ----------
    buffer : int
        Number of the buffer.
    offset : int
        Bytes from the start of the buffer.
    shape, dtype
        Shape and dtype of the ref.
    """

    buffer: int
    offset: int
    shape: tuple[int, ...]
    dtype: DType


class Registration:
    """A registered library.

    It pickles without its refs. Unpickling it imports no module of the user's:
    :meth:`create_instance` does.

    Parameters
    ----------
    name
        Name of the library.
    call
        The class, and its arguments, with a :class:`DurableArgument` for each ref; or their pickle.
    is_eager
        Whether the library is opened before a generation begins.
    refs
        The refs among the arguments, whose memory is kept.

    Attributes
    ----------
    buffers : frozenset of int
        Numbers of the refs' buffers.
    unregistrations : int
        Calls of ``unregister`` that were not cancelled and have not failed: while there are some, a
        new generation does not open the library.
    """

    def __init__(self, name: str, call: Call | bytes, *, is_eager: bool = False, refs: tuple[AccelRef, ...] = ()) -> None:
        self.name = name
        self.is_eager = is_eager
        self.refs = refs
        self.unregistrations = 0
        self._call = call
        self.buffers = frozenset(ref.buffer for ref in refs)

    @classmethod
    def of(cls, refs: Refs, name: str, library: type[KernelLibrary], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Registration:
        """Return the registration of a library with its arguments, under a name.

        It keeps the refs among the arguments; the library itself is not called.

        Raises
        ------
        InvalidArgumentError
            If a ref among them is of another device, not durable, or strided.
        StaleRefError
            If the memory of one is gone, or torn.
        """
        durable_refs: list[AccelRef] = []

        def to_durable_argument(ref: AccelRef, place: str) -> DurableArgument:
            """Check and keep a ref among the arguments, and return what is pickled instead."""
            refs.check(ref)
            wrong = "not durable" if not ref.durable else "a strided view" if ref.is_strided else ""
            if wrong:
                raise InvalidArgumentError(
                    f"{place} of library {name!r} is {wrong}: {ref!r}",
                    library=name,
                    device=refs.name,
                    remedy="Give a contiguous ref that was made with durable=True: a library may be made again in a later generation.",
                )
            durable_refs.append(ref)
            return DurableArgument(ref.buffer, ref.offset, ref.shape, ref.dtype)

        # Positions are counted as Python's own messages count them.
        positional = tuple(
            [_replace_instances(value, f"argument {index}", AccelRef, to_durable_argument) for index, value in enumerate(args, 1)]
        )
        named = {key: _replace_instances(value, f"argument {key}", AccelRef, to_durable_argument) for key, value in kwargs.items()}
        return cls(name, (library, positional, named), is_eager=library.eager, refs=tuple(durable_refs))

    def __reduce__(self) -> tuple[Any, ...]:
        return Registration, (self.name, self._call if isinstance(self._call, bytes) else dumps(self._call))

    def preload(self) -> None:
        """Import the modules that an instance needs, and make none.

        See :meth:`KernelLibrary.preload`.
        """
        library, args, kwargs = pickle.loads(self._call) if isinstance(self._call, bytes) else self._call
        library.preload(*args, **kwargs)

    def create_instance(self, operand: Callable[[DurableArgument], Operand]) -> KernelLibrary:
        """Return a new instance of the library, with an operand for each ref among its arguments.

        Imports and calls code of the user's: not for the loop's thread.
        """
        library, args, kwargs = pickle.loads(self._call) if isinstance(self._call, bytes) else self._call

        def to_operand(argument: DurableArgument, _: str) -> Operand:
            return operand(argument)

        args = [_replace_instances(value, "", DurableArgument, to_operand) for value in args]
        kwargs = {name: _replace_instances(value, "", DurableArgument, to_operand) for name, value in kwargs.items()}
        instance: KernelLibrary = library(*args, **kwargs)
        return instance

    def check(self) -> None:
        """Raise :class:`~accel.StaleRefError` if the contents of a ref are gone, or torn."""
        for ref in self.refs:
            ref.check()

    def holds(self, ref: AccelRef) -> bool:
        """Return whether the library was registered with the memory of a ref of its device."""
        return ref.buffer in self.buffers


def _replace_instances(value: Any, place: str, kind: type, replace: Callable[[Any, str], Any]) -> Any:
    """Return ``value`` with each instance of ``kind`` replaced, also in dicts, lists and tuples.

    ``replace`` is called with the instance and with where it is, for messages. Without an instance
    ``value`` itself is returned.
    """
    if isinstance(value, kind):
        return replace(value, place)
    if isinstance(value, dict):
        pairs = {key: _replace_instances(item, f"{place}[{key!r}]", kind, replace) for key, item in value.items()}
        return pairs if any(pairs[key] is not item for key, item in value.items()) else value
    if isinstance(value, (list, tuple)):
        items = [_replace_instances(item, f"{place}[{index}]", kind, replace) for index, item in enumerate(value)]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if isinstance(value, list):
            return items
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


@dataclass(frozen=True, eq=False, slots=True)
class _Unregister(KernelOp[Any]):
    """The op of an :class:`Unregistration`, for its name in errors; nothing is enqueued for it."""

    library: ClassVar[str] = "memory"
    kind: ClassVar[str] = "unregister"

    def plan(self) -> Plan:
        """See :meth:`KernelOp.plan`."""
        return _NOTHING


_NOTHING = Plan((), (), ())


class Unregistration(OpSubmission):
    """The message that unregisters a library, in its place among the ops: those before it run.

    Its dispatch removes the registration from ``core.registrations``: from then on it cannot be
    taken back.

    Attributes
    ----------
    library : str
        The library's name.
    registration : Registration or None
        The registration that was removed, from the dispatch until the instance is closed: it keeps
        the library's refs.
    """

    __slots__ = ("registration",)

    def __init__(self, library: str, future: asyncio.Future[Any], generation: int) -> None:
        super().__init__(_Unregister(), _NOTHING, future, generation)
        self.library = library
        self.registration: Registration | None = None

    @property
    def chunks(self) -> Sequence[Chunk]:
        """It is in no lane."""
        return ()

    def release_operands(self) -> None:
        """See :meth:`Submission.release_operands`; the refs of the registration too."""
        super().release_operands()
        self.registration = None


class RegisteredLibrary:
    """A registered library in one context: the instance, and its methods as kernels.

    The constructor sets the ``description`` of the instance, and its ``members``.

    Parameters
    ----------
    name
        The name that it is registered under.
    instance
        The instance of the user's class.
    description
        Describes the device.
    members
        The ranks of worlds that the context is.

    Attributes
    ----------
    part : BackendPart
        The kernels, in the form in which a family has them.
    loaded : set of type
        Classes of ops whose kernel has returned once on a worker thread, in a child: later calls
        load nothing any more.
    is_unregistered : bool
        Whether the library was unregistered: it takes no more ops.
    """

    def __init__(self, name: str, instance: KernelLibrary, description: DeviceDescription, members: Ranks) -> None:
        self.name = name
        self.instance = instance
        instance.description = self._description = description
        instance.members = members
        self.loaded: set[type[KernelOp]] = set()
        self.is_unregistered = False
        # Its lane and that of a batch may call it from two threads; it need not be thread-safe.
        self._lock = threading.Lock()
        kernels = {op.kind: self._adapt(getattr(instance, name)) for op, name in kernels_of(type(instance)).items()}
        self.part = BackendPart(kernels, may_block=instance.blocking, launches=instance.launches)

    def _adapt(self, method: Callable[..., object]) -> Kernel:
        """Return the kernel that calls a method of the instance with operands for addresses.

        Made once for each method, so that lanes launch ops of the library like any others.
        """
        backend, index, lock = self._description.backend, self._description.index, self._lock

        def call(lane: StreamClock, op: KernelOp, plan: Plan, inputs: Sequence[int], outputs: Sequence[int]) -> None:
            """Call the method; see :data:`accel.backend.Kernel`."""
            stream = lane.stream
            reads = [
                Operand(address, ref.shape, ref.dtype, False, backend, index, stream)
                for address, ref in zip(inputs, plan.reads, strict=True)
            ]
            # `outputs` are the addresses of these; a user's library has no scratch memory.
            written: tuple[AccelRef | Spec, ...] = (*plan.writes, *plan.creates, *([] if plan.status is None else [plan.status.spec]))
            writes = [
                Operand(address, spec.shape, spec.dtype, True, backend, index, stream)
                for address, spec in zip(outputs, written, strict=True)
            ]
            with lock:
                method(op, stream, reads, writes)

        return call

    def close(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close the instance, on a worker thread; ``loop`` is the device's.

        An exception is logged only, so that the rest of the context is released too. So is a
        ``CancelledError``, which would look like one of the kernel actor.
        """
        try:
            self.instance.close()
        except BaseException as raised:
            error = op_error(raised, f"closing library {self.name!r}", loop, library=self.name)
            logger.warning("library_not_closed", library=self.name, error=error)
