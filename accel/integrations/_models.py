"""A model's route, whatever the framework: JSON of one item, or of several, in; JSON of the model's answers out."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from inspect import isawaitable
from typing import TYPE_CHECKING, Any

from accel.errors import DeadlineExceededError, InvalidArgumentError, UnsupportedError
from accel.integrations.encoding import dumps
from accel.values import check_count, check_seconds

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import numpy as np

    from accel.integrations.metrics import Metrics
    from accel.models import OutputSpecs
    from accel.patterns import ModelService, Receipt

__all__ = ["ModelRoute", "check_json", "check_tenant"]


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
    tenant
        Says which tenant a request of the framework's is of.

    Attributes
    ----------
    metrics : Metrics or None
        Those of the application, or of the one that this is a part of.
    """

    __slots__ = ("_tenant", "max_list", "metrics", "name", "timeout")

    def __init__(
        self, name: str, timeout: float | None, max_list: int, tenant: Callable[[Any], str | Awaitable[str]] | None = None
    ) -> None:
        check_tenant(tenant)
        if timeout is not None:
            check_seconds("timeout", timeout, or_zero=False, or_endless=True)
        check_count("max_list", max_list, 0, remedy="Give how many items a request may have; 0 for no route.")
        self.name = name
        self.timeout = timeout
        self.max_list = max_list
        self._tenant = tenant
        self.metrics: Metrics | None = None

    def show(self, metrics: Metrics, service: ModelService) -> None:
        """Show the service in these metrics."""
        self.metrics = metrics
        metrics.add(self.name, service)

    def check_shares(self, service: ModelService, installed: Callable[[Any], str | Awaitable[str]] | None) -> None:
        """Have requests say which tenant they are of, where a service has shares: as this route says, or else as the application does.

        Raises
        ------
        InvalidArgumentError
            Neither does, or the service has no shares.
        """
        if not service.statistics().tenants:
            if self._tenant is not None:
                raise InvalidArgumentError(f"tenant= with {service!r}, which has no shares", remedy="Give accel.serve(...) shares= too.")
        elif self._tenant is None:
            if installed is None:
                raise InvalidArgumentError(
                    f"{service!r} has shares, and nothing says which tenant a request is of",
                    remedy="Give tenant= to install or add_model: a function of the request.",
                )
            self._tenant = installed

    async def tenant(self, request: Any) -> str | None:
        """Return the tenant that a request is of; ``None`` without shares.

        Raises
        ------
        DeadlineExceededError
            It was not said within the timeout.
        """
        if self._tenant is None:
            return None
        found = self._tenant(request)
        if not isawaitable(found):
            return found
        try:
            async with asyncio.timeout(self.timeout) as limit:
                return await found
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlineExceededError(f"tenant= has not said within {self.timeout} s which tenant a request is of") from None

    async def one(self, service: ModelService, item: Any, tenant: str | None) -> tuple[bytes, dict[str, str]]:
        """Return body and headers of the answer to one item, a mapping of the model's inputs.

        Raises
        ------
        InvalidArgumentError
            It is no such item; ``argument`` names the input.
        AccelError
            What the service raised.
        """
        answer, receipt = await self._answered(service, _arrays(service, item), tenant)
        return await dumps(answer), _timing(receipt)

    async def many(self, service: ModelService, body: Any, tenant: str | None) -> tuple[bytes, dict[str, str]]:
        """Return body and headers of the answers to ``{"items": [...]}``, in order. If one fails, its error is raised when all have ended.

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
        results = await asyncio.gather(*(self._answered(service, each, tenant) for each in arrays), return_exceptions=True)
        answers, receipts = [], []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            answers.append(result[0])
            receipts.append(result[1])
        slowest = max(receipts, key=lambda receipt: receipt.queued + (receipt.device_seconds or 0.0))
        return await dumps({"items": answers}), _timing(slowest)

    async def _answered(self, service: ModelService, arrays: Mapping[str, Any], tenant: str | None) -> tuple[Mapping[str, Any], Receipt]:
        try:
            answer, receipt = await service.timed(arrays, timeout=self.timeout, tenant=tenant)
        except InvalidArgumentError as error:
            raise error.clone(argument=None) from error  # the client's input was checked: this one concerns the model, and is not told
        return _named(service.model.outputs, answer), receipt


def check_tenant(tenant: object) -> None:
    """Raise unless this can say which tenant a request is of, or is ``None``.

    Raises
    ------
    InvalidArgumentError
        It cannot be called.
    """
    if tenant is not None and not callable(tenant):
        raise InvalidArgumentError(f"tenant is {tenant!r:.80}", remedy="Give a function of the request that returns its tenant, or None.")


def _timing(receipt: Receipt) -> dict[str, str]:
    """Return the header that tells browsers and clients where the time of an answer went."""
    parts = [f"queue;dur={1e3 * receipt.queued:.3f}"]
    if receipt.device_seconds is not None:
        parts.append(f"device;dur={1e3 * receipt.device_seconds:.3f}")
    return {"Server-Timing": ", ".join((*parts, f'batch;desc="{receipt.batch_items}"'))}


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
