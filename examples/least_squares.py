"""Least squares and principal components on any device, checked against numpy, or served over HTTP with FastAPI.

To run it::

    $ pip install '.[web,cpu]'                     # in a checkout
    $ python examples/least_squares.py             # computes, compares with numpy, and ends
    $ python examples/least_squares.py serve       # PORT=8000 and ACCEL_DEVICE=auto, unless set
    $ curl -s -H 'content-type: application/json' -d '{"x": [[1], [2], [4]], "y": [3, 5, 9]}' localhost:8000/fits
"""

import asyncio
import os
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import uvicorn
from fastapi import Depends, FastAPI
from pydantic import BaseModel, Field, FiniteFloat

import accel
from accel.integrations.fastapi import get_device, install, lifespan

Array = np.ndarray[Any, Any]
OnDevice = Annotated[accel.Device, Depends(get_device)]


@dataclass(frozen=True)
class Fit:
    """A linear model.

    Attributes
    ----------
    coefficients, intercept
        What ``x`` is multiplied by, and what is added.
    rank
        How many columns, the constant one among them, are independent: if not all are, the smallest solution is given.
    """

    coefficients: Array
    intercept: float
    rank: int


async def least_squares(device: accel.Device, x: Array, y: Array) -> Fit:
    """Return the linear model of ``y`` with the smallest squared error: one message to the device, and one back."""
    columns = np.column_stack([x, np.ones(len(x))])
    async with device.batch() as batch:
        solution, _, rank, _ = batch.solver.lstsq(batch.put(columns), batch.put(y))
        found, independent = batch.get(solution), batch.get(rank)
    return Fit(found[:-1], float(found[-1]), int(independent))


@dataclass(frozen=True)
class Components:
    """Principal components, on the device.

    Attributes
    ----------
    directions
        (components, features), of length 1, the one with the largest variance first.
    mean
        (features,).
    variances
        Of the samples along each direction.
    """

    directions: accel.AccelRef
    mean: accel.AccelRef
    variances: Array


async def principal_components(device: accel.Device, x: Array, count: int) -> Components:
    """Return the ``count`` directions along which samples differ most."""
    async with device.batch() as batch:
        samples = batch.put(x)
        mean = batch.reduce("mean", samples, axis=0)
        _, sizes, directions = batch.solver.svd(batch.elementwise.binary("sub", samples, mean), full_matrices=False)
        first, variances = batch.arrays.part(directions, np.s_[:count]), batch.get(sizes)
    return Components(first, mean, variances[:count] ** 2 / (len(x) - 1))


async def project(device: accel.Device, components: Components, x: Array) -> Array:
    """Return the coordinates of samples along the components."""
    async with device.batch() as batch:
        centred = batch.elementwise.binary("sub", batch.put(x), components.mean)
        return batch.get(batch.linalg.matmul(centred, components.directions, transpose_b=True))


# -- the service

Numbers = Annotated[list[FiniteFloat], Field(min_length=1, max_length=1000)]
Rows = Annotated[list[Numbers], Field(min_length=2, max_length=100_000)]


class Observations(BaseModel):
    """Samples, one a row, and what was observed for each."""

    x: Rows
    y: list[FiniteFloat]


class Analysis(BaseModel):
    """Samples, how many components are wanted of them, and samples whose coordinates are."""

    x: Rows
    count: int = Field(ge=1, default=2)
    project: list[Numbers] = []


def matrix(name: str, rows: list[list[float]], columns: int) -> Array:
    """Return rows as an array; if one has another length, that becomes a status 422 that names the field."""
    if any(len(row) != columns for row in rows):
        raise accel.InvalidArgumentError(
            f"a row of {name} has another length", argument=name, remedy=f"Give {columns} numbers in each row."
        )
    return np.array(rows)


app = FastAPI(lifespan=lifespan(device=os.environ.get("ACCEL_DEVICE", "auto")))
install(app, body_limit=64 << 20, body_timeout=60)  # errors become statuses; /healthz and /readyz


@app.post("/fits")
async def fit(observations: Observations, device: OnDevice) -> dict[str, Any]:
    """Fit a linear model."""
    x = matrix("x", observations.x, len(observations.x[0]))
    if len(observations.y) != len(x):
        raise accel.InvalidArgumentError(f"y has {len(observations.y)} numbers", argument="y", remedy=f"Give {len(x)}, one for each row.")
    found = await least_squares(device, x, np.array(observations.y))
    return {"coefficients": found.coefficients.tolist(), "intercept": found.intercept, "rank": found.rank}


@app.post("/components")
async def analyse(analysis: Analysis, device: OnDevice) -> dict[str, Any]:
    """Find principal components, and the coordinates of samples along them."""
    x = matrix("x", analysis.x, len(analysis.x[0]))
    found = await principal_components(device, x, min(analysis.count, *x.shape))
    answer = {"directions": (await device.get(found.directions)).tolist(), "variances": found.variances.tolist()}
    if analysis.project:
        answer["coordinates"] = (await project(device, found, matrix("project", analysis.project, x.shape[1]))).tolist()
    return answer


# -- the check


async def check() -> int:
    """Compute on random data, compare with numpy, and return the program's exit status."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((2000, 3)) @ rng.standard_normal((3, 20)) + 0.01 * rng.standard_normal((2000, 20)) + 5
    y = x @ rng.standard_normal(20) + 0.1 * rng.standard_normal(2000)
    async with accel.System() as system:
        device = await system.open_device(os.environ.get("ACCEL_DEVICE", "auto"))
        model = await least_squares(device, x, y)
        components = await principal_components(device, x, 3)
        coordinates = await project(device, components, x)
        directions = await device.get(components.directions)
    expected = np.linalg.lstsq(np.column_stack([x, np.ones(2000)]), y)[0]
    right = [np.allclose([*model.coefficients, model.intercept], expected, atol=1e-6)]
    variances, vectors = np.linalg.eigh(np.cov(x.T))
    right.append(np.allclose(components.variances, variances[:-4:-1]))
    right.append(np.allclose(coordinates @ directions, (x - x.mean(0)) @ vectors[:, -3:] @ vectors[:, -3:].T))
    for what, is_right in zip(("least squares", "variances", "coordinates"), right, strict=True):
        print(f"{what} as numpy has them: {is_right}")
    return 0 if all(right) else 1


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        uvicorn.run(app, host="127.0.0.1", port=int(os.environ.get("PORT", "8000")))
    else:
        sys.exit(asyncio.run(check()))
