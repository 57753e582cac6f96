"""A batch: many ops recorded without awaiting, sent as one message, waited for by one mark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from accel import ops
from accel.device.recording import Recorder
from accel.dtype import native
from accel.engine.submission import BatchSubmission
from accel.errors import AccelError, InvalidArgumentError
from accel.ops.base import operand

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    import numpy as np

    from accel.engine.core import DeviceCore
    from accel.engine.sender import Sender
    from accel.ops import KernelOp
    from accel.ops.namespace import OpNamespace
    from accel.ref import AccelRef

__all__ = ["Batch"]


class Batch(Recorder):
    """Records ops inside ``async with device.batch() as batch:``.

    They are sent when the block ends.

    Methods return refs at once; inside the block they can be used by later ops of the same batch
    only, after it everywhere. If the body raises or is cancelled, nothing is sent. If an op fails,
    later ones are not launched, the block's end raises the error with ``.op_index``, and the refs
    of earlier ops are usable. If the context is rebuilt while recording, the end raises
    :class:`~accel.StaleRefError`.
    """

    what: ClassVar[str] = "batch"
    to_host: ClassVar[tuple[type[KernelOp[Any]], ...]] = (ops.Get,)

    def __init__(
        self, core: DeviceCore, sender: Sender, timeout: float | None, families: Mapping[str, type[OpNamespace[Any]]], name: str
    ) -> None:
        super().__init__(core, sender, timeout, families)
        if not isinstance(name, str):
            raise InvalidArgumentError(f"name is {name!r:.80}", remedy="Give a text; errors call the batch so.")
        self._name = name

    def put(self, array: Any, *, out: AccelRef | None = None) -> AccelRef:
        """Record a copy of a host array to the device.

        The array must not change before the block has ended.
        """
        op = ops.Put(native(array), out)
        # run() also turns a token, which `out` may be, into its ref.
        written: AccelRef = self._record(op) if out is None else self.run(op)
        return written

    def get(self, ref: AccelRef, *, out: np.ndarray[Any, Any] | None = None) -> np.ndarray[Any, Any]:
        """Record a copy of a buffer to the host, and return the array.

        The array has the contents once the block has ended; before, and if the block's end raises,
        they are not set.

        Parameters
        ----------
        ref
            The buffer.
        out
            Writable C-contiguous array of the same shape and dtype to fill and return.
        """
        op = ops.Get.into(operand("ref", ref), out)
        if ref.is_strided:  # copy it to a contiguous buffer on the device first
            op = ops.Get(self._record(ops.Part(ref, ...)), op.destination)
        array: np.ndarray[Any, Any] = self._record(op)
        return array

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Send the recorded ops and wait for their end; send nothing if the body has raised.

        Results of ops that did not run are freed: here if none was launched, else by the engine.
        """
        self._end_recording()
        core, recorded, is_device_done = self._core, self._ops, False
        submission = BatchSubmission(
            tuple(recorded.ops), tuple(recorded.plans), recorded.outputs, core.loop.create_future(), recorded.generation
        )
        submission.name = self._name
        try:
            if error is not None:  # nothing is sent, so that nothing will fill the results
                submission.free_results_from(0)
            elif recorded.ops:
                self._sender.guard()
                await self._sender.run(None, self._timeout, submission)
            is_device_done = True
        except AccelError as failed:
            if not submission.launched:  # else the engine frees the results of ops that do not run
                submission.free_unlaunched_results()
            failed.op_index = recorded.given_index(failed.op_index)  # as the user counts the ops
            raise
        finally:
            # An error's traceback holds this frame, and the submission's future holds the error.
            del submission
            await self._release_ops(is_device_done=is_device_done)
