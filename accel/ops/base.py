"""What an op is: a frozen, picklable description of one operation and its operands, checked before anything is sent."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MemberDescriptorType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, cast, dataclass_transform

import numpy as np

from accel.dtype import MOST_DIMENSIONS, DType, check_awaited
from accel.errors import AccelError, InvalidArgumentError
from accel.family import OpFamily
from accel.ops.fields import Conversion, Convert, convert_fields, converting, flag
from accel.ref import AccelRef, AccelToken, ViewToken, overlap
from accel.values import converted, number
from accel.views import counted

__all__ = [
    "FamilyOp",
    "KernelOp",
    "OutOp",
    "Plan",
    "Shape",
    "SizedOp",
    "Spec",
    "Status",
    "as_shape",
    "check_frozen",
    "check_tf32",
    "checked_spec",
    "element",
    "factor",
    "in_place_or_apart",
    "op",
    "operand",
    "plan_of",
    "planned",
    "result_in",
    "scalar",
    "status_of_places",
    "to_real",
    "to_scalar",
    "to_shape",
    "with_refs",
]

Shape = tuple[int, ...]

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # the type checker's own: defaults are younger than the oldest Python

    R_co = TypeVar("R_co", covariant=True, default=AccelRef)
    A_co = TypeVar("A_co", covariant=True, default=AccelRef)
else:
    from typing import TypeVar

    R_co = TypeVar("R_co", covariant=True)
    A_co = TypeVar("A_co", covariant=True)


C = TypeVar("C", bound="KernelOp[Any]")


class Spec(NamedTuple):
    """Shape and element type of a buffer that an op makes."""

    shape: Shape
    dtype: DType
    durable: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return math.prod(self.shape) * self.dtype.itemsize


class Status(NamedTuple):
    """The status of an op whose success only the device knows, such as ``info`` of a factorization.

    The kernel writes it into device memory that it is lent for the time of the op, and finds its bytes 0. When the op has ended, the status is on the host
    and is checked before the op is answered.

    Attributes
    ----------
    spec
        Its shape and dtype.
    check
        Given the status as an array, returns the op's error, such as a :class:`~accel.LinAlgError`, or ``None`` for success. Called on the event loop's
        thread.
    """

    spec: Spec
    check: Callable[[np.ndarray[Any, Any]], AccelError | None]


def status_of_places(message: str, remedy: str) -> Status:
    """Return the status by which a device says that a number is out of place, and which.

    It is two int64: whether there is any, and the number, which stands for ``{}`` in the message.
    """
    return Status(Spec((2,), DType.INT64), functools.partial(_misplaced, message, remedy))


def _misplaced(message: str, remedy: str, status: np.ndarray[Any, Any]) -> AccelError | None:
    if not status[0]:
        return None
    return InvalidArgumentError(message.format(int(status[1])), remedy=remedy)


class Plan(NamedTuple):
    """What an op does to memory, worked out once when it is sent.

    Attributes
    ----------
    reads
        Refs it reads, in the order in which its kernel takes their addresses.
    writes
        Refs it writes in place (``out=``), in that order.
    creates
        Buffers it makes, which its kernel writes after those in ``writes``.
    capability
        The entry of :meth:`accel.ComputeBackend.capabilities` that must hold ``dtype``; empty where every dtype will do.
    dtype
        Element type of the computation.
    updates
        Whether the op leaves some of what was in ``writes``, or computes with it, so that it takes more than the op to make their contents sound.
    status
        The status by which the device says whether the op has succeeded. Its kernel finds the address behind those of ``creates``.
    """

    reads: tuple[AccelRef, ...]
    writes: tuple[AccelRef, ...]
    creates: tuple[Spec, ...]
    capability: str = ""
    dtype: DType = DType.UINT8
    updates: bool = False
    status: Status | None = None


plan_of: Callable[[tuple[Any, ...]], Plan] = functools.partial(tuple.__new__, Plan)
"""Make a plan of all its attributes in a row, in half the time: for the ops that are run most."""


class KernelOp(ABC, Generic[R_co]):
    """One operation. Subclasses are frozen dataclasses whose fields are operands and options.

    An op is picklable: its refs travel as :class:`~accel.AccelToken` and are turned back by the device that runs it.

    Its type parameter says what the caller gets, and is an :class:`~accel.AccelRef` where it is left out. An op with two results is declared
    ``class Split(KernelOp[tuple[AccelRef, AccelRef]])``.

    Attributes
    ----------
    library : str
        The kernel actor that runs it.
    kind : str
        Its name within the library, used in errors, predictions and fault plans.
    captures : bool
        Whether its kernel captures a stream into a graph. Then it is called on a worker thread.
    derived : object
        Whatever a backend works out of the op and needs several times on its way. It is no field: copies, and ops that were pickled, have none.
    """

    __slots__ = ("derived",)

    library: ClassVar[str]
    kind: ClassVar[str]
    captures: ClassVar[bool] = False
    conversions: ClassVar[tuple[tuple[str, Callable[[str, Any], Any], frozenset[type]], ...]] = ()
    """Names of fields, and the function and the plain types of their conversions; see :func:`op`."""
    derived: Any

    def takes_strided(self, ref: AccelRef) -> bool:
        """Return whether the op's kernels take a :class:`~accel.StridedRef` among its operands as it is; else the op runs on a copy of it."""
        return False

    @abstractmethod
    def plan(self) -> Plan:
        """Check the operands against each other and say what is read, written and made. Pure; no device is needed.

        Raises
        ------
        InvalidArgumentError
            If shapes, dtypes or options do not fit together.
        """

    def result(self, refs: tuple[AccelRef, ...]) -> R_co:
        """Return what the awaiting caller gets, given the refs written and made: the only one, the tuple of several, or ``None``."""
        return cast("R_co", refs[0] if len(refs) == 1 else refs or None)

    def __repr__(self) -> str:
        # One for all ops: to make one for each class is a twentieth of the package's import.
        fields = dataclasses.fields(cast("Any", self)) if dataclasses.is_dataclass(type(self)) else ()  # one that is none is refused
        shown = [f"{each.name}={getattr(self, each.name)!r}" for each in fields if each.repr]
        return f"{type(self).__qualname__}({', '.join(shown)})"


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(field,))
def op(library: str = "", kind: str = "", convert: Mapping[str, Convert] | None = None) -> Callable[[type[C]], type[C]]:
    """Make a class an op: a frozen dataclass with slots, whose instances are equal to themselves only.

    Parameters
    ----------
    library
        The op's library; left out, that of its base.
    kind
        The op's kind; left out, the name of the class: ``LayerNorm`` is ``"layer_norm"``.
    convert
        Name of a field -> what brings it into the form that kernels read: a function of the name
        and of what a caller wrote; see :mod:`accel.ops.fields`. Those of bases hold too. A class
        with a ``__post_init__``, its own or a base's, calls
        :func:`~accel.ops.fields.convert_fields` there.
    """

    def decorate(cls: type[C]) -> type[C]:
        if library:
            cls.library = library
        cls.kind = kind or _WORD.sub("_", cls.__name__).lower()
        has_fields = bool(inspect.get_annotations(cls))  # else the base's methods do, and half of the import's time is saved
        if convert:
            of_bases = [each for each in cls.conversions if each[0] not in convert]
            cls.conversions = (*of_bases, *[(name, *converting(given)) for name, given in convert.items()])
            if not hasattr(cls, "__post_init__"):
                has_fields = True
                cast("Any", cls).__post_init__ = convert_fields
        return dataclass(frozen=True, eq=False, slots=True, init=has_fields, repr=False)(cls)

    return decorate


