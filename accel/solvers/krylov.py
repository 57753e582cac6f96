"""Iterative solvers of sparse systems.

A graph of device ops is recorded once, and replayed until the residual is small enough. The host
reads its norm after each replay.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from accel.dtype import DType
from accel.errors import InvalidArgumentError, UnsupportedError
from accel.ops.base import operand, same_dtype
from accel.ref import AccelRef
from accel.sparse_ref import SparseRef, sparse_of
from accel.values import check_count, number

if TYPE_CHECKING:
    from accel.solvers.device import Graph, Recorder, SolvingDevice

__all__ = ["Callback", "Options", "Preconditioner", "cg", "gmres"]

Array = np.ndarray[Any, Any]

Preconditioner: TypeAlias = SparseRef | AccelRef | str | None
"""What approximates the inverse of the matrix: a sparse matrix, the diagonal of a diagonal one, or
``"jacobi"``."""

Callback: TypeAlias = Callable[[int, float], object]
"""``callback(iterations, norm of the residual)``."""

_REAL = {DType.FLOAT32: DType.FLOAT32, DType.FLOAT64: DType.FLOAT64, DType.COMPLEX64: DType.FLOAT32, DType.COMPLEX128: DType.FLOAT64}
_MOST_STEPS = 500
"""Of a cycle of GMRES: a cycle of n steps is a graph of 10 n ops."""


@dataclass(frozen=True)
class Options:
    """What both solvers are given.

    Attributes
    ----------
    rtol, atol
        The norm of the residual is to be at most ``max(rtol * norm(b), atol)``.
    maxiter
        How often to iterate at most; ``None``: 10 n times.
    M
        What approximates the inverse of the matrix.
    callback
        Called whenever the residual has been looked at.
    every
        Iterations from one look at the residual to the next.
    timeout
        Seconds for all of it.
    run_blocking
        Calls a function on a worker thread.
    """

    rtol: float
    atol: float
    maxiter: int | None
    M: Preconditioner
    callback: Callback | None
    every: int
    timeout: float | None
    run_blocking: Callable[..., Awaitable[Any]]

    def check(self, what: str) -> None:
        """Raise :class:`InvalidArgumentError` for a wrong number; ``what`` names ``every``."""
        for name, value in (("rtol", self.rtol), ("atol", self.atol)):
            if isinstance(number(name, value), complex) or not value >= 0:
                raise InvalidArgumentError(f"{name} is {value!r}", remedy="Give a number of 0 or more.")
        for name, count in (("maxiter", self.maxiter), (what, self.every)):
            if count is not None:
                check_count(name, count)
        if self.timeout is not None:
            number("timeout", self.timeout)


class _System:
    """``a @ x = b``, and what both solvers do with it on the device.

    What is solved is ``a @ x = rhs``, where ``rhs`` is the residual that x0 has, divided by its
    norm: squares of numbers of any scale neither overflow nor vanish then. :meth:`end` makes the
    solution of it.

    Attributes
    ----------
    x, rhs, r
        The solution as far as it is known, the right-hand side, and the residual ``rhs - a @ x``.
    report
        What the host reads: the norm of the residual, how many iterations were done, and the norm
        of b.
    length, spare
        Buffers for what is used at once: a graph keeps all that its ops make, so they make nothing
        in each iteration.
    scale
        The norm of the residual that x0 has; known once :meth:`begin` has ended.
    tolerance
        The norm of the residual that is small enough, in units of ``scale``.
    """

    def __init__(self, device: SolvingDevice, a: SparseRef, b: AccelRef, x0: AccelRef | None, options: Options) -> None:
        self.device, self.a, self.b, self.x0, self.options = device, sparse_of("a", a), operand("b", b, ndim=1), x0, options
        self.n, self.dtype = self.b.size, same_dtype(a=self.a.data, b=self.b)
        if self.dtype not in _REAL:
            raise UnsupportedError(f"iterative solvers are not offered for {self.dtype.value}", remedy="Use float32 or float64.")
        if self.a.shape != (self.n, self.n):
            raise InvalidArgumentError(
                f"a is {self.a.shape} and b has {self.n} elements", remedy="Give a square matrix, and as many elements."
            )
        if x0 is not None:
            same_dtype(a=self.a.data, x0=operand("x0", x0, ndim=1))
            if x0.shape != (self.n,):
                raise InvalidArgumentError(f"x0 has {x0.size} elements, and a is {self.a.shape}", remedy="Give as many as a has rows.")
        self._check_preconditioner(options.M)
        self.real = _REAL[self.dtype]
        self.zero, self.one = self.dtype.numpy.type(0), self.dtype.numpy.type(1)
        self.most = options.maxiter or 10 * max(self.n, 1)
        self.inverse: SparseRef | AccelRef | None = None
        self.scale = self.tolerance = 1.0
        self._loop = asyncio.get_running_loop()
        self._deadline = None if options.timeout is None else self._loop.time() + options.timeout

    def _check_preconditioner(self, given: Preconditioner) -> None:
        if isinstance(given, (SparseRef, AccelRef)):
            if given.shape == (self.a.shape if isinstance(given, SparseRef) else (self.n,)):
                same_dtype(a=self.a.data, M=given.data if isinstance(given, SparseRef) else given)
                return
        elif given is None or given == "jacobi":
            return
        raise InvalidArgumentError(
            f"M is {given!r:.200}",
            remedy=f"Give a SparseRef of shape {self.a.shape}, a diagonal as a ref of shape ({self.n},), or 'jacobi'.",
        )

    def left(self) -> float | None:
        """Return the seconds that are left."""
        return None if self._deadline is None else self._deadline - self._loop.time()

    async def begin(self) -> float:
        """Make x, its residual and the preconditioner.

        Return the norm of the residual: 1, or 0 if x0 is good enough.
        """
        device, given = self.device, self.options.M
        if isinstance(given, str):
            diagonal = await device.sparse.diagonal(self.a, timeout=self.left())
            # Where there is nothing to divide by, rows are left as they are.
            program = (("not_equal", 0, 1), ("div", 2, 0), ("where", 3, 4, 2))
            given = await device.elementwise.fused(program, (diagonal, self.zero, self.one), timeout=self.left())
        self.inverse = given
        async with device.batch(timeout=self.left()) as batch:
            self.x = batch.zeros((self.n,), self.dtype)
            self.r = batch.empty((self.n,), self.dtype)
            self.report = batch.zeros((3,), self.real)
            self.length = batch.zeros((), self.real)
            self.rhs = batch.empty((self.n,), self.dtype)
            self.spare = None if given is None else batch.empty((self.n,), self.dtype)
            batch.copy(self.b, self.r)
            if self.x0 is not None:
                batch.sparse.spmv(self.a, self.x0, out=self.r, alpha=-1.0, beta=1.0)
            self.norm(batch, self.r, self.report[0])
            self.norm(batch, self.b, self.report[2])
        norm, _, of_b = await self.read()
        if not (math.isfinite(norm) and math.isfinite(of_b)):
            return math.inf
        if of_b == 0:  # as in scipy, which looks at no x0 then
            self.x0 = None
            return 0.0
        limit = max(self.options.rtol * of_b, self.options.atol)
        if norm <= limit:
            return 0.0
        self.scale = norm
        # The device compares with the rounded number.
        self.tolerance = float(self.real.numpy.type(limit / norm))
        async with self.device.batch(timeout=self.left()) as batch:
            batch.elementwise.binary("div", self.r, self.dtype.numpy.type(norm), out=self.rhs)
            batch.copy(self.rhs, self.r)
        return 1.0

    async def end(self, norm: float, done: int) -> tuple[AccelRef, int]:
        """Return the solution, and 0; or ``done``, from 1, if it is not good enough."""
        async with self.device.batch(timeout=self.left()) as batch:
            batch.elementwise.binary("mul", self.x, self.dtype.numpy.type(self.scale), out=self.x)
            if self.x0 is not None:
                batch.elementwise.binary("add", self.x, self.x0, out=self.x)
            self.norm(batch, self.x, self.report[2])
        *_, size = await self.read()  # of an x that overflows it is not finite
        return self.x, 0 if self.is_enough(norm) and math.isfinite(size) else max(done, 1)

    async def read(self) -> tuple[float, int, float]:
        """Return the norm of the residual, how many iterations were done, and the norm of b."""
        async with self.device.batch(timeout=self.left()) as batch:
            report = batch.get(self.report)
        norm, count, of_b = report.tolist()
        return norm, int(count), of_b

    def norm(self, to: Recorder, x: AccelRef, out: AccelRef) -> None:
        """Record the norm of a vector; ``out`` is 0-d, of the vector's dtype or a real one."""
        is_real = out.dtype is self.real
        to.blas.nrm2(x.view(self.real), out=out if is_real else self.length)
        if not is_real:
            to.elementwise.cast(self.length, out.dtype, out=out)

    def residual(self, to: Recorder) -> None:
        """Record the residual and its norm."""
        to.copy(self.rhs, self.r)
        to.sparse.spmv(self.a, self.x, out=self.r, alpha=-1.0, beta=1.0)
        self.norm(to, self.r, self.report[0])

    def preconditioned(self, to: Recorder, x: AccelRef) -> AccelRef:
        """Record the product of the preconditioner and a vector, in one buffer each time.

        Without a preconditioner, return the vector.
        """
        if self.inverse is None:
            return x
        if isinstance(self.inverse, SparseRef):
            return to.sparse.spmv(self.inverse, x, out=self.spare)
        return to.elementwise.binary("mul", self.inverse, x, out=self.spare)

    def is_enough(self, norm: float) -> bool:
        """Return whether the solution is good enough."""
        return norm <= self.tolerance < math.inf

    def tell(self, iterations: int, norm: float) -> None:
        """Call the callback."""
        if self.options.callback is not None:
            self.options.callback(iterations, norm * self.scale)


