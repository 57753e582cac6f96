"""The modules of one context: programs that were compiled and loaded into it."""

from __future__ import annotations

import contextlib
import struct
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from accel import ClosedError, CompileError, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from accel_cuda.core.compiler import Nvrtc
    from accel_cuda.core.context import CudaContext

__all__ = ["Modules", "image_of"]

T = TypeVar("T")

_LOG = 1 << 16
_REMEDY = "Build the code for this device's architecture, or give PTX that is no newer than the driver; .log has what the driver says."

_ELF, _FATBIN = b"\x7fELF", b"\x50\xed\x55\xba"
_ELF64 = 2
# Where the header of a 64-bit ELF file says where the tables of segments and of sections are, and how large.
_HEADER = struct.Struct("<32xQQ4xHHHHH")
_SECTION = struct.Struct("<4xI16xQQ")
# Code and data, symbols, strings, and relocations.
_IN_FILE = frozenset({1, 2, 3, 4, 9})
_FAT_HEADER = struct.Struct("<4xHHQ")
_WHAT = "Give the bytes of a whole cubin or fatbin, as nvcc and NVRTC make them, or the text of PTX."


class Modules:
    """The modules that were loaded into a context. They stay loaded until it is closed: no kernel of one can be running then.

    Parameters
    ----------
    context, nvrtc
        Where they are loaded, and what compiles them.
    """

    def __init__(self, context: CudaContext, nvrtc: Nvrtc) -> None:
        self._context = context
        self._nvrtc = nvrtc
        self._lock = threading.Lock()
        self._modules: list[Any] = []
        self._users = 0
        self._after: Callable[[], None] | None = None

    def load(
        self,
        take: Callable[[Any, tuple[str, ...]], T],
        source: str,
        names: Sequence[str] = (),
        options: Sequence[str] = (),
        headers: Sequence[tuple[str, str]] = (),
    ) -> T:
        """Compile a program, load it, and return what ``take`` makes of the module and the symbols of ``names``. May block for seconds.

        ``take`` is called with the context current; meanwhile nothing is unloaded.

        Raises
        ------
        AccelError
            It does not compile, or cannot be loaded.
        ClosedError
            After :meth:`close`.
        """
        cubin = self._nvrtc.cubin(source, names, options, headers)
        context = self._context
        with self._in_use(), context.section:
            try:
                module = context.call("cuModuleLoadData", cubin.code)
            except CompileError:
                if not cubin.is_cached:
                    raise
                # What the cache has is not what was put there.
                cubin = self._nvrtc.cubin(source, names, options, headers, is_fresh=True)
                module = context.call("cuModuleLoadData", cubin.code)
            self._modules.append(module)
            return take(module, cubin.symbols)

    def load_code(self, take: Callable[[Any, tuple[str, ...]], T], code: bytes, names: Sequence[str]) -> T:
        """Load code that was compiled elsewhere, and return what ``take`` makes of it, as :meth:`load` does. May block for seconds: the driver compiles PTX.

        Raises
        ------
        InvalidArgumentError
            It is none of them, or not whole.
        CompileError
            The driver cannot load it.
        ClosedError
            After :meth:`close`.
        """
        image, context, log = image_of(code), self._context, bytearray(_LOG)
        options = context.driver.CUjit_option
        keys = [options.CU_JIT_ERROR_LOG_BUFFER, options.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES]
        with self._in_use(), context.section:
            try:
                module = context.call("cuModuleLoadDataEx", image, len(keys), keys, [log, len(log)])
            except CompileError as error:
                said = log.partition(b"\0")[0].decode(errors="replace").strip()
                message = f"{error.message}: {said.splitlines()[0]}" if said else error.message
                raise error.clone(message=message, log=said, remedy=_REMEDY) from error
            self._modules.append(module)
            return take(module, tuple(names))

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        with self._lock:
            if self._context.fault is not None:
                raise self._context.fault.clone()
            if self._after is not None:
                raise ClosedError("the context is closed", device=self._context.description.spec)
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
            self._unload()

    def close(self, after: Callable[[], None]) -> None:
        """Unload everything and call ``after``; if something is being loaded this moment, once that has ended."""
        with self._lock:
            self._after = after
        self._unload()

    def _unload(self) -> None:
        with self._lock:
            if self._after is None or self._users or self._context.fault is not None:
                return
            after, self._after = self._after, _nothing
            modules, self._modules = self._modules, []
        with self._context.section:
            for module in modules:
                self._context.driver.ignore("cuModuleUnload", module)
        after()


def _nothing() -> None:
    """Stand for what was done."""


def image_of(code: bytes) -> bytes:
    """Return what the driver is given: a cubin, a fatbin, or PTX with a 0 behind it.

    The driver is given an address and no length: code that is cut off would have it read what is behind.

    Raises
    ------
    InvalidArgumentError
        If it is none of them, or ends before it should.
    """
    if code.startswith(_ELF):
        if len(code) < _HEADER.size or code[4] != _ELF64 or _end_of_elf(code) > len(code):
            raise InvalidArgumentError(f"the cubin of {len(code)} bytes is not whole", remedy=_WHAT)
        return code
    if code.startswith(_FATBIN):
        _, header, nbytes = _FAT_HEADER.unpack_from(code.ljust(_FAT_HEADER.size, b"\0"))
        if header < _FAT_HEADER.size or header + nbytes > len(code):
            raise InvalidArgumentError(f"the fatbin of {len(code)} bytes is not whole", remedy=_WHAT)
        return code
    text = code.rstrip(b"\0")
    if b".version" not in text or b"\0" in text:
        raise InvalidArgumentError("code is neither a cubin nor a fatbin nor PTX", remedy=_WHAT)
    return text + b"\0"


def _end_of_elf(code: bytes) -> int:
    """Return where the last of what an ELF file has ends, as far as its tables are there. NVIDIA's kinds of sections need not be in the file."""
    segments, sections, _, segment, segment_count, section, section_count = _HEADER.unpack_from(code)
    end: int = max(segments + segment * segment_count, sections + section * section_count)
    if end > len(code) or (section_count and section < _SECTION.size):
        return len(code) + 1
    for i in range(section_count):
        kind, start, nbytes = _SECTION.unpack_from(code, sections + i * section)
        if kind in _IN_FILE:
            end = max(end, start + nbytes)
    return end
