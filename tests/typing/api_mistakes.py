"""Mistakes that a type checker must find: every line with an ignore is wrong, and mypy reports an ignore that is not needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import accel
    from tests.typing.api_examples import Adder


async def mistakes(root: type[accel.System], system: accel.System, device: accel.Device, adder: type[Adder], a: accel.AccelRef) -> None:
    """What does not fit."""
    root(close_timout=1.0)  # type: ignore[call-arg]
    root(workers="2")  # type: ignore[arg-type]
    await system.open_device("cpu", overload="drop")  # type: ignore[arg-type]
    await system.open_device("cpu", host="moon")  # type: ignore[arg-type]
    await system.open_device("cpu", pending_limits=3)  # type: ignore[call-arg]
    device.blas.gemm(a, a)  # type: ignore[unused-coroutine]
    await device.blas.gemm(a)  # type: ignore[call-arg]
    await device.blas.gemm(a, [1.0])  # type: ignore[arg-type]
    await device.elementwise.unary(3, a)  # type: ignore[arg-type]
    await device.elementwise.unary("cube", a)  # type: ignore[arg-type]
    await device.elementwise.binary("plus", a, a)  # type: ignore[arg-type]
    await device.reduce("median", a)  # type: ignore[arg-type]
    await device.blas.gemm(a, a, transpose_a="yes")  # type: ignore[arg-type]
    await device.linalg.matmul(a, a, activation="tanh")  # type: ignore[arg-type]
    await device.advise(a, "often")  # type: ignore[arg-type]
    await device.dnn.gemm(a)  # type: ignore[attr-defined]
    await device.gemm(a, a)  # type: ignore[attr-defined]
    a + a  # type: ignore[operator]
    float(a)  # type: ignore[arg-type]
    await device.put(a.flatten())  # type: ignore[attr-defined]
    with device.batch():  # type: ignore[attr-defined]
        pass
    await system.open_device("cpu", completion="fast")  # type: ignore[arg-type]
    await system.open_device("cpu", libraries=["blaz"])  # type: ignore[list-item]
    await system.open_device("cpu", standby="warm")  # type: ignore[arg-type]
    await device.zeros(3, timeout="1")  # type: ignore[arg-type]
    await device.get([1.0])  # type: ignore[arg-type]
    async with device.batch() as batch:
        await batch.blas.gemm(a, a)  # type: ignore[misc]
        batch.get(3)  # type: ignore[arg-type]
    ref = await system.spawn(adder, 3)
    ref.tell("text")  # type: ignore[arg-type]
    number: int = await ref.ask(4)  # type: ignore[assignment]
    a.shape = (3,)
    del number
