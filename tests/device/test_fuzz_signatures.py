"""Every parameter of what is not an op, with values that do not fit: an answer or an error of accel's, with its remedy; never another error."""

from __future__ import annotations

import asyncio
import inspect
import resource
import secrets
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from tests.fuzz_support import LIMIT, WILD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

VALUES = 50
HUNG = 10.0


class Rows:
    """A model that sums rows."""

    def open(self, weights: Any, description: Any, stream: Any) -> None: ...

    def run(self, inputs: Any) -> Any:
        return np.asarray(inputs["x"]).sum(axis=1)


class Echo(accel.Actor[Any, Any]):
    async def receive(self, message: Any, context: Any) -> Any:
        return message


_HOOKS = ("on_progress", "compare")
_NOT_FUNCTIONS = ("device", "recordings", "evaluate", "method", "indexed", "masked", "repeated", "several", "make", "check_device")
_NOT_OPTIONS = ("handler", "device", "idempotent")  # the service's own
SPEC = accel.TensorSpec(("batch", 2))


def parameters(target: Callable[..., Any], *more: Callable[..., Any]) -> Iterator[str]:
    """Yield the names of what a caller may give by keyword; ``more`` are what takes the options of ``target``."""
    for each in (target, *more):
        for parameter in inspect.signature(each).parameters.values():
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                yield parameter.name


async def told(what: str, call: Callable[[], Any]) -> str:
    """Make a call, and return what is wrong with how it ended; empty if nothing is."""
    try:
        answer = call()
        if inspect.isawaitable(answer) and not isinstance(answer, (accel.System, accel.Batch, accel.Graph)):
            answer = await asyncio.wait_for(answer, HUNG)
        if isinstance(answer, accel.Device):
            await asyncio.wait_for(answer.aclose(), HUNG)
    except accel.AccelError as error:
        return "" if error.message and error.remedy else f"{what}: {error!r} has no remedy"
    except TimeoutError:
        return f"{what} has not ended"
    except Exception as error:
        return f"{what} raised {error!r:.300}"
    return ""


async def check(
    name: str, call: Callable[..., Any], names: Iterator[str], rng: np.random.Generator, given: dict[str, Any], count: int = VALUES
) -> list[str]:
    """Call with one parameter after the other replaced, and return what was wrong."""
    wrong = []
    for parameter in dict.fromkeys(names):
        for value in [WILD[int(i)] for i in rng.permutation(len(WILD))[:count]]:
            if callable(value) and parameter in _HOOKS:
                continue  # what a function of the caller's raises is the caller's
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                what = await told(f"{name}({parameter}={value!r:.80})", lambda p=parameter, v=value: call(**{**given, p: v}))  # type: ignore[misc]
            if what:
                wrong.append(what)
    return wrong


@pytest.fixture
def numbers() -> np.random.Generator:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return np.random.default_rng(seed)


async def test_constructors(numbers: np.random.Generator) -> None:
    wrong = []
    for target, given in (
        (accel.System, {}),
        (accel.RestartStrategy, {}),
        (accel.TensorSpec, {"shape": ("batch", 2)}),
        (accel.AdaptiveCompletion, {}),
        (accel.PolledCompletion, {}),
        (accel.HostFnCompletion, {}),
        (accel.SyncCompletion, {}),
    ):
        wrong += await check(target.__name__, target, parameters(target), numbers, given)
    for name in ("fail_at", "poison_at", "hang_at", "out_of_memory_at", "kill_host_at"):
        method = getattr(accel.testing.FaultPlan, name)
        needed = {"n": 1, "error": accel.UnsupportedError("x")} if name == "fail_at" else {"n": 1}
        names = (each for each in parameters(method) if each != "self")
        wrong += await check(name, lambda m=name, **kw: getattr(accel.testing.FaultPlan(), m)(**kw), names, numbers, needed)
    assert not wrong, "\n".join(wrong)


