"""The memory that a transform works in: one piece, cut as a stack is, and the same steps taken without one to learn how large it has to be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel import LibraryError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accel_cuda.families.fft_layout import Layout

__all__ = ["Rehearsal", "WorkMemory"]

_ALIGNMENT = 256
_LAUNCHES = 8
"""Kernels that cuFFT launches for one plan at most, as seen: one to three, more for lengths with large prime factors."""


class WorkMemory:
    """One op's memory. What is freed last has to be allocated first; the stream's order lets later steps have what earlier ones had.

    Parameters
    ----------
    address, nbytes
        The piece; without ``nbytes`` there is no end.

    Attributes
    ----------
    most : int
        Bytes that were in use together, at most.
    """

    __slots__ = ("_address", "_nbytes", "_used", "most")

    def __init__(self, address: int, nbytes: int | None = None) -> None:
        self._address = address
        self._nbytes = nbytes
        self._used = 0
        self.most = 0

    def alloc(self, nbytes: int) -> int:
        """Return the address of a part, 0 if it is of no bytes.

        Raises
        ------
        LibraryError
            If the piece is too small: then it was measured wrongly.
        """
        if not nbytes:
            return 0
        address = self._address + self._used
        self._used += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self.most = max(self.most, self._used)
        if self._nbytes is not None and self._used > self._nbytes:
            raise LibraryError(f"a transform works in {self._used} bytes, {self._nbytes} were expected", library="cufft")
        return address

    def free(self, address: int) -> None:
        """Give a part back, and all that were allocated after it; 0 is ignored."""
        if address:
            self._used = min(self._used, address - self._address)


class Rehearsal:
    """Stands for stream, kernels and plans while the steps of an op are taken for nothing.

    Parameters
    ----------
    sizes
        Layout -> bytes that a plan works in.

    Attributes
    ----------
    commands : int
        How many commands the steps would have enqueued at most.
    """

    __slots__ = ("_sizes", "commands", "functions")

    def __init__(self, sizes: Mapping[Layout, int]) -> None:
        self._sizes = sizes
        self.commands = 0
        self.functions: Any = self

    def __getitem__(self, name: str) -> None:
        return None

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        """Count the copy."""
        self.commands += 1

    def launch(self, *arguments: Any) -> None:
        """Count the launch."""
        self.commands += 1

    def launch_wide(self, *arguments: Any) -> None:
        """Count the launch."""
        self.commands += 1

    def execute(
        self, stream: Any, layout: Layout, source: int, destination: int, memory: WorkMemory, *, calls: int = 1, **options: Any
    ) -> None:
        """Use the memory that the plan would work in, and count its launches."""
        self.commands += _LAUNCHES * calls
        memory.free(memory.alloc(self._sizes[layout]))
