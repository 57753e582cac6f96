"""A model's route, whatever the framework: JSON of one item, or of several, in; JSON of the model's answers out."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from accel.errors import InvalidArgumentError, UnsupportedError
from accel.integrations.encoding import dumps
from accel.values import check_count

if TYPE_CHECKING:
    import numpy as np

    from accel.integrations.metrics import Metrics
    from accel.models import OutputSpecs
    from accel.patterns import ModelService

__all__ = ["ModelRoute", "check_json"]


class ModelRoute:
    """What both frameworks do with the body of a request to a model.

    Parameters
    ----------
    name
        The label ``model`` of metrics.
    timeout
        Seconds for an answer; ``None`` waits as long as it takes.
    max_list
        Items that one request may have.

    Attributes
    ----------
    metrics : Metrics or None
        Those of the application, or of the one that this is a part of.
    """

    __slots__ = ("max_list", "metrics", "name", "timeout")

    def __init__(self, name: str, timeout: float | None, max_list: int) -> None:
        if timeout is not None and not (isinstance(timeout, (int, float)) and timeout > 0):
            raise InvalidArgumentError(f"timeout is {timeout!r}", remedy="Give seconds, or None.")
        check_count("max_list", max_list, 0, remedy="Give how many items a request may have; 0 for no route.")
        self.name = name
        self.timeout = timeout
        self.max_list = max_list
        self.metrics: Metrics | None = None

    def show(self, metrics: Metrics, service: ModelService) -> None:
        """Show the service in these metrics."""
        self.metrics = metrics
        metrics.add(self.name, service)

    async def one(self, service: ModelService, item: Any) -> bytes:
        """Return the body of the answer to one item, a mapping of the model's inputs.

        Raises
        ------
        InvalidArgumentError
            It is no such item; ``argument`` names the input.
        AccelError
            What the service raised.
        """
        return await dumps(await self._answered(service, _arrays(service, item)))

    async def many(self, service: ModelService, body: Any) -> bytes:
        """Return the body of the answers to ``{"items": [...]}``, in order. If one fails, its error is raised when all have ended.

        Raises
        ------
        InvalidArgumentError
            There are none or too many, or one is no item.
        AccelError
            What the service raised for the first that failed.
        """
        items = body.get("items") if isinstance(body, dict) else None
        if not isinstance(items, list) or not 1 <= len(items) <= self.max_list:
            raise InvalidArgumentError(f"the body has no list of 1 to {self.max_list} items", argument="items")
        if len(body) > 1:
            unknown = next(name for name in body if name != "items")
            raise InvalidArgumentError(f"field {unknown!r} is not items", argument=unknown)
        arrays = []
        for place, item in enumerate(items):
            try:
                arrays.append(_arrays(service, item))
            except InvalidArgumentError as error:
                where = f"items[{place}]" if not isinstance(item, Mapping) else f"items[{place}].{error.argument}"
                raise error.clone(argument=where) from error
        answers = await asyncio.gather(*(self._answered(service, each) for each in arrays), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return await dumps({"items": answers})

    async def _answered(self, service: ModelService, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            answer = await service.submit(arrays, timeout=self.timeout)
        except InvalidArgumentError as error:
            raise error.clone(argument=None) from error  # the client's input was checked: this one concerns the model, and is not told
        return _named(service.model.outputs, answer)


def check_json(service: ModelService) -> None:
    """Raise unless JSON has the dtypes of a model's inputs and outputs.

    Raises
    ------
    UnsupportedError
        One is complex.
    """
    model = service.model
    dtypes = {name: spec.dtype for name, spec in model.inputs.items()} | dict(zip(model.outputs.names, model.outputs.dtypes, strict=True))
    for name, dtype in dtypes.items():
        if dtype.kind == "complex":
            raise UnsupportedError(
                f"{name!r} of {model!r} is {dtype.value}, which JSON has not", remedy="Have the model take and return reals."
            )


def _arrays(service: ModelService, item: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Return an item as the service takes it."""
    model = service.model
    if not isinstance(item, Mapping):
        raise InvalidArgumentError(f"an item is a {type(item).__name__}, not an object with {', '.join(model.inputs)}", argument="body")
    return model.item(dict(item), finite=True)


def _named(outputs: OutputSpecs, answer: Any) -> Mapping[str, Any]:
    """Return what a model gave for an item as an object: its outputs by name, or ``output``, or ``outputs`` of a tuple."""
    if outputs.structure == "dict":
        found: Mapping[str, Any] = answer
        return found
    return {"output" if outputs.structure == "array" else "outputs": answer}
