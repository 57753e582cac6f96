"""Modules of torch as models."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from accel._log import get_logger
from accel.dtype import DType
from accel.errors import InvalidArgumentError, UnsupportedError
from accel.models.adapters.torch_state import assign, built, state_of
from accel.models.examples import expanded

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from contextlib import AbstractContextManager

    from torch.cuda import _POOL_HANDLE

    from accel.backend import DeviceDescription
    from accel.libraries.kernel_library import Operand
    from accel.models.adapters.group import Launcher, ModelGroup
    from accel.models.examples import Fill
    from accel.ops import Spec

__all__ = ["TorchAdapter"]

logger = get_logger()

_WRAPPED = ("_orig_mod", "module")
"""Where a compiled module and a parallel one keep the module whose names they hide."""

_FLOAT8 = (DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2)


class TorchAdapter:
    """A module that a function builds, as an :class:`~accel.models.adapters.base.Adapter`.

    The module is built without its parameters, which become views of the durable weights: they are shared by all generations, and need no gradients. A weight
    keeps the dtype that it was loaded with. Buffers, and tensors that are plain attributes, are copies that belong to one generation.

    Inputs are given to the module by name, as keyword arguments, if its ``forward`` has parameters of all these names; by position, if it has none of
    them; some alone are refused. It runs under
    ``torch.inference_mode()``, on CUDA in the stream of its operands.

    Parameters
    ----------
    builder
        Called without arguments, or with the ``group``, once in each context. It must build the same module each time; values that differ between builds are
        those of the first.
    train
        Leave the module in the mode in which the builder returned it; ``False`` calls ``eval()``.
    threads
        Threads that torch uses for one op on the CPU, set for the whole process; ``None`` leaves torch's own choice, one per core that the process may use.
    graphs
        ``"auto"`` captures the forward of each bucket into a CUDA graph when it is warmed, on CUDA and without ``train``: what Python does in a forward
        beside calling torch is then done once, and not for each request. If one bucket cannot be captured, all run eagerly, and the log says why
        (``model_not_captured``). ``"off"`` captures none.
    group
        The ranks that run the model together. Graphs are made of forwards with all ranks alone, and anew for each communicator.

    Raises
    ------
    InvalidArgumentError
        If an option has no such value.
    """

    def __init__(
        self,
        builder: Callable[..., Any],
        *,
        train: bool = False,
        threads: int | None = None,
        graphs: Literal["auto", "off"] = "auto",
        group: ModelGroup | None = None,
    ) -> None:
        if not isinstance(train, bool) or graphs not in ("auto", "off") or not (threads is None or (type(threads) is int and threads > 0)):
            raise InvalidArgumentError(
                f"train is {train!r}, threads {threads!r} and graphs {graphs!r}",
                remedy="Give True or False, a positive number or None, and 'auto' or 'off'.",
            )
        self._builder: Callable[[], Any] = builder if group is None else functools.wraps(builder)(functools.partial(builder, group))
        self._group = group
        self._train = train
        self._threads = threads
        self._graphs_wanted = graphs == "auto"
        self._module: torch.nn.Module | None = None
        self._device = torch.device("cpu")
        self._stream: Any = None
        self._named: Collection[str] | None = None
        self._graphs: dict[tuple[tuple[int, ...], ...], CapturedForward] = {}
        self._launcher: Launcher | None = None  # of the group, when the graphs were captured
        self._pool: Any = None  # of the graphs; None: there are to be none
        self._last: Any = None  # stream of the last run

    @property
    def is_captured(self) -> bool:
        """Whether the buckets that were warmed replay graphs."""
        return bool(self._graphs)

    def initial(self, given: Collection[str]) -> dict[str, torch.Tensor]:
        """Return the tensors of the host that :meth:`open` needs beside those given; see :func:`~accel.models.adapters.torch_state.state_of`."""
        return state_of(self._builder, given)

    def open(self, weights: Mapping[str, Operand], description: DeviceDescription, stream: Any) -> None:
        """Build the module around the weights; see :class:`~accel.models.adapters.base.Adapter`.

        Raises
        ------
        LibraryError
            The builder raised.
        InvalidArgumentError
            It returned no module, or the weights are not the module's.
        UnsupportedError
            The backend's memory is none that torch knows.
        """
        if description.backend not in ("cpu", "cuda"):
            raise UnsupportedError(
                f"torch does not know memory of {description.backend}", remedy="Use a device of the cpu or cuda backend."
            )
        self._device = torch.device("cpu") if description.backend == "cpu" else torch.device("cuda", description.index)
        self._stream = self._last = stream
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        module = built(self._builder)
        with _working_in(self._device, stream):
            assign(module, {name: _tensor(weight) for name, weight in weights.items()})
            for each in module.modules():
                if isinstance(each, torch.nn.RNNBase):
                    each._init_flat_weights()  # noqa: SLF001 - its first forward would gather its weights so, and count as a write of them
        self._module = module if self._train else module.eval()
        self._named = _parameters(module)
        if self._device.type == "cuda" and self._graphs_wanted and not self._train:
            self._pool = torch.cuda.graph_pool_handle()

    def run(self, inputs: Mapping[str, Operand]) -> Any:
        """Enqueue a forward, and return what the module returns.

        Raises
        ------
        UnsupportedError
            The module has written an input in place.
        """
        stream = next((each.stream for each in inputs.values()), self._stream)
        with self._working_in(stream):
            if self._graphs or self._group is not None:
                self._wait_for_last(stream)
            tensors = {name: _tensor(each) for name, each in inputs.items()}
            captured = self._graphs.get(tuple([each.shape for each in inputs.values()]))
            if captured is None:
                return self._forward(tensors)
            if self._group is not None:
                self._group.mark()
            return captured.replay(tensors)

    def warm(self, inputs: Mapping[str, tuple[Spec, Fill]]) -> None:
        """Run once with inputs of these shapes, on the stream that it was opened with, and capture that into a graph if there are to be any."""
        before = None if self._group is None else self._group.stream
        with self._working_in(self._stream):
            self._wait_for_last(self._stream)
            tensors = {name: _filled(spec, fill, self._device) for name, (spec, fill) in inputs.items()}
            self._forward(tensors)
            if self._pool is not None and (self._group is None or self._group.launcher is not None):
                self._capture(tensors)
        if before is not None and self._device.type == "cuda":  # the stream of the forwards, whose collectives come behind these
            with self._working_in(before):
                self._wait_for_last(before)

    def store(self, result: Any, output: Operand) -> None:
        """Enqueue a copy of a tensor, of any strides, or of an array of numpy, into an output of its shape and dtype.

        Raises
        ------
        InvalidArgumentError
            If shape or dtype differ.
        UnsupportedError
            If the tensor is not dense.
        """
        device = torch.device(output.backend, output.index)
        with _working_in(device, output.stream), torch.inference_mode():
            source = result if isinstance(result, torch.Tensor) else torch.from_numpy(np.array(result))
            target = _tensor(output)
            if source.layout is not torch.strided:
                raise UnsupportedError(f"a result has the layout {source.layout}", remedy="Return dense tensors: x.to_dense().")
            if source.shape != target.shape or source.dtype != target.dtype:
                raise InvalidArgumentError(
                    f"a result is {source.dtype}{list(source.shape)}, and its output {target.dtype}{list(target.shape)}",
                    remedy="Return tensors of one dtype, and of shapes that follow from those of the inputs.",
                )
            target.copy_(source)

    def close(self) -> None:
        """Let the module and its graphs go."""
        self._graphs.clear()
        self._module = None

    def _working_in(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a block in which torch and the group enqueue into a stream. Graphs go that have the addresses of a communicator that is no more."""
        if self._group is not None:
            if self._device.type == "cuda":
                self._group.stream = stream
            if self._group.launcher is not self._launcher:
                self._graphs.clear()
                if self._pool is not None:  # torch ends a pool with its last graph, and takes none that has ended
                    self._pool = torch.cuda.graph_pool_handle()
                self._launcher = self._group.launcher
        return _working_in(self._device, stream)

    def _wait_for_last(self, stream: Any) -> None:
        """Have a stream wait for the last one. Graphs share memory, also with what ran eagerly in their stream: batches have another one."""
        if stream is not self._last and self._device.type == "cuda":
            torch.cuda.current_stream(self._device).wait_stream(_external(self._device, self._last))
            self._last = stream

    def _capture(self, tensors: Mapping[str, torch.Tensor]) -> None:
        try:
            captured = CapturedForward(self._forward, tensors, self._pool)
        except Exception as error:
            self._graphs.clear()
            self._pool = None
            shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            name = getattr(self._builder, "__qualname__", repr(self._builder))
            logger.warning("model_not_captured", model=name, inputs=shapes, error=error, remedy='It runs eagerly; graphs="off" says so.')
        else:
            self._graphs[tuple([tuple(tensor.shape) for tensor in tensors.values()])] = captured

    def _takes(self, names: Collection[str]) -> bool:
        """Whether ``forward`` takes the inputs by name, and not by position."""
        if self._named is None:
            return True
        found = [name for name in names if name in self._named]
        if 0 < len(found) < len(names):
            other = next(name for name in names if name not in self._named)
            raise InvalidArgumentError(
                f"the module's forward has a parameter {found[0]!r} and none {other!r}, so that its inputs are bound neither by name nor by position",
                argument="inputs",
                remedy=f"Name the inputs as forward does ({', '.join(self._named)}), or none of them.",
            )
        return bool(found) or not names

    def _forward(self, tensors: Mapping[str, torch.Tensor]) -> Any:
        module = self._module
        if module is None:
            raise AssertionError("not open")
        versions = [tensor._version for tensor in tensors.values()]  # noqa: SLF001 - torch has no other name for it
        with torch.inference_mode():
            result = module(**tensors) if self._takes(tensors) else module(*tensors.values())
        for (name, tensor), version in zip(tensors.items(), versions, strict=True):
            if tensor._version != version:  # noqa: SLF001
                raise UnsupportedError(
                    f"the module writes its input {name!r} in place, which others use",
                    library="torch",
                    remedy="Use an op that is not in place (inplace=False), or clone it first.",
                )
        return result


