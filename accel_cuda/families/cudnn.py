"""cuDNN in one context: plans of graphs, which a helper process builds, and a handle for each stream.

A build holds the GIL for up to a second, so it happens in another process: see :mod:`accel_cuda.families.cudnn_builder`. It is kept on disk. To load one here
holds the GIL for some 5 ms.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import select
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from accel import BackendUnavailableError, LibraryError
from accel_cuda.core.libraries import VendorLibrary, load_library, load_module, version_of
from accel_cuda.core.plan_cache import PlanCache
from accel_cuda.core.program_cache import ProgramCache
from accel_cuda.errors import error_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from accel_cuda.core.context import CudaContext
    from accel_cuda.core.stream import CudaStream

__all__ = ["CUDNN", "Cudnn", "Plan", "Room", "Work"]

CUDNN = VendorLibrary(
    "cudnn", "nvidia-cudnn-cu13", "cudnn", "cudnnGraphNotSupportedError", "nvidia-cudnn-frontend", "dnn", "_compiled_module"
)

_KEPT = 256
_PARTS = ("graph", "ops", "cnn", "adv", "heuristic", "engines_precompiled", "engines_runtime_compiled")
_BUILDER = Path(__file__).with_name("cudnn_builder.py")
_LONGEST_BUILD = 300.0
_ALIGNMENT = 256
_TENSOR = 16
"""What addresses in plans are multiples of."""
_RESULT = 4


class Work(Protocol):
    """What a plan is made for, and found by. Ops that are alike have one."""

    def __hash__(self) -> int:
        """Return its hash."""

    @property
    def is_for_cudnn(self) -> bool:
        """Whether cuDNN is asked for a plan."""

    @property
    def sizes(self) -> Mapping[int, int]:
        """Number of a tensor in the plan -> its bytes."""

    @property
    def own_nbytes(self) -> int:
        """Bytes of tensors that are made for the plan."""

    def request(self) -> dict[str, Any]:
        """Return the request to the helper process."""


class Room:
    """Memory that an op works in, taken piece by piece; from 0, what tells how much that is."""

    __slots__ = ("end",)

    def __init__(self, address: int = 0) -> None:
        self.end = address

    def take(self, nbytes: int) -> int:
        """Return where the next piece begins."""
        begin = self.end
        self.end = begin + -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return begin


class Plan:
    """A plan that was loaded.

    Attributes
    ----------
    graph : pygraph
        The frontend's object; ``None`` once the plan is given back.
    operands : tuple of int
        Which tensors it takes, in order.
    pointers : ctypes array
        Where their addresses are put, by the one thread that uses the plan.
    workspace : int
        Bytes that it works in.
    """

    __slots__ = ("graph", "operands", "pointers", "workspace")

    def __init__(self, graph: Any) -> None:
        graph._prepare_variant_pack_template()  # noqa: SLF001  # the frontend's calls without dicts, in all releases that the extra allows
        self.graph: Any = graph
        self.operands: tuple[int, ...] = tuple(graph._get_variant_pack_uids_sorted())  # noqa: SLF001  # see above
        self.pointers: Any = (ctypes.c_void_p * len(self.operands))()
        self.workspace = int(graph.get_workspace_size())


class _Builder:
    """The helper process. It is started when it is first needed, and ended with this object.

    Parameters
    ----------
    libraries
        Paths of what it loads; cuDNN's is the last.
    """

    def __init__(self, libraries: tuple[str, ...]) -> None:
        # It needs no device, and finds the modules where this process does.
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_BUILDER), *libraries],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # what interrupts a terminal's processes is this process's to answer
        )
        self.close = weakref.finalize(self, _end, self._process, os.getpid())

    @property
    def is_alive(self) -> bool:
        """Whether it takes requests."""
        return self.close.alive and self._process.poll() is None

    def build(self, request: Mapping[str, Any]) -> bytes | str:
        """Return a plan, or why there is none. May block for seconds.

        Raises
        ------
        LibraryError
            If the process ended, or takes too long; it is of no further use.
        """
        write, read = self._process.stdin, self._process.stdout
        assert write is not None
        assert read is not None
        try:
            write.write(json.dumps(request).encode() + b"\n")
            write.flush()
            poll = select.poll()
            poll.register(read, select.POLLIN)
            is_there = poll.poll(1e3 * _LONGEST_BUILD)
            line = read.readline() if is_there else b""
            reply: dict[str, Any] = (
                json.loads(line) if line else {"failure": "it ended" if is_there else f"no answer after {_LONGEST_BUILD:.0f} s"}
            )
            plan = read.read(reply.get("nbytes", 0))
        except (OSError, ValueError) as error:
            reply = {"failure": error}
        if "failure" in reply:
            self.close()
            raise LibraryError(
                f"the helper process that builds plans of cuDNN failed: {reply['failure']}",
                library="cudnn",
                retryable=True,
                remedy="Its standard error has the reason; see whether `python -c 'import cudnn'` works.",
            )
        return str(reply["error"]) if "error" in reply else plan


def _end(process: subprocess.Popen[bytes], parent: int) -> None:
    """End the process; it holds nothing that a kill could lose. In a forked child, the process is not this one's to end."""
    if os.getpid() == parent:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


