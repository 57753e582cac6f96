"""How much memory this process may have: the machine's, or less where a control group says so."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["memory_left", "memory_size"]

_SPARE_BYTES, _SPARE_FRACTION = 64 << 20, 8
"""Bytes of a group's limit that are left to the interpreter and to other libraries: this many, or
one part in this many of a small limit."""


def memory_size() -> int:
    """Return the bytes of memory that this process may have; 0 where that is not known.

    It is the least of the machine's memory and the limits of the process's groups.
    """
    sizes = [limit for limit, _ in _limits()]
    if machine := _machine_bytes():
        sizes.append(machine)
    return min(sizes, default=0)


def memory_left() -> int | None:
    """Return the bytes that this process can still allocate; ``None`` where no group bounds them.

    Beyond a group's limit the kernel ends one of its processes: nothing fails that could be told to
    a caller. Pages of files do not count, for they can be dropped, and some memory is left to
    others.
    """
    left = [limit - min(_SPARE_BYTES, limit // _SPARE_FRACTION) - used for limit, used in _limits()]
    return max(min(left), 0) if left else None


def _machine_bytes() -> int:
    """Return the bytes of the machine's memory; 0 if that is not known."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 0


def _limits() -> Iterator[tuple[int, int]]:
    """Yield the limit, and what is used of it, of each group that bounds this process.

    These are its own group and those above it, as far as they are seen from here.
    """
    machine = _machine_bytes()
    for mount, path, names in _hierarchies():
        while True:
            limit = _read_number(f"{mount}{path}/{names[0]}")
            if limit is not None and (not machine or limit < machine):
                used, files = _read_number(f"{mount}{path}/{names[1]}") or 0, _read_cache_bytes(f"{mount}{path}/memory.stat", names[2])
                yield limit, max(used - files, 0)
            if not path:
                break
            path = path.rpartition("/")[0]


_Names = tuple[str, str, str]
_V1: _Names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
_V2: _Names = ("memory.max", "memory.current", "")
"""Files with a group's limit and its use, and how its statistics with those below it begin."""


def _hierarchies() -> Iterator[tuple[str, str, _Names]]:
    """Yield the mount of each hierarchy with memory, this process's group there, and file names."""
    own: dict[_Names, str] = {}
    for line in _read_lines("/proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            own[_V2] = path
        elif "memory" in controllers.split(","):
            own[_V1] = path
    for line in _read_lines("/proc/self/mountinfo"):
        fields, _, rest = line.partition(" - ")
        kind, _, options = rest.partition(" ")
        names = _V2 if kind == "cgroup2" else _V1 if kind == "cgroup" and "memory" in options.rpartition(" ")[2].split(",") else None
        if names in own:
            root, mount = fields.split()[3:5]
            path = own[names].removeprefix(root.rstrip("/"))
            yield mount, path.rstrip("/") if own[names].startswith(root) else "", names


def _read_lines(path: str) -> list[str]:
    """Return the lines of a file; none if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().splitlines()
    except OSError:  # there are no groups, or they are not shown
        return []


def _read_number(path: str) -> int | None:
    """Return the number in a file; ``None`` where there is none, or it says ``max``."""
    text = "".join(_read_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _read_cache_bytes(path: str, prefix: str) -> int:
    """Return the bytes of a group's page cache, from its ``memory.stat``."""
    wanted = {f"{prefix}inactive_file", f"{prefix}active_file"}
    pairs = [line.split() for line in _read_lines(path)]
    return sum([int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] in wanted and pair[1].isdigit()])
