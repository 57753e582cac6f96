"""Models in ONNX files, which ONNX Runtime computes on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from accel._child import IS_WORKER
from accel.errors import InvalidArgumentError, UnsupportedError
from accel.files.growth import limit_private_memory
from accel.files.onnx import CPU, session, whole
from accel.files.regular_file import RegularFile
from accel.memory.machine import memory_size
from accel.models.adapters import host
from accel.models.onnx_inputs import dtype_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from accel.backend import DeviceDescription
    from accel.libraries.kernel_library import Operand
    from accel.models.examples import Fill
    from accel.ops import Spec

__all__ = ["OnnxAdapter"]

Array = np.ndarray[Any, Any]

_FILE: Final = "model.onnx"
"""Name of the one weight: the bytes of the file."""


class OnnxAdapter:
    """An ONNX file, as an :class:`~accel.models.adapters.base.Adapter`. One output is returned as an array, several as a dict.

    The bytes of the file are one durable buffer, ``"model.onnx"``: after a fault the model is made from these, and nothing is read from the disk. What
    ONNX Runtime makes of them, the weights too, is in memory of its own. Data in other files beside the ONNX file is not read.

    Parameters
    ----------
    path
        Of the file.
    threads
        Threads that compute one op; ``None``: one per core that the process may use.
    memory_limit
        Bytes that the device's child process may take from now on for itself, beside the device's buffers: for what ONNX Runtime makes of the weights, and for
        what the graph computes. What is beyond fails. ``None``: half of the memory that the machine, or the process's control group, has; with
        ``host="inline"``, where that is the memory of the service, without a limit.
    providers
        Of ONNX Runtime. ``"CPUExecutionProvider"`` is the only one that is taken: the others work in memory, streams and contexts of their own, whose
        faults no supervisor sees.

    Raises
    ------
    InvalidArgumentError
        If ``threads`` or ``memory_limit`` is no positive number.
    UnsupportedError
        If another provider is named, or a limit where the model is not in a child.
    """

    is_captured: Final = False

    def __init__(
        self, path: Path, *, threads: int | None = None, memory_limit: int | None = None, providers: Sequence[str] = (CPU,)
    ) -> None:
        for name, value in (("threads", threads), ("memory_limit", memory_limit)):
            if not (value is None or (type(value) is int and value > 0)):
                raise InvalidArgumentError(f"{name} is {value!r}", remedy="Give a positive number, or None.")
        if memory_limit is not None and not IS_WORKER:
            raise UnsupportedError(
                "memory_limit is for a model in a child process, and this one is in the service's",
                remedy='Open the device with host="process", or leave memory_limit out.',
            )
        if list(providers) != [CPU]:
            raise UnsupportedError(
                f"ONNX models run with the {CPU}, not with {', '.join(map(str, providers))}: others have contexts whose faults are not seen",
                library="onnxruntime",
                remedy="Leave providers out; for a GPU give the model as a torch.nn.Module.",
            )
        self._path = path
        self._threads = threads
        self._memory_limit = memory_limit
        self._session: Any = None
        self._inputs: set[str] = set()
        self._outputs: list[str] = []

    def initial(self, given: Collection[str]) -> dict[str, Array]:
        """Return the bytes of the file, unless they are given.

        Raises
        ------
        InvalidArgumentError
            If the file cannot be read.
        """
        return {} if _FILE in given else {_FILE: np.frombuffer(whole(RegularFile(self._path)), np.uint8)}

    def open(self, weights: Mapping[str, Operand], description: DeviceDescription, stream: Any) -> None:
        """Make a session of the file's bytes; see :class:`~accel.models.adapters.base.Adapter`.

        Raises
        ------
        InvalidArgumentError
            The weights are not the bytes of an ONNX file that ONNX Runtime takes.
        UnsupportedError
            The device is not a CPU, or an input or output is of a type that numpy does not know.
        """
        if description.backend != "cpu":
            raise UnsupportedError(
                f"an ONNX model runs on the CPU, not on {description.spec}",
                library="onnxruntime",
                remedy="Open a device with open_device('cpu'), or give the model as a torch.nn.Module.",
            )
        if list(weights) != [_FILE]:
            raise InvalidArgumentError(
                f"the weights of an ONNX model are {sorted(weights)!r:.200}", remedy="Give the .onnx file, or no weights."
            )
        # The graph says how much it computes. That is to fail here, before the kernel ends one of the processes for it.
        if IS_WORKER and (limit := self._memory_limit or memory_size() // 2):
            limit_private_memory(limit)
        self._session = session(np.asarray(weights[_FILE]).tobytes(), self._path, self._threads)
        for each in (*self._session.get_inputs(), *self._session.get_outputs()):
            dtype_of(each.name, each.type)
        self._inputs = {each.name for each in self._session.get_inputs()}
        self._outputs = [each.name for each in self._session.get_outputs()]

    def run(self, inputs: Mapping[str, Operand]) -> Array | dict[str, Array]:
        """Compute, and return the outputs. Inputs are read where they are."""
        return self._computed({name: np.asarray(operand) for name, operand in inputs.items()})

    def warm(self, inputs: Mapping[str, tuple[Spec, Fill]]) -> None:
        """Compute once with inputs of these shapes."""
        self._computed(host.filled(inputs))

    def store(self, result: Any, output: Operand) -> None:
        """Copy an array into an output; see :func:`accel.models.adapters.host.store`."""
        host.store(result, output)

    def close(self) -> None:
        """Let the session go."""
        self._session = None

    def _computed(self, arrays: dict[str, Array]) -> Array | dict[str, Array]:
        if arrays.keys() != self._inputs:
            raise InvalidArgumentError(
                f"the inputs are {', '.join(arrays)}, and those of the ONNX model {', '.join(sorted(self._inputs))}",
                argument="inputs",
                remedy="Call them as the file does, or leave inputs out.",
            )
        results: list[Array] = self._session.run(self._outputs, arrays)
        return results[0] if len(results) == 1 else dict(zip(self._outputs, results, strict=True))
