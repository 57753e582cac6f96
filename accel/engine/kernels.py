"""How each op is enqueued on any backend: the translation of ops into calls of :class:`~accel.ComputeBackend`.

Each kernel is ``kernel(lane, op, inputs, outputs)``; see :data:`accel.backend.Kernel`. A backend replaces single ones through
:meth:`accel.backend.AccelDevice.kernels` where its libraries do better.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from accel.compute import Transpose, UnaryOp
from accel.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from accel import ops
    from accel.backend import Kernel
    from accel.dtype import DType
    from accel.engine.lane import Lane

__all__ = ["LIBRARIES", "NO_COMPILER"]

NO_COMPILER = "Open a device that has one, such as open_device('cuda'), or use the libraries' ops, which every device has."
"""What to do where kernels of the user's own cannot be compiled."""

_NONE = Transpose.NONE


def _bytes(array: np.ndarray[Any, Any]) -> memoryview:
    # The buffer protocol does not know the narrow floats; bytes it does. The view keeps the array alive.
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def put(lane: Lane, op: ops.Put, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Copy the host array into the output."""
    lane.compute.copy_htod(outputs[0], _bytes(op.source))


def get(lane: Lane, op: ops.Get, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Copy the input into the host array."""
    lane.compute.copy_dtoh(_bytes(op.destination), inputs[0])


def empty(lane: Lane, op: ops.Empty, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Enqueue nothing: the buffer is there."""


def fill(lane: Lane, op: ops.Fill, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Write the element's bytes over the whole output."""
    count = int(np.prod(op.shape, dtype=np.int64))
    lane.stream.fill(outputs[0], op.pattern(), count)


def copy(lane: Lane, op: ops.Copy, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Copy device memory to device memory."""
    lane.stream.copy(outputs[0], inputs[0], op.source.nbytes)


def gemm(lane: Lane, op: ops.Gemm, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Multiply C-order matrices by a column-major call: a C-order matrix is the transpose of a column-major one, and ``C^T = B^T A^T``."""
    a, b = op.a.shape, op.b.shape
    m, k = a if op.transpose_a is _NONE else (a[1], a[0])
    n = b[1] if op.transpose_b is _NONE else b[0]
    lane.compute.gemm(
        op.transpose_b, op.transpose_a, n, m, k, op.alpha, inputs[1], b[1] or 1, inputs[0], a[1] or 1, op.beta, outputs[0], n or 1, dtype=op.a.dtype
    )  # fmt: skip


def gemm_batched(lane: Lane, op: ops.GemmBatched, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Multiply a strided batch as :func:`gemm` does one; a single matrix has stride 0."""
    (*batch_a, rows_a, columns_a), (*batch_b, rows_b, columns_b) = op.a.shape, op.b.shape
    m, k = (rows_a, columns_a) if op.transpose_a is _NONE else (columns_a, rows_a)
    n = columns_b if op.transpose_b is _NONE else rows_b
    lane.compute.batched_gemm(
        op.transpose_b,
        op.transpose_a,
        n,
        m,
        k,
        op.alpha,
        inputs[1],
        columns_b or 1,
        rows_b * columns_b if batch_b else 0,
        inputs[0],
        columns_a or 1,
        rows_a * columns_a if batch_a else 0,
        op.beta,
        outputs[0],
        n or 1,
        m * n,
        op.batch_count,
        dtype=op.a.dtype,
    )


def gemv(lane: Lane, op: ops.Gemv, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Multiply a matrix by a matrix of one column."""
    rows, columns = op.a.shape
    m, k = (rows, columns) if op.transpose_a is _NONE else (columns, rows)
    lane.compute.gemm(
        _NONE, op.transpose_a, 1, m, k, op.alpha, inputs[1], 1, inputs[0], columns or 1, op.beta, outputs[0], 1, dtype=op.a.dtype
    )


def axpy(lane: Lane, op: ops.Axpy, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Add the product of a column with the 1x1 matrix 1."""
    n, dtype = op.x.size, op.x.dtype
    lane.compute.gemm(_NONE, _NONE, n, 1, 1, op.alpha, inputs[0], n or 1, _one(lane, dtype), 1, 1.0, outputs[0], n or 1, dtype=dtype)


def _one(lane: Lane, dtype: DType) -> int:
    """Return the address of a 1 of ``dtype`` in device memory, written at first use."""
    address = lane.constants.get(dtype)
    if address is None:
        address = lane.constants[dtype] = lane.compute.alloc(dtype.itemsize)
        lane.compute.copy_htod(address, _bytes(np.ones((), dtype.numpy)))
    return address


def dot(lane: Lane, op: ops.Dot, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Multiply a row by a column."""
    n = op.x.size
    lane.compute.gemm(_NONE, _NONE, 1, 1, n, 1.0, inputs[0], 1, inputs[1], n or 1, 0.0, outputs[0], 1, dtype=op.x.dtype)


def nrm2(lane: Lane, op: ops.Nrm2, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Take the root of the product of x with itself; squares beyond the dtype's range overflow (a backend's own kernel may do better)."""
    n, dtype = op.x.size, op.x.dtype
    lane.compute.gemm(_NONE, _NONE, 1, 1, n, 1.0, inputs[0], 1, inputs[0], n or 1, 0.0, outputs[0], 1, dtype=dtype)
    lane.compute.unary(UnaryOp.SQRT, outputs[0], outputs[0], 1, dtype=dtype)


def scal(lane: Lane, op: ops.Scal, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Multiply nothing and keep ``alpha`` times the output."""
    n = op.x.size
    lane.compute.gemm(_NONE, _NONE, n, 1, 0, 0.0, outputs[0], n or 1, outputs[0], 1, op.alpha, outputs[0], n or 1, dtype=op.x.dtype)


def unary(lane: Lane, op: ops.Unary, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Apply a function of one element."""
    lane.compute.unary(op.op, inputs[0], outputs[0], op.x.size, dtype=op.x.dtype)


def binary(lane: Lane, op: ops.Binary, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Apply a function of two elements."""
    lane.compute.binary(op.op, inputs[0], inputs[1], outputs[0], op.x.size, dtype=op.x.dtype)


def reduce(lane: Lane, op: ops.Reduce, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Reduce one axis."""
    shape, axis = op.flattened()
    lane.compute.reduce(op.op, inputs[0], outputs[0], shape, axis, dtype=op.x.dtype)


def conv2d(lane: Lane, op: ops.Conv2d, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Convolve."""
    lane.compute.conv2d_forward(
        inputs[0], op.input.shape, inputs[1], op.filter.shape, outputs[0], op.output_shape(), op.stride, op.padding, dtype=op.input.dtype
    )


def attention(lane: Lane, op: ops.Attention, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Attend."""
    batch, heads, seq_q, head_dim = op.q.shape
    scale = head_dim**-0.5 if op.scale is None and head_dim else float(op.scale or 0.0)
    lane.compute.attention(
        inputs[0], inputs[1], inputs[2], outputs[0], batch, heads, seq_q, op.k.shape[2], head_dim, scale, op.causal, dtype=op.q.dtype
    )


def capture(lane: Lane, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Do nothing: the ops are enqueued one by one at each replay."""


def replay(lane: Lane, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Enqueue a graph's ops."""
    op.program.enqueue(lane)


def launch(lane: Lane, op: ops.Launch, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Refuse: a kernel that a user wrote is for the backend that compiled it."""
    raise UnsupportedError(f"{op.kernel.name} cannot be launched: this backend has no compiler", remedy=NO_COMPILER)


def not_offered(lane: Lane, op: ops.KernelOp, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Refuse an op that :class:`~accel.ComputeBackend` has no call for, on a backend without a kernel of its own."""
    raise UnsupportedError(f"{op.library}.{op.kind} is not offered by this backend", remedy="Use another backend, such as 'cpu'.")


def checksum(lane: Lane, op: ops.Checksum, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Refuse: there is no call of the compute interface for it."""
    raise UnsupportedError("this backend makes no checksums", remedy="Leave checksum out.")


LIBRARIES: Mapping[str, Mapping[str, Kernel]] = {
    "memory": {"put": put, "get": get, "empty": empty, "fill": fill, "copy": copy, "checksum": checksum},
    "blas": {"gemm": gemm, "gemm_batched": gemm_batched, "gemv": gemv, "axpy": axpy, "dot": dot, "nrm2": nrm2, "scal": scal},
    "elementwise": {"unary": unary, "binary": binary},
    "reduce": {"reduce": reduce},
    "dnn": {"conv2d": conv2d, "attention": attention},
    "graph": {"replay": replay},
    "capture": {"capture": capture},
    "compiler": {"launch": launch},
    "fft": dict.fromkeys(("fft", "ifft", "rfft", "irfft"), not_offered),
    "rng": dict.fromkeys(("uniform", "normal", "lognormal", "integers"), not_offered),
}
"""Library -> op kind -> kernel. Of ``fft`` and ``rng`` every kernel is a backend's own."""
