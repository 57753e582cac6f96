"""Stand-ins for the driver, a context, and libraries of NVIDIA's, for tests of the CUDA backend without a GPU."""

from __future__ import annotations

import sys
from collections import deque
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from accel.ref import AccelRef
from accel_cuda.errors import error_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from accel import AccelError, DType
    from accel.memory import HostArena

__all__ = ["Context", "Driver", "FakeLibrary", "FakeLibraryError", "Names", "Numbers", "Structure", "ref"]


class Structure:
    """Any of the driver's structures and enums."""

    CU_STREAM_CAPTURE_MODE_RELAXED = 2
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3
    CU_STREAM_NON_BLOCKING = 1
    CU_EVENT_DISABLE_TIMING, CU_EVENT_BLOCKING_SYNC = 2, 1


class Driver:
    """Answers what it is told to."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {"cuStreamCreate": 77, "cuMemCreate": 5, "cuStreamEndCapture": 88}
        self.fails: dict[str, int] = {}
        self.called: list[tuple[Any, ...]] = []
        self.while_recording: Callable[[], object] = lambda: None
        self.hot = SimpleNamespace(
            launch=None,
            event_create=lambda handle, flags: 0,
            event_record=self.record,
            event_query=self.hot_call("query"),
            wait_event=self.wait_event,
            copy_from_host=self.hot_call("copy in"),
            copy_to_host=self.hot_call("copy out"),
            graph_launch=self.hot_call("graph"),
            fill={1: self.taken("fill")},
            copy=self.taken("copy"),
        )
        self.query = self.hot.event_query
        self.depth = 0
        self.waited: list[tuple[int, int]] = []

    def hot_call(self, name: str) -> Callable[..., int]:
        """Return a call that takes down whether it was made in the section."""

        def call(*_: Any) -> int:
            self.called.append((name, self.depth))
            return self.fails.get(name, 0)

        return call

    def taken(self, name: str) -> Callable[..., int]:
        """Return a call that takes down its arguments."""

        def call(*arguments: Any) -> int:
            self.called.append((name, *[getattr(each, "value", each) for each in arguments]))
            return 0

        return call

    def record(self, event: Any, stream: Any) -> int:
        self.while_recording()
        return 0

    def wait_event(self, stream: Any, event: Any, flags: int) -> int:
        self.waited.append((stream.value, self.depth))
        return 0

    def call(self, name: str, *arguments: Any) -> Any:
        self.called.append((name, *arguments))
        if name in self.fails:
            raise error_of(self.fails[name], name)
        return self.answers.get(name, 1)

    def answer(self, name: str, *arguments: Any) -> tuple[int, Any]:
        self.called.append((name, *arguments))
        return self.fails.get(name, 0), self.answers.get(name, 1)

    def status(self, name: str, *arguments: Any) -> int:
        self.called.append((name, *arguments))
        return self.fails.get(name, 0)

    def ignore(self, name: str, *arguments: Any) -> None:
        self.called.append((name, *arguments))

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("CU"):
            raise AttributeError(name)
        return Structure

    def names(self) -> list[str]:
        return [name for name, *_ in self.called]


class Context:
    """What streams and slabs ask of their context."""

    description = SimpleNamespace(spec="cuda:0", index=0)
    is_alive = True
    device = 0

    def __init__(self, arena: HostArena) -> None:
        self.driver = Driver()
        self.staging = arena
        self.fault: AccelError | None = None
        self.section = self
        self.handle = 1
        self.released: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        self.driver.depth += 1

    def __exit__(self, *_: object) -> None:
        self.driver.depth -= 1

    def enter(self) -> None: ...

    def forget(self, stream: Any) -> None: ...

    def release(self, close: Callable[[], None]) -> None:
        self.released.append(close)

    def call(self, name: str, *arguments: Any) -> Any:
        return self.driver.call(name, *arguments)

    def check(self, status: int, call: str) -> None:
        if status:
            raise self.failure(status, call)

    def failure(self, status: int, call: str) -> AccelError:
        error = error_of(status, call)
        if error.is_fault and self.fault is None:
            self.fault = error
        return error


class FakeLibraryError(Exception):
    """What bindings raise for a status that is not success."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class Numbers:
    """An enum of bindings: each member is a number."""

    def __getattr__(self, name: str) -> int:
        return sum(name.encode())

    def __getitem__(self, name: str) -> int:
        return sum(name.encode())


class Names(dict[str, str]):
    """Functions of a program, each of which is its name."""

    def __missing__(self, name: str) -> str:
        return name


def ref(shape: tuple[int, ...], dtype: DType) -> AccelRef:
    """Return a ref of no device."""
    owner: Any = SimpleNamespace(dropped=deque(), check_process=lambda: None)
    return AccelRef(owner, 1, shape, dtype, 1)


class FakeLibrary(ModuleType):
    """The bindings of a library: takes down its calls, and answers those in ``fails`` with the status that is there.

    Handles are numbers from 1 on. Names that begin with a capital are enums. ``error`` may be of another module, which is named before it then.
    """

    def __init__(self, name: str, error: str) -> None:
        super().__init__(name)
        self.raises, _, error = error.rpartition(".")
        setattr(self, error, FakeLibraryError)
        self.called: list[tuple[Any, ...]] = []
        self.fails: dict[str, int] = {}
        self.handles = 0

    def install(self, monkeypatch: pytest.MonkeyPatch, *shared: str) -> None:
        """Have it imported by its name, and the ``shared`` libraries found; no other is."""

        def find(name: str) -> Any:
            if name not in shared:
                raise FileNotFoundError(name)
            return SimpleNamespace(abs_path=f"/lib/lib{name}.so")

        parts = self.__name__.split(".")
        for i in range(1, len(parts)):
            package = ModuleType(".".join(parts[:i]))
            package.__path__ = []
            monkeypatch.setitem(sys.modules, package.__name__, package)
        monkeypatch.setitem(sys.modules, self.__name__, self)
        if self.raises:
            monkeypatch.setitem(sys.modules, self.raises, self)
        pathfinder = SimpleNamespace(load_nvidia_dynamic_lib=find, DynamicLibNotFoundError=FileNotFoundError)
        monkeypatch.setitem(sys.modules, "cuda.pathfinder", pathfinder)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            return Numbers()

        def call(*arguments: Any) -> int:
            self.called.append((name, *arguments))
            if name in self.fails:
                raise FakeLibraryError(self.fails[name])
            self.handles += name == "create"
            return self.handles

        return call

    def names(self) -> list[str]:
        """Return the names of the calls."""
        return [name for name, *_ in self.called]