_WORD = re.compile(r"(?<!^)(?=[A-Z])")


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class FamilyOp(KernelOp[R_co]):
    """An op of a family: its fields are the parameters of a method such as ``device.blas.gemm``, in order, and with their defaults.

    Fields are brought into the form that kernels read when it is made; see :mod:`accel.ops.fields`.

    Parameters
    ----------
    timeout
        Seconds until waiting ends with :class:`~accel.DeadlineExceededError`. A batch or graph has one timeout for all its ops, and rejects this one.
    """

    family: ClassVar[OpFamily | None] = None
    """Set by the :class:`~accel.ops.Family` that has the op."""
    is_sized: ClassVar[bool] = False
    """Whether it is a :class:`SizedOp`; asked for every op, and ``isinstance`` of an abstract class is slow."""

    timeout: float | None = field(default=None, kw_only=True, repr=False)


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class OutOp(FamilyOp[R_co]):
    """An op of a family with one result.

    Parameters
    ----------
    out
        Buffer to write instead of making one.
    """

    out: AccelRef | None = field(default=None, kw_only=True)


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class SizedOp(FamilyOp[R_co], Generic[A_co, R_co]):
    """An op whose results have as many elements as only the device finds out, such as the places of what is not 0.

    Its buffers hold ``size`` elements at most, and the last of its results is how many there are: a 0-d int64. Elements behind them are 0, those that find no
    room are dropped. A batch or graph needs a ``size`` and returns all results. A method of the device returns views of the elements that there are: it
    awaits the op, fetches the number, and raises :class:`InvalidArgumentError` if it is more than ``size``. ``device.run`` returns all results.

    Its type parameters are what a method of the device gives, and what a batch does.

    Parameters
    ----------
    size
        How many elements there is room for; without it, the most that there may be.
    """

    is_sized: ClassVar[bool] = True

    size: int | None = field(default=None, kw_only=True)

    def room(self, most: int) -> int:
        """Return how many elements there is room for, where there may be ``most``.

        Raises
        ------
        InvalidArgumentError
            If ``size`` is not an int of 0 or more.
        """
        if self.size is None:
            return most
        (size,) = as_shape(self.size) if isinstance(self.size, (int, np.integer)) and not isinstance(self.size, bool) else (-1,)
        if size < 0:
            raise InvalidArgumentError(f"size is {self.size!r}", remedy="Give how many elements there is room for, as an int.")
        return size

    @classmethod
    def trimmed(cls, made: Any, count: int) -> A_co:
        """Return what a method of the device gives: the results, of which ``count`` elements are there.

        It is all of ``made`` but the last. Here it is the first: an op with more results overrides it.
        """
        found: A_co = made[0][:count]
        return found


