"""The common base of batches and graphs: records ops without awaiting them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, TypeVar

from accel import ops
from accel.actors.turns import CHECK_EVERY, Turn, release
from accel.device.compiler import Launches
from accel.device.families import BuiltInFamilies
from accel.device.hints import RECORDER_HINTS
from accel.dtype import DType, DTypeLike
from accel.engine.copies import OpList
from accel.errors import AccelError, ClosedError, InvalidArgumentError, NotInitializedError
from accel.hints import AsyncOnly, hinted
from accel.ops.base import FamilyOp, SizedOp, as_shape, with_refs
from accel.ops.namespace import OpNamespace, Recorded, Submitter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from accel.engine.core import DeviceCore
    from accel.engine.sender import Sender
    from accel.ops import KernelOp
    from accel.ref import AccelRef

__all__ = ["Recorder"]

T = TypeVar("T")
N = TypeVar("N", bound=OpNamespace[Any])


@hinted(RECORDER_HINTS)
class Recorder(BuiltInFamilies[Recorded], AsyncOnly):
    """Records ops inside its ``async with`` block.

    Methods return refs at once; inside the block they can be used by later ops of the same block
    only.

    Parameters
    ----------
    core, sender
        The state of the device, and what sends ops to it.
    timeout
        Seconds of waiting: at the beginning of the block for a rebuild, and for what its end does.
    families
        Families that are not built in, by their names: they are attributes while the block records.
    """

    what: ClassVar[str]
    """The word for it in errors: ``"batch"`` or ``"graph"``."""

    to_host: ClassVar[tuple[type[KernelOp[Any]], ...]] = ()
    """Ops that it takes although they make and write no buffer."""

    def __init__(self, core: DeviceCore, sender: Sender, timeout: float | None, families: Mapping[str, type[OpNamespace[Any]]]) -> None:
        self._core = core
        self._sender = sender
        self._timeout = timeout
        self._families = families
        self._ops = OpList(core, sender.check, 0)
        self._state = "new"  # then "recording" inside the block, and "ended" for good

    def family(self, namespace: Callable[[Submitter[Recorded]], N]) -> N:
        """See :meth:`BuiltInFamilies.family`."""
        return namespace(Submitter(self._record, self._refuse, self.what))

    @property
    def compiler(self) -> Launches:
        """Launches of kernels that ``device.compiler`` compiled.

        See :class:`~accel.device.Launches`.
        """
        return Launches(self._record)

    def __len__(self) -> int:
        return len(self._ops)

    def run(self, op: KernelOp[T]) -> T:
        """Record an op that makes or writes buffers, and return its ref, or the tuple of its refs.

        Raises
        ------
        InvalidArgumentError
            If the op's operands do not fit, or it has no ref to return, such as ``Free``, which
            comes after the block.
        NotInitializedError, ClosedError
            Before and after the block.
        StaleRefError
            If an operand is not there any more.
        """
        result: T = self._record(with_refs(op, self._core.refs.resolve))
        return result

    def empty(self, shape: Any, dtype: DTypeLike = "float32") -> AccelRef:
        """Record the making of a buffer with no set contents."""
        return self.run(ops.Empty(as_shape(shape), DType.of(dtype)))

    def zeros(self, shape: Any, dtype: DTypeLike = "float32") -> AccelRef:
        """Record the making of a buffer of zeros."""
        return self.full(shape, 0, dtype)

    def full(self, shape: Any, value: Any, dtype: DTypeLike = "float32") -> AccelRef:
        """Record the making of a buffer whose elements are all ``value``."""
        return self.run(ops.Fill(as_shape(shape), DType.of(dtype), value))

    def copy(self, source: AccelRef, destination: AccelRef) -> AccelRef:
        """Record a copy from buffer to buffer, and return the destination."""
        return self.run(ops.Copy(source, destination))

    def _record(self, op: KernelOp[Any]) -> Any:
        """Check and record an op; return its result, refs that later ops of the block may use.

        Raises as :meth:`run` does; the op is not recorded then.
        """
        if self._state != "recording":
            if self._state == "new":
                raise NotInitializedError(
                    f"the {self.what} records inside its block only", remedy=f"Use `async with device.{self.what}() as {self.what}:`."
                )
            raise ClosedError(f"the {self.what} has ended", remedy="Open another one.")
        # The attribute is looked at first: `isinstance` is slow with these generic classes.
        if getattr(op, "timeout", None) is not None and isinstance(op, FamilyOp):
            raise InvalidArgumentError(f"an op of a {self.what} has no timeout of its own", remedy=f"Use device.{self.what}(timeout=...).")
        if getattr(op, "size", 0) is None and isinstance(op, SizedOp):
            raise InvalidArgumentError(
                f"{op.kind} in a {self.what} does not know how many elements there will be",
                op=op.kind,
                remedy="Give size=, the most that there is room for; the last result is how many there are.",
            )
        plan = self._sender.check(op, self)
        if not plan.writes and not plan.creates and type(op) not in self.to_host:
            raise InvalidArgumentError(
                f"{op.kind} makes no buffer to return from a {self.what}", remedy="Await it after the block.", op=op.kind
            )
        return self._ops.add(op, plan, self)

    def _refuse(self, error: AccelError) -> NoReturn:
        """Raise the error of a family method's arguments, with the device's name."""
        error.device = error.device or self._core.name
        raise error

    async def __aenter__(self) -> Self:
        """Begin to record, in the generation of this moment; before that, wait for a rebuild.

        The time that the wait takes is subtracted from the timeout of the block's end.
        """
        if self._state != "new":
            raise ClosedError(f"a {self.what} is recorded once", remedy=f"Call device.{self.what}() for each block.")
        self._sender.guard()
        refs = self._core.refs
        if not refs.live_generation:
            deadline = self._sender.deadline_after(self._timeout)
            await self._sender.wait_ready(self._timeout)
            self._timeout = self._sender.seconds_left(deadline)
        self._ops.generation = refs.live_generation
        self._state = "recording"
        for name, namespace in self._families.items():
            setattr(self, name, self.family(namespace))
        return self

    @property
    def is_recording(self) -> bool:
        """Whether the block has begun and not ended."""
        return self._state == "recording"

    def _end_recording(self) -> None:
        """Record no more, and remove the namespaces; called at the end of the block."""
        self._state = "ended"
        # Namespaces refer to the recorder: a cycle, which would keep a dropped recorder alive.
        for name, value in tuple(vars(self).items()):
            if isinstance(value, OpNamespace):
                delattr(self, name)

    async def _release_ops(self, *, is_device_done: bool) -> None:
        """Release the recorded ops, and allow their refs outside the block.

        Many ops are released over several loop iterations; if this is cancelled, all refs are
        allowed at once. Called after the block was sent, so that blocks are sent in the order in
        which they end.

        Parameters
        ----------
        is_device_done
            Whether the device has no use for the result refs any more: they are released in turns
            too, where no user keeps them.
        """
        recording, recorded = self._core.refs.recording, self._ops
        ops, plans, outputs = recorded.ops, recorded.plans, recorded.outputs
        recorded.clear()
        # One iterator for both loops: the second one goes on where the first is cancelled.
        remaining = iter(outputs)
        try:
            if len(ops) > CHECK_EVERY:
                turn = Turn()
                for number, refs in enumerate(remaining, 1):
                    for ref in refs:
                        recording.pop(ref.buffer, None)
                    if not number % CHECK_EVERY and turn.is_over:
                        await turn.next()
                await release(ops, plans, outputs if is_device_done else [])
        finally:
            for refs in remaining:
                for ref in refs:
                    recording.pop(ref.buffer, None)
