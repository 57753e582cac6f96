"""The kernels of one context: of the backend, of families, and of registered libraries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel.backend import CountsCommands
from accel.engine.kernels import LIBRARIES
from accel.engine.program import Replay
from accel.engine.status import STATUS_COMMANDS
from accel.errors import AccelError, InvalidArgumentError, UnsupportedError
from accel.family import BackendPart
from accel.ops import FamilyOp
from accel.ops.families import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.backend import AccelDevice, Kernel
    from accel.engine.core import DeviceCore
    from accel.engine.registration import RegisteredLibrary
    from accel.engine.scratch import Scratch
    from accel.ops import KernelOp, Plan

__all__ = ["KernelTable"]


class KernelTable:
    """The kernels of one context.

    Parameters
    ----------
    core
        State of the device that outlives its contexts.
    device
        The backend's context.
    scratch
        Is told the sizes of the scratch memory that ops of a family need.

    Attributes
    ----------
    may_block : callable
        Given a lane and an op, whether calling the op's kernel may block.
    parts : dict of str to BackendPart
        The kernels of libraries and families that are not the backend's.
    cache : dict
        Class of ops -> kernel, of the ops that were dispatched so far.
    command_counts : mapping or None
        Library and kind of an op -> its commands, or a function that counts them, where the backend
        counts commands; ``None``: each op counts as one.
    registered : dict of str to RegisteredLibrary
        The registered libraries that are open here.
    leaving : set of str
        Registered libraries that take no more ops.
    """

    def __init__(self, core: DeviceCore, device: AccelDevice, scratch: Scratch) -> None:
        self._core = core
        self._device = device
        self._scratch = scratch
        self.parts: dict[str, BackendPart] = {}
        self.may_block: Callable[[Any, Any], bool] = device.may_block
        self.cache: dict[type[KernelOp], Kernel] = {}
        self.command_counts = device.commands if isinstance(device, CountsCommands) else None
        self.registered: dict[str, RegisteredLibrary] = {}
        self.leaving: set[str] = set()

    def find(self, op: KernelOp) -> Kernel:
        """Return the kernel of an op: the function that enqueues it.

        The kernel is taken from :attr:`cache`, else from the backend, else from the op's family,
        and is in the cache from then on. At the first op of a family from outside ``accel`` this
        adds the family's part for this backend, and the sizes of scratch memory that the part has.

        Raises
        ------
        UnsupportedError
            If there is none.
        InvalidArgumentError
            If its family has the name of another library.
        """
        cached = self.cache.get(type(op))
        if cached is not None:
            return cached
        name, backend = op.library, self._core.description.backend
        family = op.family if isinstance(op, FamilyOp) else None
        # A family from outside accel has its part of the backend registered at its first op.
        if family is not None and name not in self.parts and family not in FAMILIES:
            if name in LIBRARIES:
                raise InvalidArgumentError(f"there is another library {name!r}", op=op.kind, remedy="Give the family another name.")
            self.parts[name] = family.part(backend) or BackendPart({})
            self.may_block = self._may_block
        # The kernel for this backend, else the generic one of the library or family. A library that
        # is being unregistered has none any more.
        part = None if name in self.leaving else self.parts.get(name)
        specific = self._device.kernels(name) if part is None else part.kernels
        kernel = specific.get(op.kind) or (LIBRARIES.get(name, {}).get(op.kind) if family is None else family.kernel(op.kind, backend))
        if kernel is None:
            raise self._no_kernel_error(op, is_library_known=bool(name in LIBRARIES or specific or family is not None))
        if part is not None and part.scratch is not None:
            self._scratch.add(op, part.scratch)
        if isinstance(type(op).library, str):  # else it is a field: ops of one class are of several libraries
            self.cache[type(op)] = kernel
        return kernel

    def _no_kernel_error(self, op: KernelOp, *, is_library_known: bool) -> UnsupportedError:
        """Return the error of an op without a kernel, which says what would give it one."""
        name = op.library
        if name in self.registered and name not in self.leaving:
            remedy = f"Mark a method of the library with @accel.kernel({type(op).__name__})."
        elif isinstance(op, FamilyOp) and op.family is None:
            remedy = f"Make the accel.ops.Family of {type(op).__name__}, in a module that is imported."
        else:
            remedy = "Use another device." if is_library_known else "Register it first: await device.register(YourLibrary)."
        what = f"{name} has no {op.kind}" if is_library_known else f"there is no library {name!r}"
        return UnsupportedError(f"{what} on {self._core.description.backend}", op=op.kind, device=self._core.name, remedy=remedy)

    def count_commands(self, op: KernelOp, plan: Plan) -> int:
        """Return how many commands an op puts into the device's queues at most.

        Called only where the backend counts commands. A library or family that is not the
        backend's has one number for all of its ops.
        """
        assert self.command_counts is not None, "the backend counts commands"
        part = self.parts.get(op.library)
        count = self.command_counts.get((op.library, op.kind), 1) if part is None else part.launches
        commands = count if isinstance(count, int) else count(op)
        return commands if plan.status is None else commands + STATUS_COMMANDS

    def is_known(self, op: KernelOp) -> bool:
        """Return whether the op has a kernel, or will have once its registered library is open.

        Asked before the libraries of a batch are opened. An unknown op is refused in its turn, so
        that those before it run.
        """
        if op.library in self._core.registrations:
            return True
        try:
            self.find(op)
        except AccelError:
            return False
        return True

    def _may_block(self, lane: Any, op: Any) -> bool:
        """Return whether an op may block, where there are kernels that are not the backend's.

        For an op of such a library its part says so. The backend is not asked: it may have ops of
        the same kind with other fields. A replay that calls such kernels may block if they do.
        """
        part = self.parts.get(op.library)
        if part is not None:
            return part.may_block
        if isinstance(op, Replay) and any(part.may_block and op.program.calls(name) for name, part in self.parts.items()):
            return True
        return self._device.may_block(lane, op)

    def add_part(self, library: str, part: BackendPart) -> None:
        """Add the kernels of a library that is not the backend's."""
        self.parts[library] = part
        self.may_block = self._may_block

    def is_capturable(self, op: KernelOp) -> bool:
        """Return whether what the op enqueues may be repeated by a graph.

        A registered library, and a family's part for this backend, say so themselves; all else may.
        """
        registered, family = self.registered.get(op.library), op.family if isinstance(op, FamilyOp) else None
        if registered is not None:
            return registered.instance.capturable
        part = None if family is None else family.part(self._core.description.backend)
        return part is None or part.capturable

    # -- registered libraries

    def add_registered(self, library: RegisteredLibrary) -> None:
        """Add a registered library that was opened in this context: its ops have kernels now."""
        self.registered[library.name] = library
        self.add_part(library.name, library.part)

    def refuse_registered(self, name: str) -> None:
        """Refuse further ops of a registered library; those that were dispatched run.

        Graphs that have recorded its kernels refuse to be replayed from now on.
        """
        self.leaving.add(name)
        for op in [op for op in self.cache if op.library == name]:
            del self.cache[op]
        if name in self.registered:
            self.registered[name].is_unregistered = True

    def remove_registered(self, name: str) -> None:
        """Forget a registered library, whose instance is closed."""
        self.leaving.discard(name)
        self.registered.pop(name, None)
        self.parts.pop(name, None)
