"""Mistakes that new users make: each is told in one clear sentence what is wrong and what to do instead."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import inspect
import pickle
import typing
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

import accel
from accel.integrations.fastapi import DeviceDependency, install, lifespan
from accel.ops import KernelOp, Plan, Spec
from accel.patterns import DynamicBatcher
from accel.testing import FaultPlan

PATIENCE = 10.0


@dataclass(frozen=True, eq=False)
class Twice(KernelOp):
    """An op of a library of the user's own."""

    library: ClassVar[str] = "mine"
    kind: ClassVar[str] = "twice"

    x: accel.AccelRef

    def plan(self) -> Plan:
        """One result like the operand."""
        return Plan((self.x,), (), (Spec(self.x.shape, self.x.dtype),))


class Mine(accel.KernelLibrary):
    """The library, which leaves out what its work costs."""

    name = "mine"

    @accel.kernel(Twice)
    def twice(self, op: Twice, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        """Enqueue it."""
        source, target = np.asarray(inputs[0]), np.asarray(outputs[0])
        stream.submit(lambda: np.multiply(source, 2.0, out=target))


class Index(accel.Actor[int, int]):
    """An actor with an argument."""

    def __init__(self, size: int) -> None:
        self.size = size

    async def receive(self, message: int, context: accel.ActorContext) -> int:
        """Answer."""
        return message % self.size


async def add_to_batch(system: Any, device: Any, x: Any) -> None:
    async with device.batch() as batch:
        await batch.blas.gemm(x, x)


async def free_twice(system: Any, device: Any, x: Any) -> None:
    await device.free(x)
    await device.free(x)


async def use_ref_of_another_device(system: Any, device: Any, x: Any) -> None:
    async with accel.System() as another:  # in one system they would have names of their own
        other = await another.open_device("cpu")
        await other.blas.gemm(x, x)


async def open_after_close(system: Any, device: Any, x: Any) -> None:
    async with accel.System() as other:
        pass
    await other.open_device("cpu")


async def enter(manager: Any) -> None:
    with manager:
        pass


async def answer_with_ref(response: Any) -> None:
    app = FastAPI()

    async def handler(device: DeviceDependency) -> Any:
        return await device.put([1.0])

    handler.__annotations__ = {"device": DeviceDependency, **response}
    app.get("/")(handler)
    async with lifespan(device="cpu")(app), httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        await client.get("/")


def assign(x: Any) -> None:
    x[0] = 1.0


async def wait_for(awaitable: Any) -> None:
    await awaitable


async def record_put(system: Any, device: Any, x: Any) -> None:
    async with device.graph() as graph:
        graph.put([1.0])


async def block_after_close(system: Any, device: Any, x: Any) -> None:
    async with accel.System() as other:
        pass
    await other.run_blocking(print)


async def from_a_thread(call: Callable[[], object]) -> None:
    await asyncio.to_thread(call)


async def watch_nothing(system: Any, device: Any, x: Any) -> None:
    (await system.spawn(Index, 3)).watch(3)


async def call_receive(system: Any, device: Any, x: Any) -> None:
    (await system.spawn(Index, 3)).receive(3)


@dataclass(frozen=True, eq=False)
class Nameless(KernelOp):
    """An op that says neither library nor kind."""

    x: accel.AccelRef

    def plan(self) -> Plan:
        """It only reads."""
        return Plan((self.x,), (), ())


@dataclass(frozen=True, eq=False)
class Thrice(Twice):
    """An op that the library has no kernel for."""

    kind: ClassVar[str] = "thrice"


class Awaited(accel.KernelLibrary):
    """A library whose kernel would never be awaited."""

    name = "mine"

    @accel.kernel(Twice)
    async def twice(self, op: Twice, stream: Any, inputs: Any, outputs: Any) -> None:
        """Do nothing."""


class Deaf(accel.Actor[int, int]):
    """An actor whose method lacks a parameter."""

    async def receive(self, message: int) -> int:  # type: ignore[override]
        """Answer."""
        return message


async def run_without_kernel(system: Any, device: Any, x: Any) -> None:
    await device.register(Mine)
    await device.run(Thrice(x))


async def enter_asynchronously(manager: Any) -> None:
    async with manager:
        pass


async def use_ref_of_a_batch_that_was_not_sent(system: Any, device: Any, x: Any) -> None:
    y = None
    with contextlib.suppress(ZeroDivisionError):
        async with device.batch() as batch:
            y = batch.blas.gemm(x, x)
            raise ZeroDivisionError
    await device.get(y)


async def handle(items: list[int]) -> list[int]:
    """Answer what came."""
    return items


async def call_from_sync_handler(caplog: pytest.LogCaptureFixture) -> tuple[int, str]:
    app = FastAPI()
    install(app)

    def handler(device: Any) -> object:
        return asyncio.run(device.put([1.0]))

    handler.__annotations__ = {"device": DeviceDependency}
    app.get("/")(handler)
    async with lifespan(device="cpu")(app), httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        answer = await client.get("/")
    return answer.status_code, "\n".join(record.getMessage() for record in caplog.records)


async def free_in_handler() -> int:
    app = FastAPI()
    install(app)

    async def handler(device: Any) -> None:
        x = await device.put([1.0])
        await device.free(x)
        await device.free(x)

    handler.__annotations__ = {"device": DeviceDependency}
    app.get("/")(handler)
    async with lifespan(device="cpu")(app), httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        return (await client.get("/")).status_code


@dataclass(frozen=True)
class Case:
    """What is done, given a system, a device and a ref; the error's class; and what its message says."""

    do: Callable[[Any, Any, Any], object]
    kind: type[BaseException]
    words: tuple[str, ...]


def case(do: Callable[[Any, Any, Any], object], kind: type[BaseException], *words: str) -> Case:
    return Case(do, kind, words)


ARGUMENT, HOST = accel.InvalidArgumentError, "array = await device.get(ref)"
CASES = {
    "await batch.op": case(add_to_batch, TypeError, "is not awaited", "batch", "after the batch's block"),
    "double free": case(free_twice, accel.StaleRefError, "freed", "Free a ref once"),
    "library not registered": case(lambda s, d, x: d.run(Twice(x)), accel.UnsupportedError, "'mine'", "await device.register("),
    "ref of a device of the same name": case(use_ref_of_another_device, ARGUMENT, "another device that was opened as cpu:0 too"),
    "System not entered": case(
        lambda s, d, x: accel.System().open_device("cpu"), accel.NotInitializedError, "Enter it: `async with accel.System()"
    ),
    "with System": case(lambda s, d, x: enter(accel.System()), TypeError, "System", "`async with`"),
    "with batch": case(lambda s, d, x: enter(d.batch()), TypeError, "Batch", "`async with`"),
    "with graph": case(lambda s, d, x: enter(d.graph()), TypeError, "Graph", "`async with`"),
    "zeros(-3)": case(lambda s, d, x: d.zeros(-3), ARGUMENT, "(-3,)", "0 or more"),
    "spawn(instance)": case(lambda s, d, x: s.spawn(Index(3)), ARGUMENT, "not an instance of Index", "spawn(Index, ...)"),
    "open_device after close": case(open_after_close, accel.ClosedError, "system 'accel' is closed", "Make a new one"),
    "no streams": case(lambda s, d, x: s.open_device("cpu", streams=0), ARGUMENT, "streams is 0", "number of streams"),
    "System(3)": case(lambda s, d, x: typing.cast("Any", accel.System)(3), ARGUMENT, "name is 3", "string"),
    "ref + ref": case(lambda s, d, x: x + x, TypeError, HOST, "binary('add', x, y)"),
    "1 + ref": case(lambda s, d, x: 1 + x, TypeError, HOST, "binary('add', x, y)"),
    "ref @ ref": case(lambda s, d, x: x @ x, TypeError, HOST, "device.blas.gemm(x, y)"),
    "-ref": case(lambda s, d, x: -x, TypeError, HOST, "unary('neg', ref)"),
    "ref ** 2": case(lambda s, d, x: x**2, TypeError, HOST),
    "ref < 1": case(lambda s, d, x: x < 1, TypeError, HOST),
    "float(ref)": case(lambda s, d, x: float(x), TypeError, HOST),
    "format(ref, '.2f')": case(lambda s, d, x: f"{x:.2f}", TypeError, HOST),
    "list(ref)": case(lambda s, d, x: list(x), TypeError, HOST),
    "1 in ref": case(lambda s, d, x: 1 in x, TypeError, HOST),
    "ref[0] = 1": case(lambda s, d, x: assign(x), TypeError, "await device.put(array, out=ref[index])"),
    "ref.mT": case(lambda s, d, x: x.mT, AttributeError, "'mT'", "ref.T"),
    "ref.numpy()": case(lambda s, d, x: x.numpy(), AttributeError, "'numpy'", HOST),
    "ref.sum()": case(lambda s, d, x: x.sum(), AttributeError, "await device.reduce('sum', ref"),
    "device.gemm": case(lambda s, d, x: d.gemm(x, x), AttributeError, "'gemm'", "await device.blas.gemm(...)"),
    "device.close": case(lambda s, d, x: d.close(), AttributeError, "await device.aclose()"),
    "graph.get": case(lambda s, d, x: d.graph().get(x), AttributeError, "await device.get(ref) after the block"),
    "system.open": case(lambda s, d, x: s.open("cpu"), AttributeError, "await system.open_device("),
    "dnn.embed": case(lambda s, d, x: d.dnn.embed(x), AttributeError, "'embed'", "has attention, attention_grad"),
    "dnn.dropout": case(lambda s, d, x: d.dnn.dropout(x), TypeError, "device.dnn.dropout() missing"),
    "blas.matmul": case(lambda s, d, x: d.blas.matmul(x, x), AttributeError, "Use linalg.matmul("),
    "dnn.gemm": case(lambda s, d, x: d.dnn.gemm(x, x), AttributeError, "Use blas.gemm(...)"),
    "blas.gemn": case(lambda s, d, x: d.blas.gemn(x, x), AttributeError, "Did you mean", "gemm"),
    "elementwise.relu": case(lambda s, d, x: d.elementwise.relu(x), AttributeError, "Use elementwise.unary('relu', x)"),
    "reduce.sum": case(lambda s, d, x: d.reduce.sum(x), AttributeError, "Use reduce('sum', x"),
    "handler that returns a ref": case(lambda s, d, x: answer_with_ref({}), ValueError, HOST),
    "handler that returns a ref as Any": case(lambda s, d, x: answer_with_ref({"return": Any}), ValueError, HOST),
    "await System()": case(lambda s, d, x: wait_for(accel.System()), TypeError, "System", "`async with`"),
    "await device.batch()": case(lambda s, d, x: wait_for(d.batch()), TypeError, "Batch", "`async with`"),
    "with device": case(lambda s, d, x: enter(d), TypeError, "its system closes it", "await device.aclose()"),
    "async with device": case(lambda s, d, x: enter_asynchronously(d), TypeError, "its system closes it", "await device.aclose()"),
    "ref of a batch that was not sent": case(use_ref_of_a_batch_that_was_not_sent, accel.StaleRefError, "batch", "did not run"),
    "put(array, 1.0)": case(lambda s, d, x: d.put([1.0], 1.0), TypeError, "Device.put()"),
    "with batcher": case(lambda s, d, x: enter(DynamicBatcher(handle)), TypeError, "DynamicBatcher", "`async with`"),
    "graph.put": case(record_put, AttributeError, "await device.put(array, out=ref)"),
    "gemm(coroutine)": case(lambda s, d, x: d.blas.gemm(x, d.put([1.0])), ARGUMENT, "coroutine of put(...)", "Await it first"),
    "put(coroutine)": case(lambda s, d, x: d.put(d.blas.gemm(x, x)), ARGUMENT, "coroutine of gemm(...)", "Await it first"),
    "run(coroutine)": case(lambda s, d, x: d.run(d.blas.gemm(x, x)), ARGUMENT, "coroutine of gemm(...)", "Await it first"),
    "get([ref, ref])": case(lambda s, d, x: d.get([x, x]), ARGUMENT, "a list of refs", "once for each"),
    "zeros(3, 4)": case(lambda s, d, x: d.zeros(3, 4), ARGUMENT, "4 is not a dtype", "(3, 4)"),
    "DType('floot')": case(lambda s, d, x: accel.DType("floot"), ARGUMENT, "'floot'", "DType.of", "float32"),
    "keepdims='no'": case(lambda s, d, x: d.reduce("sum", x, keepdims="no"), ARGUMENT, "keepdims is 'no'", "True or False"),
    "resident(loader that is no coroutine function)": case(lambda s, d, x: d.resident("w", lambda _: 3), ARGUMENT, "'w'", "`async def"),
    "evict([1])": case(lambda s, d, x: d.evict([1]), ARGUMENT, "name is [1]"),
    "aclose(timeout='1')": case(lambda s, d, x: d.aclose(timeout="1"), ARGUMENT, "timeout is '1'", "seconds"),
    "faults=FaultPlan": case(lambda s, d, x: s.open_device("cpu", faults=FaultPlan), ARGUMENT, "FaultPlan()"),
    "completion=['polled']": case(lambda s, d, x: s.open_device("cpu", completion=["polled"]), ARGUMENT, "['polled']", "'adaptive'"),
    "PolledCompletion('1')": case(lambda s, d, x: accel.PolledCompletion(typing.cast("Any", "1")), ARGUMENT, "'1'", "seconds"),
    "RestartStrategy(-1)": case(lambda s, d, x: accel.RestartStrategy(-1), ARGUMENT, "max_restarts is -1", "at least 0"),
    "backoff=(2, 1)": case(lambda s, d, x: accel.RestartStrategy(backoff=(2, 1)), ARGUMENT, "(2, 1)", "the shortest first"),
    "System(clock=3)": case(lambda s, d, x: typing.cast("Any", accel.System)(clock=3), ARGUMENT, "clock is 3", "functions"),
    "System(rng=3)": case(lambda s, d, x: typing.cast("Any", accel.System)(rng=3), ARGUMENT, "rng is 3", "random.Random"),
    "run_blocking(None)": case(lambda s, d, x: s.run_blocking(None), ARGUMENT, "None", "plain function"),
    "run_blocking(coroutine function)": case(lambda s, d, x: s.run_blocking(handle, [1]), ARGUMENT, "await a coroutine function"),
    "run_blocking after close": case(block_after_close, accel.ClosedError, "system 'accel' is closed", "Make a new one"),
    "portal.run(timeout='1')": case(
        lambda s, d, x: from_a_thread(lambda: s.portal.run(handle, [1], timeout="1")), ARGUMENT, "timeout is '1'"
    ),
    "portal.run that takes too long": case(
        lambda s, d, x: from_a_thread(lambda: s.portal.run(asyncio.sleep, 60, timeout=0.01)), accel.DeadlineExceededError, "sleep", "0.01 s"
    ),
    "portal.call_soon(coroutine function)": case(
        lambda s, d, x: from_a_thread(lambda: s.portal.call_soon(handle, [1])), ARGUMENT, "portal.start(f, *args)"
    ),
    "spawn(mailbox_size=0)": case(lambda s, d, x: s.spawn(Index, 3, mailbox_size=0), ARGUMENT, "capacity is 0", "at least 1"),
    "spawn(restart={})": case(lambda s, d, x: s.spawn(Index, 3, restart={}), ARGUMENT, "restart is {}", "RestartStrategy"),
    "watch(3)": case(watch_nothing, ARGUMENT, "watcher is 3", "ActorRef"),
    "an op that the library lacks": case(run_without_kernel, accel.UnsupportedError, "no thrice", "@accel.kernel(Thrice)"),
    "an op without library": case(lambda s, d, x: d.run(Nameless(x)), ARGUMENT, "Nameless", "`library ="),
    "a kernel with async def": case(lambda s, d, x: d.register(Awaited), ARGUMENT, "Awaited.twice", "`def`"),
    "receive(message)": case(lambda s, d, x: s.spawn(Deaf), ARGUMENT, "Deaf.receive", "receive(self, message, context)"),
    "ref.receive(message)": case(call_receive, AttributeError, "await ref.ask(message)"),
}


@pytest.mark.parametrize("name", CASES)
async def test_the_message_names_the_remedy(name: str) -> None:
    mistake = CASES[name]
    async with asyncio.timeout(PATIENCE), accel.System() as system:
        device = await system.open_device("cpu")
        x = await device.put(np.eye(2))
        with pytest.raises(mistake.kind) as caught:
            done = mistake.do(system, device, x)
            if inspect.iscoroutine(done):
                await done
        said = str(caught.value)
        assert [word for word in mistake.words if word not in said] == [], said
        y = await device.put(np.eye(2))
        assert np.array_equal(await device.get(await device.blas.gemm(y, y)), np.eye(2)), "the device serves on"


@pytest.mark.parametrize(
    ("call", "method"),
    [
        (lambda device, x: device.blas.gemm(x, x), "blas.gemm"),
        (lambda device, x: device.reduce("sum", x), "reduce"),
        (lambda device, x: device.elementwise.unary("relu", x), "elementwise.unary"),
        (lambda device, x: device.run(accel.ops.Gemm(x, x)), "Device.run"),
        (lambda device, x: device.put([1.0]), "Device.put"),
    ],
    ids=["gemm", "reduce", "unary", "run", "put"],
)
async def test_a_forgotten_await_names_the_method_that_was_called(call: Callable[[Any, Any], object], method: str) -> None:
    async with asyncio.timeout(PATIENCE), accel.System() as system:
        device = await system.open_device("cpu")
        x = await device.put(np.eye(2))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            call(device, x)
            gc.collect()
    assert [method in str(each.message) and "never awaited" in str(each.message) for each in told] == [True]


async def test_a_ref_with_remedies_behaves_as_before_elsewhere() -> None:
    async with asyncio.timeout(PATIENCE), accel.System() as system:
        device = await system.open_device("cpu")
        x = await device.put(np.eye(2))
        with pytest.raises(AttributeError, match=r"await device\.get"):
            x.numpy  # type: ignore[attr-defined]  # noqa: B018
        assert not any(hasattr(x, name) for name in ("mT", "numpy", "__array_interface__", "__len_hint__"))
        assert getattr(x, "mT", None) is None
        assert "mT" not in dir(x)
        assert "shape" in dir(x)
        assert copy.copy(x) is x
        assert copy.deepcopy([x])[0] is x
        assert device.resolve(pickle.loads(pickle.dumps(x))) is x
        assert (x == x, x != x, x in {x: 1}, bool(x), f"{x}") == (True, False, True, True, repr(x))
        with pytest.raises(TypeError, match=r"await device\.get"):
            np.add(np.eye(2), x)


async def test_a_handler_on_a_thread_that_calls_the_device_is_told_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with asyncio.timeout(PATIENCE):
        status, log = await call_from_sync_handler(caplog)
    assert status == 503
    assert "system.portal" in log


async def test_a_handlers_own_use_of_a_freed_ref_is_not_to_be_tried_again() -> None:
    async with asyncio.timeout(PATIENCE):
        assert await free_in_handler() == 500


class Knowing:
    """Another library's type, which knows what to do with a ref."""

    def __radd__(self, other: object) -> str:
        return "mine"


async def test_another_librarys_operand_answers_first() -> None:
    async with asyncio.timeout(PATIENCE), accel.System() as system:
        x: Any = await (await system.open_device("cpu")).put(np.eye(2))
        assert x + Knowing() == "mine"
        with pytest.raises(TypeError, match=r"await device\.get"):
            x + x
