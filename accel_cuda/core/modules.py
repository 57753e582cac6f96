"""The modules of one context: programs that were compiled and loaded into it."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from accel import ClosedError, CompileError
from accel_cuda.core.images import image_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from accel_cuda.core.compiler import Nvrtc
    from accel_cuda.core.context import CudaContext

__all__ = ["Modules"]

T = TypeVar("T")

_LOG = 1 << 16
_REMEDY = "Build the code for this device's architecture, or give PTX that is no newer than the driver; .log has what the driver says."


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
