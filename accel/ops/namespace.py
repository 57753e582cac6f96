"""Namespaces of ops, such as ``device.blas``: one method for each op, with the op's parameters."""

from __future__ import annotations

import difflib
import inspect
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, ParamSpec, Protocol, TypeVar, cast, overload

from accel.errors import AccelError, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from accel.ops.base import FamilyOp, SizedOp

__all__ = ["Awaited", "M", "Method", "OpNamespace", "Recorded", "SizedMethod", "Submitter", "calls_of", "method", "ops_of", "sized_method"]

P = ParamSpec("P")
A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
M = TypeVar("M")


class Awaited:
    """The mode of a device: its methods return coroutines, whose result is the op's."""


class Recorded:
    """The mode of a batch and of a graph: their methods return the op's result at once."""


class Submitter(Generic[M]):
    """Takes the ops of namespaces.

    Its type parameter is the mode, :class:`Awaited` or :class:`Recorded`; a namespace made with it has the same.

    Parameters
    ----------
    submit
        Takes an op and returns what the method returns.
    refuse
        Takes what was wrong with the arguments: raises it, or returns what raises it when awaited.
    owner
        What has the namespaces, for messages: ``"device"``, ``"batch"`` or ``"graph"``.
    """

    __slots__ = ("owner", "refuse", "submit")

    def __init__(self, submit: Callable[[FamilyOp[Any]], Any], refuse: Callable[[AccelError], Any], owner: str) -> None:
        self.submit = submit
        self.refuse = refuse
        self.owner = owner


class OpNamespace(Generic[M]):
    """The ops of one family; its type parameter is the mode.

    A subclass has one :func:`method` for each op::

        class Stats(OpNamespace[M]):
            library = "stats"
            mean = method(Mean)

    Parameters
    ----------
    submitter
        Takes the ops.
    """

    __slots__ = ("_owner", "_refuse", "_submit")

    library: ClassVar[str]
    """Name of the family."""

    aliases: ClassVar[Mapping[str, str]] = {}
    """What users of other libraries call an op -> how it is called here, for errors."""

    def __init__(self, submitter: Submitter[M]) -> None:
        self._submit = submitter.submit
        self._refuse = submitter.refuse
        self._owner = submitter.owner

    def _check_call(self, op: type[FamilyOp[Any]], args: tuple[Any, ...], kwargs: dict[str, Any], signature: inspect.Signature) -> None:
        """Raise a ``TypeError`` that names the method, if the arguments do not fit its parameters."""
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            unknown = next((name for name in kwargs if name not in signature.parameters), "")
            close = difflib.get_close_matches(unknown, signature.parameters, n=1)
            name = self.library if self.library == op.kind else f"{self.library}.{op.kind}"
            hint = f". Did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"{self._owner}.{name}() {error}{hint}") from None

    if not TYPE_CHECKING:  # for a type checker, an op that is not there is an error

        def __getattr__(self, name: str) -> NoReturn:
            own, calls = [each for each in ops_of(type(self)) if each != "__call__"], {}
            for kind in OpNamespace.__subclasses__():  # the first that has the name, whose op it is; others call theirs so
                calls = calls_of(kind) | calls
            calls |= calls_of(type(self))
            has = f"it has {', '.join(own)}" if own else "it is called itself"
            if name in calls:
                remedy = f"Use {calls[name]}."
            elif close := difflib.get_close_matches(name, own):
                remedy = f"Did you mean {' or '.join(close)}?"
            else:
                remedy = "An op of your own comes by device.register or device.compiler."
            raise AttributeError(f"library {self.library!r} has no {name!r}; {has}. {remedy}", name=name)


class Method(Protocol[P, R_co]):
    """How a type checker sees what :func:`method` returns."""

    op: type[FamilyOp[Any]]

    @overload
    def __get__(self, instance: OpNamespace[Awaited], owner: object) -> Callable[P, Coroutine[Any, Any, R_co]]: ...
    @overload
    def __get__(self, instance: OpNamespace[Recorded], owner: object) -> Callable[P, R_co]: ...
    @overload
    def __get__(self, instance: None, owner: object) -> Method[P, R_co]: ...


class SizedMethod(Protocol[P, A_co, R_co]):
    """How a type checker sees what :func:`sized_method` returns."""

    op: type[FamilyOp[Any]]

    @overload
    def __get__(self, instance: OpNamespace[Awaited], owner: object) -> Callable[P, Coroutine[Any, Any, A_co]]: ...
    @overload
    def __get__(self, instance: OpNamespace[Recorded], owner: object) -> Callable[P, R_co]: ...
    @overload
    def __get__(self, instance: None, owner: object) -> SizedMethod[P, A_co, R_co]: ...


def method(op: Callable[P, FamilyOp[R]], kind: type[FamilyOp[Any]] | None = None) -> Method[P, R]:
    """Return the method of an op for the body of an :class:`OpNamespace`: its parameters and its documentation are the op's.

    It returns a coroutine on a device and the result in a batch or graph.

    Parameters
    ----------
    op
        The op's class, or a function that makes one, with the method's parameters: the operands of ``einsum`` are given one by one.
    kind
        The op's class, where ``op`` is a function.
    """
    kind = kind or cast("type[FamilyOp[Any]]", op)

    def call(self: OpNamespace[Any], /, *args: Any, **kwargs: Any) -> Any:
        try:
            made = op(*args, **kwargs)
        except AccelError as error:
            error.op = error.op or kind.kind
            return self._refuse(error)
        except TypeError:
            self._check_call(kind, args, kwargs, inspect.signature(op))
            raise
        return self._submit(made)

    parameters = dict(inspect.signature(op).parameters)
    if "timeout" not in parameters:
        raise InvalidArgumentError(f"{kind.__name__} is not a FamilyOp", remedy="Derive it from accel.ops.FamilyOp.", op=kind.kind)
    last = [parameters.pop(name) for name in ("out", "timeout") if name in parameters]
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    described: Any = call
    described.__signature__ = inspect.Signature([itself, *parameters.values(), *last])
    call.__name__, call.__qualname__ = kind.kind, f"{kind.library}.{kind.kind}"
    call.__module__, call.__doc__ = kind.__module__, kind.__doc__
    described.op = kind
    return cast("Method[P, R]", call)


def sized_method(op: Callable[P, SizedOp[A, R]]) -> SizedMethod[P, A, R]:
    """Return the method of a :class:`~accel.ops.SizedOp`, which gives views of what was found on a device, and all results in a batch or graph."""
    return cast("SizedMethod[P, A, R]", method(op))


def ops_of(namespace: type[OpNamespace[Any]]) -> dict[str, type[FamilyOp[Any]]]:
    """Return the ops of a namespace by the names of its methods; ``__call__`` is the one by which the namespace itself is called."""
    found = {name: getattr(getattr(namespace, name, None), "op", None) for name in dir(namespace)}
    return {name: op for name, op in found.items() if op is not None}


def calls_of(namespace: type[OpNamespace[Any]]) -> dict[str, str]:
    """Return the names of a namespace's ops, and what else they are called -> how they are called."""
    name = namespace.library
    calls = {op: f"{name}.{op}(...)" for op in ops_of(namespace) if op != "__call__"}
    return calls | {alias: name + call for alias, call in namespace.aliases.items()}
