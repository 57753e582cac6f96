"""Matrix products of any rank, with what usually follows them: a bias, an activation, another dtype."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, TypeAlias

from accel.dtype import DType, DTypeLike
from accel.enums import Transpose
from accel.errors import InvalidArgumentError, UnsupportedError
from accel.ops.base import OutOp, Plan, Shape, Spec, check_tf32, op, operand, plan_of, result_in
from accel.ops.blas_operands import TRANSPOSES, TransposeField, no_product
from accel.ops.family import Family
from accel.ops.fields import convert_fields, flag, set_fields, to_dtype, unless_none
from accel.ops.namespace import M, OpNamespace, method
from accel.ref import AccelRef, StridedRef, overlap
from accel.views import broadcast

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["FAMILY", "Activation", "LinalgOps", "Matmul", "MatmulMemory"]


Activation: TypeAlias = Literal["relu", "gelu"]

_NONE = Transpose.NONE
_E4M3, _E5M2 = DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2
_FLOAT8 = frozenset({_E4M3, _E5M2})
_FROM_FLOAT8 = (DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32, _E4M3)
_INTEGERS = (DType.INT16, DType.INT32, DType.INT64, DType.UINT8, DType.UINT16, DType.UINT32, DType.UINT64)
_RESULTS: Mapping[tuple[DType, DType], tuple[DType, ...]] = {
    (DType.FLOAT16, DType.FLOAT16): (DType.FLOAT16, DType.FLOAT32),
    (DType.BFLOAT16, DType.BFLOAT16): (DType.BFLOAT16, DType.FLOAT32),
    **{(dtype, dtype): (dtype,) for dtype in (DType.FLOAT32, DType.FLOAT64, DType.COMPLEX64, DType.COMPLEX128, *_INTEGERS)},
    (DType.INT8, DType.INT8): (DType.INT32,),
    (_E4M3, _E4M3): _FROM_FLOAT8,
    (_E4M3, _E5M2): (*_FROM_FLOAT8, _E5M2),
    (_E5M2, _E4M3): (*_FROM_FLOAT8, _E5M2),
}
"""Dtypes of a and b -> those of the result; the first one is what ``out_dtype=None`` means."""

_FUSED = frozenset({DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64, *_FLOAT8})
"""Dtypes of a whose products take a bias and an activation."""


_REFS = ("a", "b", "bias", "scale_a", "scale_b", "scale_out", "out", "aux", "amax")
_NO_OTHERS = (None,) * 9


class MatmulMemory(NamedTuple):
    """Addresses of one product's operands and results; 0 where there is none."""

    a: int
    b: int
    bias: int
    scale_a: int
    scale_b: int
    scale_out: int
    out: int
    aux: int
    amax: int


_OUT = MatmulMemory._fields.index("out")


def _turned(ref: AccelRef, transpose: TransposeField) -> tuple[AccelRef, TransposeField]:
    """Return matrices of which a view has the last two dimensions exchanged, as they are in memory, and how to transpose them then."""
    if isinstance(ref, StridedRef) and len(ref.shape) > 1 and transpose is not Transpose.CONJUGATE:
        *others, rows, columns = range(len(ref.shape))
        turned = ref.transpose((*others, columns, rows))
        if not turned.is_strided:
            return turned, Transpose.TRANSPOSE if transpose is _NONE else _NONE
    return ref, transpose


