"""A limit to the memory that this process takes from now on: what is beyond it fails, instead of taking that of other processes."""

from __future__ import annotations

import os
import resource

__all__ = ["limit_address_space", "limit_private_memory"]


def limit_address_space(nbytes: int) -> None:
    """Let this process map that many bytes more, of files too. Not for one that has a GPU: drivers map far more than they use."""
    _limit(resource.RLIMIT_AS, _statm()[0] + nbytes)


def limit_private_memory(nbytes: int) -> None:
    """Let this process have that many bytes more of memory that is its own; memory that it shares, and files, do not count."""
    _limit(resource.RLIMIT_DATA, _statm()[5] + nbytes)


def _statm() -> list[int]:
    with open("/proc/self/statm", encoding="ascii") as file:
        return [int(pages) * os.sysconf("SC_PAGE_SIZE") for pages in file.read().split()]


def _limit(kind: int, nbytes: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (nbytes if hard == resource.RLIM_INFINITY else min(nbytes, hard), hard))