async def cg(device: SolvingDevice, a: SparseRef, b: AccelRef, x0: AccelRef | None, options: Options) -> tuple[AccelRef, int]:
    """See :meth:`DeviceSparse.cg`."""
    options.check("check_every")
    system = _System(device, a, b, x0, options)
    norm, done = await system.begin(), 0
    if system.is_enough(norm) or not math.isfinite(norm):
        return await system.end(norm, 0)
    async with device.batch(timeout=system.left()) as batch:
        z = system.preconditioned(batch, system.r)
        state = _State(
            p=batch.copy(z, batch.empty((system.n,), system.dtype)),
            q=batch.empty((system.n,), system.dtype),
            is_on=batch.zeros((), DType.BOOL),
            rz=batch.blas.dotc(system.r, z),
            new=batch.zeros((), system.dtype),
            factor=batch.zeros((), system.dtype),
        )
    graph = device.graph(timeout=system.left())
    async with graph:
        for _ in range(min(options.every, system.most)):
            _iteration(graph, system, state)
    try:
        while not system.is_enough(norm) and done < system.most and math.isfinite(norm):
            await graph.replay(timeout=system.left())
            norm, done, _ = await system.read()
            system.tell(done, norm)
    finally:
        await graph.aclose()
    return await system.end(norm, done)


