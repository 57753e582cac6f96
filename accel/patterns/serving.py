"""A model as a service: requests of single items, answered in batches."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

from accel._log import get_logger
from accel.device import DeviceState
from accel.errors import DeadlineExceededError, InvalidArgumentError, LibraryError, StaleRefError
from accel.models import Model
from accel.patterns.batcher import DynamicBatcher
from accel.patterns.rollout import Rollout, roll_out
from accel.values import check_count, check_flag, check_seconds

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from accel.device import Device
    from accel.models.model import Compare
    from accel.models.weights import Progress
    from accel.patterns.recovering import Recovering

__all__ = ["ModelService", "serve"]

logger = get_logger()


class Replica:
    """Answers the batches of a service by the model on one device, and by the same model in quarantine.

    Attributes
    ----------
    model : Model
        What answers.
    mended_in : int
        Generation of the device in which its weights were loaded again, after they were torn: what tears them twice in one tears them always.
    mend_at : float
        When that may be tried next: see :meth:`asyncio.loop.time`.
    """

    def __init__(self, model: Model, wait_mended: Callable[[Replica], Awaitable[None]], *, check_finite: bool) -> None:
        self.model = model
        self.mended_in = 0
        self.mend_at = 0.0
        self._wait_mended = wait_mended
        self._check_finite = check_finite
        self._apart: Model | None = None  # on the device in quarantine

    async def rows(self, items: list[Any]) -> list[Any]:
        """Answer a batch. One for which the weights are torn, and that no other replica takes, waits until they are loaded again."""
        try:
            return await self.model.rows(items, check_finite=self._check_finite)
        except StaleRefError:
            if not self.model.is_torn:
                raise
        await self._wait_mended(self)
        return await self.model.rows(items, check_finite=self._check_finite)

    async def in_quarantine(self, device: Device) -> Callable[[list[Any]], Awaitable[list[Any]]]:
        """Return the handler on a device in quarantine, which has none of this one's memory."""

        async def answer(items: list[Any]) -> list[Any]:
            apart = await self._model_apart(device)
            return await apart.rows(items, check_finite=self._check_finite)

        await self._model_apart(device)
        return answer

    async def _model_apart(self, device: Device) -> Model:
        """Return the model in quarantine, with the weights that serve now. It is loaded once: its weights are durable there too."""
        apart = self._apart
        if apart is None or apart.device is not device or apart.version != self.model.version or apart.is_torn:
            self._apart = None
            if apart is not None and apart.device is device:
                await apart.aclose()
            self._apart = apart = await self.model.on(device)
        return apart


