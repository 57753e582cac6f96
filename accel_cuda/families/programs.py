"""The backend's own kernels: their programs, and those that are loaded in one context. They are compiled when they are first needed, off the loop."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from typing import TYPE_CHECKING, Any

from accel import UnsupportedError
from accel.enums import CAPABILITIES
from accel_cuda.core.driver import Handle
from accel_cuda.core.family import Source
from accel_cuda.families import kernels
from accel_cuda.families.kernels import CODES
from accel_cuda.families.parts import PARTS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from accel_cuda.core.context import CudaContext
    from accel_cuda.core.modules import Modules

__all__ = ["PROGRAMS", "Programs", "program_of", "source_of"]

_COMPILERS = 16
_REPORT = "This is an error in accel_cuda: report it."
_SOURCES = (Source("memory", lambda code: ("memory.cu", "")), *(source for part in PARTS.values() for source in part.programs))
_PROGRAM_OF_WORD = {word: source.name for source in _SOURCES for word in source.functions}


def _codes(source: Source) -> tuple[str, ...]:
    if not source.capabilities:
        return ("",)
    offered = [dtypes for name, dtypes in CAPABILITIES.items() if name.startswith(source.capabilities)]
    return tuple(code for dtype, code in CODES.items() if any(dtype in dtypes for dtypes in offered))


PROGRAMS: Mapping[str, tuple[Source, str]] = {
    "_".join(filter(None, (source.name, code))): (source, code) for source in _SOURCES for code in _codes(source)
}
"""Name of a program -> its source, and the code of its dtype. The first is of no family: what any stream may need."""


def program_of(function: str) -> str:
    """Return which of :data:`PROGRAMS` has a function: ``unary_f32`` has ``unary_relu_f32``. The first, where no name tells."""
    words = function.split("_")
    pairs = (f"{first}_{second}" for i, first in enumerate(words) for second in words[i + 1 :])
    names = (*pairs, *words, *(_PROGRAM_OF_WORD.get(word, "") for word in words))
    return next((name for name in names if name in PROGRAMS), next(iter(PROGRAMS)))


def source_of(program: str) -> str:
    """Return the whole source of one of :data:`PROGRAMS`."""
    source, code = PROGRAMS[program]
    *files, instances = source.text(code)
    folder = resources.files(kernels)
    return "\n".join((*((folder / file).read_text() for file in ("common.cuh", *files)), instances, ""))


class Programs(dict[str, Handle]):
    """The backend's own kernels that are loaded: name -> handle of the CUfunction. To look another one up loads its program, which may take seconds.

    A name that none of them has raises :class:`~accel.UnsupportedError`, and compiles at most the one program that it would be in.

    Parameters
    ----------
    context, modules
        Where they are loaded.

    Attributes
    ----------
    missing : set of str
        Those of :data:`PROGRAMS` that are not loaded.
    """

    def __init__(self, context: CudaContext, modules: Modules) -> None:
        super().__init__()
        self._context = context
        self._modules = modules
        self.missing = set(PROGRAMS)
        self._locks = {program: threading.Lock() for program in PROGRAMS}

    def __missing__(self, name: str) -> Handle:
        program = program_of(name)
        self.load(program)
        function = self.get(name)
        if function is None:
            raise UnsupportedError(f"there is no kernel {name!r} in the program {program!r}", library="driver", remedy=_REPORT)
        return function

    def load(self, program: str) -> None:
        """Compile and load one of :data:`PROGRAMS`, unless that was done before.

        Every function is loaded with it: the first launch of one that is not may wait for the whole device.

        Raises
        ------
        UnsupportedError
            If there is no such program.
        AccelError
            If it does not compile, or cannot be loaded.
        """
        lock = self._locks.get(program)
        if lock is None:
            raise UnsupportedError(f"there is no program {program!r}", library="driver", remedy=_REPORT)
        with lock:
            if program in self.missing:
                self.update(self._modules.load(self._functions_of, source_of(program)))
                self.missing.discard(program)

    def made(self, name: str, source: Callable[[], str]) -> Handle:
        """Return a kernel of which there is no program: it is compiled from ``source()`` the first time. May block.

        Raises
        ------
        AccelError
            If it does not compile, or cannot be loaded.
        """
        function = self.get(name)
        if function is None:
            with self._locks.setdefault(name, threading.Lock()):
                if name not in self:
                    self.update(self._modules.load(self._functions_of, source()))
                function = self[name]
        return function

    def _functions_of(self, module: Any, symbols: tuple[str, ...]) -> dict[str, Handle]:
        context, functions = self._context, {}
        driver = context.driver
        count = int(context.call("cuModuleGetFunctionCount", module))
        for function in context.call("cuModuleEnumerateFunctions", count, module):
            context.call("cuFuncLoad", function)
            name = context.call("cuFuncGetName", function).decode()
            if name.startswith("attention"):
                limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                context.call("cuFuncSetAttribute", function, limit, self._context.shared_limit)
            functions[name] = Handle(int(function))
        return functions

    def prepare(self, sources: tuple[Source, ...]) -> None:
        """Load the programs of ``sources``, side by side, but those that are loaded on demand."""
        wanted = [program for program, (source, _) in PROGRAMS.items() if source in sources and not source.on_demand]
        missing = [program for program in wanted if program in self.missing]
        if missing:
            with ThreadPoolExecutor(min(len(missing), _COMPILERS), thread_name_prefix="accel-nvrtc") as workers:
                list(workers.map(self.load, missing))
