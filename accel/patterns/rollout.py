"""Other weights for all replicas of a service: one after the other, held against the old ones, and undone if something goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from accel._log import get_logger
from accel.device import DeviceState
from accel.errors import AccelError, ClosedError, DeviceLostError, LibraryError
from accel.patterns.outcome import is_worth_a_retry
from accel.patterns.recovering import until_ready

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping

    from accel.models import Model, Rows
    from accel.patterns.takers import Taker

__all__ = ["Rollout", "roll_out"]

logger = get_logger()

_ATTEMPTS = 3
"""How often a replica's weights are swapped while faults interrupt that."""

_PATIENCE = 0.5
"""Seconds after which a replica is swapped although it runs a batch, or has items of its own: it answers them all the same."""

_LEAST = 5
"""How many bad answers, or slow batches, are needed for a verdict."""

_DEVIATIONS = 4.0
"""Standard deviations by which their share has to grow, so that chance does not explain it."""

_ENOUGH, _MOST = 64, 1 << 16
"""Batches of the old weights whose times are needed for a verdict; and of how many times are kept, the latest."""

_SLOWER = 1.5
"""A batch is slow if it takes this many times the 99th percentile of batches of the old weights."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """What a swap over the replicas of a service has done.

    Parameters
    ----------
    version
        Which weights serve now, on all replicas.
    replicas
        Names of their devices, in the order in which they were swapped.
    left_out
        Names of the devices that were LOST or closed. They are drained.
    compared
        Canaries that the old and the new weights have answered.
    held
        Answers of the new weights that were held against those of the old.
    """

    version: int
    replicas: tuple[str, ...]
    left_out: tuple[str, ...]
    compared: int
    held: int


@dataclass(slots=True)
class _Answers:
    """How weights have answered.

    Attributes
    ----------
    items, errors, non_finite : int
        Answers, those that are errors, and those with NaNs or infinities. A batch that raised has one error.
    seconds : deque of float
        Of batches without an error.
    """

    items: int = 0
    errors: int = 0
    non_finite: int = 0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST))


class _Watch:
    """Holds what new weights answer against what the old ones do.

    Parameters
    ----------
    models
        The replicas.
    version
        Of the new weights.

    Attributes
    ----------
    old, new : _Answers
    refused : Future
        Done with the error that says why the new weights do not serve, once that is so.
    """

    def __init__(self, models: Mapping[Taker, Model], version: int) -> None:
        self._models = models
        self._version = version
        self.old, self.new = _Answers(), _Answers()
        self._first: Taker | None = None
        self.refused: asyncio.Future[LibraryError] = asyncio.get_running_loop().create_future()

    def rolled_back(self, left: int, error: BaseException | None) -> None:
        """Let all replicas leave the version that one of them has left: see :attr:`accel.models.Model.on_rollback`."""
        for model in self._models.values():
            model.on_rollback = None  # it is told once, and would hold the error
            model.leave(left, error)
        self._refuse("rollback", "it was rolled back" if error is None else f"the old weights answered instead: {error}", error)

    def check(self) -> None:
        """Raise why the new weights do not serve, if that is so."""
        if self.refused.done():
            raise self.refused.result()

    async def listen(self, seconds: float, first: Taker | None = None) -> None:
        """Count what is answered for some time, or until the new weights, which ``first`` serves, are refused."""
        self._first = first
        with self._listening():
            await asyncio.wait({self.refused}, timeout=seconds)

    def judge(self, first: Taker) -> None:
        """Raise if the new weights, which the first replica has served for a while, are worse."""
        if first.state is DeviceState.LOST:
            self._refuse("lost", f"{first.name} was lost")
        before, after = np.array(self.old.seconds), np.array(self.new.seconds)
        if len(before) >= _ENOUGH:
            limit = _SLOWER * float(np.quantile(before, 0.99))
            slow, slow_before = [int((seconds > limit).sum()) for seconds in (after, before)]
            if _is_worse(slow, len(after), slow_before, len(before)):
                self._refuse(
                    "slow", f"{slow} of {len(after)} batches took more than {limit:.3g} s, and {slow_before} of {len(before)} before"
                )
        self.check()

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        handlers = {taker: taker.handler for taker in self._models}
        for taker, handler in handlers.items():
            taker.handler = partial(self._answered, self._models[taker], handler)
        try:
            yield
        finally:
            for taker, handler in handlers.items():
                taker.handler = handler

    async def _answered(self, model: Model, handler: Callable[[list[Any]], Awaitable[Any]], items: list[Any]) -> Rows:
        """Return what the handler does, and count it for the weights that answered."""
        version, began = model.version, perf_counter()
        if self._first is not None and version != self._version:
            self._first.seconds = 0.0  # as of one that is to be tried: it gets the next batch, however few there are
        try:
            rows: Rows = await handler(items)
        except Exception:
            self._count(version, len(items), 1, 0)
            raise
        seconds = perf_counter() - began
        errors = sum([isinstance(row, Exception) for row in rows])
        bad = sum([isinstance(row, Exception) or isinstance(model.checked(row), Exception) for row in rows])
        if not errors:
            self._of(rows.version).seconds.append(seconds)
        self._count(rows.version, len(rows), errors, bad - errors)
        return rows

    def _of(self, version: int) -> _Answers:
        return self.new if version == self._version else self.old

    def _count(self, version: int, items: int, errors: int, non_finite: int) -> None:
        old, new, answers = self.old, self.new, self._of(version)
        answers.items += items
        answers.errors += errors
        answers.non_finite += non_finite
        if _is_worse(new.errors, new.items, old.errors, old.items):
            self._refuse("errors", f"{new.errors} of {new.items} answers are errors, and {old.errors} of {old.items} of the old weights")
        if _is_worse(new.non_finite, new.items, old.non_finite, old.items):
            text = (
                f"{new.non_finite} of {new.items} answers have NaNs or infinities, and {old.non_finite} of {old.items} of the old weights"
            )
            self._refuse("non-finite", text)

    def _refuse(self, code: str, why: str, cause: BaseException | None = None) -> None:
        if not self.refused.done():
            text, remedy = f"version {self._version} does not serve: {why}", "Look at the weights; all replicas serve the old ones."
            error = LibraryError(text, op="swap", code=code, remedy=remedy)
            error.__cause__ = cause
            self.refused.set_result(error)


def _is_worse(bad: int, count: int, bad_before: int, count_before: int) -> bool:
    """Return whether the share of what is bad has grown, and chance hardly explains by how much."""
    if bad < _LEAST:
        return False
    before = max(1, count_before)
    share = (bad + bad_before) / (count + before)
    return bad / count - bad_before / before > _DEVIATIONS * math.sqrt(share * (1 - share) * (1 / count + 1 / before))


async def roll_out(
    models: Mapping[Taker, Model], weights: Any, launch: Callable[[], None], *, hold: float, compare: Any, **options: Any
) -> Rollout:
    """Swap the models of a service, one after the other; for the other arguments and errors see :meth:`accel.patterns.ModelService.swap`.

    Parameters
    ----------
    models
        The replicas. Those that are left out stay paused. With hold the fastest one is the first: no other device's speed is held against it.
    launch
        Called when a replica takes batches again.
    """
    models = dict(sorted(models.items(), key=lambda pair: (pair[0].state is not DeviceState.READY, pair[0].seconds if hold else 0.0)))
    first = next(iter(models.values()))
    version = 1 + max(model.latest_version for model in models.values())
    options |= {"canaries": first.canaries(options["canaries"]), "version": version}
    collected = await first.collected(weights)
    watch = _Watch(models, version)
    swapped: list[str] = []
    left_out: list[str] = []
    try:
        if hold and sum(taker.state is DeviceState.READY for taker in models) < 2:  # none will serve the old weights meanwhile
            await watch.listen(hold)
        for model in models.values():
            model.drop_kept()  # or one that rolls back meanwhile would serve what others do not have
            model.on_rollback = watch.rolled_back
        for taker, model in models.items():
            taker.is_paused = True
            try:
                await _until_idle(taker, models)
                await _swap(model, collected, compare=None if swapped else compare, **options)
            except (ClosedError, DeviceLostError) as error:
                if not swapped:
                    raise
                left_out.append(taker.name)
                logger.warning("replica_left_out", device=taker.name, version=version, error=error)
                continue
            taker.is_paused = False
            launch()
            swapped.append(taker.name)
            if hold and len(swapped) == 1:
                await watch.listen(hold, taker)
                watch.judge(taker)
            watch.check()
    except BaseException as error:
        for taker, model in models.items():
            taker.is_paused = False
            model.on_rollback = None  # what it holds has the error
            model.leave(version, error)
        launch()
        raise
    logger.info("service_swapped", version=version, replicas=swapped, left_out=left_out)
    return Rollout(version, tuple(swapped), tuple(left_out), compared=len(options["canaries"]), held=watch.new.items)


async def _until_idle(taker: Taker, others: Iterable[Taker]) -> None:
    """Wait until a paused taker runs nothing, if another one takes the batches meanwhile."""
    if any(other.state is DeviceState.READY and not other.is_paused for other in others):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE):
                await taker.idle()


async def _swap(model: Model, weights: Any, **options: Any) -> None:
    """Swap one replica, again after faults of its device."""
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            await model.swap(weights, **options)
        except AccelError as error:
            if attempt == _ATTEMPTS or not is_worth_a_retry(error):
                raise
            logger.warning("swap_interrupted", device=model.device.name, attempt=attempt, error=error)
        else:
            return
        try:
            await until_ready(model.device)
        except StopAsyncIteration:
            raise ClosedError(f"device {model.device.name} was closed", device=model.device.name) from None
