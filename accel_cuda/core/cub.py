"""CUB's device-wide algorithms by cuda.compute: built once for each kind of GPU, kept on disk, loaded in a context when they are first needed.

A build takes seconds, off the loop: the library releases the GIL. It needs no GPU; what it makes is a cubin and what describes it.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from accel import BackendUnavailableError, DType, LibraryError
from accel_cuda.core.libraries import INSTALL, VendorLibrary, load_library, load_module, version_of
from accel_cuda.core.memo import Memo
from accel_cuda.core.program_cache import ProgramCache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from accel_cuda.core.context import CudaContext
    from accel_cuda.core.stream import CudaStream

__all__ = ["CUB", "Cub", "RadixSort", "RunningOp"]

CUB = VendorLibrary("nvrtc", "nvidia-cuda-nvrtc", "cuda.compute", "RuntimeError", bindings="cuda-cccl")
"""The compiler and the wheel that has CUB."""

_INCREMENT, _DECREMENT = ctypes.pythonapi.Py_IncRef, ctypes.pythonapi.Py_DecRef
_REPORT = "This is an error in accel_cuda: report it."
_OPERATORS = {"cumsum": "PLUS", "cumprod": "MULTIPLIES"}


class RadixSort(NamedTuple):
    """A stable sort of unsigned keys in rising order, by some of their low bits; with values of 32 bits, or without.

    Attributes
    ----------
    keys
        UINT32 or UINT64.
    has_values
        Whether there are values.
    """

    keys: DType
    has_values: bool


class RunningOp(NamedTuple):
    """Inclusive sums or products of an array; float16 and bfloat16 are accumulated in float32. It may be in place.

    Attributes
    ----------
    kind
        Of the op.
    dtype
        Of the elements.
    """

    kind: Literal["cumsum", "cumprod"]
    dtype: DType


Algorithm = RadixSort | RunningOp


class _Memory:
    """Device memory, as cuda.compute takes it."""

    __slots__ = ("address", "dtype", "nbytes")

    def __init__(self, address: int, dtype: np.dtype[Any], nbytes: int = 0) -> None:
        self.address = address
        self.dtype = dtype
        self.nbytes = nbytes

    def data_ptr(self) -> int:
        """Return the address."""
        return self.address

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (1,), "typestr": self.dtype.str, "strides": None, "version": 3, "data": (self.address, False)}


_BYTE, _VALUE = np.dtype(np.uint8), np.dtype(np.uint32)


class _Tool:
    """One algorithm in one context. Its object holds the arguments of a call, so one thread at a time calls it."""

    __slots__ = ("is_warm", "lock", "run")

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run
        self.lock = threading.Lock()
        self.is_warm = False


class Cub:
    """The algorithms of one context. Any thread may call it.

    Parameters
    ----------
    context
        The context.
    """

    def __init__(self, context: CudaContext) -> None:
        self._context = context
        self._tools: dict[Algorithm, _Tool] = {}
        self._sizes: Memo[tuple[Algorithm, int, int], int] = Memo()
        self._lock = threading.Lock()  # of opening and loading
        self._compute: Any = None
        self._kept: ProgramCache | None = None
        self._versions: tuple[Any, ...] = ()

    def is_ready(self, algorithm: Algorithm) -> bool:
        """Return whether an algorithm was run here before, so that :meth:`run` does not block. Quick."""
        tool = self._tools.get(algorithm)
        return tool is not None and tool.is_warm

    def prepare(self, algorithms: Iterable[Algorithm]) -> None:
        """Build algorithms, side by side, and load them. May block for seconds."""
        wanted = [each for each in algorithms if each not in self._tools]
        if wanted:
            self._open()
            with ThreadPoolExecutor(len(wanted), thread_name_prefix="accel-cub") as workers:
                for algorithm, blob in zip(wanted, workers.map(self._build, wanted), strict=True):
                    self._load(algorithm, blob)

    def scratch_nbytes(self, algorithm: Algorithm, count: int, bits: int = 0) -> int | None:
        """Return how many bytes an algorithm works in, for ``count`` elements, or ``None`` before :meth:`measure`. Quick."""
        return self._sizes.get((algorithm, _rounded(count), bits))

    def measure(self, algorithm: Algorithm, count: int, bits: int = 0) -> None:
        """See that :meth:`scratch_nbytes` knows. May block for seconds."""
        most = _rounded(count)
        if (algorithm, most, bits) not in self._sizes:
            tool = self._tool(algorithm)
            with self._context.section, tool.lock:
                nbytes = int(tool.run(temp_storage=None, stream=None, **_arguments(self._compute, algorithm, most, bits, (1, 1, 1, 1))))
            self._sizes[algorithm, most, bits] = nbytes

    def run(
        self,
        stream: CudaStream,
        algorithm: Algorithm,
        scratch: int,
        count: int,
        x: int,
        y: int,
        *,
        values: int = 0,
        sorted_values: int = 0,
        bits: int = 0,
    ) -> None:
        """Enqueue an algorithm.

        Parameters
        ----------
        stream
            Where it is enqueued.
        algorithm
            Which; it was measured for ``count`` and ``bits``.
        scratch
            Address of what it works in.
        count
            How many elements, at least one.
        x, y
            Addresses of the elements, or keys, and of the results. A sort leaves its input as it is.
        values, sorted_values
            Addresses of what goes with the keys of a sort.
        bits
            By how many low bits of a key is sorted.
        """
        tool = self._tool(algorithm)
        nbytes = self.scratch_nbytes(algorithm, count, bits)
        if nbytes is None:  # it was forgotten since
            self.measure(algorithm, count, bits)
            nbytes = self._sizes[algorithm, _rounded(count), bits]
        context = stream.ready()
        try:
            with context.section, tool.lock:
                arguments = _arguments(self._compute, algorithm, count, bits, (x, y, values, sorted_values))
                tool.run(temp_storage=_Memory(scratch, _BYTE, nbytes), stream=stream, **arguments)
        except RuntimeError as error:
            fault = stream.find_fault("cuda.compute")
            if fault is not None:
                raise fault from error
            raise LibraryError(f"cuda.compute: {error}", library="cuda.compute", device=context.description.spec) from error
        tool.is_warm = True

    def close(self) -> None:
        """Unload everything. May block; the streams have ended, and the context is healthy."""
        with self._context.section:
            tools = list(self._tools.values())
            self._tools.clear()
            while tools:
                _DECREMENT(ctypes.py_object(tools.pop().run))

    def _tool(self, algorithm: Algorithm) -> _Tool:
        tool = self._tools.get(algorithm)
        if tool is None:
            self._open()
            self._load(algorithm, self._build(algorithm))
            tool = self._tools[algorithm]
        return tool

    def _open(self) -> None:
        with self._lock:
            if self._compute is not None:
                return
            load_library("nvJitLink", "nvidia-nvjitlink")
            load_library("cudart", "nvidia-cuda-runtime")
            compute = CUB.load()
            try:
                compute.make_radix_sort  # noqa: B018 - the module imports without its extension, and has nothing then
            except AttributeError as error:
                raise BackendUnavailableError(f"cuda-cccl has no build for this Python and CUDA: {error}", remedy=INSTALL) from error
            nvrtc = load_module("cuda.bindings.nvrtc", "cuda-bindings")
            self._versions = version_of("cuda-cccl"), nvrtc.nvrtcVersion()[1:], self._context.driver.version, self._context.capability
            self._kept = ProgramCache(load_module("cuda.core.utils", "cuda-core"))
            self._compute = compute

    def _build(self, algorithm: Algorithm, *, is_fresh: bool = False) -> bytes:
        """Return an algorithm as bytes: from the disk if it is there, unless that was of no use."""
        kept = self._kept
        assert kept is not None
        name = repr((type(algorithm).__name__, *algorithm, *self._versions))
        key = hashlib.sha256(name.encode(), usedforsecurity=False).digest()
        found = kept.get(key)
        if found is not None and not is_fresh:
            return found[0]
        major, minor = self._context.capability
        try:
            blob: bytes = _make(self._compute, algorithm, 10 * major + minor).serialize()
        except RuntimeError as error:
            raise LibraryError(f"cuda.compute does not build {name}: {error}", library="cuda.compute", remedy=_REPORT) from error
        kept.put(key, blob, name.encode())
        return blob

    def _load(self, algorithm: Algorithm, blob: bytes) -> None:
        with self._lock, self._context.section:
            if algorithm in self._tools:
                return
            try:
                run = self._compute.deserialize(blob)
            except ValueError:  # what was kept is not what was put there
                run = self._compute.deserialize(self._build(algorithm, is_fresh=True))
            _INCREMENT(ctypes.py_object(run))  # its end unloads the cubin, which of a dead context must not be: only close() lets it end
            self._tools[algorithm] = _Tool(run)


def _rounded(count: int) -> int:
    """Return a number of elements that is not smaller, and not much larger: sizes are measured for few numbers."""
    step = 1 << max(count.bit_length() - 4, 0)
    return -(-count // step) * step


def _accumulator(dtype: DType) -> np.dtype[Any]:
    return DType.FLOAT32.numpy if dtype in (DType.FLOAT16, DType.BFLOAT16) else dtype.numpy


def _neutral(algorithm: RunningOp) -> np.ndarray[Any, Any]:
    return np.full(1, int(algorithm.kind == "cumprod"), _accumulator(algorithm.dtype))


def _make(compute: Any, algorithm: Algorithm, capability: int) -> Any:
    """Build an algorithm. An address of a proxy is 0, which for the values of a sort means that there are none."""
    if isinstance(algorithm, RunningOp):
        x = _Memory(1, algorithm.dtype.numpy)
        operator = getattr(compute.OpKind, _OPERATORS[algorithm.kind])
        return compute.make_inclusive_scan(d_in=x, d_out=x, op=operator, init_value=_neutral(algorithm), compute_capability=capability)
    keys, values = _Memory(1, algorithm.keys.numpy), _Memory(1, _VALUE) if algorithm.has_values else None
    return compute.make_radix_sort(
        d_in_keys=keys,
        d_out_keys=keys,
        d_in_values=values,
        d_out_values=values,
        order=compute.SortOrder.ASCENDING,
        compute_capability=capability,
    )


def _arguments(compute: Any, algorithm: Algorithm, count: int, bits: int, addresses: tuple[int, int, int, int]) -> dict[str, Any]:
    x, y, values, sorted_values = addresses
    if isinstance(algorithm, RunningOp):
        dtype = algorithm.dtype.numpy
        operator = getattr(compute.OpKind, _OPERATORS[algorithm.kind])
        return {
            "d_in": _Memory(x, dtype),
            "d_out": _Memory(y, dtype),
            "op": operator,
            "init_value": _neutral(algorithm),
            "num_items": count,
        }
    keys, has_values = algorithm.keys.numpy, algorithm.has_values
    return {
        "d_in_keys": _Memory(x, keys),
        "d_out_keys": _Memory(y, keys),
        "d_in_values": _Memory(values, _VALUE) if has_values else None,
        "d_out_values": _Memory(sorted_values, _VALUE) if has_values else None,
        "num_items": count,
        "begin_bit": 0,
        "end_bit": bits,
    }
