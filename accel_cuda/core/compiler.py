"""NVRTC: from CUDA C++ to a cubin for the device's own architecture, kept on disk between processes."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from accel import CompileError, InvalidArgumentError
from accel_cuda.core.libraries import load_library, load_module
from accel_cuda.core.program_cache import ProgramCache
from accel_cuda.errors import error_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Cubin", "Nvrtc", "architecture", "check_options", "compile_source"]

_ARCHITECTURE = "The architecture is the device's own: leave the option out."
_LINKED = "A program is compiled as a whole, and to machine code: leave the option out."
_FILES = "Nothing but the program is read or written: leave the option out."
_REFUSED = {
    r"-arch|--gpu-architecture|--gpu-code": _ARCHITECTURE,
    r"-dc|--device-c|-rdc|--relocatable-device-code|-ewp|--extensible-whole-program": _LINKED,
    r"-dlto|--dlink-time-opt|-gen-opt-lto|--gen-opt-lto|-fdevice-syntax-only|--fdevice-syntax-only": _LINKED,
    r"-pch|--pch|-create-pch|--create-pch|-use-pch|--use-pch|-pch-dir|--pch-dir|-time|--time|-fdevice-time-trace|--fdevice-time-trace": _FILES,
    r"-optf|--options-file|-use-bundled-headers|--use-bundled-headers": _FILES,
}
_OPTION = re.compile(r"(?P<name>-{1,2}[^=\s]*)")
# Options that make the compiler read files whose contents no key can cover.
_READS = re.compile(r"-I|--include-path|-include|--pre-include|-split-compile-extended")
_CUDA_HEADER = re.compile(r"^[ \t]*#[ \t]*include[ \t]*[<\"]", re.MULTILINE)
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_NAME_MAP = "__nv_name_map"


class Cubin(NamedTuple):
    """A compiled program.

    Attributes
    ----------
    code
        The cubin.
    symbols
        Name of each kernel that was asked for, as the code has it.
    is_cached
        Whether it was compiled before.
    """

    code: bytes
    symbols: tuple[str, ...]
    is_cached: bool


class Nvrtc:
    """The compiler for one architecture. Its methods may block, and may be called on any threads.

    Parameters
    ----------
    arch
        Such as ``"sm_90"``.
    driver_version
        Version of the driver that will load the code.
    """

    def __init__(self, arch: str, driver_version: int) -> None:
        self._arch = arch
        self._driver_version = driver_version
        self._cache: ProgramCache | None = None
        self._loading = threading.Lock()
        self._nvrtc: Any = None
        self._core: Any = None
        self._utils: Any = None
        self._headers: str | None = None

    def cubin(
        self,
        source: str,
        names: Sequence[str] = (),
        options: Sequence[str] = (),
        headers: Sequence[tuple[str, str]] = (),
        *,
        is_fresh: bool = False,
    ) -> Cubin:
        """Return a compiled program, from the cache if it is there.

        Parameters
        ----------
        source, names, options, headers
            What to compile; see :class:`accel.ops.CompiledKernel`.
        is_fresh
            Compile it even if the cache has it: that was of no use.

        Raises
        ------
        CompileError
            With the compiler's log.
        InvalidArgumentError
            If an option cannot be honoured.
        BackendUnavailableError
            If NVRTC cannot be loaded.
        """
        check_options(options)
        self._load()
        every = [f"-arch={self._arch}", "--no-source-include", *options]
        if self._headers and (_CUDA_HEADER.search(source) or headers):
            every.append(f"-I{self._headers}")
        cache = None if any(_READS.match(option) for option in options) else self._cache
        key = self._key(source, names, every, headers)
        found = None if cache is None or is_fresh else cache.get(key)
        if found is not None:
            code, notes = found
            return Cubin(code, tuple(json.loads(notes)), is_cached=True)
        made = self._compile(source, names, every, dict(headers))
        if cache is not None:
            cache.put(key, made.code, json.dumps(made.symbols).encode())
        return made

    def _load(self) -> None:
        with self._loading:  # the import of cuda.core is not safe in several threads at once
            if self._cache is not None:
                return
            load_library("nvrtc", "nvidia-cuda-nvrtc")
            self._nvrtc = load_module("cuda.bindings.nvrtc", "cuda-bindings")
            self._core = load_module("cuda.core", "cuda-core")
            self._utils = load_module("cuda.core.utils", "cuda-core")
            self._headers = _toolkit_headers()
            self._cache = ProgramCache(self._utils)

    def _key(self, source: str, names: Sequence[str], options: Sequence[str], headers: Sequence[tuple[str, str]]) -> bytes:
        """Return what the program is kept by: cuda-core's digest of source, names, architecture and compiler, and what that does not know of."""
        rest = (
            *self._nvrtc.nvrtcVersion()[1:],
            self._driver_version,
            list(options),
            [list(pair) for pair in headers],
            _stamp(self._headers),
        )
        key: bytes = self._utils.make_program_cache_key(
            code=source,
            code_type="c++",
            options=self._core.ProgramOptions(arch=self._arch, name=_file_name(names)),
            target_type="cubin",
            name_expressions=tuple(names),
            extra_digest=hashlib.sha256(json.dumps(rest).encode(), usedforsecurity=False).digest(),
        )
        return key

    def _compile(self, source: str, names: Sequence[str], options: Sequence[str], headers: Mapping[str, str]) -> Cubin:
        nvrtc = self._nvrtc
        texts, titles = [text.encode() for text in headers.values()], [title.encode() for title in headers]
        status, program = nvrtc.nvrtcCreateProgram(source.encode(), _file_name(names).encode(), len(texts), texts, titles)
        _check(status, "nvrtcCreateProgram")
        try:
            for name in names:
                _check(nvrtc.nvrtcAddNameExpression(program, name.encode())[0], "nvrtcAddNameExpression")
            flags = [option.encode() for option in options]
            (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
            if int(status):
                raise _failure(int(status), self._log(program), names)
            symbols = []
            for name in names:
                status, symbol = nvrtc.nvrtcGetLoweredName(program, name.encode())
                _check(status, "nvrtcGetLoweredName")
                symbols.append(symbol.decode())
            status, size = nvrtc.nvrtcGetCUBINSize(program)
            _check(status, "nvrtcGetCUBINSize")
            code = b" " * size
            _check(nvrtc.nvrtcGetCUBIN(program, code)[0], "nvrtcGetCUBIN")
            return Cubin(code, tuple(symbols), is_cached=False)
        finally:
            nvrtc.nvrtcDestroyProgram(program)

    def _log(self, program: Any) -> str:
        status, size = self._nvrtc.nvrtcGetProgramLogSize(program)
        if int(status) or size <= 1:
            return ""
        log = b" " * size
        self._nvrtc.nvrtcGetProgramLog(program, log)
        text: str = log.rstrip(b"\0 \n").decode(errors="replace")
        return text


def architecture(major: int, minor: int) -> str:
    """Return what the compiler calls a compute capability; 9.0 with the instructions that no later one has, such as products beside the warps."""
    return f"sm_{major}{minor}{'a' if (major, minor) == (9, 0) else ''}"


def compile_source(source: str, arch: str) -> bytes:
    """Compile ``source`` for ``arch`` and return the cubin; see :meth:`Nvrtc.cubin`. May block for seconds."""
    return Nvrtc(arch, 0).cubin(source).code


def check_options(options: Sequence[str]) -> None:
    """Refuse options that cannot be honoured; what NVRTC does not know, it refuses itself.

    Raises
    ------
    InvalidArgumentError
    """
    for option in options:
        match = _OPTION.match(option)
        name = match["name"] if match else ""
        for pattern, remedy in _REFUSED.items():
            if re.fullmatch(pattern, name):
                raise InvalidArgumentError(f"the option {option!r} is not offered", remedy=remedy)


def _failure(status: int, log: str, names: Sequence[str]) -> Exception:
    lines = [line for line in log.splitlines() if "error" in line]
    # A source that does not compile has no names either; the source's own errors say more.
    lines.sort(key=lambda line: line.startswith(_NAME_MAP))
    first = lines[0].strip() if lines else "the compiler gave no reason"
    found = error_of(status, "nvrtcCompileProgram", library="nvrtc")
    if not isinstance(found, CompileError):
        return found
    if first.startswith(_NAME_MAP):
        first = f"the program has no kernel {', '.join(names)}: {first.partition('error: ')[2] or first}"
    return CompileError(first, log=log, code=found.code, library="nvrtc")


def _check(status: Any, call: str) -> None:
    if int(status):
        raise error_of(int(status), call, library="nvrtc")


def _file_name(names: Sequence[str]) -> str:
    """Return what the log calls the source: the first kernel's name, which for a template is an expression."""
    found = _IDENTIFIER.search(names[0]) if names else None
    return f"{found[0] if found else 'program'}.cu"


def _toolkit_headers() -> str | None:
    """Return where ``cuda_fp16.h`` and its like are, or ``None`` if they are not installed."""
    pathfinder = load_module("cuda.pathfinder", "cuda-pathfinder")
    found: str | None = pathfinder.find_nvidia_header_directory("cudart")
    return found


def _stamp(folder: str | None) -> str:
    """Return what tells one release of the toolkit's headers from another."""
    if folder is None:
        return ""
    try:
        with open(f"{folder}/cuda.h", encoding="utf-8", errors="replace") as header:
            version = re.search(r"#define\s+CUDA_VERSION\s+(\d+)", header.read(200_000))
    except OSError:
        return folder
    return f"{folder} {version[1] if version else ''}"