_TOKENS = frozenset((AccelToken, ViewToken))


def with_refs(op: KernelOp[R_co], resolve: Callable[[AccelToken], AccelRef]) -> KernelOp[R_co]:
    """Return the op with every token among its operands turned back into a ref; the op itself where there is none.

    Raises
    ------
    InvalidArgumentError
        If it is no op, one whose fields can change, or a collective, which a world alone sends.
    """
    names = _fields_of(type(op))
    if names is None:
        check_awaited("op", op)
        raise InvalidArgumentError(f"{op!r} is not a KernelOp", remedy="Make an op, such as accel.ops.Gemm(a, b).")
    for name in names:
        value = getattr(op, name)
        # Few have such, and this is on the way of every op.
        if type(value) in _TOKENS or (type(value) is tuple and not _TOKENS.isdisjoint(map(type, value))):
            return _resolved(op, names, resolve)
    return op


@functools.lru_cache(maxsize=1024)
def _fields_of(kind: type) -> tuple[str, ...] | None:
    """Return the names of a class's fields, or ``None`` if it is no op's. A user's op need not be a dataclass if it has no refs."""
    if not issubclass(kind, KernelOp):
        return None
    # A library that is a field is that of each op.
    if not (isinstance(getattr(kind, "library", None), (str, MemberDescriptorType)) and isinstance(getattr(kind, "kind", None), str)):
        raise InvalidArgumentError(
            f"{kind.__name__} does not say its library and kind", remedy='Set `library = "mine"` and `kind = "name"` in the class.'
        )
    if kind.library == "collective":
        raise InvalidArgumentError(
            f"{kind.__name__} is run by all ranks of a world together, and was given to one device",
            op=kind.kind,
            remedy="Call the world's method: await world.barrier().",
        )
    check_frozen(kind)
    return tuple([field.name for field in dataclasses.fields(kind)]) if dataclasses.is_dataclass(kind) else ()


def check_frozen(kind: type[KernelOp[Any]]) -> None:
    """Raise :class:`InvalidArgumentError` if the fields of a class of ops can change while an op is on its way."""
    parameters = getattr(kind, "__dataclass_params__", None)
    if parameters is not None and not parameters.frozen:
        raise InvalidArgumentError(
            f"{kind.__name__} is a dataclass that is not frozen: its fields could change while the op is on its way",
            op=getattr(kind, "kind", None),
            remedy="Declare it with @dataclass(frozen=True).",
        )


def _resolved(op: KernelOp[R_co], names: Iterable[str], resolve: Callable[[AccelToken], AccelRef]) -> KernelOp[R_co]:
    refs: dict[str, Any] = {}
    for name in names:
        value = getattr(op, name)
        if isinstance(value, AccelToken):
            refs[name] = resolve(value)
        elif type(value) is tuple and any(isinstance(each, AccelToken) for each in value):
            refs[name] = tuple([resolve(each) if isinstance(each, AccelToken) else each for each in value])
    return cast("KernelOp[R_co]", dataclasses.replace(cast("Any", op), **refs)) if refs else op


