"""Compiled code as the driver takes it. The driver is given an address and no length: code that is cut off would have it read what is behind."""

from __future__ import annotations

import struct

from accel import InvalidArgumentError

__all__ = ["image_of"]

_ELF, _FATBIN = b"\x7fELF", b"\x50\xed\x55\xba"
_ELF64 = 2
# Where the header of a 64-bit ELF file says where the tables of segments and of sections are, and how large.
_HEADER = struct.Struct("<32xQQ4xHHHHH")
_SECTION = struct.Struct("<4xI16xQQ")
# Code and data, symbols, strings, and relocations.
_IN_FILE = frozenset({1, 2, 3, 4, 9})
_FAT_HEADER = struct.Struct("<4xHHQ")
_WHAT = "Give the bytes of a whole cubin or fatbin, as nvcc and NVRTC make them, or the text of PTX."


def image_of(code: bytes) -> bytes:
    """Return what the driver is given: a cubin, a fatbin, or PTX with a 0 behind it.

    Raises
    ------
    InvalidArgumentError
        If it is none of them, or ends before it should.
    """
    if code.startswith(_ELF):
        if len(code) < _HEADER.size or code[4] != _ELF64 or _end_of_elf(code) > len(code):
            raise InvalidArgumentError(f"the cubin of {len(code)} bytes is not whole", remedy=_WHAT)
        return code
    if code.startswith(_FATBIN):
        _, header, nbytes = _FAT_HEADER.unpack_from(code.ljust(_FAT_HEADER.size, b"\0"))
        if header < _FAT_HEADER.size or header + nbytes > len(code):
            raise InvalidArgumentError(f"the fatbin of {len(code)} bytes is not whole", remedy=_WHAT)
        return code
    text = code.rstrip(b"\0")
    if b".version" not in text or b"\0" in text:
        raise InvalidArgumentError("code is neither a cubin nor a fatbin nor PTX", remedy=_WHAT)
    return text + b"\0"


def _end_of_elf(code: bytes) -> int:
    """Return where the last of what an ELF file has ends, as far as its tables are there. NVIDIA's kinds of sections need not be in the file."""
    segments, sections, _, segment, segment_count, section, section_count = _HEADER.unpack_from(code)
    end: int = max(segments + segment * segment_count, sections + section * section_count)
    if end > len(code) or (section_count and section < _SECTION.size):
        return len(code) + 1
    for i in range(section_count):
        kind, start, nbytes = _SECTION.unpack_from(code, sections + i * section)
        if kind in _IN_FILE:
            end = max(end, start + nbytes)
    return end