class _State(NamedTuple):
    """The state of CG between iterations, and its work buffers: vectors, and then 0-d ones."""

    p: AccelRef
    q: AccelRef
    is_on: AccelRef
    rz: AccelRef
    new: AccelRef
    factor: AccelRef


def _iteration(to: Graph, system: _System, state: _State) -> None:
    """Record one iteration.

    It changes nothing once the residual is small enough, or all iterations were done: the device
    looks, so that the host need not.
    """
    x, r, report, zero, real, (p, q, is_on, rz, new, factor) = system.x, system.r, system.report, system.zero, system.real.numpy.type, state
    fused = to.elementwise.fused
    to.sparse.spmv(system.a, p, out=q)
    to.blas.dotc(p, q, out=new)
    limits = real(system.tolerance), report[1], real(system.most)
    fused((("greater", 0, 1), ("less", 2, 3), ("logical_and", 4, 5)), (report[0], *limits), out=is_on)
    # Of a positive definite matrix, p @ a @ p is 0 for p = 0 only. Of another one, the next
    # iteration begins anew.
    fused((("div", 1, 2), ("not_equal", 2, 3), ("logical_and", 0, 5), ("where", 6, 4, 3)), (is_on, rz, new, zero), out=factor)
    fused((("mul", 1, 2), ("add", 0, 3)), (x, factor, p), out=x)
    fused((("mul", 1, 2), ("sub", 0, 3)), (r, factor, q), out=r)
    system.norm(to, r, report[0])
    fused((("where", 1, 2, 3), ("add", 0, 4)), (report[1], is_on, real(1), real(0)), out=report[1])
    z = system.preconditioned(to, r)
    if z is r:
        squared: tuple[tuple[Any, ...], ...] = (("mul", 0, 0),)
        fused(squared if system.dtype is system.real else (*squared, (system.dtype.value, 1)), (report[0],), out=new)
    else:
        to.blas.dotc(r, z, out=new)
    fused((("div", 0, 1), ("not_equal", 2, 3), ("where", 5, 4, 3)), (new, rz, factor, zero), out=factor)
    fused((("mul", 1, 2), ("add", 0, 3)), (z, factor, p), out=p)
    to.copy(new, rz)