def operand(name: str, value: object, *, ndim: int | None = None) -> AccelRef:
    """Return ``value`` if it is a ref (of ``ndim`` dimensions); else raise what tells the caller the remedy."""
    if not isinstance(value, AccelRef):
        if isinstance(value, AccelToken):
            raise InvalidArgumentError(f"{name} is a token", remedy="Turn it back into a ref first: ref = device.resolve(token).")
        check_awaited(name, value)
        if value is Ellipsis:
            raise InvalidArgumentError(f"{name} is Ellipsis", remedy="Leave it out, or give a ref of the result's shape and dtype.")
        if isinstance(value, (list, tuple)) and any(isinstance(each, AccelRef) for each in value):
            raise InvalidArgumentError(f"{name} is a {type(value).__name__} of refs", remedy="Call it once for each of them.")
        remedy = getattr(type(value), "instead_of_ref", "Put it on the device first: ref = await device.put(array).")
        raise InvalidArgumentError(f"{name} is a {type(value).__name__}, not an AccelRef", remedy=remedy)
    if ndim is not None and len(value.shape) != ndim:
        raise InvalidArgumentError(
            f"{name} has shape {value.shape}; {ndim} dimension(s) are needed", remedy="Put it on the device with as many dimensions."
        )
    return value


def result_in(out: AccelRef | None, shape: Shape, dtype: DType, *, durable: bool = False) -> tuple[tuple[AccelRef, ...], tuple[Spec, ...]]:
    """Return ``(writes, creates)`` of an op with one result: into ``out`` where it is given and fits, else into a new buffer."""
    if durable is not False:
        durable = flag("durable", durable)
    if out is None:
        return (), (Spec(shape, dtype, durable),)
    if type(out) is not AccelRef:
        operand("out", out)
    if durable and not out.durable:
        raise InvalidArgumentError("out is not durable", remedy="Give a durable buffer, or leave out= or durable= out.")
    if out.shape != shape or out.dtype is not dtype:
        raise InvalidArgumentError(
            f"out is {out.dtype.value}{list(out.shape)}, the result is {dtype.value}{list(shape)}",
            remedy="Give a buffer of the result's shape and dtype, or leave out= out.",
        )
    return (out,), ()


def same_dtype(**refs: AccelRef) -> DType:
    """Return the one dtype of all ``refs``; raise if they differ. Nothing is converted silently."""
    dtypes = [ref.dtype for ref in refs.values()]
    if dtypes.count(dtypes[0]) < len(dtypes):
        listing = ", ".join(f"{name} is {ref.dtype.value}" for name, ref in refs.items())
        raise InvalidArgumentError(f"operands differ in dtype: {listing}", remedy="Convert them before they are put on the device.")
    return dtypes[0]


def check_tf32(allowed: bool, dtype: DType) -> None:
    """Refuse to let anything but float32 be rounded to TF32, and what is no bool."""
    if allowed is not False and flag("allow_tf32", allowed) and dtype is not DType.FLOAT32:
        raise InvalidArgumentError(f"allow_tf32 is given for {dtype.value}", remedy="Leave it out: only float32 is ever computed in TF32.")


def not_aliased(out: AccelRef | None, **refs: AccelRef) -> None:
    """Raise if ``out`` shares memory with one of ``refs``: the kernel would read what it has already overwritten."""
    if out is None:
        return
    operand("out", out)
    for name, ref in refs.items():
        if out is ref:
            raise InvalidArgumentError(f"out is {name} itself", remedy="Give another buffer as out=, or leave it out.")
        if out.buffer == ref.buffer and overlap(out, ref):
            raise InvalidArgumentError(f"out overlaps {name}: both are views of one buffer", remedy=_APART)


def in_place_or_apart(out: AccelRef | None, **refs: AccelRef) -> None:
    """Raise if ``out`` shares memory with one of ``refs`` and is not the same part of it: elements would be overwritten before they are read."""
    if out is None:
        return
    for name, ref in refs.items():
        if out is ref or out.buffer != ref.buffer:
            continue
        is_same = out.offset == ref.offset and out.shape == ref.shape and out.dtype is ref.dtype and out.strides == ref.strides
        if not is_same and overlap(out, ref):
            raise InvalidArgumentError(f"out overlaps {name}, and is not the same part of the buffer", remedy=_APART)


_APART = "Give a part that does not overlap, another buffer as out=, or leave it out."


