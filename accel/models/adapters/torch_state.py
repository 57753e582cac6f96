"""The state of a torch module: what it needs beside its class to give the same answers, taken from one build and given to the next.

``state_dict()`` is not all of it. Buffers that are not persistent (tables of rotary embeddings), tensors that are plain attributes or are in lists and dicts of
a module, and ties between parameters are in no state dict. They are called *leftovers* here, and have names that no state dict has.
"""

from __future__ import annotations

import inspect
import threading
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from accel._log import get_logger
from accel.errors import InvalidArgumentError, LibraryError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

__all__ = ["assign", "built", "state_of"]

logger = get_logger()

_LEFTOVER: Final = "leftover:"
"""Begins the names of what is in no state dict."""

_NOT_ELEMENTS: Final = (
    *("as_strided_", "detach_", "rename_", "requires_grad_", "resize_", "resize_as_", "set_", "share_memory_"),
    *("squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_"),
)
"""What ends like a function that writes elements, and changes other things of a tensor."""

_OF_EVERY_MODULE: Final = frozenset(vars(nn.Module()))


def state_of(builder: Callable[[], Any], given: Collection[str] = ()) -> dict[str, torch.Tensor]:
    """Build a module on the host, and return what :func:`assign` needs of it.

    Parameters
    ----------
    builder
        Returns the module.
    given
        Names of the weights that there are. If there are none, all of the module's are returned, as the builder initialized them; else the leftovers alone,
        for which parameters are not allocated unless a leftover is computed from them.

    Raises
    ------
    LibraryError
        The builder raised.
    InvalidArgumentError
        It returned no module.
    UnsupportedError
        There is state in the module that is no tensor, or a parameter without a shape.
    """
    if not given:
        module = _called(builder)
        return _state_dict(module) | _leftovers(module)
    found = _leftovers(built(builder))
    if any(tensor.is_meta for tensor in found.values()):
        found = _leftovers(_called(builder))
    return {name: tensor for name, tensor in found.items() if name not in given}


def built(builder: Callable[[], Any]) -> nn.Module:
    """Return a module whose parameters are on the device meta: it has everything but their elements.

    Only parameters are: builders compute with their other tensors. A builder that computes with parameters too builds all of the module.

    Raises
    ------
    LibraryError, InvalidArgumentError, UnsupportedError
        See :func:`state_of`.
    """
    thread = threading.get_ident()
    replaced: Any = WeakTensorKeyDictionary()  # a parameter that is registered twice is one afterwards, too

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        """Replace a parameter that a module gets. The hook is that of all modules; only those that this thread builds are meant."""
        if threading.get_ident() != thread or type(parameter) is not nn.Parameter or parameter.is_meta:
            return None
        if parameter not in replaced:
            replaced[parameter] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        found: nn.Parameter = replaced[parameter]
        return found

    hook = register_module_parameter_registration_hook(on_meta)  # type: ignore[arg-type]
    try:
        with _NoFilling():
            return _called(builder)
    except LibraryError as error:
        logger.info("torch_module_built_with_parameters", reason=repr(error.__cause__))
    finally:
        hook.remove()
    return _called(builder)


class _NoFilling(TorchFunctionMode):
    """Leaves out what writes elements of tensors that have none.

    It would change nothing, but torch imports its compiler to find that out, for 1.7 s of the processor: for ``normal_``, with which an embedding begins.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, or return the tensor that it was to write."""
        given = kwargs or {}
        name = getattr(function, "__name__", "")
        if name.endswith("_") and not name.startswith("__") and name not in _NOT_ELEMENTS:
            target = args[0] if args else given.get("tensor")  # torch.nn.init names it
            if isinstance(target, torch.Tensor) and target.is_meta:
                return target
        return function(*args, **given)


