"""What a model of any framework looks like to a device, and how it is found where the model lives."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, cast

import numpy as np

from accel.dtype import DType
from accel.errors import AccelError, BackendUnavailableError, InvalidArgumentError, LibraryError, UnsupportedError
from accel.libraries.kernel_library import Operand
from accel.models.adapters import host
from accel.values import check_choice

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from accel.backend import DeviceDescription
    from accel.models.adapters.group import ModelGroup
    from accel.models.examples import Fill
    from accel.ops import Spec

__all__ = ["Adapter", "ModelSource", "source_of"]

Array = np.ndarray[Any, Any]

_EXTRAS: Final = {"torch": "torch", "onnxruntime": "onnx"}

_GUARD: Final = 'put what starts a program behind `if __name__ == "__main__":`, or the model into a module of its own'
_BY_ITSELF: Final = f"See its cause. The module must import by itself: {_GUARD}."


class Adapter(Protocol):
    """One model in one context. An object of the user's with :meth:`open` and :meth:`run` is one too: the others have defaults.

    Methods are called one at a time, in the process where the context is, and not on an event loop. On a GPU what they do is enqueued into the stream of
    the operands; on the CPU it has ended when they return.
    """

    @property
    def is_captured(self) -> bool:
        """Whether forwards of the warmed buckets replay CUDA graphs. The default says that they do not."""

    def open(self, weights: Mapping[str, Operand], description: DeviceDescription, stream: Any) -> None:
        """Build the model around its weights.

        Parameters
        ----------
        weights
            By name: memory of the device that stays where it is until :meth:`close`. It is only read: generations that follow use it too.
        description
            Of the device.
        stream
            To enqueue into.
        """

    def run(self, inputs: Mapping[str, Operand]) -> Any:
        """Enqueue a forward, and return an array, a tuple or a mapping of arrays of the framework. Inputs are only read."""

    def store(self, result: Any, output: Operand) -> None:
        """Enqueue a copy of one array that :meth:`run` returned into an output of the same shape and dtype.

        The default copies what numpy can read, on the CPU.
        """

    def warm(self, inputs: Mapping[str, tuple[Spec, Fill]]) -> None:
        """Run once with inputs of these shapes and dtypes, so that the first request waits for no kernel to be made ready.

        They are filled with a number, or an array of as many dimensions, which is repeated or cut in each of them.

        The default does so on the CPU.
        """

    def initial(self, given: Collection[str]) -> dict[str, Array]:
        """Return the arrays that :meth:`open` needs beside those that the user gave by these names. Called before :meth:`open`, in any process.

        The default returns none.
        """

    def close(self) -> None:
        """Let the model go, and everything made of its weights. The default does nothing."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """What makes a model's adapter, in whatever process; made by :func:`source_of`. It can be pickled if its target can.

    Attributes
    ----------
    target : object
        A file, ``"package.module:name"``, a function or class, or an adapter.
    options : mapping
        Keyword arguments of the adapter.
    graphs : {"auto", "off"}
        Whether the forwards of buckets are captured into CUDA graphs, where the framework can.
    imports : tuple of str
        Modules that the model imports when it is built or run.
    outputs : tuple of str, optional
        Names of the outputs that are wanted; all, if it is ``None``.
    """

    target: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    graphs: Literal["auto", "off"] = "auto"
    imports: tuple[str, ...] = ()
    outputs: tuple[str, ...] | None = None

    @property
    def name(self) -> str:
        """The target in a word or two."""
        if isinstance(self.target, (str, Path)):
            return self.target if isinstance(self.target, str) else self.target.name
        return str(getattr(self.target, "__qualname__", type(self.target).__qualname__))

    @property
    def function(self) -> Callable[..., Awaitable[Any]] | None:
        """The target, if it is a coroutine function: one of refs, which runs in the process that opened the device."""
        return self.target if inspect.iscoroutinefunction(self.target) else None

    def adapter(self, group: ModelGroup | None = None) -> Adapter:
        """Return a new adapter. May block: it imports the framework.

        Parameters
        ----------
        group
            The ranks that run the model together: what the target is called with, before its options.

        Raises
        ------
        InvalidArgumentError
            There is no such name, it is neither an adapter nor callable, or an option is not known.
        BackendUnavailableError
            The framework is not installed.
        LibraryError
            The module of the target could not be imported, or the class of the user's raised.
        """
        for name in self.imports:
            _imported(name, name)
        if isinstance(self.target, Path):
            if group is not None:
                raise InvalidArgumentError(
                    f"{self.name} is the model of one device", remedy="Give a function of the group of ranks that builds it."
                )
            return self._made("onnx", "OnnxAdapter", self.target)
        target = _resolved(self.target) if isinstance(self.target, str) else self.target
        if inspect.iscoroutinefunction(target):
            raise InvalidArgumentError(
                f"{self.target!r} is a coroutine function, which runs in the process that opened the device",
                remedy="Give the function itself, not its name.",
            )
        if _is_adapter(target):
            if isinstance(target, type):
                return _WithDefaults(_called(target, () if group is None else (group,), self.options))
            if group is not None:
                raise InvalidArgumentError(
                    f"{target!r} is the model of one rank", remedy="Give its class: each rank makes one, with its group."
                )
            if self.options:
                raise InvalidArgumentError(f"{target!r} takes no options", remedy="Give its class, or set them before.")
            return _WithDefaults(target)
        if not callable(target):
            raise InvalidArgumentError(
                f"{self.target!r} is a {type(target).__name__}, not a model",
                remedy="Give a function that returns a torch.nn.Module, a path ending in .onnx, or an object with open and run.",
            )
        return self._made("torch", "TorchAdapter", target, graphs=self.graphs, group=group)

    def preload(self) -> None:
        """Import what :meth:`adapter` does, and make nothing.

        Raises
        ------
        InvalidArgumentError, BackendUnavailableError, LibraryError
            As :meth:`adapter` does.
        """
        for name in self.imports:
            _imported(name, name)
        if isinstance(self.target, Path):
            _ours("onnx")
        elif not _is_adapter(_resolved(self.target) if isinstance(self.target, str) else self.target):
            _ours("torch")

    def _made(self, framework: str, adapter: str, target: Any, **options: Any) -> Adapter:
        """Import an adapter of ours, and its framework with it."""
        return cast("Adapter", _called(getattr(_ours(framework), adapter), (target,), {**self.options, **options}))


def source_of(
    model: Any,
    options: Mapping[str, Any] | None = None,
    *,
    graphs: Literal["auto", "off"] = "auto",
    imports: Sequence[str] = (),
    outputs: Sequence[str] | None = None,
) -> ModelSource:
    """Return the source of a model. Imports nothing, and reads no file.

    Parameters
    ----------
    model
        ``"package.module:name"``, or what has that name: a function without parameters that returns a ``torch.nn.Module``, or a class with ``open`` and ``run``
        (:class:`Adapter`); an instance of one; a coroutine function of refs; or a path that ends in ``.onnx``.
    options
        Keyword arguments of the adapter, of the class, or of the coroutine function.
    graphs
        Whether the forwards of buckets are captured into CUDA graphs, where the framework can.
    imports
        Names of modules that the model imports when it is built or run.
    outputs
        Names of the outputs that are wanted.

    Raises
    ------
    InvalidArgumentError
        It is none of these.
    """
    if outputs is not None and not (isinstance(outputs, (tuple, list)) and outputs and all(isinstance(name, str) for name in outputs)):
        raise InvalidArgumentError(
            f"outputs is {outputs!r}", argument="outputs", remedy='Give names of outputs, of a tuple their places: ("scores",).'
        )
    if not isinstance(imports, (tuple, list)) or not all(isinstance(name, str) and name for name in imports):
        raise InvalidArgumentError(f"imports is {imports!r}", argument="imports", remedy='Give names of modules: ("transformers",).')
    if imports and inspect.iscoroutinefunction(model):
        raise InvalidArgumentError(
            f"{model!r} is a coroutine function, which runs in this process",
            argument="imports",
            remedy="Leave imports out: this process imports for it.",
        )
    check_choice("graphs", graphs, "auto", "off")
    if options is not None and not (isinstance(options, Mapping) and all(isinstance(name, str) for name in options)):
        raise InvalidArgumentError(
            f"options is {options!r:.200}", argument="options", remedy="Give a dict: name of a parameter of the model -> value."
        )
    given = {} if options is None else dict(options)
    rest = (given, graphs, tuple(imports), None if outputs is None else tuple(dict.fromkeys(outputs)))
    if isinstance(model, (str, os.PathLike)):
        text = os.fspath(model)
        if isinstance(text, str) and text.endswith(".onnx"):
            return ModelSource(Path(text).absolute(), *rest)
        parts = text.split(":") if isinstance(model, str) else []
        if len(parts) == 2 and all(part.replace(".", "_").isidentifier() for part in parts):
            return ModelSource(model, *rest)
        raise InvalidArgumentError(f"{model!r} names no model", remedy="Give 'package.module:function', or a path that ends in .onnx.")
    if any(each.__module__ == "torch.nn.modules.module" for each in type(model).__mro__):
        raise InvalidArgumentError(
            f"model is a {type(model).__name__}, which a later generation could not make again",
            remedy="Give the function that builds it, and its state_dict() as weights.",
        )
    if not (_is_adapter(model) or callable(model)):
        raise InvalidArgumentError(
            f"model is a {type(model).__name__}", remedy="Give a function that returns a torch.nn.Module, or an object with open and run."
        )
    return ModelSource(model, *rest)


class _WithDefaults:
    """An adapter of the user's, with what it lacks. See :class:`Adapter` for the methods."""

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter
        self._backend = ""

    @property
    def is_captured(self) -> bool:
        return bool(getattr(self._adapter, "is_captured", False))

    def open(self, weights: Mapping[str, Operand], description: DeviceDescription, stream: Any) -> None:
        self._backend = description.backend
        self._adapter.open(weights, description, stream)

    def run(self, inputs: Mapping[str, Operand]) -> Any:
        return self._adapter.run(inputs)

    def store(self, result: Any, output: Operand) -> None:
        if hasattr(self._adapter, "store"):
            self._adapter.store(result, output)
            return
        if output.backend != "cpu":
            raise UnsupportedError(
                f"{type(self._adapter).__name__} has no method store",
                remedy=f"Define store(result, output) for memory of {output.backend}.",
            )
        host.store(result, output)

    def warm(self, inputs: Mapping[str, tuple[Spec, Fill]]) -> None:
        if hasattr(self._adapter, "warm"):
            self._adapter.warm(inputs)
        elif self._backend == "cpu":
            arrays = host.filled(inputs)
            operands = {
                name: Operand(array.ctypes.data, array.shape, DType.of(array.dtype), False, "cpu") for name, array in arrays.items()
            }
            self._adapter.run(operands)

    def initial(self, given: Collection[str]) -> dict[str, Array]:
        return dict(self._adapter.initial(given)) if hasattr(self._adapter, "initial") else {}

    def close(self) -> None:
        if hasattr(self._adapter, "close"):
            self._adapter.close()