async def test_devices_and_actors(numbers: np.random.Generator) -> None:
    wrong = []
    async with accel.System(close_timeout=5) as system:
        names = (each for each in parameters(system.open_device) if each != "host")
        wrong += await check("open_device", system.open_device, names, numbers, {"spec": "cpu", "host": "inline"})
        wrong += await check("open_device", system.open_device, iter(("host",)), numbers, {"spec": "cpu"})

        async def spawn(**options: Any) -> None:
            actor = await system.spawn(options.pop("kind"), **options)
            await actor.stop()

        wrong += await check(
            "spawn",
            spawn,
            iter(("kind", *[n for n in parameters(system.spawn) if n not in ("actor", "args", "cls")])),
            numbers,
            {"kind": Echo},
        )
        actor = await system.spawn(Echo)
        for name in ("ask", "send", "tell"):
            method = getattr(actor, name)
            wrong += await check(name, method, (each for each in parameters(method) if each != "message"), numbers, {"message": 1})
    assert not wrong, "\n".join(wrong)


async def test_models_and_services(numbers: np.random.Generator) -> None:
    wrong = []
    async with accel.System(close_timeout=5) as system:
        device = await system.open_device("cpu", host="inline", memory_limit=LIMIT)
        given: dict[str, Any] = {"target": Rows, "inputs": {"x": SPEC}}

        async def load(**options: Any) -> None:
            model = await device.load_model(**options)
            await model.aclose()

        wrong += await check("load_model", load, parameters(device.load_model), numbers, given, 8)
        model = await device.load_model(**given)

        async def serve(**options: Any) -> None:
            async with accel.serve(**options):
                pass

        names = (n for n in parameters(accel.serve, accel.patterns.DynamicBatcher) if n not in _NOT_OPTIONS)
        wrong += await check("serve", serve, names, numbers, {"models": model})
        async with accel.serve(model) as service:
            wrong += await check("submit", service.submit, parameters(service.submit), numbers, {"item": [1, 2]})
            swap: dict[str, Any] = {"weights": {}, "canaries": [[1.0, 2.0]]}
            names = (n for n in parameters(service.swap) if n != "hold")  # which may be as long as it takes
            wrong += await check("service.swap", service.swap, names, numbers, swap, 8)
        wrong += await check("model.numpy", model.numpy, iter(("x",)), numbers, {})
        wrong += await check("swap", model.swap, parameters(model.swap), numbers, swap, 8)
        for name in ("batch", "graph", "aclose"):
            wrong += await check(name, getattr(device, name), parameters(getattr(device, name)), numbers, {})
    assert not wrong, "\n".join(wrong)


@pytest.fixture
def bounded_memory() -> Iterator[None]:
    """Let a call that takes memory without an end fail, and not the machine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (4 << 30), hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.usefixtures("bounded_memory")
async def test_functions_of_expressions(numbers: np.random.Generator) -> None:
    wrong = []
    async with accel.System(close_timeout=5) as system:
        device = await system.open_device("cpu", host="inline", memory_limit=LIMIT)
        xp = device.xp
        x = xp.asarray(numbers.standard_normal((3, 3)))
        wrong += await check("x[]", lambda key: x[key], iter(("key",)), numbers, {})
        spaces = {"xp": xp, "xp.linalg": xp.linalg, "xp.fft": xp.fft}
        for space, owner in spaces.items():
            for name in (each for each in dir(owner) if not each.startswith("_") and each not in _NOT_FUNCTIONS):
                function = getattr(owner, name)
                if not inspect.isroutine(function):
                    continue
                positions = [p for p in inspect.signature(function).parameters.values() if p.kind is p.POSITIONAL_ONLY]
                names = iter([*(p.name for p in positions), *parameters(function)])
                call = _positional(function, [p.name for p in positions])
                given = {p.name: x for p in inspect.signature(function).parameters.values() if p.default is p.empty and p.kind <= 1}
                wrong += await check(f"{space}.{name}", call, names, numbers, given, 3)
    assert not wrong, "\n".join(wrong)


def _positional(function: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
    """Return what takes all arguments by name, for a function that takes some by their place only."""
    return lambda **given: function(*[given.pop(name) for name in names if name in given], **given)