def _parameters(module: torch.nn.Module) -> Collection[str] | None:
    """Return the names of what ``forward`` takes by name; ``None`` for any. What hides them, and wraps no module that shows them, takes none."""
    schema = getattr(module.forward, "schema", None)
    if schema is not None:  # of a script, which has no signature, or one that a trace made
        return [each.name for each in schema.arguments[1:]]
    parameters = inspect.signature(module.forward).parameters.values()
    kinds = [each.kind for each in parameters]
    if inspect.Parameter.VAR_KEYWORD in kinds:
        if inspect.Parameter.VAR_POSITIONAL not in kinds:
            return None
        wrapped = next((each for each in (getattr(module, name, None) for name in _WRAPPED) if isinstance(each, torch.nn.Module)), None)
        return _parameters(wrapped) if wrapped is not None else []
    return [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]


def _working_in(device: torch.device, stream: Any) -> AbstractContextManager[Any]:
    """Return a block in which torch enqueues into a stream of the device's; on the CPU it has none."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    block: AbstractContextManager[Any] = torch.cuda.stream(_external(device, stream))
    return block


def _external(device: torch.device, stream: Any) -> Any:
    """Return a stream of the device's as torch knows it."""
    external: Any = torch.cuda.ExternalStream
    return external(stream.handle, device=device)


