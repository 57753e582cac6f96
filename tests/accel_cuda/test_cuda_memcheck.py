"""What memcheck is given to run, without a GPU: that every kernel around random numbers and transforms is launched, and within memory that was asked for."""

from __future__ import annotations

import re
from typing import Any

from accel_cuda.families.checksum import checksum
from accel_cuda.families.programs import source_of
from accel_cuda.families.rng import PART as RNG
from tests.accel_cuda.signal_kernels import launch_all
from tests.cuda_support import Names

CHOOSING = "choice", "draws_words", "draws_pairs"
"""Kernels that every_order launches."""


class FakeContext:
    """Gives addresses, and keeps a list of what was launched there."""

    multiprocessors = 2

    def __init__(self) -> None:
        self.functions = Names()
        self.section = self.driver = self.context = self
        self.launched: set[str] = set()
        self.pieces: dict[int, int] = {}
        self._next = 1 << 20

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def kernels(self, library: str) -> Any:
        return RNG.kernels if library == "rng" else {"checksum": checksum}

    def call(self, name: str, *arguments: int) -> int:
        if name == "cuMemAlloc":
            self._next += arguments[0] + 256 & -256
            self.pieces[self._next] = arguments[0]
            self._next += arguments[0]
            return self._next - arguments[0]
        if name == "cuMemFree":
            del self.pieces[arguments[0]]
        else:
            assert name == "cuCtxSynchronize"
        return 0

    # -- and as a stream

    def ready(self) -> FakeContext:
        return self

    def copy_dtoh(self, destination: memoryview, source: int) -> None: ...

    def launch(self, function: str, blocks: int, threads: int, *arguments: int) -> None:
        assert blocks > 0
        self.launched.add(function)
        if function != "spin":
            assert self.inside(arguments[1 if function.startswith("sobol") else 0]), function

    def launch_wide(self, function: str, grid: tuple[int, int], block: tuple[int, int], shared: int, *arguments: int) -> None:
        assert self.inside(arguments[0]), function
        assert self.inside(arguments[1]), function
        self.launched.add(function)

    def inside(self, address: int) -> bool:
        return any(start <= address < start + nbytes for start, nbytes in self.pieces.items())

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        assert self.inside(destination)

    def fill(self, destination: int, pattern: bytes, count: int) -> None:
        assert self.inside(destination)

    def synchronize(self) -> None: ...


def kernels_in(program: str) -> set[str]:
    """Return the names of the kernels in a source, those that macros make too."""
    source = source_of(program).replace("\\\n", " ")
    plain = re.sub(r"^#.*$", "", source, flags=re.MULTILINE)
    names = set(re.findall(r'extern "C" __global__ void (\w+)\(', plain))
    for macro, first, body in re.findall(r"^#define (\w+)\((\w+)[^)]*\)(.*)$", source, re.MULTILINE):
        for beginning in re.findall(rf"__global__ void (?:(\w+)##)?{first}\(", body):
            names |= {beginning + made for made in re.findall(rf"^{macro}\((\w+),", plain, re.MULTILINE)}
    return names


def test_every_kernel_around_random_numbers_and_transforms_is_launched() -> None:
    context: Any = FakeContext()
    launch_all(context, context)
    wanted = kernels_in("rng") | kernels_in("draws") | kernels_in("fft") | {"checksum", "spin"}
    known = {"philox_uniform_f32", "philox_pairs_8", "draws_rejected", "choice_take_16", "fft_turn_4", "fft_ends_c128", "fft_crop_f32"}
    assert known <= wanted, "the sources are read wrongly"
    assert context.launched == {name for name in wanted if not name.startswith(CHOOSING)}
    assert not context.pieces, "memory was not given back"
