"""Poisson's equation on any device: a sparse matrix of finite differences, solved by conjugate gradients that stay on the device.

Run: ``pip install '.[cpu]'``, in a checkout, then ``python examples/poisson_equation.py``.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import numpy as np

import accel

try:
    from scipy import sparse
except ImportError:
    sys.exit("This example needs scipy: pip install '.[cpu]'")

INNER = 127

Array = np.ndarray[Any, Any]


def laplacian(inner: int) -> Any:
    """Return the negative Laplacian of the unit square with a number of points a side inside of it; the border is 0: five elements a row, as csr."""
    line = sparse.diags_array([-np.ones(inner - 1), 2 * np.ones(inner), -np.ones(inner - 1)], offsets=[-1, 0, 1])
    one = sparse.eye_array(inner)
    return ((sparse.kron(line, one) + sparse.kron(one, line)) * (inner + 1) ** 2).tocsr()


def exact(inner: int) -> tuple[Array, Array]:
    """Return a function that is 0 on the border, at the points inside, and the negative sum of its second derivatives."""
    x = np.arange(1, inner + 1) / (inner + 1)
    u = np.outer(np.sin(np.pi * x), np.sin(2 * np.pi * x)) + np.outer(x * (1 - x), x * (1 - x))
    f = 5 * np.pi**2 * np.outer(np.sin(np.pi * x), np.sin(2 * np.pi * x)) + 2 * np.add.outer(x * (1 - x), x * (1 - x))
    return u.ravel(), f.ravel()


async def solve(device: accel.Device, inner: int) -> tuple[Array, int]:
    """Return the solution, and how many iterations it took."""
    matrix, (_, f) = await device.sparse.put(laplacian(inner)), exact(inner)
    right, done = await device.put(f), 0

    def tell(iterations: int, norm: float) -> None:
        nonlocal done
        done = iterations
        print(f"  iteration {iterations:4}: residual {norm / np.linalg.norm(f):.1e}")

    x, info = await device.sparse.cg(matrix, right, rtol=1e-8, check_every=64, callback=tell)
    if info:
        raise RuntimeError(f"no solution within {info} iterations")
    return await device.get(x), done


async def main() -> int:
    """Run the example and return its exit status."""
    async with accel.System() as system:
        device = await system.open_device("auto", libraries=("sparse", "blas", "elementwise"))
        print(f"{device.name}: {INNER}**2 unknowns")
        found, iterations = await solve(device, INNER)
    u, _ = exact(INNER)
    error = float(abs(found - u).max())
    print(f"{iterations} iterations, error against the exact solution {error:.1e}")
    print("the error is that of the differences:", error < 10 / (INNER + 1) ** 2)
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
