"""What cuFFT is given of views, without a GPU: real arrays begin where complex ones could lie, and what was copied is given back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from accel import DType, ops
from accel.ref import AccelRef
from accel_cuda.fft import FftLibrary

if TYPE_CHECKING:
    from accel.device.core import DeviceCore

BASE = 1 << 20


class Compute:
    """Memory that is only counted."""

    def __init__(self) -> None:
        self.live: set[int] = set()
        self.next = 1 << 30

    def alloc(self, nbytes: int) -> int:
        self.next += 1 << 20
        self.live.add(self.next)
        return self.next

    def free(self, pointer: int) -> None:
        if pointer:
            self.live.remove(pointer)


class Plans:
    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def execute(self, layout: Any, source: int, destination: int, **options: Any) -> None:
        self.log.append(("plan", source, destination))


class Stream:
    """Writes down what is enqueued."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        functions = {name: name for name in ("fft_ends_c64", "fft_ends_c128", "fft_scale_f32", "fft_scale_f64")}
        self.context = SimpleNamespace(section=self, functions=functions)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def ready(self) -> Any:
        return self.context

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        self.log.append(("copy", destination, source, nbytes))

    def launch(self, function: str, blocks: int, threads: int, *arguments: int) -> None:
        self.log.append((function, arguments[0]))


def run(op: ops.KernelOp, source: int, destination: int) -> list[Any]:
    op.plan()
    library, stream, compute = FftLibrary(), Stream(), Compute()
    library.plans[stream] = Plans(stream.log)  # type: ignore[assignment]
    library.kernels[op.kind](SimpleNamespace(stream=stream, compute=compute), op, [source], [destination])
    assert not compute.live
    return stream.log


def ref(shape: tuple[int, ...], dtype: DType) -> AccelRef:
    core: DeviceCore = SimpleNamespace(dropped=[], check_process=lambda: None)  # type: ignore[assignment]
    return AccelRef(core, 1, shape, dtype, 1)


@pytest.mark.parametrize(("real", "size"), [(DType.FLOAT32, 4), (DType.FLOAT64, 8)])
def test_a_real_signal_that_begins_in_between_is_copied(real: DType, size: int) -> None:
    op = ops.Rfft(ref((16,), real))
    assert run(op, BASE, 2 * BASE) == [("plan", BASE, 2 * BASE)]
    copy, plan = run(op, BASE + size, 2 * BASE)
    assert copy == ("copy", plan[1], BASE + size, 16 * size)
    assert plan[1] % (2 * size) == 0
    assert plan[2] == 2 * BASE


@pytest.mark.parametrize(("spectrum", "size"), [(DType.COMPLEX64, 4), (DType.COMPLEX128, 8)])
def test_a_real_result_that_begins_in_between_is_scaled_and_copied_there(spectrum: DType, size: int) -> None:
    op = ops.Irfft(ref((9,), spectrum))
    *_, plan, scale = run(op, BASE, 2 * BASE)
    assert (plan[2], scale[1]) == (2 * BASE, 2 * BASE)
    *_, plan, scale, copy = run(op, BASE, 2 * BASE + size)
    assert plan[2] % (2 * size) == 0
    assert scale[1] == plan[2]
    assert copy == ("copy", 2 * BASE + size, plan[2], 16 * size)
