"""``device.compiler``: kernels of the user's own, compiled for the device and launched as ops."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from accel.engine.kernels import NO_COMPILER
from accel.errors import AccelError, ClosedError, DeadlineExceededError, InvalidArgumentError, UnsupportedError
from accel.ops.compiler import CompiledKernel, CompilesKernels, Dimensions, KernelLayout, Launch, kernel_of, loaded_kernel
from accel.values import check_timeout

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping

    from accel.engine.core import DeviceCore
    from accel.engine.host import Host
    from accel.engine.sender import Sender

__all__ = ["Compiler", "CompilesRemotely", "DeviceKernel", "Launches"]


class Launches:
    """Launches kernels that were compiled before: the compiler of a batch or graph."""

    __slots__ = ("_submit",)

    def __init__(self, submit: Callable[[Launch], Any]) -> None:
        self._submit = submit

    def launch(
        self,
        kernel: DeviceKernel | CompiledKernel,
        grid: Dimensions,
        block: Dimensions,
        args: Iterable[Any] = (),
        shared_bytes: int = 0,
        *,
        cooperative: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Launch a kernel; see :class:`accel.ops.Launch`.

        Returns what the kernel writes: one ref, a tuple of several, or ``None``.
        """
        program = kernel.program if isinstance(kernel, DeviceKernel) else kernel
        return self._submit(Launch(program, grid, block, _arguments(args), shared_bytes, cooperative, timeout=timeout))


class DeviceKernel:
    """A compiled kernel, bound to a device.

    Made by ``await device.compiler.compile(...)``; valid over rebuilds.

    Attributes
    ----------
    program : CompiledKernel
        What it is made of: picklable, and good for every device of the backend.
    """

    __slots__ = ("_submit", "program")

    def __init__(self, submit: Callable[[Launch], Coroutine[Any, Any, Any]], program: CompiledKernel) -> None:
        self._submit = submit
        self.program = program

    def __repr__(self) -> str:
        return f"<DeviceKernel {self.name}>"

    @property
    def name(self) -> str:
        """The name it was compiled by."""
        return self.program.name

    def launch(
        self,
        grid: Dimensions,
        block: Dimensions,
        args: Iterable[Any] = (),
        shared_bytes: int = 0,
        *,
        cooperative: bool = False,
        timeout: float | None = None,
    ) -> Coroutine[Any, Any, Any]:
        """Launch it: ``await kernel.launch(grid, block, (y, x, n))``.

        Parameters
        ----------
        grid, block
            Blocks of the grid and threads of a block: an int, or up to three for x, y and z.
        args
            One for each parameter: refs for pointers, else numbers; see :class:`accel.ops.Launch`.
        shared_bytes
            Dynamic shared memory of each block.
        cooperative
            Whether all blocks run at the same time, so that they can wait for each other.
        timeout
            As in :meth:`Device.run`.

        Returns
        -------
        AccelRef, tuple of AccelRef, or None
            What the kernel writes.

        Raises
        ------
        InvalidArgumentError
            Before anything is sent: arguments do not fit the parameters, or the device cannot
            launch so much at once. Of a cooperative launch, when it is enqueued: the device cannot
            run that many blocks at the same time; the message has the largest number.
        """
        return self._submit(Launch(self.program, grid, block, _arguments(args), shared_bytes, cooperative, timeout=timeout))


@runtime_checkable
class CompilesRemotely(Protocol):
    """A context in a child process, which has the compiler."""

    async def compile(self, kernel: CompiledKernel) -> KernelLayout:
        """Have the child compile and load a kernel; see :class:`accel.ops.CompilesKernels`."""