@op("linalg", convert={"out_dtype": unless_none(to_dtype), **TRANSPOSES})
class Matmul(OutOp):
    """``activation(op(a) @ op(b) + bias)``, with numpy's rules for ranks and broadcasting.

    Parameters
    ----------
    a, b
        (..., m, k) and (..., k, n), after ``op``; the dimensions before the last two are broadcast. A vector as ``a`` is one row, as ``b`` one column, and
        the result lacks that dimension. Dtypes are float16, bfloat16, float32, float64, complex64, complex128, integers, or two of float8_e4m3fn and
        float8_e5m2 (not e5m2 twice). Sums are float32 at least; of int8 they are int32. Integers wrap around.
    out
        Buffer to write: the result's shape and dtype.
    bias
        (n,): is added to each row. Its dtype is the result's; of a product of float8 whose result is float32 or float8 it is bfloat16.
    activation
        ``"relu"``, which keeps NaN, or ``"gelu"``, which is the tanh form. Like ``bias`` it is for floats, float8 among them.
    aux
        Buffer of the result's shape and dtype that takes what goes into the GELU: its gradient needs that. Not for float8, and not for one column.
    out_dtype
        float32 for 16-bit floats; float16, float32 or float8 for float8. ``None`` means the operands' dtype, int32 for int8, bfloat16 for float8.
    scale_a, scale_b
        float32 of one element, for float8: what ``a`` and ``b`` are multiplied by.
    scale_out
        The same for a float8 result, which is multiplied by it last. Results beyond the range of float8 become its largest number.
    amax
        float32 of one element, for a float8 result: takes the largest absolute value before ``scale_out``. ``b`` is one matrix then.
    transpose_a, transpose_b
        What ``op`` does to the last two dimensions.
    allow_tf32
        As in :class:`~accel.ops.Gemm`.
    autotune
        Whether the first product of its kind is computed by several algorithms, and the quickest of them kept: that takes some hundred times as long, off the
        loop. A device without a choice of algorithms has nothing to do for it.
    """

    a: AccelRef
    b: AccelRef
    _: KW_ONLY
    bias: AccelRef | None = None
    activation: Activation | None = None
    aux: AccelRef | None = None
    out_dtype: DTypeLike | None = None
    scale_a: AccelRef | None = None
    scale_b: AccelRef | None = None
    scale_out: AccelRef | None = None
    amax: AccelRef | None = None
    transpose_a: TransposeField = _NONE
    transpose_b: TransposeField = _NONE
    allow_tf32: bool = False
    autotune: bool = False

    def __post_init__(self) -> None:
        """Convert ``out_dtype`` and the transposes."""
        if not (self.transpose_a is _NONE is self.transpose_b and self.out_dtype is None):  # mostly they are
            convert_fields(self)
        if getattr(self.a, "is_strided", False) or getattr(self.b, "is_strided", False):
            a, transpose_a = _turned(self.a, self.transpose_a)
            b, transpose_b = _turned(self.b, self.transpose_b)
            set_fields(self, a=a, b=b, transpose_a=transpose_a, transpose_b=transpose_b)

    def sizes(self) -> tuple[Shape, int, int, int]:
        """Return the broadcast dimensions, and m, n and k; a vector is a matrix of one row or column."""
        a, b = self.a.shape, self.b.shape
        m, k = (1, a[0]) if len(a) == 1 else a[-2:] if self.transpose_a is _NONE else a[:-3:-1]
        k_b, n = (b[0], 1) if len(b) == 1 else b[-2:] if self.transpose_b is _NONE else b[:-3:-1]
        if k != k_b:
            raise no_product(a, b, k, k_b)
        stack = a[:-2]
        return stack if stack == b[:-2] else broadcast(stack, b[:-2]), m, n, k

    def result_type(self) -> DType:
        """Return the dtype of the result."""
        a, b = self.a.dtype, self.b.dtype
        possible = _RESULTS.get((a, b))
        if possible is None:
            raise UnsupportedError(
                f"matmul of {a.value} and {b.value} is not offered",
                remedy="Convert them with elementwise.cast: to one dtype of floats, complex numbers or integers, or to float8.",
            )
        if self.out_dtype is None:
            return possible[0]
        if self.out_dtype not in possible:
            raise InvalidArgumentError(
                f"out_dtype is {DType.of(self.out_dtype).value}, and the operands are {a.value} and {b.value}",
                remedy=f"Use {', '.join(each.value for each in possible)}.",
            )
        return DType.of(self.out_dtype)

    def bias_type(self) -> DType:
        """Return the dtype of a bias."""
        result = self.result_type()
        return DType.BFLOAT16 if self.a.dtype in _FLOAT8 and (result is DType.FLOAT32 or result in _FLOAT8) else result

    def plan(self) -> Plan:
        a, b = self.a, self.b
        if type(a) is not AccelRef or type(b) is not AccelRef or not a.shape or not b.shape:  # nearly always they are
            self._check_operands()
        if not (self.transpose_a is _NONE is self.transpose_b and self.allow_tf32 is False is self.autotune):
            self._check_options()
        batch, m, n, k = self.sizes()
        dtype = self.result_type()
        shape = (*batch, m, n) if len(a.shape) > 1 < len(b.shape) else (*batch, *((m,) * (len(a.shape) > 1)), *((n,) * (len(b.shape) > 1)))
        others = (self.bias, self.activation, self.aux, self.scale_a, self.scale_b, self.scale_out, self.amax, self.out, self.out_dtype)
        if others == _NO_OTHERS:  # mostly there are none
            return plan_of(((a, b), (), (Spec(shape, dtype),), "", dtype, False, None))
        self._check_epilogue(shape, dtype, n, k)
        self._check_scales(dtype)
        creates = result_in(self.out, shape, dtype)[1]
        reads = (a, b, *[ref for ref in (self.bias, self.scale_a, self.scale_b, self.scale_out) if ref is not None])
        writes = tuple([ref for ref in (self.out, self.aux, self.amax) if ref is not None])
        if writes:
            self._check_overlap()
        return Plan(reads, writes, creates, dtype=dtype)

    def result(self, refs: tuple[AccelRef, ...]) -> AccelRef:
        """Return the product: what else is written, the caller has given."""
        return refs[0] if self.out is not None else refs[-1]

    def memory(self, inputs: Sequence[int], outputs: Sequence[int]) -> MatmulMemory:
        """Return which of the addresses that a kernel is given is what."""
        if len(inputs) == 2 and self.aux is None and self.amax is None:
            return MatmulMemory(inputs[0], inputs[1], 0, 0, 0, 0, outputs[0], 0, 0)
        addresses = iter((*inputs, *outputs))  # behind the results, a kernel has memory to work in
        given = [0 if getattr(self, name) is None else next(addresses) for name in MatmulMemory._fields]
        if self.out is None:
            given[_OUT] = next(addresses)  # what the plan creates comes behind what it writes
        return MatmulMemory(*given)

    def _check_operands(self) -> None:
        for name, ref in (("a", self.a), ("b", self.b)):
            if not operand(name, ref).shape:
                raise InvalidArgumentError(
                    f"{name} has no dimensions", remedy="Give a vector or a matrix; elementwise.binary multiplies numbers."
                )

    def _check_options(self) -> None:
        """See that transposes are of matrices, that TF32 is allowed for what it is offered for, and that flags are flags."""
        for name, ref, transpose in (("a", self.a, self.transpose_a), ("b", self.b, self.transpose_b)):
            if len(ref.shape) == 1 and transpose is not _NONE:
                raise InvalidArgumentError(f"transpose_{name} is given for a vector", remedy="Leave it out.")
        check_tf32(self.allow_tf32, self.a.dtype)
        flag("autotune", self.autotune)

    def _check_overlap(self) -> None:
        """See that nothing is written over what is read, or written twice."""
        refs = {name: ref for name in _REFS if (ref := getattr(self, name)) is not None}
        for name in ("out", "aux", "amax"):
            for other, each in refs.items():
                if (ref := refs.get(name)) is not None and name != other and ref.buffer == each.buffer and overlap(ref, each):
                    raise InvalidArgumentError(f"{name} overlaps {other}", remedy="Give another buffer, or a part that does not overlap.")

    def _check_epilogue(self, shape: Shape, dtype: DType, n: int, k: int) -> None:
        """See that bias, activation and ``aux`` fit the product."""
        if self.activation not in (None, "relu", "gelu"):
            raise InvalidArgumentError(f"activation is {self.activation!r}", remedy="Use 'relu', 'gelu' (in its tanh form) or None.")
        fused = [name for name in ("bias", "activation", "aux") if getattr(self, name) is not None]
        if fused and self.a.dtype not in _FUSED:
            raise UnsupportedError(
                f"{fused[0]} is not offered for {self.a.dtype.value} matrices",
                remedy="Use elementwise.binary and elementwise.unary on the product.",
            )
        if k == 0 and (self.bias is not None or self.aux is not None):
            raise InvalidArgumentError(f"{fused[0]} is given, and the sums are of no products", remedy="Leave empty buffers out.")
        if self.bias is not None:
            bias, wanted = operand("bias", self.bias), self.bias_type()
            if bias.shape != (n,) or bias.dtype is not wanted:
                raise InvalidArgumentError(
                    f"bias is {bias.dtype.value}{list(bias.shape)}, and the product takes {wanted.value}{[n]}",
                    remedy="Give one element for each column of the product.",
                )
        if self.aux is None:
            return
        if self.activation != "gelu" or self.a.dtype in _FLOAT8:
            raise InvalidArgumentError(
                "aux takes what goes into the GELU of a product of floats of 16 bits or more",
                remedy="Leave it out: the gradient of a ReLU needs its result only.",
            )
        aux = operand("aux", self.aux)
        if n == 1:
            raise InvalidArgumentError(
                "aux is given for a product of one column", remedy="Use elementwise.unary('gelu_tanh', x) on the product."
            )
        if aux.shape != shape or aux.dtype is not dtype:
            raise InvalidArgumentError(
                f"aux is {aux.dtype.value}{list(aux.shape)}, and the result {dtype.value}{list(shape)}",
                remedy="Give a buffer like the result.",
            )

    def _check_scales(self, dtype: DType) -> None:
        """See that scales, and the largest absolute value, are those of float8."""
        for name in ("scale_a", "scale_b", "scale_out", "amax"):
            if (value := getattr(self, name)) is None:
                continue
            ref = operand(name, value)
            if (self.a.dtype if name in ("scale_a", "scale_b") else dtype) not in _FLOAT8:
                whose = "operands" if name in ("scale_a", "scale_b") else "results"
                raise InvalidArgumentError(f"{name} is for {whose} of float8", remedy="Leave it out; blas.gemm has alpha.")
            if ref.dtype is not DType.FLOAT32 or ref.size != 1:
                raise InvalidArgumentError(f"{name} is {ref.dtype.value}{list(ref.shape)}", remedy="Give float32 of one element.")
        if self.amax is not None and (len(self.b.shape) > 2 or (len(self.a.shape) > 2 and self.transpose_a is not _NONE)):
            raise InvalidArgumentError("amax is given for several products", remedy="Give one matrix as b, and do not transpose a.")


class LinalgOps(OpNamespace[M]):
    """Products of matrices with what follows them. Nothing is converted silently: the operands' dtypes decide what is computed."""

    __slots__ = ()

    library: ClassVar = "linalg"
    aliases: ClassVar = {"linear": ".matmul(x, w, bias=b, transpose_b=True)", "addmm": ".matmul(x, y, bias=b)"}

    matmul = method(Matmul)


FAMILY = Family(LinalgOps)