def _filled(spec: Spec, fill: Fill, device: torch.device) -> torch.Tensor:
    """Return a tensor that is filled with a number, or with an array that is repeated."""
    dtype = getattr(torch, spec.dtype.value)
    if not isinstance(fill, np.ndarray):
        return torch.full(spec.shape, fill, dtype=dtype, device=device)
    array = expanded(fill, spec.shape, spec.dtype)
    return torch.from_numpy(array.astype(np.float32) if spec.dtype.is_extended else array).to(device, dtype)


def _tensor(operand: Operand) -> torch.Tensor:
    """Return a tensor over an operand's memory."""
    if operand.dtype in _FLOAT8:
        # torch has taken float8 by DLPack only since 2.10; bytes it always took.
        data: torch.Tensor = from_dlpack(dataclasses.replace(operand, dtype=DType.UINT8))
        return data.view(getattr(torch, operand.dtype.value))
    found: torch.Tensor = from_dlpack(operand)
    return found


class CapturedForward:
    """One forward as a CUDA graph. What it reads and what it returns stay in place, so nothing may run beside a replay that shares the pool.

    ``torch.cuda.graph`` is not used: it synchronizes the device, empties the allocator's cache, and by default forbids other threads to allocate. Everything
    else in the process would feel that.

    Parameters
    ----------
    forward
        Takes tensors by name. It must have run with these shapes before: what it loads, compiles or tunes at first cannot be captured.
    inputs
        Tensors that are the graph's from now on.
    pool
        Of ``torch.cuda.graph_pool_handle()``: memory of the graphs that are never replayed at the same time.

    Raises
    ------
    Exception
        What ``forward`` raised, or torch's ``RuntimeError`` where it did what cannot be captured, such as waiting for a result. The current stream is not
        capturing any more.
    """

    def __init__(
        self, forward: Callable[[Mapping[str, torch.Tensor]], Any], inputs: Mapping[str, torch.Tensor], pool: _POOL_HANDLE
    ) -> None:
        self._inputs = inputs
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            self._result = forward(inputs)
            self._graph.capture_end()
        except BaseException:
            _end_failed(self._graph, pool)
            raise

    def replay(self, inputs: Mapping[str, torch.Tensor]) -> Any:
        """Enqueue a forward of these inputs into the current stream, and return its result: valid until the next replay of a graph of the pool."""
        for name, tensor in inputs.items():
            self._inputs[name].copy_(tensor)
        self._graph.replay()
        return self._result


def _end_failed(graph: torch.cuda.CUDAGraph, pool: _POOL_HANDLE) -> None:
    """End a capture that failed. Torch's own end of it leaves the allocator as if it still went on, if CUDA had broken it off."""
    with contextlib.suppress(RuntimeError):
        graph.capture_end()
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)  # noqa: SLF001
