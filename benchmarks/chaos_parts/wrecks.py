"""Libraries whose kernels do real damage, on the device or to the process that holds it. Children import them by name."""

from __future__ import annotations

import ctypes
import fcntl
import importlib
import os
import signal
import socket
import stat
import struct
import threading
from dataclasses import dataclass
from typing import Any, ClassVar

import accel
from accel.ops import Plan, Spec

__all__ = ["CpuWreck", "CudaWreck", "Wreck"]

_SOURCE = """
extern "C" __global__ void illegal(float *out) { out[1ll << 45] = 1.0f; }
extern "C" __global__ void trap(float *out) { asm volatile("trap;"); }
extern "C" __global__ void assertion(float *out) { __assertfail("out == nullptr", "chaos.cu", 1, "assertion", 1); }
extern "C" __global__ void hang(float *out) { while (*(volatile float *)out != -1.0f) {} }
"""


@dataclass(frozen=True, eq=False, slots=True)
class Wreck(accel.KernelOp):
    """Do one kind of damage.

    Parameters
    ----------
    way
        ``"illegal"``, ``"trap"``, ``"assert"``, ``"hang"``; and to the process ``"exit"``, ``"cut"``, ``"stuck"`` (nothing of
        Python's runs any more), ``"stall"`` (the call that enqueues never returns).
    victim
        Number of the process that must not be damaged: the service's own. There it is refused.
    """

    library: ClassVar[str] = "wreck"
    kind: ClassVar[str] = "wreck"

    way: str
    victim: int = 0

    def plan(self) -> Plan:
        """See :meth:`accel.KernelOp.plan`: it makes a buffer, which is never given out."""
        return Plan((), (), (Spec((16,), accel.DType.FLOAT32),))


def _to_process(way: str, service: int) -> bool:
    """Do what damages a process, on whatever device; return whether ``way`` is such."""
    if way == "exit":
        os._exit(0)
    elif way == "stuck":
        # With the interpreter's lock in hand, so that no thread goes on, the event loop's neither.
        while True:
            ctypes.PyDLL(None).pause()
    elif way == "stall":
        threading.Event().wait()
    elif way == "cut":
        for fd in map(int, os.listdir("/proc/self/fd")):
            if _is_to(fd, service):
                with socket.socket(fileno=os.dup(fd)) as sock:
                    sock.shutdown(socket.SHUT_RDWR)
    else:
        return False
    return True


def _is_to(fd: int, service: int) -> bool:
    """Return whether a descriptor is the socket for messages to a process, not the lifeline by which it has this one end (``O_ASYNC``)."""
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode) or fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ASYNC:
            return False
    except OSError:  # the folder's own descriptor, which is closed
        return False
    with socket.socket(fileno=os.dup(fd)) as sock:
        peer, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(peer == service)


def _refuse_here(op: Wreck) -> None:
    if os.getpid() == op.victim:
        raise accel.UnsupportedError(f"{op.way} would end the service itself", op=op.kind)


class CpuWreck(accel.KernelLibrary):
    """Damage by the CPU's own means: signals that a bad program gets."""

    name = "wreck"

    @accel.kernel(Wreck)
    def wreck(self, op: Wreck, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        """Do it where kernels run."""
        _refuse_here(op)
        if _to_process(op.way, op.victim):
            return
        ways = {
            "illegal": lambda: ctypes.memset(16, 1, 1),
            "trap": lambda: signal.raise_signal(signal.SIGTRAP),
            "assert": os.abort,
            "hang": threading.Event().wait,
        }
        stream.submit(ways[op.way], 1.0)  # as long work, so on the stream's worker thread


class CudaWreck(accel.KernelLibrary):
    """Damage by kernels that fault, or that never end."""

    name = "wreck"

    def open(self, stream: Any) -> None:
        """Compile the kernels."""
        self._core: Any = importlib.import_module("cuda.core")
        device = self._device()
        program = self._core.Program(_SOURCE, "c++", self._core.ProgramOptions(arch=f"sm_{device.arch}"))
        module = program.compile("cubin")
        names = {"illegal": "illegal", "trap": "trap", "assert": "assertion", "hang": "hang"}
        self._kernels = {way: module.get_kernel(name) for way, name in names.items()}

    def _device(self) -> Any:
        device = self._core.Device(self.description.index)
        device.set_current()
        return device

    @accel.kernel(Wreck)
    def wreck(self, op: Wreck, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        """Launch it, or damage the process."""
        if op.way in ("exit", "stuck", "stall", "cut", "hang"):
            _refuse_here(op)
        if _to_process(op.way, op.victim):
            return
        self._device()
        config, stream = self._core.LaunchConfig(grid=1, block=1), self._core.Stream.from_handle(stream.handle)
        self._core.launch(stream, config, self._kernels[op.way], outputs[0].address)