class Compiler(Launches):
    """Compiles kernels for one device and launches them."""

    __slots__ = ("_core", "_host", "_sender")

    def __init__(self, core: DeviceCore, sender: Sender, host: Host) -> None:
        super().__init__(sender.submit)
        self._core = core
        self._sender = sender
        self._host = host

    async def compile(
        self,
        source: str,
        name: str,
        options: Iterable[str] = (),
        *,
        headers: Mapping[str, str] | None = None,
        parameters: Iterable[str] | None = None,
        timeout: float | None = None,
    ) -> DeviceKernel:
        """Compile a program, off the loop, and return one of its kernels.

        Programs compiled before come from a cache on disk.

        It takes no place in the device's order: ops go on meanwhile, and several programs compile
        side by side.

        Parameters
        ----------
        source
            The program, in the backend's language (CUDA C++).
        name
            The kernel's name, or an expression that names one of a template: ``"axpy<float>"``.
        options
            The compiler's, such as ``"-DN=4"`` or ``"--use_fast_math"``. The architecture is the
            device's own.
        headers
            Name -> text of headers that the program includes.
        parameters
            Types of the kernel's parameters, such as ``("float32*", "const float32*", "int64")``:
            arguments are then checked and converted, and ``const`` pointers only read. See
            :class:`accel.ops.Launch`.
        timeout
            Seconds until waiting ends with :class:`~accel.DeadlineExceededError`.

        Raises
        ------
        CompileError
            The program does not compile; ``.log`` says where and why.
        InvalidArgumentError
            An argument or option is wrong, or ``parameters`` do not fit the kernel.
        UnsupportedError
            The device has no compiler.
        DeadlineExceededError
            It took longer than ``timeout``.

        Notes
        -----
        Cancelling detaches the waiter at once; the compiler goes on, and its result is kept in the
        cache.
        """
        return await self._create("compile", name, timeout, lambda: kernel_of(source, name, options, headers, parameters))

    async def load(
        self, code: bytes | str, name: str, *, parameters: Iterable[str] | None = None, timeout: float | None = None
    ) -> DeviceKernel:
        """Load code that was compiled elsewhere, off the loop, and return one of its kernels.

        Like :meth:`compile` it takes no place in the device's order.

        Parameters
        ----------
        code
            For CUDA the bytes of a cubin or fatbin, or PTX, as text or bytes. Code of other devices
            is refused. It is trusted as source is: it can do anything to the device's memory.
        name
            The kernel's name as the code has it: the mangled one, where it is not ``extern "C"``.
        parameters
            As in :meth:`compile`.
        timeout
            Seconds until waiting ends with :class:`~accel.DeadlineExceededError`.

        Raises
        ------
        CompileError
            The driver cannot load it: damaged, for another device, or newer than the driver.
            ``.log`` has what the driver says.
        InvalidArgumentError
            It is no such code, has no such kernel, or ``parameters`` do not fit it.
        UnsupportedError
            The device has no compiler.
        DeadlineExceededError
            It took longer than ``timeout``.

        Notes
        -----
        Cancelling detaches the waiter at once; loading goes on.
        """
        return await self._create("load", name, timeout, lambda: loaded_kernel(code, name, parameters))

    async def _create(self, op: str, name: str, timeout: float | None, make: Callable[[], CompiledKernel]) -> DeviceKernel:
        """Make a kernel of source or code, have it compiled or loaded, and bind it to the device.

        Parameters
        ----------
        op
            ``"compile"`` or ``"load"``, for errors.
        name, timeout
            As in :meth:`compile`.
        make
            Checks the user's arguments, and returns the kernel.
        """
        core = self._core
        core.guard()
        check_timeout(timeout)
        try:
            async with asyncio.timeout(timeout) as deadline:
                kernel = make()
                compiled = kernel.with_layout(await self._compile(kernel))
        except AccelError as error:
            error.op = error.op or op
            error.device = error.device or core.name
            raise
        except TimeoutError:
            if not deadline.expired():  # the compiler, or an argument of the user's, has raised it
                raise
            raise DeadlineExceededError(f"{name} was not ready within {timeout:g} s", op=op, device=core.name) from None
        return DeviceKernel(self._sender.submit, compiled)

    async def _compile(self, kernel: CompiledKernel) -> KernelLayout:
        """Wait until the device is ready, and have its context compile and load a kernel.

        If a rebuild closes the context meanwhile, the next one compiles the kernel. A fault that
        surfaces here is reported to the context, and raised as a :class:`ContextPoisonedError`.
        """
        core = self._core
        while True:
            await self._sender.wait_ready(None)
            context = self._host.context
            try:
                if isinstance(context, CompilesRemotely):
                    return await context.compile(kernel)
                if not isinstance(context.device, CompilesKernels):
                    raise UnsupportedError(f"{core.name} has no compiler", remedy=NO_COMPILER)
                return await core.system.run_blocking(context.device.compile, kernel)
            except ClosedError:
                if core.is_closing or self._host.context is context:  # else a rebuild has closed it
                    raise
            except AccelError as error:
                if not error.is_fault:
                    raise
                # The compiler's call was the first to see the fault.
                context.report_fault(error.clone(op="compile"))
                raise context.poisoned_error(error) from error


def _arguments(args: Iterable[Any]) -> tuple[Any, ...]:
    """Return the arguments of a launch as a tuple; the iterable is the user's."""
    try:
        return tuple(args)
    except Exception as error:
        raise InvalidArgumentError(f"args is {args!r}: {error}", remedy="Give a tuple with one argument for each parameter.") from error
