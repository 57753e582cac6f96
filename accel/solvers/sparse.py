"""``device.sparse``: the ops on sparse matrices, and how matrices come to the device and back."""

from __future__ import annotations

import asyncio
import importlib
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.dtype import DType
from accel.errors import BackendUnavailableError, InvalidArgumentError, OutOfMemoryError
from accel.ops.namespace import Awaited
from accel.ops.sparse import SparseOps
from accel.ops.sparse_operands import structure_error
from accel.ref import AccelRef
from accel.solvers import krylov
from accel.sparse_ref import FORMATS, SparseFormat, SparseRef, sparse_of, structure_fault

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from accel.ops.namespace import Submitter
    from accel.solvers.device import SolvingDevice

__all__ = ["DeviceSparse"]

Array = np.ndarray[Any, Any]
_OF_SCIPY = {np.dtype(np.float16): np.dtype(np.float32), DType.BFLOAT16.numpy: np.dtype(np.float32)}
_INT32 = np.iinfo(np.int32).max
_MOST_SIZES = 64
_SLACK = 8
"""Of remembered sizes, an eighth is added: matrices with as many elements in other places need a
little more or less."""


class DeviceSparse(SparseOps[Awaited]):
    """The sparse matrices of a device.

    Parameters
    ----------
    submitter
        Takes the ops.
    device
        The device.
    run_blocking
        Calls a function on a worker thread.
    """

    __slots__ = ("_device", "_run_blocking", "_sizes")

    def __init__(self, submitter: Submitter[Awaited], device: SolvingDevice, run_blocking: Callable[..., Awaitable[Any]]) -> None:
        super().__init__(submitter)
        self._device = device
        self._run_blocking = run_blocking
        # Of products: bytes of workspace, and room for elements.
        self._sizes: dict[tuple[Any, ...], tuple[int, int]] = {}

    async def csr(self, parts: tuple[Any, Any, Any], *, shape: tuple[int, int], durable: bool = False) -> SparseRef:
        """Make a matrix of ``(data, indices, indptr)``, as scipy's ``csr_array`` does.

        Parameters
        ----------
        parts
            Host arrays: they are checked, brought into order, elements of one place are added up,
            and indices become int32 where that holds them. Or refs, which are taken as they are;
            see :class:`~accel.SparseRef`.
        shape
            Rows and columns.
        durable
            Of host arrays, whether the matrix outlives a fault.

        Raises
        ------
        InvalidArgumentError
            If these are no parts of such a matrix.
        """
        return await self._create("csr", parts, shape, durable)

    async def csc(self, parts: tuple[Any, Any, Any], *, shape: tuple[int, int], durable: bool = False) -> SparseRef:
        """Make a matrix of ``(data, indices, indptr)``, as scipy's ``csc_array`` does.

        See :meth:`csr`.
        """
        return await self._create("csc", parts, shape, durable)

    async def coo(self, parts: tuple[Any, tuple[Any, Any]], *, shape: tuple[int, int], durable: bool = False) -> SparseRef:
        """Make a matrix of ``(data, (rows, columns))``, as scipy's ``coo_array`` does.

        See :meth:`csr`.
        """
        if not (isinstance(parts, (tuple, list)) and len(parts) == 2 and isinstance(parts[1], (tuple, list)) and len(parts[1]) == 2):
            raise InvalidArgumentError("the parts of coo are (data, (rows, columns))", remedy="Give them so.", op="coo")
        return await self._create("coo", (parts[0], parts[1][1], parts[1][0]), shape, durable)

    async def bsr(self, parts: tuple[Any, Any, Any], *, shape: tuple[int, int], durable: bool = False) -> SparseRef:
        """Make a matrix of ``(data, indices, indptr)``, as scipy's ``bsr_array`` does.

        See :meth:`csr`.

        ``data`` is (blocks, rows, columns).
        """
        return await self._create("bsr", parts, shape, durable)

    async def put(self, matrix: Any, *, durable: bool = False) -> SparseRef:
        """Copy a sparse matrix of scipy's to the device, as csr, csc, coo or bsr; others as csr.

        Parameters
        ----------
        matrix
            Any of scipy's sparse arrays and matrices, of two dimensions. It is read until the copy
            has ended: do not change it before.
        durable
            Whether the copy outlives a fault.

        Raises
        ------
        InvalidArgumentError
            If it is no sparse matrix.
        """
        if not hasattr(matrix, "tocsr") or isinstance(matrix, SparseRef) or len(matrix.shape) != 2:
            raise InvalidArgumentError(
                f"{type(matrix).__name__} is no sparse matrix of scipy's",
                remedy="Dense arrays: device.put, then device.sparse.fromdense.",
                op="put",
            )
        if matrix.format not in FORMATS:
            matrix = await self._run_blocking(matrix.tocsr)
        shape = (int(matrix.shape[0]), int(matrix.shape[1]))
        if matrix.format == "coo":
            return await self._create("coo", (matrix.data, matrix.col, matrix.row), shape, durable)
        return await self._create(matrix.format, (matrix.data, matrix.indices, matrix.indptr), shape, durable)

    async def get(self, matrix: SparseRef) -> Any:
        """Copy a matrix to the host, and return scipy's array of its format, such as ``csr_array``.

        Elements of float16 and bfloat16, which scipy has not, come as float32.

        Raises
        ------
        BackendUnavailableError
            If scipy is not installed.
        InvalidArgumentError
            If an index is out of range, or ``indptr`` is out of order: scipy reads wherever they
            say.
        """
        matrix = sparse_of("matrix", matrix)
        try:
            scipy = await self._run_blocking(importlib.import_module, "scipy.sparse")
        except ImportError as error:
            raise BackendUnavailableError("scipy is not installed", remedy="In a checkout: pip install '.[cpu]'.") from error
        data, indices, indptr = [await self._device.get(ref) for ref in matrix.refs]
        wrong = structure_error(np.array(await self._run_blocking(structure_fault, matrix, indices, indptr)))
        if wrong is not None:
            wrong.op = "get"
            raise wrong
        data = data.astype(_OF_SCIPY.get(data.dtype, data.dtype), copy=False)
        parts = (data, (indptr, indices)) if matrix.format == "coo" else (data, indices, indptr)
        return getattr(scipy, f"{matrix.format}_array")(parts, shape=matrix.shape)

    async def spgemm(  # type: ignore[override]  # it asks what the op needs
        self, a: SparseRef, b: SparseRef, *, alpha: complex = 1.0, size: int | None = None, timeout: float | None = None
    ) -> SparseRef:
        """Return ``alpha * a @ b`` of two sparse matrices.

        The result stores an element wherever both matrices store factors of one, also where the sum
        is 0. The device is asked first how many products of elements there are, and in how many
        bytes the library works: one or two copies of 16 bytes. For matrices of the same shapes and
        as many elements as in an earlier product, that product's numbers are tried first.

        Parameters
        ----------
        a, b
            (m, k) and (k, n), both csr or both csc, of one dtype: float32, float64, complex64 or
            complex128.
        alpha
            Factor.
        size
            How many elements there is room for meanwhile; the result takes no more than it needs,
            or twice that. ``None``: for as many as there are products, or places.
        timeout
            Seconds for all of it.

        Raises
        ------
        InvalidArgumentError
            If the matrices have no product, or ``size`` is too small.
        UnsupportedError
            If they are of another dtype; on CUDA, if indices are int64.
        OutOfMemoryError, DeadlineExceededError
            If there is no room, or no time.

        Notes
        -----
        Cancelling ends the wait. What was enqueued runs on.
        """
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout

        def left() -> float | None:
            return None if deadline is None else deadline - loop.time()

        async def product(workspace: int, products: int) -> SparseRef:
            room = min(products, a.shape[0] * b.shape[1]) if size is None else size
            made = await super(DeviceSparse, self).spgemm(a, b, alpha=alpha, size=room, workspace=workspace, timeout=left())
            if 2 * made.nnz >= room:
                return made
            async with self._device.batch(timeout=left()) as batch:
                data, indices = (batch.copy(ref, batch.empty(ref.shape, ref.dtype)) for ref in (made.data, made.indices))
            return SparseRef(made.format, data, indices, made.indptr, made.shape)

        a, b = sparse_of("a", a), sparse_of("b", b)
        key = a.format, a.dtype, a.shape, a.nnz, b.shape, b.nnz
        if key in self._sizes:
            try:
                return await product(*self._sizes[key])
            except InvalidArgumentError:  # too little room; wrong arguments are refused again below
                pass
            except OutOfMemoryError:  # these may need less
                self._sizes.pop(key, None)
        workspace, products = 0, -1
        while products < 0:
            counted = await self.spgemm_size(a, b, workspace=workspace, timeout=left())
            workspace, products = (await self._device.get(counted, timeout=left())).tolist()
        made = await product(workspace, products)
        before = self._sizes.pop(key, (0, 0))
        self._sizes[key] = max(before[0], workspace + workspace // _SLACK), max(before[1], products + products // _SLACK)
        if len(self._sizes) > _MOST_SIZES:
            del self._sizes[next(iter(self._sizes))]
        return made

    async def cg(
        self,
        a: SparseRef,
        b: AccelRef,
        x0: AccelRef | None = None,
        *,
        rtol: float = 1e-5,
        atol: float = 0.0,
        maxiter: int | None = None,
        M: krylov.Preconditioner = None,  # noqa: N803 - as in scipy
        callback: krylov.Callback | None = None,
        check_every: int = 16,
        timeout: float | None = None,
    ) -> tuple[AccelRef, int]:
        """Solve ``a @ x = b`` by conjugate gradients, as ``scipy.sparse.linalg.cg`` does.

        Return ``(x, info)``.

        The iterations stay on the device: ``check_every`` of them are recorded as a graph, which is
        replayed. The device itself stops at the iteration whose residual is small enough; the host
        reads three numbers after each replay.

        Parameters
        ----------
        a
            Symmetric (Hermitian) and positive definite, (n, n): float32, float64, complex64 or
            complex128.
        b
            (n,), of the dtype of ``a``.
        x0
            Where to begin, (n,); it is not written. ``None``: zeros.
        rtol, atol
            It ends when the norm of ``b - a @ x`` is at most ``max(rtol * norm(b), atol)``.
        maxiter
            How many iterations there are at most; ``None``: 10 n.
        M
            What approximates the inverse of ``a``, positive definite: a sparse matrix; a ref of
            shape (n,), for a diagonal matrix; or ``"jacobi"``, the inverse of the diagonal of
            ``a``.
        callback
            ``callback(iterations, norm of the residual)``, called on the event loop after each
            replay.
        check_every
            Iterations of a replay.
        timeout
            Seconds for the whole solution.

        Returns
        -------
        x
            The solution, (n,): the last one if ``info`` is not 0.
        info
            0, or how many iterations were done without success: all, or fewer if the residual has
            become infinite or NaN.

        Raises
        ------
        InvalidArgumentError, UnsupportedError
            If the operands do not fit, or are of another dtype.
        DeadlineExceededError
            If it has not ended in time.
        StaleRefError, ContextPoisonedError
            If the context is rebuilt meanwhile.

        Notes
        -----
        Cancelling ends it: a replay that has reached the device runs on, and no further one is
        sent.
        """
        return await krylov.cg(
            self._device, a, b, x0, krylov.Options(rtol, atol, maxiter, M, callback, check_every, timeout, self._run_blocking)
        )

    async def gmres(
        self,
        a: SparseRef,
        b: AccelRef,
        x0: AccelRef | None = None,
        *,
        rtol: float = 1e-5,
        atol: float = 0.0,
        restart: int = 20,
        maxiter: int | None = None,
        M: krylov.Preconditioner = None,  # noqa: N803 - as in scipy
        callback: krylov.Callback | None = None,
        timeout: float | None = None,
    ) -> tuple[AccelRef, int]:
        """Solve ``a @ x = b`` by the generalized minimal residual method; return ``(x, info)``.

        It does what ``scipy.sparse.linalg.gmres`` does.

        A cycle of ``restart`` iterations is recorded as a graph, which is replayed. After each the
        host reads ``(restart + 1)**2`` numbers, solves a small problem of least squares on a worker
        thread, and reads the norm of the residual.

        Parameters
        ----------
        a
            Any matrix that is not singular, (n, n): float32, float64, complex64 or complex128.
        b, x0, rtol, atol, timeout
            As for :meth:`cg`.
        restart
            Iterations of a cycle, at most 500. Their vectors are kept: ``(restart + 1) * n``
            elements.
        maxiter
            How many cycles there are at most; ``None``: 10 n.
        M
            As for :meth:`cg`, but not of necessity positive definite. It is applied from the left;
            the residual that is looked at is that of ``a`` and ``b``.
        callback
            ``callback(iterations, norm of the residual)``, called on the event loop after each
            cycle.

        Returns
        -------
        x
            The solution, (n,): the last one if ``info`` is not 0.
        info
            0, or how many cycles were done without success.

        Raises
        ------
        InvalidArgumentError, UnsupportedError, DeadlineExceededError, StaleRefError,
        ContextPoisonedError
            As :meth:`cg`.

        Notes
        -----
        Cancelling ends it, as it does :meth:`cg`.
        """
        return await krylov.gmres(
            self._device, a, b, x0, krylov.Options(rtol, atol, maxiter, M, callback, restart, timeout, self._run_blocking)
        )

    async def _create(self, form: SparseFormat, parts: Any, shape: tuple[int, int], durable: bool) -> SparseRef:
        if not (isinstance(parts, (tuple, list)) and len(parts) == 3):
            raise InvalidArgumentError(f"the parts of {form} are (data, indices, indptr)", remedy="Give them so.", op=form)
        if all(isinstance(part, AccelRef) for part in parts):
            data, indices, indptr = parts
            return SparseRef(form, data, indices, indptr, shape)
        if any(isinstance(part, AccelRef) for part in parts):
            raise InvalidArgumentError("some parts are refs, and others are not", remedy="Give refs only, or host arrays only.", op=form)
        arrays = await self._run_blocking(_canonical, form, *[np.asarray(part) for part in parts], shape)
        data, indices, indptr = [await self._device.put(part, durable=durable) for part in arrays]
        return SparseRef(form, data, indices, indptr, shape)


def _canonical(form: SparseFormat, data: Array, indices: Array, indptr: Array, shape: tuple[int, int]) -> tuple[Array, Array, Array]:
    """Return the parts of a matrix with its elements (of bsr, blocks) in order, and none twice.

    Raises
    ------
    InvalidArgumentError
        If they do not fit together.
    """
    rows, columns = shape if form != "csc" else shape[::-1]
    count, is_whole = len(data) if data.ndim else -1, data.ndim == (3 if form == "bsr" else 1)
    if not is_whole or indices.shape != (count,) or indptr.ndim != 1 or not all(part.dtype.kind in "iu" for part in (indices, indptr)):
        raise _wrong(form, f"data is {data.shape}, indices {indices.dtype}{indices.shape}, indptr {indptr.dtype}{indptr.shape}")
    if form == "bsr":
        height, width = data.shape[1:]
        if not height or not width or rows % height or columns % width:
            raise _wrong(form, f"blocks are {height} x {width} and the matrix {shape}")
        rows, columns = rows // height, columns // width
    major = indptr
    if form != "coo":
        # Differences of numbers without a sign are none below 0.
        if indptr.shape != (rows + 1,) or indptr[0] != 0 or indptr[-1] != count or (indptr[1:] < indptr[:-1]).any():
            raise _wrong(form, f"indptr does not rise from 0 to {count} in {rows + 1} elements")
        indptr = indptr.astype(np.int64)
        major = np.repeat(np.arange(rows), indptr[1:] - indptr[:-1])
    limits = (major, rows), (indices, columns)
    if major.shape != (count,) or any(part.size and not 0 <= part.min() <= part.max() < most for part, most in limits):
        raise _wrong(form, f"an index is outside of {shape}")
    major, indices = major.astype(np.int64), indices.astype(np.int64)
    places = major * max(columns, 1) + indices if rows * columns <= np.iinfo(np.int64).max else None
    if places is None or (np.diff(places) <= 0).any():
        order = np.lexsort((indices, major))
        data, indices, major = data[order], indices[order], major[order]
        is_first = np.ones(count, bool)
        is_first[1:] = (np.diff(major) != 0) | (np.diff(indices) != 0)
        if not is_first.all():
            starts = np.flatnonzero(is_first)
            data, indices, major = np.add.reduceat(data, starts, axis=0, dtype=data.dtype), indices[starts], major[starts]
    index = np.int32 if max(*shape, data.size) <= _INT32 else np.int64
    marks = major if form == "coo" else np.searchsorted(major, np.arange(rows + 1))
    return data, indices.astype(index), marks.astype(index)


def _wrong(form: str, what: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"these are no parts of a {form} matrix: {what}", remedy=f"Give what scipy's {form}_array takes.", op=form)