class Cudnn:
    """cuDNN in one context. Any thread may call it. To make it may block.

    Parameters
    ----------
    context
        The context.

    Attributes
    ----------
    plans : PlanCache
        What a plan is made for -> the plan, or why cuDNN has none.

    Raises
    ------
    BackendUnavailableError
        If cuDNN or its frontend is not installed.
    """

    def __init__(self, context: CudaContext) -> None:
        self._context = context
        path = load_library(CUDNN.name, CUDNN.wheel, CUDNN.extra)
        # The frontend looks for the runtime, and cuDNN for the compiler, by their names alone.
        self._paths = load_library("cudart", "nvidia-cuda-runtime"), load_library("nvrtc", "nvidia-cuda-nvrtc"), path
        _load_parts(Path(path).parent)
        # The frontend holds the GIL in all calls; these release it.
        self._library = ctypes.CDLL(path)
        self._module: Any = CUDNN.load()
        if not hasattr(getattr(self._module, "pygraph", None), "_execute_with_raw_ptrs"):
            raise BackendUnavailableError(
                f"{CUDNN.bindings} {version_of(CUDNN.bindings)} is not one that accel calls: 1.22 to 1.26",
                remedy="In a checkout, run: pip install '.[dnn]'",
            )
        self._module._set_dlhandle_cudnn(self._library._handle)  # noqa: SLF001  # what the package does at its import
        self._unsupported: Any = self._module.cudnnGraphNotSupportedError
        self._handles: dict[int, int] = {}
        with context.section:
            # One to load plans by, and one for a stream that is captured: to make one then may not be allowed.
            self._handle, self._spare = self._created(), [self._created()]
            self._device = str(self._module.create_device_properties(context.description.index).serialize())
        self._cache = ProgramCache(load_module("cuda.core.utils", "cuda-core"))
        self._version = [version_of(CUDNN.bindings), self._module.backend_version(), hashlib.sha256(_BUILDER.read_bytes()).hexdigest()]
        self._builder: _Builder | None = None
        self.plans: PlanCache[Work, Plan | str] = PlanCache(self._make, self._destroy, _KEPT)

    # -- handles

    def has_handle(self, stream: CudaStream) -> bool:
        """Return whether a stream has its handle."""
        return stream.handle in self._handles

    def prepare(self, stream: CudaStream) -> int:
        """Return the handle of a stream; make it if it is not there. May block then."""
        found = self._handles.get(stream.handle)
        if found is None:
            with self._context.section:
                try:
                    found = self._spare.pop()
                except IndexError:  # another thread may have taken the last one just now
                    found = self._created()
                stream.at_close(lambda: self._take_back(stream.handle, found))
                self._check(self._library.cudnnSetStream(ctypes.c_void_p(found), ctypes.c_void_p(stream.handle)), "cudnnSetStream")
                if not self._spare and not stream.is_capturing:
                    self._spare.append(self._created())
            self._handles[stream.handle] = found
        return found

    def _created(self) -> int:
        handle = ctypes.c_void_p()
        self._check(self._library.cudnnCreate(ctypes.byref(handle)), "cudnnCreate")
        return handle.value or 0

    def _take_back(self, stream: int, handle: int) -> None:
        self._handles.pop(stream, None)
        self._spare.append(handle)

    def _check(self, status: int, call: str) -> None:
        if status:
            raise error_of(status, call, library="cudnn", device=self._context.description.spec)

    # -- plans

    def run(
        self, stream: CudaStream, work: Work, tensors: Mapping[int, int], room: Room, otherwise: Callable[[CudaStream, str], object]
    ) -> None:
        """Enqueue a plan, or what stands for it where cuDNN has none. May block where the plan is new.

        Parameters
        ----------
        tensors
            Number of a tensor in the plan -> address. What begins between two multiples of 16 bytes is copied.
        room
            Where the plan works, and such copies are.
        otherwise
            Called with the stream and the reason if cuDNN has no plan. The plan counts as new until this has run once: it may load a kernel.
        """
        handle = self.prepare(stream)
        with stream.ready().section, self.plans.use(work, stream) as plan:
            if isinstance(plan, str):
                otherwise(stream, plan)
                return
            pointers, workspace, copied = plan.pointers, room.take(plan.workspace), 0
            for place, uid in enumerate(plan.operands):
                address = tensors[uid]
                if address % _TENSOR:
                    copy = room.take(work.sizes[uid])
                    if uid == _RESULT:
                        copied = copy
                    else:
                        stream.copy(copy, address, work.sizes[uid])
                    address = copy
                pointers[place] = address
            try:
                plan.graph._execute_with_raw_ptrs(ctypes.addressof(pointers), len(pointers), workspace, handle)  # noqa: SLF001  # see Plan
            except (RuntimeError, self._unsupported) as error:
                raise stream.find_fault("cudnn execute") or self._failure("cuDNN refused to run a plan", error) from error
            if copied:
                stream.copy(tensors[_RESULT], copied, work.sizes[_RESULT])

    def _failure(self, what: str, reason: object) -> LibraryError:
        return LibraryError(f"{what}: {reason}", library="cudnn", device=self._context.description.spec)

    def _make(self, work: Work) -> Plan | str:
        request = {**work.request(), "device": self._device, "sm_version": 10 * self._context.capability[0] + self._context.capability[1]}
        key = b"cudnn-" + hashlib.sha256(json.dumps([request, *self._version], sort_keys=True).encode(), usedforsecurity=False).digest()
        kept = self._cache.get(key)
        if kept is not None:
            try:
                return self._loaded(kept[0])
            except (RuntimeError, ValueError, self._unsupported):  # what the cache has is not what was put there
                pass
        built = self._built(request)
        if isinstance(built, str):
            return built.strip().partition("\n")[0]
        self._cache.put(key, built, b"plan")
        try:
            return self._loaded(built)
        except (RuntimeError, ValueError, self._unsupported) as error:
            raise self._failure("cuDNN refused to load a plan", error) from error

    def _built(self, request: Mapping[str, Any]) -> bytes | str:
        """One thread at a time makes plans, so one asks the helper process."""
        if self._builder is None or not self._builder.is_alive:
            self._builder = _Builder(self._paths)
        return self._builder.build(request)

    def _loaded(self, plan: bytes) -> Plan:
        with self._context.section:
            graph = self._module.pygraph(handle=self._handle)
            graph.deserialize(self._handle, bytearray(plan))
            return Plan(graph)

    def _destroy(self, plan: Plan | str) -> None:
        if isinstance(plan, Plan):
            with self._context.section:
                plan.graph = None

    def close(self) -> None:
        """Give everything back. May block; the streams have ended, and the context is healthy."""
        if self._builder is not None:
            self._builder.close()
        self.plans.close()
        with self._context.section:
            for handle in (self._handle, *self._spare):
                self._library.cudnnDestroy(ctypes.c_void_p(handle))


_LOADING = threading.Lock()


def _load_parts(folder: Path) -> None:
    """Load what cuDNN would load at its first use, while it holds the GIL for a tenth of a second."""
    loader: Any = ctypes.CDLL(None).dlopen
    loader.restype = ctypes.c_void_p
    with _LOADING:
        for part in _PARTS:
            # One that is not there is none that this release of cuDNN has, or needs.
            loader(str(folder / f"libcudnn_{part}.so.9").encode(), os.RTLD_NOW)
