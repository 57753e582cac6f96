"""A family of the CUDA backend from its part alone, without a GPU: kernels, what may block, commands, memory, preloading, and what the doctor says."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from accel import BackendUnavailableError
from accel_cuda import CudaBackend, backend
from accel_cuda.core import checks, libraries
from accel_cuda.core.blocking import Blocking
from accel_cuda.core.family import CudaPart, FamilyState, Source
from accel_cuda.core.libraries import VendorLibrary
from accel_cuda.families.context import ContextFamilies

if TYPE_CHECKING:
    from collections.abc import Sequence

LIBRARY = VendorLibrary("fakelib", "nvidia-fakelib", "nvmath.bindings.fakelib", "fakeError")


def kernel(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    lane.ran.append(op.kind)


class State(FamilyState[SimpleNamespace]):
    """What the family has in a context: it knows how much memory an op works in once that was measured."""

    commands = 7

    def __init__(self, context: Any) -> None:
        super().__init__(context, lambda context: SimpleNamespace(close=lambda: setattr(self, "is_closed", True)))
        self.kernels = {"planned": kernel}
        self.prepared: list[Any] = []
        self.measured = False
        self.is_closed = False

    def may_block(self, lane: Any, op: Any) -> bool:
        return lane.stream not in self.prepared

    def prepare(self, stream: Any) -> None:
        super().prepare(stream)
        self.prepared.append(stream)

    def scratch_nbytes(self, op: Any) -> int | None:
        return 512 if self.measured else None

    def measure(self, op: Any) -> None:
        self.measured = True


PARTS = {
    "fake": CudaPart(
        kernels={"compiled": kernel, "signed": kernel},
        open=State,
        libraries=(LIBRARY,),
        programs=(Source("fake", lambda code: ("fake.cu", "")),),
        program={"compiled": lambda op: f"fake_{op.dtype}", "planned": lambda op: "fake_plans"},
        lacks={"signed": lambda lane, op: not lane.has_handle},
        signatures={"signed": lambda lane, op: op.dtype},
        commands={"signed": 2},
    )
}


class Programs:
    """The backend's own programs, by name."""

    def __init__(self) -> None:
        self.missing = {"fake_f32", "fake_plans"}

    def prepare(self, sources: tuple[Source, ...]) -> None:
        names = [source.name for source in sources]
        self.missing -= {program for program in self.missing if program.partition("_")[0] in names}


class Setup:
    """The family in a context, and a lane."""

    def __init__(self, context: Any, programs: Any) -> None:
        self.context = context
        self.programs = programs
        self.families = ContextFamilies(self.context, self.programs, PARTS)
        self.blocking = Blocking(self.families.checks(), self.families.signatures(), pinned=None)  # type: ignore[arg-type]  # no copies here
        self.lane = SimpleNamespace(stream="stream", has_handle=True, ran=[])

    @property
    def state(self) -> State:
        state = self.families.states["fake"]
        assert isinstance(state, State)
        return state

    def may_block(self, kind: str) -> bool:
        return self.blocking.may_block(self.lane, op(kind))

    def prepare(self, library: str) -> None:
        self.families.prepare(library, self.lane.stream)


def op(kind: str) -> Any:
    return SimpleNamespace(kind=kind, library="fake", dtype="f32")


@pytest.fixture
def setup() -> Setup:
    return Setup(object(), Programs())


def test_its_kernels_are_those_of_the_part_and_those_of_the_context(setup: Setup) -> None:
    assert setup.state.context is setup.context
    assert set(setup.families.kernels()["fake"]) == {"compiled", "signed", "planned"}


def test_an_op_may_block_until_its_program_and_its_plans_are_there(setup: Setup) -> None:
    assert setup.may_block("compiled")
    assert setup.may_block("planned")
    setup.prepare("fake")
    assert not setup.may_block("compiled")
    assert not setup.may_block("planned")
    setup.programs.missing.add("fake_plans")
    assert setup.may_block("planned"), "the plan is there, and the program is not"


def test_only_the_library_that_is_named_is_prepared(setup: Setup) -> None:
    setup.prepare("other")
    assert setup.state.prepared == []
    assert setup.may_block("compiled")


def test_an_op_whose_library_loads_functions_may_block_until_one_has_run_through(setup: Setup) -> None:
    assert setup.may_block("signed")
    noted = setup.blocking.noting("fake", setup.families.kernels()["fake"])
    thread = threading.Thread(target=noted["signed"], args=(setup.lane, op("signed"), None, (), ()))
    thread.start()
    thread.join()
    assert setup.lane.ran == ["signed"]
    assert not setup.may_block("signed")
    setup.lane.has_handle = False
    assert setup.may_block("signed")


def test_ops_of_one_name_in_two_families_are_told_apart() -> None:
    parts = {
        "slow": CudaPart(kernels={"solve": kernel}, lacks={"solve": lambda lane, op: True}),
        "fast": CudaPart(kernels={"solve": kernel}, lacks={"solve": lambda lane, op: False}),
    }
    families: Any = ContextFamilies(object(), Programs(), parts)  # type: ignore[arg-type]
    blocking = Blocking(families.checks(), families.signatures(), pinned=None)  # type: ignore[arg-type]
    assert [blocking.may_block(None, SimpleNamespace(kind="solve", library=name)) for name in parts] == [True, False]


def test_its_commands_are_counted(setup: Setup) -> None:
    assert setup.families.commands() == {("fake", "signed"): 2, ("fake", "planned"): 7}


def test_its_ops_work_in_memory_that_is_measured_first(setup: Setup) -> None:
    size = setup.families.scratch()["fake", "planned"]
    assert size(op("planned")) is None
    setup.families.measure_scratch(op("planned"))
    assert size(op("planned")) == 512


def test_what_it_has_in_the_context_is_given_back(setup: Setup) -> None:
    setup.state.loaded()
    setup.families.close()
    assert setup.state.is_closed


def test_preloading_and_the_doctor_know_its_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []

    def load_module(name: str, distribution: str, extra: str) -> None:
        loaded.append(name)

    def load_library(name: str, distribution: str, extra: str) -> None:
        if name == LIBRARY.name:
            raise BackendUnavailableError(f"{distribution} is not installed", remedy=libraries.INSTALL)
        loaded.append(name)

    def no_driver() -> None:
        raise BackendUnavailableError("there is no NVIDIA driver")

    monkeypatch.setattr(libraries, "load_module", load_module)
    monkeypatch.setattr(libraries, "load_library", load_library)
    monkeypatch.setattr(checks, "load_driver", no_driver)
    monkeypatch.setattr(backend, "load_driver", lambda: None)
    monkeypatch.setattr(backend, "PARTS", PARTS)
    CudaBackend().preload(("memory", "other"))
    assert loaded == ["cuda.bindings.driver", "cuda.core", "cuda.core.utils", "nvrtc"]
    with pytest.raises(BackendUnavailableError, match="nvidia-fakelib") as caught:
        CudaBackend().preload(("fake",))
    assert "pip install '.[cuda]'" in caught.value.remedy
    told = {check.name: check for check in CudaBackend().checks()}
    assert (told["nvidia-fakelib"].state, told["nvidia-fakelib"].remedy) == ("missing", libraries.INSTALL)
    assert told["nvmath-python"].state == "ok"
