"""Models in ONNX files, which ONNX Runtime computes on the CPU."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import onnxruntime

from accel.dtype import DType
from accel.errors import InvalidArgumentError, UnsupportedError
from accel.models.adapters import host
from accel.models.tensor_spec import BATCH, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from accel.backend import DeviceDescription
    from accel.engine.kernel_library import Operand
    from accel.ops import Spec

__all__ = ["OnnxAdapter", "input_specs"]

Array = np.ndarray[Any, Any]

_FILE: Final = "model.onnx"
"""Name of the one weight: the bytes of the file."""
_CPU: Final = "CPUExecutionProvider"

_DTYPES: Final = {
    "tensor(bool)": DType.BOOL,
    "tensor(float16)": DType.FLOAT16,
    "tensor(float)": DType.FLOAT32,
    "tensor(double)": DType.FLOAT64,
    **{f"tensor({sign}int{bits})": DType.of(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)},
}
"""What numpy and ONNX Runtime exchange."""


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
    providers
        Of ONNX Runtime. ``"CPUExecutionProvider"`` is the only one that is taken: the others work in memory, streams and contexts of their own, whose
        faults no supervisor sees.

    Raises
    ------
    InvalidArgumentError
        If ``threads`` is no positive number.
    UnsupportedError
        If another provider is named.
    """

    is_captured: Final = False

    def __init__(self, path: Path, *, threads: int | None = None, providers: Sequence[str] = (_CPU,)) -> None:
        if not (threads is None or (type(threads) is int and threads > 0)):
            raise InvalidArgumentError(f"threads is {threads!r}", remedy="Give a positive number, or None.")
        if list(providers) != [_CPU]:
            raise UnsupportedError(
                f"ONNX models run with the {_CPU}, not with {', '.join(map(str, providers))}: others have contexts whose faults are not seen",
                library="onnxruntime",
                remedy="Leave providers out; for a GPU give the model as a torch.nn.Module.",
            )
        self._path = path
        self._threads = threads
        self._session: Any = None
        self._outputs: list[str] = []

    def initial(self, given: Collection[str]) -> dict[str, Array]:
        """Return the bytes of the file, unless they are given.

        Raises
        ------
        InvalidArgumentError
            If the file cannot be read.
        """
        return {} if _FILE in given else {_FILE: np.frombuffer(_read(self._path), np.uint8)}

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
        self._session = _session(np.asarray(weights[_FILE]).tobytes(), self._path, self._threads)
        for each in (*self._session.get_inputs(), *self._session.get_outputs()):
            _dtype(each)
        self._outputs = [each.name for each in self._session.get_outputs()]

    def run(self, inputs: Mapping[str, Operand]) -> Array | dict[str, Array]:
        """Compute, and return the outputs. Inputs are read where they are."""
        return self._computed({name: np.asarray(operand) for name, operand in inputs.items()})

    def warm(self, inputs: Mapping[str, tuple[Spec, float]]) -> None:
        """Compute once with inputs of these shapes."""
        self._computed(host.filled(inputs))

    def store(self, result: Any, output: Operand) -> None:
        """Copy an array into an output; see :func:`accel.models.adapters.host.store`."""
        host.store(result, output)

    def close(self) -> None:
        """Let the session go."""
        self._session = None

    def _computed(self, arrays: dict[str, Array]) -> Array | dict[str, Array]:
        results: list[Array] = self._session.run(self._outputs, arrays)
        return results[0] if len(results) == 1 else dict(zip(self._outputs, results, strict=True))


def input_specs(path: Path) -> dict[str, TensorSpec]:
    """Return what a file says of its inputs. May block: it reads the file.

    A first dimension that has no length, and one name in all inputs, is the batch. Others keep their names; characters that no name of Python has become
    underscores, and a dimension without a name is called after its input and its place.

    Raises
    ------
    InvalidArgumentError
        The file cannot be read, or is not one that ONNX Runtime takes.
    UnsupportedError
        An input is of a type that numpy does not know.
    """
    inputs = _session(_read(path), path, 1, optimizes=False).get_inputs()
    shapes = {each.name: [_dimension(each.name, place, dim) for place, dim in enumerate(each.shape)] for each in inputs}
    first = next((shape[0] for shape in shapes.values() if shape), 0)
    if isinstance(first, str) and all(shape[:1] == [first] and first not in shape[1:] for shape in shapes.values()):
        shapes = {name: [BATCH, *shape[1:]] for name, shape in shapes.items()}
    return {each.name: TensorSpec(shapes[each.name], _dtype(each)) for each in inputs}


def _dimension(name: str, place: int, dim: int | str | None) -> int | str:
    if isinstance(dim, int) and dim >= 0:
        return dim
    found = re.sub(r"\W", "_", dim if isinstance(dim, str) and dim else f"{name}_{place}")
    return f"dim_{found}" if not found.isidentifier() or (found == BATCH and place) else found


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidArgumentError(f"{path} cannot be read: {error}", remedy="Give the path of a readable .onnx file.") from error


def _session(data: bytes, path: Path, threads: int | None, *, optimizes: bool = True) -> Any:
    options = onnxruntime.SessionOptions()
    # Given a number, ONNX Runtime pins no thread to a core that the process may not use.
    options.intra_op_num_threads = len(os.sched_getaffinity(0)) if threads is None else threads
    # Threads that spin between two ops take the cores of the event loop.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3  # errors are raised; warnings would go to stderr
    if not optimizes:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        return onnxruntime.InferenceSession(data, options, providers=[_CPU])
    except Exception as error:  # its errors have no common class
        raise InvalidArgumentError(
            f"ONNX Runtime does not take {path}: {error}",
            library="onnxruntime",
            remedy="Give a valid ONNX file that has all of its data in itself.",
        ) from error


def _dtype(each: Any) -> DType:
    if each.type not in _DTYPES:
        raise UnsupportedError(
            f"{each.name!r} of the ONNX model is a {each.type}",
            library="onnxruntime",
            remedy=f"Cast it in the file; inputs and outputs are one of {', '.join(_DTYPES)}.",
        )
    return _DTYPES[each.type]
