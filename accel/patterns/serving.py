"""A model as a service: requests of single items, answered in batches."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from accel.errors import InvalidArgumentError
from accel.models import Model
from accel.patterns.batcher import DynamicBatcher
from accel.values import check_flag

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from accel.device import Device

__all__ = ["ModelService", "serve"]


class ModelService(DynamicBatcher[Any, Any]):
    """A :class:`~accel.patterns.DynamicBatcher` whose handler is a model; made by :func:`accel.serve`.

    An item of :meth:`submit` is the model's only input, or a mapping of its inputs, without the batch dimension. Arrays are copied: they may be changed
    while it is answered. The answer is the model's, in host arrays. What is raised besides: :class:`~accel.InvalidArgumentError`, where an input does not
    fit its spec, or is longer than the longest bucket (``argument`` is its name); and :class:`~accel.NonFiniteError`, only with ``check_finite=True``,
    where the answer has a NaN or an infinity.

    Attributes
    ----------
    model : Model
        What answers.
    """

    def __init__(self, model: Model, *, check_finite: bool, max_items: int | None, quarantine: bool, **options: Any) -> None:
        if not isinstance(model, Model):
            raise InvalidArgumentError(f"{model!r} is not a Model", remedy="Give what `await device.load_model(...)` returned.")
        if not model.buckets.is_batched:
            raise InvalidArgumentError(
                f"the inputs of {model!r} have no batch dimension",
                remedy='Begin the shape of every TensorSpec with "batch", or call the model itself.',
            )
        most = model.buckets.most
        if max_items is None:
            max_items = most or _ITEMS
        elif most is not None and max_items > most:
            raise InvalidArgumentError(
                f"max_items is {max_items}, and the largest batch of {model!r} {most}", remedy="Load the model with a larger bucket."
            )
        self.model = model
        check_flag("check_finite", check_finite)
        check_flag("quarantine", quarantine)
        self._check_finite = check_finite
        self._apart: Model | None = None  # on the device in quarantine, with the weights of this version
        self._apart_version = 0
        super().__init__(
            partial(model.rows, check_finite=check_finite),
            max_items=max_items,
            idempotent=True,
            device=model.device,
            quarantine=self._quarantined if quarantine else None,
            **options,
        )
        self._convert = model.buckets.item

    def _name(self) -> str:
        return repr(self.model)

    async def _quarantined(self, device: Device) -> Callable[[list[Any]], Awaitable[list[Any]]]:
        """Return the handler on a device in quarantine, which has none of this one's memory."""

        async def answer(items: list[Any]) -> list[Any]:
            apart = await self._model_apart(device)
            return await apart.rows(items, check_finite=self._check_finite)

        await self._model_apart(device)
        return answer

    async def _model_apart(self, device: Device) -> Model:
        """Return the model in quarantine, with the weights that serve now. It is loaded once: its weights are durable there too."""
        apart, version = self._apart, self.model.version
        if apart is None or apart.device is not device or self._apart_version != version:
            self._apart = None
            if apart is not None and apart.device is device:
                await apart.aclose()
            self._apart = apart = await self.model.on(device)
            self._apart_version = version
        return apart


_ITEMS = 64


def serve(
    model: Model, *, max_items: int | None = None, check_finite: bool = False, quarantine: bool = True, **options: Any
) -> ModelService:
    """Serve a model to many tasks: ``async with accel.serve(model) as service``, then ``await service.submit(item)``.

    Items of tasks that ask at the same time are stacked, padded to a bucket, and run as one batch. After a fault items that were on the device are
    tried apart, in a child process of their own, so that one poisonous item is named and the others are answered. If the fault may have come from outside, as a
    kill does, they run again where they were.

    Parameters
    ----------
    model
        Made by :meth:`accel.Device.load_model`; it stays open when the service is closed.
    max_items
        Items in a batch; ``None``: as many as the largest bucket has, or 64.
    check_finite
        Fail an item whose answer has a NaN or an infinity, instead of returning it.
    quarantine
        Whether suspects of a fault are tried apart; ``False`` retries each once on the device.
    **options
        The other options of :class:`~accel.patterns.DynamicBatcher`: ``max_delay``, ``max_pending``, ``overload``, ``max_in_flight``, ``close_timeout``...

    Raises
    ------
    InvalidArgumentError
        The model's inputs have no batch dimension, or an option is out of range.
    """
    return ModelService(model, max_items=max_items, check_finite=check_finite, quarantine=quarantine, **options)