def assign(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Let a module have the state that :func:`state_of` returned, or weights of the user's and the rest from there.

    Parameters become the given tensors themselves, and need no gradients. Everything else is copied, because a module may write it.

    Raises
    ------
    InvalidArgumentError
        A tensor is missing, has another shape, or is none of the module's.
    UnsupportedError
        A tensor of the module has no elements, and is nowhere that they could be given to.
    """
    for parameter in module.parameters():  # a ScriptModule cannot do it for all
        parameter.requires_grad_(False)
    before = _registered(module)
    names_of_state = module.state_dict(keep_vars=True).keys()
    state = {name: tensor for name, tensor in tensors.items() if not name.startswith(_LEFTOVER)}
    ties = _ties(before)
    for names in ties:
        # Files keep one name of each tie.
        tied = next((state[name] for name in names if name in state), None)
        if tied is not None:
            state |= {name: tied for name in names if name in names_of_state and name not in state}
    own = {name: tensor if isinstance(before.get(name), nn.Parameter) else tensor.clone() for name, tensor in state.items()}
    try:
        found = module.load_state_dict(own, strict=False, assign=True)
    except RuntimeError as error:
        raise InvalidArgumentError(f"the weights do not fit the module: {error}", remedy="Give those of this module.") from error
    if found.missing_keys or found.unexpected_keys:
        wrong = (("the module has", found.unexpected_keys), ("the weights have", found.missing_keys))
        raise InvalidArgumentError(
            " and ".join(f"{what} no {_some(names)}" for what, names in wrong if names),
            remedy="Give the weights of this module, by the names of its state_dict().",
        )
    for first, *others in ties:
        shared = _registered(module)[first]
        for name in others:
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, shared)
    after = _registered(module)
    _restore(module, {id(old): after[name] for name, old in before.items() if after[name] is not old}, tensors)


def _restore(module: nn.Module, replaced: dict[int, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """Give a module the leftovers; ``replaced`` are the tensors that came for others, by the identities of these."""
    kept = {id(tensor) for tensor in replaced.values()}

    def restored(path: str, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in kept:
            return tensor
        if id(tensor) not in replaced:
            name = _LEFTOVER + path
            if name in tensors:
                new = tensors[name].clone()
                replaced[id(tensor)] = nn.Parameter(new, requires_grad=False) if isinstance(tensor, nn.Parameter) else new
            elif tensor.is_meta:
                raise UnsupportedError(
                    f"tensor {path!r} of the module has no elements",
                    remedy="Register it as a buffer, or compute it from other tensors than parameters.",
                )
            else:
                replaced[id(tensor)] = tensor
            kept.add(id(replaced[id(tensor)]))
        return replaced[id(tensor)]

    _Walk(module, restored).run()


def _leftovers(module: nn.Module) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    state = module.state_dict(keep_vars=True)
    seen = {id(tensor) for tensor in chain(module.parameters(), state.values())}

    def take(path: str, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[_LEFTOVER + path] = tensor.detach()
        return tensor

    _Walk(module, take).run()
    return found


class _Walk:
    """Calls a function with each tensor that is anywhere in a module, and puts what it returns in the tensor's place.

    Parameters
    ----------
    module
        The module. Attributes, lists, tuples, dicts and modules are searched, in whatever they are.
    visit
        Called with the path and the tensor.
    """

    def __init__(self, module: nn.Module, visit: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
        self._module = module
        self._visit = visit
        self._seen: dict[int, Any] = {}  # kept, so that identities stay theirs

    def run(self) -> None:
        """Do so."""
        self._of(self._module, "")

    def _of(self, value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            self._seen[id(value)] = value
            return self._visit(path, value)
        if isinstance(value, (nn.Module, list, dict, tuple)) and id(value) not in self._seen:
            self._seen[id(value)] = value
            if isinstance(value, nn.Module):
                self._of_module(value, f"{path}." if path else "")
            elif isinstance(value, tuple):
                return self._of_tuple(value, path)
            else:
                for key, item in list(value.items()) if isinstance(value, dict) else enumerate(value):
                    self._put(value, key, item, f"{path}[{key!r}]")
        return value

    def _of_module(self, module: nn.Module, prefix: str) -> None:
        for name, value in list(vars(module).items()):
            if name in ("_parameters", "_buffers", "_modules"):
                for key, item in list(value.items()):
                    self._put(value, key, item, prefix + key)
            elif name not in _OF_EVERY_MODULE:
                self._put(vars(module), name, value, prefix + name)

    def _of_tuple(self, value: tuple[Any, ...], path: str) -> Any:
        items = [self._of(item, f"{path}[{index}]") for index, item in enumerate(value)]
        if all(new is item for new, item in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)

    def _put(self, container: Any, key: Any, item: Any, path: str) -> None:
        new = self._of(item, path)
        if new is not item:
            container[key] = new


def _state_dict(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict, with one name of each tie."""
    found = {}
    others = {name for _, *names in _ties(_registered(module)) for name in names}
    for name, value in module.state_dict().items():
        if name in others:
            continue
        if not isinstance(value, torch.Tensor):
            raise UnsupportedError(
                f"{name!r} in the module's state dict is a {type(value).__name__}", remedy="Keep such state in the builder."
            )
        found[name] = value
    return found


def _registered(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers, each by all of its names."""
    return dict(chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)))


def _ties(registered: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Return the names of each tensor that has several."""
    names: dict[int, list[str]] = {}
    for name, tensor in registered.items():
        names.setdefault(id(tensor), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def _called(builder: Callable[[], Any]) -> nn.Module:
    name = getattr(builder, "__qualname__", repr(builder))
    try:
        module = builder()
    except Exception as error:
        raise LibraryError(
            f"the builder {name} raised {error!r}",
            library="torch",
            remedy="See its cause; it is called without arguments, in a world with the group.",
        ) from error
    if inspect.iscoroutine(module):
        module.close()
    if not isinstance(module, nn.Module):
        raise InvalidArgumentError(f"the builder {name} returned a {type(module).__name__}", remedy="Return a torch.nn.Module.")
    lazy = next((name for name, tensor in module.named_parameters() if is_lazy(tensor)), None)
    if lazy is not None:
        raise UnsupportedError(f"parameter {lazy!r} has no shape yet", remedy="Build the module with the sizes of its inputs.")
    return module


def _some(names: Sequence[str]) -> str:
    """Return a few of the names, as a part of a sentence."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more