class ModelService(DynamicBatcher[Any, Any]):
    """A :class:`~accel.patterns.DynamicBatcher` whose handlers are models, one a device; made by :func:`accel.serve`.

    An item of :meth:`submit` is the model's only input, or a mapping of its inputs, without the batch dimension. Arrays are copied: they may be changed
    while it is answered. The answer is the model's, in host arrays. What is raised besides: :class:`~accel.InvalidArgumentError`, where an input does not
    fit its spec, or is longer than the longest bucket (``argument`` is its name); and :class:`~accel.NonFiniteError`, only with ``check_finite=True``,
    where the answer has a NaN or an infinity.
    """

    def __init__(
        self, models: Model | Sequence[Model], *, check_finite: bool, max_items: int | None, quarantine: bool, **options: Any
    ) -> None:
        given = [models] if isinstance(models, Model) else models
        if not isinstance(given, (list, tuple)) or not given:
            raise InvalidArgumentError(
                f"{models!r} is not a Model", remedy="Give what `await device.load_model(...)` returned, or several."
            )
        first = given[0]
        for model in given:
            _check_serves_with(model, first)
            if model.version != first.version:
                raise InvalidArgumentError(
                    f"{model!r} and {first!r} serve different weights",
                    remedy="Give one the weights of the other: `await model.follow(other)`.",
                )
        most = first.buckets.most
        if max_items is None:
            max_items = most or _ITEMS
        elif most is not None and max_items > most:
            raise InvalidArgumentError(
                f"max_items is {max_items}, and the largest batch of {first!r} {most}", remedy="Load the model with a larger bucket."
            )
        check_flag("check_finite", check_finite)
        check_flag("quarantine", quarantine)
        self._check_finite = check_finite
        self._has_quarantine = quarantine
        self._rollouts = asyncio.Lock()
        replica = Replica(first, self._wait_mended, check_finite=check_finite)
        self._replicas = [replica]
        if options.get("max_pending") is None:
            options["max_pending"] = (
                8 * len(given) * check_count("max_items", max_items) * check_count("max_in_flight", options.get("max_in_flight", 2))
            )
        super().__init__(
            replica.rows,
            max_items=max_items,
            idempotent=True,
            device=first.device,
            quarantine=replica.in_quarantine if quarantine else None,
            **options,
        )
        self._convert = first.buckets.item
        self._takers.first.is_torn = partial(getattr, first, "is_torn")
        for model in given[1:]:
            self._add_model(model)

    def _name(self) -> str:
        return self.model.name

    @property
    def model(self) -> Model:
        """The model that answers; with several the first."""
        return self._replicas[0].model

    @property
    def models(self) -> tuple[Model, ...]:
        """The models that answer, one a device."""
        return tuple([replica.model for replica in self._replicas])

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices that take batches."""
        return tuple([replica.model.device for replica in self._replicas])

    async def add(self, model: Model) -> None:
        """Have a model on another device answer too, with the weights that serve here.

        Parameters
        ----------
        model
            Of the same inputs, buckets and outputs, such as ``await service.model.on(device)``. If its version is another one, it gets copies of the
            weights that serve.

        Raises
        ------
        InvalidArgumentError
            It takes or returns other arrays, or its device answers already.
        AccelError
            What giving it the weights that serve raised.
        ClosedError
            The service is closing or closed.

        Notes
        -----
        It waits for a swap that is under way. The weights of before the last swap go on all devices, because the added one does not have them.
        """
        self._check_home()
        async with self._rollouts:
            _check_serves_with(model, self.model)
            if self._takers.of(model.device) is None:  # or it is refused
                await model.follow(min(self.models, key=lambda other: (other.is_torn, other.device.state is not DeviceState.READY)))
                for each in (model, *self.models):
                    each.drop_kept()
            self._add_model(model)

    async def swap(
        self,
        weights: Any,
        *,
        canaries: Iterable[Any] = (),
        compare: Compare | None = None,
        hold: float = 0.0,
        on_progress: Progress | None = None,
    ) -> Rollout:
        """Serve other weights on all devices, one after the other, and return what was done; :meth:`accel.models.Model.swap` is the step.

        A device takes no batches while its weights are swapped, if another one is ready. The first device decides: its canaries before it serves the new
        weights, and its answers for ``hold`` seconds after. Then the others follow. Each answer is of one version.

        Parameters
        ----------
        weights, canaries, compare, on_progress
            As for :meth:`accel.models.Model.swap`. Canaries are answered on each device, and compared on the first.
        hold
            Seconds for which errors, NaNs and infinities in answers, and the times of batches are held against those of the old weights, on all devices.
            With one device that is ready these are watched for as long before the swap.

        Raises
        ------
        LibraryError
            The new weights are worse, by ``code``: ``"errors"``, ``"non-finite"``, ``"slow"``, ``"lost"`` if the first device was lost meanwhile, or
            ``"rollback"`` if they failed where the old ones answer, or were rolled back by hand. Without a code: ``compare`` refused them.
        AccelError
            As of :meth:`accel.models.Model.swap`.

        Notes
        -----
        Whatever is raised, and when it is cancelled, all devices serve the old weights at once. Swaps wait for each other. After a fault a device is swapped
        again, up to three times in all. One that is LOST or closed is left out and drained, unless it is the first; :meth:`add` brings it back, with the
        weights that serve then.

        The old weights stay on each device, as after :meth:`accel.models.Model.swap`; those of before the last swap go first. Where the new ones fail on one
        device, and the old ones answer, all devices roll back.
        """
        if self._state == "new":
            raise self._not_open()
        self._check_home()
        check_seconds("hold", hold)
        async with self._rollouts:
            takers = [(self._takers.of(model.device), model) for model in self.models]
            models = {taker: model for taker, model in takers if taker is not None and not taker.is_draining}
            was_torn = any(model.is_torn for model in models.values())
            options = {"canaries": canaries, "compare": compare, "on_progress": on_progress}
            try:
                rollout = await roll_out(models, weights, self._launch, hold=min(hold, _AGES), **options)
            except LibraryError:
                self.forget_poison()  # what these weights made of items is no proof against them
                raise
            for model in models.values() if was_torn else ():
                model.drop_kept()  # or what one rolls back to, another does not have
            for taker in models:
                if taker.is_paused:
                    taker.is_paused = False
                    with contextlib.suppress(DeadlineExceededError, InvalidArgumentError):  # it, or all others, were drained meanwhile
                        await self.drain(models[taker], timeout=0.0)
        return rollout

    async def drain(self, device: Recovering | Model, *, timeout: float | None = None) -> None:
        """Let a device, or its model, take no more batches, and return when those that it has are answered; both stay open.

        Parameters
        ----------
        device
            The device, or the model on it.
        timeout
            Seconds.

        Raises
        ------
        InvalidArgumentError
            It does not answer here, or is the only one that does.
        DeadlineExceededError
            ``timeout`` ran out. It takes nothing more; call again to wait for what it has.
        ClosedError
            The service is closing or closed.

        Notes
        -----
        Cancelling ends the wait, as ``timeout`` does.
        """
        drained = device.device if isinstance(device, Model) else device
        await super().drain(drained, timeout=timeout)
        self._replicas = [replica for replica in self._replicas if replica.model.device is not drained]

    def _add_model(self, model: Model) -> None:
        replica = Replica(model, self._wait_mended, check_finite=self._check_finite)
        self.add_handler(replica.rows, device=model.device, quarantine=replica.in_quarantine if self._has_quarantine else None)
        self._replicas.append(replica)
        self._takers.all[-1].is_torn = partial(getattr, model, "is_torn")

    # -- weights that are torn

    def _launch(self) -> None:
        if len(self._replicas) > 1:  # the only one takes its items all the same, and is mended by the first
            for replica in self._replicas:
                if replica.model.is_torn:
                    self._begin_to_mend(replica)
        super()._launch()

    def _begin_to_mend(self, replica: Replica) -> None:
        """Load the weights of a replica again in a task, if that may help; items wait for it only where no other replica takes them."""
        taker, root = self._takers.of(replica.model.device), self._root
        if taker is None or taker.is_awaited or root is None or self._state != "open" or not self._may_mend(replica):
            return

        def on_ended(task: asyncio.Task[None]) -> None:
            taker.is_awaited = False
            if not task.cancelled():
                self._launch()

        taker.is_awaited = root.start(self._mend(replica), "accel-mend", on_ended)

    async def _wait_mended(self, replica: Replica) -> None:
        """Load the weights of a replica again, or wait until that is done, unless another one is ready to take its items."""
        if not any(taker.state is DeviceState.READY for taker in self._takers.all):
            await self._mend(replica)

    def _may_mend(self, replica: Replica) -> bool:
        device = replica.model.device
        return (
            device.state is DeviceState.READY
            and replica.model.generation != replica.mended_in
            and asyncio.get_running_loop().time() >= replica.mend_at
        )

    async def _mend(self, replica: Replica) -> None:
        """Load weights that are torn again: from a replica that has them, or from their files, if there are any."""
        model = replica.model
        async with self._rollouts:
            if not (model.is_torn and self._may_mend(replica)):  # a swap has given it others, or it was tried just now
                return
            generation = model.generation
            sources = [other for other in self.models if other.device.state is DeviceState.READY and not other.is_torn]
            try:
                if sources:
                    await model.follow(sources[0])
                elif not await model.reload():
                    return  # each call says what there is to do
            except Exception as error:
                logger.warning("replica_not_mended", device=model.device.name, error=error)
                return
            finally:
                replica.mend_at = asyncio.get_running_loop().time() + _MEND_PAUSE
            replica.mended_in = generation
            for each in self.models:
                each.drop_kept()  # this one has nothing to go back to
        logger.warning("replica_mended", device=model.device.name, version=model.version)


def _check_serves_with(model: object, first: Model) -> None:
    """Raise unless a model is one that answers what ``first`` does."""
    if not isinstance(model, Model):
        raise InvalidArgumentError(f"{model!r} is not a Model", remedy="Give what `await device.load_model(...)` returned.")
    if not model.buckets.is_batched:
        raise InvalidArgumentError(
            f"the inputs of {model!r} have no batch dimension",
            remedy='Begin the shape of every TensorSpec with "batch", or call the model itself.',
        )
    if (model.inputs, model.buckets.lengths) != (first.inputs, first.buckets.lengths):
        raise InvalidArgumentError(
            f"{model!r} takes other inputs, or has other buckets, than {first!r}",
            remedy="Load the same model on each device: pool.load_model().",
        )
    model.outputs.check_serves_for(first.outputs)


_ITEMS = 64
_MEND_PAUSE = 1.0
"""Seconds until torn weights that could not be loaded again are tried again."""
_AGES = 1e9


def serve(
    models: Model | Sequence[Model], *, max_items: int | None = None, check_finite: bool = False, quarantine: bool = True, **options: Any
) -> ModelService:
    """Serve a model, on one device or on several, to many tasks: ``async with accel.serve(model) as service``, then ``await service.submit(item)``.

    Items of tasks that ask at the same time are stacked, padded to a bucket, and run as one batch. After a fault items that were on the device are
    tried apart, in a child process of their own, so that one poisonous item is named and the others are answered. If the fault may have come from outside, as a
    kill does, they run again where they were.

    Parameters
    ----------
    models
        Made by :meth:`accel.Device.load_model`, or several of the same model on different devices, which share one queue: see
        :meth:`ModelService.add`. They stay open when the service is closed.
    max_items
        Items in a batch; ``None``: as many as the largest bucket has, or 64.
    check_finite
        Fail an item whose answer has a NaN or an infinity, instead of returning it.
    quarantine
        Whether suspects of a fault are tried apart; ``False`` retries each once on the device.
    **options
        The other options of :class:`~accel.patterns.DynamicBatcher`: ``max_delay``, ``max_pending``, ``overload``, ``max_in_flight``, ``shares``...

    Raises
    ------
    InvalidArgumentError
        The model's inputs have no batch dimension, or an option is out of range.
    """
    return ModelService(models, max_items=max_items, check_finite=check_finite, quarantine=quarantine, **options)
