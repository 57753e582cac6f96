"""cuRAND's generators without a GPU: which calls are made, for each stream and type, and what is refused."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from accel import BackendUnavailableError, UnsupportedError, ops
from accel_cuda.families.rng import RngLibrary
from tests.cuda_support import FakeLibrary

if TYPE_CHECKING:
    from collections.abc import Callable


class Stream:
    """A stream that may be captured, and ends."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.is_capturing = False
        self.ends: list[Callable[[], object]] = []

    def ready(self) -> Any:
        return SimpleNamespace(section=contextlib.nullcontext())

    def at_close(self, end: Callable[[], object]) -> None:
        self.ends.append(end)

    def failure(self, status: int, call: str, library: str) -> Exception:
        return RuntimeError(f"{library} {call} {status}")


@pytest.fixture
def curand(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    fake = FakeLibrary("nvmath.bindings.curand", "cuRANDError")
    fake.install(monkeypatch, "curand")
    return fake


def run(library: RngLibrary, stream: Stream, op: Any) -> None:
    library.kernels[op.kind](SimpleNamespace(stream=stream), op, op.plan(), (), (4096, 0))


def test_ops_of_curand_are_enqueued_off_the_loop_and_in_no_graph(curand: FakeLibrary) -> None:
    library, stream = RngLibrary(SimpleNamespace()), Stream(1)  # type: ignore[arg-type]
    op = ops.Uniform((5,), generator="curand_philox")
    assert library.may_block(None, op)
    assert library.commands(op) > 1
    assert not library.may_block(None, ops.Uniform((5,)))
    assert library.commands(ops.Uniform((5,))) == 1
    assert library.scratch_nbytes(op) == library.scratch_nbytes(ops.Gamma((5,), a=1.0)) == 0
    stream.is_capturing = True
    with pytest.raises(UnsupportedError, match="graph"):
        run(library, stream, op)
    assert not curand.called


def test_a_failure_names_the_call(curand: FakeLibrary) -> None:
    curand.fails["set_generator_offset"] = 104
    with pytest.raises(RuntimeError, match="curand set_generator_offset 104"):
        run(RngLibrary(SimpleNamespace()), Stream(1), ops.Uniform((5,), generator="curand_mrg32k3a"))  # type: ignore[arg-type]


def test_a_generator_whose_stream_was_not_set_draws_nothing(curand: FakeLibrary) -> None:
    library, stream = RngLibrary(SimpleNamespace()), Stream(11)  # type: ignore[arg-type]  # which is not used here
    op = ops.Uniform((5,), seed=3, generator="curand_philox")
    curand.fails["set_stream"] = 201
    for _ in range(2):
        with pytest.raises(RuntimeError, match="201"):
            run(library, stream, op)
    del curand.fails["set_stream"]
    run(library, stream, op)
    assert curand.names().count("set_stream") == 3, "one without its stream would draw in another"
    assert curand.names().count("generate_uniform") == 1
    for end in stream.ends:
        end()
    assert [call[1] for call in curand.called if call[0] == "destroy_generator"] == [0, 0, 0]


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeLibrary("nvmath.bindings.curand", "cuRANDError").install(monkeypatch)
    with pytest.raises(BackendUnavailableError, match="nvidia-curand"):
        run(RngLibrary(SimpleNamespace()), Stream(1), ops.Uniform((5,), generator="curand_philox"))  # type: ignore[arg-type]