def planned(
    out: AccelRef | None,
    reads: Mapping[str, AccelRef],
    shape: Shape,
    dtype: DType,
    capability: str = "",
    *,
    of: DType | None = None,
    in_place: Collection[str] = (),
    updates: bool = False,
    status: Status | None = None,
) -> Plan:
    """Return the plan of an op with one result, of this shape and dtype.

    Parameters
    ----------
    out
        Where the result is written, if it is no new buffer.
    reads
        What the op reads, by the names of its operands, in the order of its kernel.
    shape, dtype
        Of the result.
    capability, updates, status
        As in :class:`Plan`.
    of
        Element type of the computation, if it is not that of the result.
    in_place
        Those of ``reads`` that ``out`` may be itself. It may overlap no other one.

    Raises
    ------
    InvalidArgumentError
        If ``out`` does not fit.
    """
    if out is None:
        return plan_of((tuple(reads.values()), (), (Spec(shape, dtype),), capability, of or dtype, updates, status))
    writes, creates = result_in(out, shape, dtype)
    for name, ref in reads.items():
        check = in_place_or_apart if name in in_place else not_aliased
        check(out, **{name: ref})
    return plan_of((tuple(reads.values()), writes, creates, capability, of or dtype, updates, status))


def factor(name: str, value: object, dtype: DType) -> complex:
    """Return what elements of ``dtype`` are multiplied by, as a float or, for complex elements, a complex.

    Raises
    ------
    InvalidArgumentError
        If it is no such number, or beyond the range of a float64. Beyond the range of ``dtype`` it is infinite.
    """
    if type(value) is float:
        return value
    result = number(name, value)
    if isinstance(result, complex):
        if dtype.is_complex:
            return result
        raise InvalidArgumentError(f"{name} is {result}, and {dtype.value} elements are real", remedy="Give a real number.")
    try:
        return float(result)
    except OverflowError as error:
        raise InvalidArgumentError(f"{name} is beyond the range of a float64", remedy="Give a number of at most 1.7e308.") from error


def scalar(name: str, value: object) -> complex:
    """Return a scaling factor as a float or a complex.

    Raises
    ------
    InvalidArgumentError
        If it is no number, or beyond the range of a float64.
    """
    if type(value) is float:
        return value
    result = number(name, value)
    return result if isinstance(result, complex) else factor(name, result, DType.FLOAT64)


to_real = Conversion(functools.partial(factor, dtype=DType.FLOAT64), frozenset({float}))


to_scalar = Conversion(scalar, frozenset({float}))


def element(name: str, value: object, dtype: DType) -> np.ndarray[Any, np.dtype[Any]]:
    """Return a number as a 0-d array of ``dtype``. An integer type takes whole numbers in its range, a boolean one 0 and 1; floats round it.

    Raises
    ------
    InvalidArgumentError
        If it is no number, ``dtype`` is no float and cannot hold it, or it is complex and the type is not.
    """
    return converted(name, number(name, value), dtype, to_infinity=True)


def as_shape(shape: int | Iterable[int]) -> Shape:
    """Return ``shape`` as a tuple of non-negative ints; an int alone means one dimension.

    Raises
    ------
    InvalidArgumentError
        If it is not a shape.
    """
    try:
        dimensions = (operator.index(shape),) if not isinstance(shape, Iterable) else tuple(map(operator.index, shape))
    except Exception as error:  # iterating, and asking for an index, may raise anything
        raise InvalidArgumentError(f"{shape!r} is not a shape", remedy="Use an int or a tuple of ints.") from error
    least = min(dimensions, default=1)
    if least < 0:
        raise InvalidArgumentError(
            f"shape {dimensions} has a negative dimension", remedy="Give dimensions of 0 or more; only ref.reshape takes -1."
        )
    return dimensions if least and len(dimensions) <= MOST_DIMENSIONS else counted(dimensions)


to_shape = Conversion(lambda name, value: as_shape(value))


def checked_spec(shape: object, dtype: object, durable: object = False) -> Spec:
    """Return what an op makes, where all comes from the op's maker; raise unless it is a tuple of non-negative ints, a :class:`DType` and a bool."""
    if not isinstance(dtype, DType):
        raise InvalidArgumentError(f"dtype is {dtype!r}", remedy="Give a member of accel.DType; DType.of finds it by name.")
    if not isinstance(shape, tuple):
        raise InvalidArgumentError(f"shape is {shape!r}", remedy="Give a tuple of ints.")
    return Spec(as_shape(shape), dtype, flag("durable", durable))
