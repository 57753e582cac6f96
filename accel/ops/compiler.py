"""Kernels that users write: what names one, what its parameters take, and the op that launches it."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Protocol, TypeAlias, runtime_checkable

from accel.errors import InvalidArgumentError
from accel.ops.base import FamilyOp, Plan, op, operand
from accel.ops.fields import set_fields
from accel.ops.parameters import Parameter, packed, parse_parameter
from accel.ref import AccelRef, AccelToken
from accel.values import check_count, check_flag

__all__ = ["CompiledKernel", "CompilesKernels", "Dimensions", "KernelLayout", "Launch", "kernel_of", "loaded_kernel"]

Dimensions: TypeAlias = int | tuple[int, ...]
"""A number of blocks or threads: one int, or up to three for x, y and z."""

_POINTER = 8
_SHAPES = 256
_AXES = "xyz"


@dataclass(frozen=True, slots=True)
class KernelLayout:
    """What a device's compiler says of a kernel.

    Parameters
    ----------
    sizes
        Bytes of each parameter.
    max_threads
        The most threads of a block.
    max_block, max_grid
        The most threads of a block, and blocks of a grid, in x, y and z.
    max_shared
        The most bytes of dynamic shared memory that a block can have.
    """

    sizes: tuple[int, ...]
    max_threads: int
    max_block: tuple[int, int, int]
    max_grid: tuple[int, int, int]
    max_shared: int


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel of a program: everything that makes it, and nothing that is on a device. Picklable, and valid in every generation.

    Parameters
    ----------
    source
        The program's text.
    name
        Of the kernel; for one made from a template an expression, such as ``"axpy<float>"``.
    options
        What the compiler was given.
    headers
        Name and text of each header that the program includes.
    parameters
        Types of the kernel's parameters, or ``None`` where the caller gave none.
    layout
        What the compiler found; ``None`` where nothing has compiled it yet.
    code
        Compiled code, which is loaded in the place of a source.
    """

    source: str
    name: str
    options: tuple[str, ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    parameters: tuple[str, ...] | None = None
    layout: KernelLayout | None = None
    code: bytes = field(default=b"", repr=False)

    @cached_property
    def key(self) -> str:
        """A digest of the program and the kernel's name; kernels with one key have the same code."""
        digest = hashlib.sha256(usedforsecurity=False)
        flat = (text for pair in self.headers for text in pair)
        texts = (self.name, self.source, str(len(self.options)), *self.options, *flat)
        for data in (*[text.encode("utf-8", "surrogatepass") for text in texts], self.code):
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
        return digest.hexdigest()

    @cached_property
    def types(self) -> tuple[Parameter, ...] | None:
        """What ``parameters`` say, read.

        Raises
        ------
        InvalidArgumentError
            If one is not a type.
        """
        return None if self.parameters is None else tuple([parse_parameter(each) for each in self.parameters])

    @cached_property
    def shapes(self) -> dict[tuple[Any, Any, int], tuple[int, ...]]:
        """Grids, blocks and shared memory that it was launched with; see :class:`Launch`."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def with_layout(self, layout: KernelLayout) -> CompiledKernel:
        """Return the same kernel with what a compiler said of it.

        Raises
        ------
        InvalidArgumentError
            If ``parameters`` are not what the compiler found.
        """
        types = self.types
        if types is not None and len(types) != len(layout.sizes):
            raise InvalidArgumentError(
                f"{self.name} takes {len(layout.sizes)} parameter(s), and {len(types)} types were given",
                remedy="Give the type of each parameter.",
            )
        for i, (wanted, size) in enumerate(zip(types or (), layout.sizes, strict=False)):
            if wanted.size != size:
                raise InvalidArgumentError(
                    f"parameter {i} of {self.name} has {size} byte(s), and {wanted} has {wanted.size}",
                    remedy="Give the type that the source has.",
                )
        return replace(self, layout=layout)


@runtime_checkable
class CompilesKernels(Protocol):
    """What an :class:`~accel.AccelDevice` has besides if it compiles kernels that users write. It then offers ``launch`` among ``kernels("compiler")``."""

    def compile(self, kernel: CompiledKernel) -> KernelLayout:
        """Compile a kernel and load it, and return what its launches need to know. May block; called on any threads, several at once.

        Raises
        ------
        CompileError
            If the program does not compile.
        InvalidArgumentError
            If an option cannot be honoured.
        ClosedError
            After the context was closed.
        """


def kernel_of(
    source: str,
    name: str,
    options: Iterable[str] = (),
    headers: Mapping[str, str] | None = None,
    parameters: Iterable[str] | None = None,
) -> CompiledKernel:
    """Return the kernel that the arguments name, checked as far as that needs no compiler.

    Raises
    ------
    InvalidArgumentError
        If an argument is not of the right kind.
    """
    if not isinstance(source, str) or not source.strip():
        raise InvalidArgumentError(
            f"source is {type(source).__name__ if not isinstance(source, str) else 'empty'}", remedy="Give the program's text."
        )
    if not isinstance(name, str) or not name.strip():
        raise InvalidArgumentError(f"name is {name!r}", remedy="Give the kernel's name, or an expression such as 'axpy<float>'.")
    headers = {} if headers is None else headers
    if not isinstance(headers, Mapping) or not all(isinstance(part, str) for pair in headers.items() for part in pair):
        raise InvalidArgumentError("headers is not a mapping of names to texts", remedy="Give {'name.h': text}.")
    kernel = CompiledKernel(
        source,
        name.strip(),
        _texts("options", options),
        tuple(sorted(headers.items())),
        None if parameters is None else _texts("parameters", parameters),
    )
    kernel.types  # noqa: B018 - it raises where a type is none
    return kernel


def loaded_kernel(code: bytes | str, name: str, parameters: Iterable[str] | None = None) -> CompiledKernel:
    """Return the kernel of compiled code that the arguments name, checked as far as that needs no device.

    Raises
    ------
    InvalidArgumentError
        If an argument is not of the right kind.
    """
    if not isinstance(code, (bytes, bytearray, memoryview, str)):
        raise InvalidArgumentError(f"code is a {type(code).__name__}", remedy="Give the bytes of a cubin or fatbin, or the text of PTX.")
    data = code.encode() if isinstance(code, str) else bytes(code)
    if not data.strip():
        raise InvalidArgumentError("code is empty", remedy="Give the bytes of a cubin or fatbin, or the text of PTX.")
    if not isinstance(name, str) or not name.strip():
        raise InvalidArgumentError(f"name is {name!r}", remedy="Give the kernel's name as the code has it.")
    kernel = CompiledKernel("", name.strip(), parameters=None if parameters is None else _texts("parameters", parameters), code=data)
    kernel.types  # noqa: B018 - it raises where a type is none
    return kernel


def _texts(name: str, values: Iterable[str]) -> tuple[str, ...]:
    # A string is a sequence of strings too, and never what was meant.
    try:
        texts = None if isinstance(values, str) else tuple(values)
    except TypeError:  # not iterable
        texts = None
    if texts is None or not all(isinstance(each, str) and each for each in texts):
        raise InvalidArgumentError(f"{name} is {values!r}", remedy=f"Give a list of strings as {name}.")
    return texts


@op("compiler")
class Launch(FamilyOp[Any]):
    """Launch a kernel that a user wrote. The result is what it writes: one ref, a tuple of several, or ``None``.

    Parameters
    ----------
    kernel
        What to launch.
    grid, block
        Blocks of the grid, and threads of a block.
    args
        One for each parameter of the kernel: a ref where it takes a pointer, else a number. With ``kernel.parameters`` numbers are converted, and
        ``const`` pointers are only read. Without, refs count as read and written, and a number must have the parameter's size:
        ``np.float32(0.5)``; a Python int is an int64, a float a float64, a bool one byte.
    shared_bytes
        Dynamic shared memory of each block.
    cooperative
        Whether all blocks run at the same time, so that they can wait for each other. A grid that is too large for that is refused when it is enqueued.
    """

    kernel: CompiledKernel
    grid: Dimensions
    block: Dimensions
    args: tuple[Any, ...] = ()
    shared_bytes: int = 0
    cooperative: bool = False
    shape: tuple[int, ...] = field(default=(), init=False, repr=False)
    """Grid and block, three numbers each, and ``shared_bytes``; set by :meth:`plan`."""
    slots: tuple[int | None, ...] = field(default=(), init=False, repr=False)
    """The arguments as 8-byte words, ``None`` for the address of the next ref; set by :meth:`plan`."""

    def plan(self) -> Plan:
        kernel, args = self.kernel, self.args
        if not isinstance(kernel, CompiledKernel):
            raise InvalidArgumentError(f"kernel is a {type(kernel).__name__}", remedy="Give what device.compiler.compile returned.")
        if not isinstance(args, tuple):
            raise InvalidArgumentError(f"args is a {type(args).__name__}", remedy="Give a tuple with one argument for each parameter.")
        check_flag("cooperative", self.cooperative)
        types, layout = kernel.types, kernel.layout
        sizes = None if layout is None else layout.sizes
        count = len(types) if types is not None else len(args) if sizes is None else len(sizes)
        if len(args) != count:
            raise InvalidArgumentError(
                f"{kernel.name} takes {count} argument(s), and {len(args)} were given", remedy="Give one for each parameter."
            )
        writes: dict[AccelRef, None] = {}
        words: list[int | None] = []
        for i, value in enumerate(args):
            if isinstance(value, AccelRef):
                wanted = None if types is None else types[i]
                if wanted is None or not (wanted.is_pointer and wanted.dtype is value.dtype):
                    self._check_ref(i, value, wanted, sizes)
                if wanted is None or not wanted.is_const:
                    writes[value] = None
                words.append(None)
            else:
                words += self._words(i, value, types, sizes)
        # The op is frozen for its users; what its kernel needs is worked out once, here.
        set_fields(self, shape=self._shape(), slots=tuple(words))
        return Plan(tuple([value for value in args if isinstance(value, AccelRef)]), tuple(writes), (), updates=True)

    def _check_ref(self, i: int, ref: AccelRef, wanted: Parameter | None, sizes: tuple[int, ...] | None) -> None:
        """Raise unless the parameter is a pointer to such elements."""
        name = f"argument {i} of {self.kernel.name}"
        if wanted is None:
            if sizes is not None and sizes[i] != _POINTER:
                raise InvalidArgumentError(f"{name} is a ref, and the parameter has {sizes[i]} byte(s)", remedy="Give a number.")
        elif not wanted.is_pointer:
            raise InvalidArgumentError(f"{name} is a ref, and the parameter is {wanted}", remedy="Give a number.")
        elif wanted.dtype is not None and wanted.dtype is not ref.dtype:
            raise InvalidArgumentError(
                f"{name} has {ref.dtype.value} elements, and the parameter is {wanted}", remedy="Give a ref of the parameter's dtype."
            )

    def _words(self, i: int, value: object, types: tuple[Parameter, ...] | None, sizes: tuple[int, ...] | None) -> Iterable[int]:
        name = f"argument {i} of {self.kernel.name}"
        if isinstance(value, AccelToken):
            operand(name, value)
        if types is not None:
            if types[i].is_pointer:
                operand(name, value)
            return types[i].words(name, value)
        return packed(name, value, None if sizes is None else sizes[i])

    def _shape(self) -> tuple[int, ...]:
        """Return grid, block and shared memory, checked; what a kernel was launched with before is known to be right."""
        kernel, grid, block, shared = self.kernel, self.grid, self.block, self.shared_bytes
        # Equal keys must be equally good: 1.0 is 1, and no number of blocks.
        is_plain = type(grid) is int and type(block) is int and type(shared) is int
        known = kernel.shapes.get((grid, block, shared)) if is_plain else None
        if known is not None:
            return known
        check_count("shared_bytes", shared, 0, remedy="Give a number of bytes.")
        shape = (*_three("grid", grid), *_three("block", block), shared)
        if kernel.layout is not None:
            _within(kernel.name, shape, kernel.layout)
        if is_plain and len(kernel.shapes) < _SHAPES:
            kernel.shapes[grid, block, shared] = shape
        return shape


def _three(name: str, value: Dimensions) -> tuple[int, int, int]:
    """Return x, y and z."""
    remedy = "Give an int, or up to three of them, each at least 1."
    try:
        numbers = [operator.index(each) for each in value] if isinstance(value, Iterable) else [operator.index(value)]
    except TypeError:
        raise InvalidArgumentError(f"{name} is {value!r}", remedy=remedy) from None
    if not 1 <= len(numbers) <= 3 or min(numbers) < 1:
        raise InvalidArgumentError(f"{name} is {value!r}", remedy=remedy)
    x, y, z = (*numbers, 1, 1)[:3]
    return x, y, z


def _within(name: str, shape: tuple[int, ...], layout: KernelLayout) -> None:
    """Raise unless the device can launch so much at once."""
    limits = (*layout.max_grid, *layout.max_block)
    for axis, (number, limit) in enumerate(zip(shape, limits, strict=False)):
        if number > limit:
            what = f"{('grid', 'block')[axis // 3]} has {number} in {_AXES[axis % 3]}"
            raise InvalidArgumentError(f"the {what}, and the device takes {limit}", remedy="Use a smaller one.")
    if (threads := shape[3] * shape[4] * shape[5]) > layout.max_threads:
        raise InvalidArgumentError(
            f"a block of {threads} threads is more than the {layout.max_threads} that {name} can have on this device",
            remedy="Use a smaller block.",
        )
    if shape[6] > layout.max_shared:
        raise InvalidArgumentError(
            f"shared_bytes is {shape[6]}, and {name} can have {layout.max_shared} bytes a block on this device", remedy="Use less."
        )
