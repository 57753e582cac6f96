"""Compiled code before the driver sees it: what is whole, and what is not."""

from __future__ import annotations

import secrets
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

from accel import InvalidArgumentError
from accel_cuda.core.modules import image_of

PTX = ".version 8.0\n.target sm_90\n.address_size 64\n"
FATBIN = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 32) + bytes(32)


def elf() -> bytes:
    """Return a 64-bit ELF file: the interpreter's."""
    return Path(sys.executable).resolve().read_bytes()


def test_ptx_ends_with_a_0() -> None:
    for text in (PTX, PTX + "\0", PTX + "\0\0"):
        assert image_of(text.encode()) == PTX.encode() + b"\0"


def test_whole_files_are_taken_as_they_are() -> None:
    for code in (elf(), FATBIN, FATBIN + b"more"):
        assert image_of(code) == code


@pytest.mark.parametrize("cut", [5, 64, 1000])
def test_what_is_cut_off_is_refused(cut: int) -> None:
    for code in (elf()[:-cut], elf()[:cut], FATBIN[:-1], FATBIN[:9]):
        with pytest.raises(InvalidArgumentError, match="is not whole"):
            image_of(code)


def test_anything_else_is_refused_and_nothing_is_read_beyond_the_end() -> None:
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    for code in (b"hello", b".version 8.0\0.target", b"\x7fELF", b"\x7fELF\x01" + bytes(100)):
        with pytest.raises(InvalidArgumentError):
            image_of(code)
    for _ in range(1000):
        code = (b"", b"\x7fELF\x02", FATBIN[:4])[int(rng.integers(3))] + rng.bytes(int(rng.integers(0, 300)))
        try:
            image_of(code)
        except InvalidArgumentError:
            continue
        assert code.startswith((b"\x7fELF", FATBIN[:4])), f"seed {seed}"  # numbers that happen to fit