def _is_adapter(value: object) -> bool:
    return callable(getattr(value, "open", None)) and callable(getattr(value, "run", None))


def _ours(framework: str) -> Any:
    """Import the module of an adapter, and its framework with it."""
    try:
        return importlib.import_module(f"accel.models.adapters.{framework}")
    except ImportError as error:
        raise _unavailable(error) from error


def _resolved(target: str) -> Any:
    """Return what ``"package.module:name"`` names."""
    module_name, _, path = target.partition(":")
    found = _imported(module_name, target)
    for name in path.split("."):
        if not hasattr(found, name):
            raise InvalidArgumentError(
                f"{target!r}: module {module_name} has no {path!r}", remedy="Name a function or class of the module."
            )
        found = getattr(found, name)
    return found


def _imported(module_name: str, target: str) -> Any:
    """Import a module, which ``target`` names."""
    try:
        return importlib.import_module(module_name)
    except ImportError as error:
        missing = getattr(error, "name", None) or ""
        if missing and f"{module_name}.".startswith(f"{missing}."):
            raise InvalidArgumentError(
                f"{target!r}: there is no module {missing!r}",
                remedy="Name a module that can be imported, and set PYTHONPATH if it is elsewhere.",
            ) from error
        if missing.partition(".")[0] in _EXTRAS:
            raise _unavailable(error) from error
        raise LibraryError(f"importing {module_name} raised {error!r}", remedy=_BY_ITSELF) from error
    except SystemExit as error:  # of a program that ends when its server does, or cannot start
        raise LibraryError(f"importing {module_name} ended the program: {error!r}", remedy=_BY_ITSELF) from error
    except UnsupportedError:  # of a program without a main guard: it says what to write
        raise
    except Exception as error:
        raise LibraryError(f"importing {module_name} raised {error!r}", remedy=_BY_ITSELF) from error


def _called(factory: Any, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    try:
        inspect.signature(factory).bind(*arguments, **options)
    except TypeError as error:
        raise InvalidArgumentError(
            f"{factory.__name__} cannot be made with options {dict(options)!r}: {error}", argument="options"
        ) from None
    try:
        return factory(*arguments, **options)
    except AccelError:
        raise
    except Exception as error:
        raise LibraryError(f"{factory.__name__} could not be made: {error!r}", remedy="See its cause.") from error


def _unavailable(error: ImportError) -> BackendUnavailableError:
    """Return the error of a framework that is not installed, or not usable."""
    name = (error.name or "").partition(".")[0]
    extra = _EXTRAS.get(name)
    remedy = f"Install it: pip install '.[{extra}]'  # in a checkout" if extra else "See its cause."
    return BackendUnavailableError(f"{name or 'the framework'} cannot be imported: {error}", remedy=remedy)
