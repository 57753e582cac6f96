"""What a context of the CUDA backend takes note of, on a driver that only answers: also a fault that ends this context and no other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from accel import AccelError, FaultScope
from accel_cuda.core.context import CudaContext
from accel_cuda.core.driver import Driver

DESTROYED, ILLEGAL_ADDRESS, BUSY = 709, 700, 46


class Bindings:
    """Answers every call with one status."""

    def __init__(self) -> None:
        self.status = 0

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: (self.status, 7)


class Library:
    """The same for calls that keep the GIL."""

    def __init__(self, bindings: Bindings) -> None:
        self._bindings = bindings

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: 0 if name == "cuThreadExchangeStreamCaptureMode" else self._bindings.status


@pytest.fixture
def bindings() -> Bindings:
    return Bindings()


def context_of(bindings: Bindings) -> CudaContext:
    """Return a context of which nothing is made but what takes note of faults."""
    driver = Driver(bindings, Library(bindings), 13000)  # type: ignore[arg-type]
    context = CudaContext.__new__(CudaContext)
    context.driver = driver
    context.description = SimpleNamespace(spec="cuda:0", index=0)  # type: ignore[assignment]
    context.fault = None
    context.handle = 10
    context.section = driver.section(10, context.failure)
    driver.watch(context)
    return context


def enter(context: CudaContext) -> None:
    with context.section:
        pass


@pytest.mark.parametrize(
    "use",
    [
        enter,
        CudaContext.enter,
        lambda context: context.call("cuStreamSynchronize", 1),
        lambda context: context.check(DESTROYED, "cuLaunchKernel"),
    ],
    ids=["section", "enter", "call", "status"],
)
def test_a_context_that_somebody_destroyed_knows_it_whatever_finds_out(bindings: Bindings, use: Any) -> None:
    context, other = context_of(bindings), context_of(bindings)
    bindings.status = DESTROYED
    with pytest.raises(AccelError) as caught:
        use(context)
    assert (caught.value.code, caught.value.scope) == (DESTROYED, FaultScope.CONTEXT)
    assert context.fault is not None
    assert context.fault.code == DESTROYED
    assert other.fault is None
    assert context.driver.fault is None, "the process goes on"


def test_a_fault_of_the_process_is_every_contexts(bindings: Bindings) -> None:
    context = context_of(bindings)
    bindings.status = ILLEGAL_ADDRESS
    with pytest.raises(AccelError):
        context.call("cuStreamSynchronize", 1)
    assert context.fault is not None
    assert context.driver.fault is not None


def test_an_ordinary_failure_is_no_fault(bindings: Bindings) -> None:
    context = context_of(bindings)
    bindings.status = BUSY
    with pytest.raises(AccelError):
        context.call("cuMemCreate", 1)
    assert context.fault is None


class Closing(CudaContext):
    """Notes whether its objects could be given back while it unloads."""

    was_alive = False

    def attribute(self, name: str) -> int:
        return 1

    def _unload(self) -> None:
        self.was_alive = self.is_alive
        super()._unload()


def test_what_a_context_gives_back_while_it_closes_is_given_back_before_its_end(bindings: Bindings) -> None:
    driver = Driver(bindings, Library(bindings), 13000)  # type: ignore[arg-type]
    context = Closing(driver, SimpleNamespace(spec="cuda:0", index=0))  # type: ignore[arg-type]
    context.close()
    assert context.was_alive
    assert not context.is_alive