async def gmres(device: SolvingDevice, a: SparseRef, b: AccelRef, x0: AccelRef | None, options: Options) -> tuple[AccelRef, int]:
    """See :meth:`DeviceSparse.gmres`."""
    options.check("restart")
    system = _System(device, a, b, x0, options)
    norm, done = await system.begin(), 0
    if system.is_enough(norm) or not math.isfinite(norm):
        return await system.end(norm, 0)
    steps = min(options.every, system.n)
    if steps > _MOST_STEPS:
        raise UnsupportedError(f"restart is {steps}", remedy=f"Use at most {_MOST_STEPS}: each step is recorded.")
    async with device.batch(timeout=system.left()) as batch:
        basis, products = batch.zeros((steps + 1, system.n), system.dtype), batch.zeros((steps + 1, steps + 1), system.dtype)
        weights = batch.zeros((steps,), system.dtype)
        room = _Room(
            w=batch.empty((system.n,), system.dtype),
            conjugate=batch.empty((system.n,), system.dtype) if system.dtype.is_complex else None,
            found=(batch.zeros((steps,), system.dtype), batch.zeros((steps,), system.dtype)),
            norms=(batch.zeros((), system.real), batch.zeros((), system.real)),
        )
    cycle, update = device.graph(timeout=system.left()), device.graph(timeout=system.left())
    async with cycle:
        _cycle(cycle, system, basis, products, room)
    async with update:
        update.blas.gemv(basis[:steps], weights, transpose_a=True, out=system.x, beta=1.0)
        system.residual(update)
    try:
        while not system.is_enough(norm) and done < system.most and math.isfinite(norm):
            await cycle.replay(timeout=system.left())
            found = await device.get(products, timeout=system.left())
            best = await options.run_blocking(_weights, found)
            await device.put(best, out=weights, timeout=system.left())
            await update.replay(timeout=system.left())
            norm, _, _ = await system.read()
            done += 1
            system.tell(done * steps, norm)
    finally:
        await cycle.aclose()
        await update.aclose()
    return await system.end(norm, done)


def _weights(products: Array) -> Array:
    """Return what the vectors of the basis are to be multiplied by, for the least residual.

    Row j of ``products`` has those of ``a`` times vector j with all vectors; the last row begins
    with the norm of the residual.
    """
    target = np.zeros(len(products), products.dtype)
    target[0] = products[-1, 0]
    if not np.isfinite(products).all():
        return np.full(len(products) - 1, math.nan, products.dtype)
    return np.ascontiguousarray(np.linalg.lstsq(products[:-1].T, target, rcond=None)[0])


class _Room(NamedTuple):
    """Work buffers of a cycle of GMRES.

    A vector, its conjugate if it is complex, its products with the basis, twice, and two 0-d norms.
    """

    w: AccelRef
    conjugate: AccelRef | None
    found: tuple[AccelRef, AccelRef]
    norms: tuple[AccelRef, AccelRef]


def _cycle(to: Graph, system: _System, basis: AccelRef, products: AccelRef, room: _Room) -> None:
    """Record a cycle: a basis of the Krylov space, orthogonalized twice, and its products."""
    steps, fused, zero, real = products.shape[0] - 1, to.elementwise.fused, system.zero, system.real.numpy.type
    (before, after), eps = room.norms, real(np.finfo(system.real.numpy).eps)
    # Where the space ends, the norm is that of rounding: the vector, and all behind it, become 0.
    scaled = (("not_equal", 1, 2), ("div", 0, 1), ("where", 3, 4, 2))
    kept: tuple[tuple[Any, ...], ...] = (("mul", 1, 2), ("greater", 0, 4), ("where", 5, 0, 3))
    if system.dtype is not system.real:
        kept = (*kept, (system.dtype.value, 6))
    first = system.preconditioned(to, system.r)
    system.norm(to, first, products[steps, 0])
    fused(scaled, (first, products[steps, 0], zero), out=basis[0])
    for j in range(steps):
        known = basis[: j + 1]
        w = system.preconditioned(to, to.sparse.spmv(system.a, basis[j], out=room.w))
        system.norm(to, w, before)
        once, twice = (_subtracted(to, known, w, room.conjugate, found[: j + 1]) for found in room.found)
        to.elementwise.binary("add", once, twice, out=products[j, : j + 1])
        system.norm(to, w, after)
        fused(kept, (after, before, eps, real(0)), out=products[j, j + 1])
        fused(scaled, (w, products[j, j + 1], zero), out=basis[j + 1])


def _subtracted(to: Graph, known: AccelRef, w: AccelRef, conjugate: AccelRef | None, found: AccelRef) -> AccelRef:
    """Record the products of ``w`` and a basis, subtract them from it, and return them."""
    if conjugate is None:
        to.blas.gemv(known, w, out=found)
    else:
        turned = (("conj", 0),)
        to.blas.gemv(known, to.elementwise.fused(turned, (w,), out=conjugate), out=found)
        to.elementwise.fused(turned, (found,), out=found)
    to.blas.gemv(known, found, transpose_a=True, out=w, alpha=-1.0, beta=1.0)
    return found
