"""Functions as ops: ``@accel.kernel_op`` makes an op of a function that computes with arrays."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, ParamSpec, Protocol, TypeVar, overload

from accel.errors import InvalidArgumentError
from accel.family import BackendPart
from accel.libraries.kernel_library import Operand
from accel.ops.base import FamilyOp, Plan, Spec, operand
from accel.ops.user_plans import are_specs, with_dtypes
from accel.ref import AccelRef
from accel.values import check_flag

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from accel.backend import Kernel
    from accel.engine.lane import Lane
    from accel.ops.base import KernelOp

__all__ = ["FunctionOp", "OpFunction", "kernel_op"]

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)

_COST = 1e-3
"""Seconds that a function takes on the CPU unless it says otherwise: enough for the stream's own
thread."""


class OpFunction(Protocol[P, R_co]):
    """What :func:`kernel_op` makes of a function: called, it returns the op."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> KernelOp[R_co]:
        """Return the op, for ``device.run`` or ``batch.run``."""

    def on(self, backend: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Decorate the function that computes the op on another backend; same parameters."""


class Decorator(Protocol):
    """What :func:`kernel_op` returns: one result for each :class:`Operand` in front."""

    @overload
    def __call__(self, function: Callable[Concatenate[Operand, Operand, P], None]) -> OpFunction[P, tuple[AccelRef, AccelRef]]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[Operand, P], None]) -> OpFunction[P, AccelRef]: ...


class FunctionOp(FamilyOp[Any]):
    """An op made of a function; its fields are the function's parameters."""

    __slots__ = ()

    library: ClassVar[str] = "functions"
    makes: ClassVar[Callable[..., Spec | tuple[Spec, ...]]]
    results: ClassVar[int]
    operands: ClassVar[frozenset[str]]
    names: ClassVar[tuple[str, ...]]
    functions: ClassVar[_Functions]

    def plan(self) -> Plan:
        """See :meth:`KernelOp.plan`."""
        values = {name: getattr(self, name) for name in self.names}
        for name, value in values.items():
            if name not in self.operands and isinstance(value, AccelRef):
                raise InvalidArgumentError(f"{name} is a ref", remedy=f"Annotate the parameter: {name}: accel.AccelRef.")
        reads = tuple([operand(name, value) for name, value in values.items() if name in self.operands and value is not None])
        made = type(self).makes(**values)
        creates = made if isinstance(made, tuple) and not isinstance(made, Spec) else (made,)
        if len(creates) != self.results:
            raise InvalidArgumentError(
                f"{self.kind} writes {self.results} result(s), and makes= gives {len(creates)}", remedy="Give one Spec for each."
            )
        plan = with_dtypes(Plan(reads, (), creates))
        if not are_specs(plan.creates):
            raise InvalidArgumentError(
                f"makes= of {self.kind} gives {plan.creates!r:.200}",
                op=self.kind,
                remedy="Give a Spec for each result: Spec(shape, dtype), whose shape is a tuple of integers.",
            )
        return plan

    @classmethod
    def on(cls, backend: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """See :meth:`OpFunction.on`."""

        def add(function: Callable[..., None]) -> Callable[..., None]:
            cls.functions.by_backend[backend] = function
            return function

        return add


class _Functions:
    """The family of one function's op: see :class:`accel.family.OpFamily`."""

    name = FunctionOp.library

    def __eq__(self, other: object) -> bool:  # all functions share one library
        return isinstance(other, _Functions)

    def __init__(self, function: Callable[..., None], cost: float, *, capturable: bool) -> None:
        self.by_backend: dict[str, Callable[..., None]] = {"cpu": function}
        self._cost = cost
        self._capturable = capturable

    def part(self, backend: str) -> BackendPart:
        return BackendPart({}, may_block=backend != "cpu", launches=64, capturable=self._capturable)

    def kernel(self, kind: str, backend: str) -> Kernel | None:
        function = self.by_backend.get(backend)
        return None if function is None else partial(self._run, function, backend)

    def _run(
        self,
        function: Callable[..., object],
        backend: str,
        lane: Lane,
        op: FunctionOp,
        plan: Plan,
        inputs: Sequence[int],
        outputs: Sequence[int],
    ) -> None:
        addresses, index = iter(inputs), lane.device.description.index
        made = [
            Operand(address, spec.shape, spec.dtype, True, backend, index, lane.stream)
            for address, spec in zip(outputs, plan.creates, strict=True)
        ]
        values = {name: getattr(op, name) for name in op.names}
        for name, value in values.items():
            if isinstance(value, AccelRef):
                values[name] = Operand(next(addresses), value.shape, value.dtype, False, backend, index, lane.stream)

        def work() -> None:
            if function(*made, **values) is not None:
                raise InvalidArgumentError(
                    f"{op.kind} returned a value", remedy="Write into the first parameter: np.asarray(out)[...] = ..."
                )

        if backend == "cpu":
            stream: Any = lane.stream
            stream.submit(work, self._cost)
        else:
            work()


def kernel_op(
    function: None = None,
    *,
    like: str | None = None,
    makes: Callable[..., Spec | tuple[Spec, ...]] | None = None,
    cost: float = _COST,
    capturable: bool = False,
) -> Decorator:
    """Make an op of a function that computes with arrays.

    ::

        @accel.kernel_op(like="x")
        def softmax(out: accel.Operand, x: accel.AccelRef, scale: float = 1.0) -> None:
            powers = np.exp(scale * np.asarray(x))
            np.divide(powers, powers.sum(), out=np.asarray(out))

        y = await device.run(softmax(x, scale=2.0))

    The function's first parameters, annotated :class:`Operand`, are the results that it writes: one
    or two. Those annotated :class:`AccelRef` are refs for the caller, and each is an
    :class:`Operand` inside the function: ``np.asarray(x)`` on the CPU, ``torch.from_dlpack(x)`` or
    ``cupy.asarray(x)`` on a GPU. All others are options. The function keeps no operand.

    The decorated function computes on the CPU, in the stream's order. ``@softmax.on("cuda")``
    decorates what *enqueues* the op on a GPU, into ``out.stream``. On a process host the module is
    imported by the child, so the function is defined at the top of a module.

    Parameters
    ----------
    function
        Nothing: the decorator is called first, since results have a shape that only its options
        tell.
    like
        Name of the parameter whose shape and dtype each result has.
    makes
        Given the parameters after the results, returns the :class:`~accel.ops.Spec` of each result.
        Give ``like`` or ``makes``.
    cost
        About how many seconds the function takes on the CPU; below 50 us it runs at once, on the
        event loop's thread.
    capturable
        See :attr:`KernelLibrary.capturable`.

    Raises
    ------
    InvalidArgumentError
        If the function does not fit.
    """
    if function is not None:
        raise InvalidArgumentError(
            f"kernel_op decorates {getattr(function, '__name__', function)!r} without options",
            remedy="Say what its results are like: @accel.kernel_op(like='x'), or @accel.kernel_op(makes=...).",
        )
    if isinstance(cost, bool) or not isinstance(cost, (int, float)) or not cost >= 0:
        raise InvalidArgumentError(f"cost is {cost!r}", remedy="Give the seconds that the function takes, such as 1e-3.")
    check_flag("capturable", capturable)

    def decorate(function: Any) -> Any:
        return _op_class(function, like, makes, cost, capturable=capturable)

    return decorate


def _op_class(
    function: Any, like: str | None, makes: Callable[..., Spec | tuple[Spec, ...]] | None, cost: float, *, capturable: bool
) -> type[FunctionOp]:
    parameters = list(inspect.signature(function).parameters.values())
    try:
        hints = typing.get_type_hints(function)
    except NameError as error:
        raise InvalidArgumentError(
            f"the annotations of {function.__name__} name what is not there: {error}", remedy="Import it outside TYPE_CHECKING."
        ) from error
    results = 0
    while results < len(parameters) and hints.get(parameters[results].name) is Operand:
        results += 1
    fields = parameters[results:]
    names = tuple(field.name for field in fields)
    operands = frozenset(name for name in names if _is_ref(hints.get(name)))
    remedy = "Write def op(out: accel.Operand, x: accel.AccelRef, option: float = 1.0) -> None, and like='x' or makes=."
    if results not in (1, 2) or any(field.kind not in (field.POSITIONAL_OR_KEYWORD, field.KEYWORD_ONLY) for field in fields):
        raise InvalidArgumentError(
            f"{function.__name__} has {results} result(s) in front, or takes *args or positional-only parameters", remedy=remedy
        )
    if inspect.iscoroutinefunction(function) or (like is None) == (makes is None) or (like and like not in operands):
        raise InvalidArgumentError(f"{function.__name__} is a coroutine function, or names no parameter to be like", remedy=remedy)
    functions = _Functions(function, cost, capturable=capturable)
    namespace = {
        "kind": function.__name__,
        "makes": staticmethod(makes or partial(_alike, str(like), results)),
        "results": results,
        "operands": operands,
        "names": names,
        "functions": functions,
        "family": functions,
        "__doc__": function.__doc__,
        "__module__": function.__module__,
    }
    for field in fields:
        if field.name in namespace or hasattr(FunctionOp, field.name):
            raise InvalidArgumentError(f"{function.__name__} has a parameter {field.name}: ops have it", remedy="Give it another name.")
        if type(field.default).__hash__ is None:
            raise InvalidArgumentError(f"the default of {field.name} can change: {field.default!r:.200}", remedy="Use a tuple, or None.")
    made: type[FunctionOp] = dataclasses.make_dataclass(
        function.__name__, [_field(field) for field in fields], bases=(FunctionOp,), namespace=namespace, frozen=True, eq=False, slots=True
    )
    # Where pickle finds it.
    made.__module__, made.__qualname__ = function.__module__, function.__qualname__
    return made


def _field(parameter: inspect.Parameter) -> tuple[str, Any, Any]:
    is_keyword = parameter.kind is inspect.Parameter.KEYWORD_ONLY
    if parameter.default is inspect.Parameter.empty:
        return parameter.name, Any, dataclasses.field(kw_only=is_keyword)
    return parameter.name, Any, dataclasses.field(default=parameter.default, kw_only=is_keyword)


def _is_ref(hint: Any) -> bool:
    return hint is AccelRef or AccelRef in typing.get_args(hint)


def _alike(like: str, results: int, **values: Any) -> tuple[Spec, ...]:
    model = operand(like, values[like])
    return (Spec(model.shape, model.dtype),) * results
