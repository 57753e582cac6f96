"""Options priced by simulation on any device, beside the formulas of Black, Scholes and Kemna and Vorst; and the same as a service.

Run: ``pip install .``, in a checkout, then ``python examples/option_pricing.py``. With ``pip install '.[web]'``, ``python examples/option_pricing.py serve``
answers::

    $ curl -s -H 'content-type: application/json' -d '{"spot": 100, "strike": 105, "rate": 0.03, "volatility": 0.2, "years": 1}' localhost:8000/price
"""

import asyncio
import math
import os
import sys
from statistics import NormalDist
from typing import Any, NamedTuple

import accel

PATHS, STEPS = 1 << 18, 16
SURE = 5.0
"""Standard errors that a price may be off."""


class Option(NamedTuple):
    """The right to buy for ``strike`` after some years, what costs ``spot`` today."""

    spot: float
    strike: float
    rate: float
    volatility: float
    years: float


def black_scholes(option: Option) -> float:
    """Return the price of an option on the last price."""
    spread = option.volatility * math.sqrt(option.years)
    return _priced(option, math.log(option.spot) + (option.rate - option.volatility**2 / 2) * option.years, spread)


def kemna_vorst(option: Option, steps: int) -> float:
    """Return the price of an option on the geometric mean of the prices at ``steps`` times."""
    drift = (option.rate - option.volatility**2 / 2) * option.years * (steps + 1) / (2 * steps)
    variance = option.volatility**2 * option.years * (steps + 1) * (2 * steps + 1) / (6 * steps**2)
    return _priced(option, math.log(option.spot) + drift, math.sqrt(variance))


def _priced(option: Option, mean: float, deviation: float) -> float:
    """Return the price of an option on what has a normal logarithm."""
    normal, gap = NormalDist(), mean - math.log(option.strike)
    likely = math.exp(mean + deviation**2 / 2) * normal.cdf(gap / deviation + deviation) - option.strike * normal.cdf(gap / deviation)
    return math.exp(-option.rate * option.years) * likely


async def simulate(device: accel.Device, option: Option, *, steps: int = 1, seed: int | None = None) -> tuple[float, float]:
    """Return the price of an option on the geometric mean of the prices at ``steps`` times, by simulation, and its standard error.

    All is one batch: random steps of the logarithm, their running sums, the mean over time, what the option pays, and the mean over the paths.
    """
    step = option.years / steps
    drift, spread = (option.rate - option.volatility**2 / 2) * step, option.volatility * math.sqrt(step)
    async with device.batch() as batch:
        moves = batch.rng.normal((PATHS, steps), mean=drift, std=spread, seed=seed)
        logarithms = batch.reduce("mean", batch.scan.cumsum(moves, axis=1), axis=1)
        prices = batch.elementwise.binary("mul", batch.elementwise.unary("exp", logarithms), option.spot)
        paid = batch.elementwise.binary("max", batch.elementwise.binary("sub", prices, option.strike), 0.0)
        mean, deviation = batch.get(batch.reduce("mean", paid)), batch.get(batch.reduce("std", paid))
    discount = math.exp(-option.rate * option.years)
    return discount * float(mean), discount * float(deviation) / math.sqrt(PATHS)


def service(device: str = "auto") -> Any:
    """Return the application: ``POST /price`` of an option."""
    from typing import Annotated

    from fastapi import Depends, FastAPI
    from pydantic import BaseModel, Field

    from accel.integrations.fastapi import get_device, install, lifespan

    class Request(BaseModel):
        """An option, and at how many times the price counts."""

        spot: float = Field(gt=0, le=1e6)
        strike: float = Field(gt=0, le=1e6)
        rate: float = Field(ge=-1, le=1)
        volatility: float = Field(gt=0, le=5)
        years: float = Field(gt=0, le=100)
        steps: int = Field(default=1, ge=1, le=256)

    app = FastAPI(lifespan=lifespan(device=device))
    install(app, body_limit=1 << 16, body_timeout=10)

    @app.post("/price")
    async def price(request: Request, device: Annotated[accel.Device, Depends(get_device)]) -> dict[str, float]:
        """Price an option."""
        option = Option(request.spot, request.strike, request.rate, request.volatility, request.years)
        found, error = await simulate(device, option, steps=request.steps)
        return {"price": found, "standard_error": error}

    return app


async def main() -> int:
    """Run the example and return its exit status."""
    option = Option(spot=100.0, strike=105.0, rate=0.03, volatility=0.2, years=1.0)
    async with accel.System() as system:
        device = await system.open_device("auto", libraries=("rng", "elementwise", "reduce", "scan"))
        plain, asian = await simulate(device, option), await simulate(device, option, steps=STEPS)
        again = [await simulate(device, option, steps=STEPS, seed=7) for _ in range(2)]
        name = device.name
    for what, (price, error), exact in (
        ("the last price", plain, black_scholes(option)),
        (f"the mean of {STEPS} prices", asian, kemna_vorst(option, STEPS)),
    ):
        print(f"{name}: an option on {what} costs {price:.3f}, by the formula {exact:.3f}:", abs(price - exact) < SURE * error)
    print("a seed gives the same price again:", again[0] == again[1])
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        import uvicorn

        uvicorn.run(service(os.environ.get("ACCEL_DEVICE", "auto")), host="127.0.0.1", port=int(os.environ.get("PORT", "8000")))
    else:
        sys.exit(asyncio.run(main()))
