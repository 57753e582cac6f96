"""How ops that are of no family are enqueued: memory, graphs and launches.

Each kernel is ``kernel(lane, op, plan, inputs, outputs)``; see :data:`accel.backend.Kernel`. A
backend replaces single ones through :meth:`accel.backend.AccelDevice.kernels`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from accel.errors import UnsupportedError
from accel.ops.families import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from accel import ops
    from accel.backend import Kernel
    from accel.ops import Plan

__all__ = ["LIBRARIES", "NO_COMPILER"]

NO_COMPILER = "Open a device that has one, such as open_device('cuda'), or use the libraries' ops, which every device has."
"""The remedy where kernels of the user's own cannot be compiled."""


class _Lane(Protocol):
    """The members of a lane that these kernels use: see :class:`accel.engine.lane.Lane`."""

    stream: Any


def _bytes(array: np.ndarray[Any, Any]) -> memoryview:
    """Return a view of an array's bytes, which keeps the array alive."""
    # Bytes, because the buffer protocol does not know the narrow floats.
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def put(lane: _Lane, op: ops.Put, plan: Plan, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Copy the host array into the output."""
    lane.stream.copy_htod(outputs[0], _bytes(op.source))


def get(lane: _Lane, op: ops.Get, plan: Plan, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Copy the input into the host array."""
    lane.stream.copy_dtoh(_bytes(op.destination), inputs[0])


def empty(lane: _Lane, op: Any, plan: Plan, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Enqueue nothing: the buffer was allocated at the dispatch, or another device reads it."""


def fill(lane: _Lane, op: ops.Fill, plan: Plan, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Write the element's bytes over the whole output."""
    count = math.prod(op.shape)
    lane.stream.fill(outputs[0], op.pattern(), count)


def copy(lane: _Lane, op: ops.Copy, plan: Plan, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Copy device memory to device memory."""
    lane.stream.copy(outputs[0], inputs[0], op.source.nbytes)


def capture(lane: _Lane, op: Any, plan: Plan, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Do nothing: the ops are enqueued one by one at each replay."""


def replay(lane: _Lane, op: Any, plan: Plan, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Enqueue a graph's ops."""
    op.program.enqueue(lane)
    op.program.copy_status(lane, outputs)


def call(lane: _Lane, op: Any, plan: Plan, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Enqueue a graph's ops between the copies of its operands and results."""
    op.copy_in(lane, inputs, outputs)
    op.program.enqueue(lane)
    op.copy_out(lane, outputs)


def launch(lane: _Lane, op: ops.Launch, plan: Plan, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Refuse: a kernel that a user wrote is for the backend that compiled it."""
    raise UnsupportedError(f"{op.kernel.name} cannot be launched: this backend has no compiler", remedy=NO_COMPILER)


def checksum(lane: _Lane, op: ops.Checksum, plan: Plan, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Refuse: only a backend's own kernel makes checksums."""
    raise UnsupportedError("this backend makes no checksums", remedy="Leave checksum out.")


_INTERNAL: Mapping[str, Mapping[str, Kernel]] = {
    "memory": {"put": put, "get": get, "empty": empty, "lend": empty, "fill": fill, "copy": copy, "checksum": checksum},
    "graph": {"replay": replay, "call": call},
    "capture": {"capture": capture},
    "compiler": {"launch": launch},
    "collective": {"replay": replay},  # a context that is in a world has kernels: see accel.world.member
}

LIBRARIES: Mapping[str, Mapping[str, Kernel]] = {**_INTERNAL, **{family.name: family.kernels for family in FAMILIES}}
"""Library -> op kind -> kernel on any backend."""
