"""``accel doctor``: what is there, what is missing, and the command that fixes it."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import shutil
import sys
import textwrap
import time
from dataclasses import asdict, dataclass
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from accel import BackendUnavailableError, ContextPoisonedError, System, __version__
from accel._log import one_line
from accel.backend import Diagnosis
from accel.cli.console import quiet_log
from accel.cli.devices import list_devices, memory_text
from accel.cli.extras import CORE, EXTRAS, UNUSED, install_command, installable, version_of
from accel.completion.timer import TimerfdTimer
from accel.ops.families import installed_families
from accel.registry import load_backend
from accel.testing import FaultPlan

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from accel import Device

__all__ = ["SelfTest", "add_arguments", "checks", "run", "self_test"]

_Matrix: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.float32]]

_GROUPS = {"Works": ("ok", "limited"), "Optional, and not there": ("missing", "unused"), "Broken": ("failed",)}
"""Heading -> the states of what stands under it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Look at everything and print it; 0 if at least one backend works."""
    found = [*checks()]
    with quiet_log():
        test = asyncio.run(self_test("cpu"))
        # Without a fault: whether a new context can follow one is for the backend to say, and this process goes on.
        beside = [_of_self_test(spec, asyncio.run(self_test(spec, with_fault=False))) for spec in _usable_beside_the_cpu()]
    found += [_of_self_test("cpu", test), *beside]
    backends = [check for check in found if check.name.startswith("backend ")]
    usable = any(check.state == "ok" for check in backends) and test.is_ok
    if arguments.json:
        document: dict[str, Any] = {
            "ok": usable,
            "checks": [asdict(check) | {"remedy": installable(check.remedy)} for check in found],
            "self_test_ms": test.steps,
        }
        print(json.dumps(document, indent=2))
    else:
        _print(found)
        print("This machine can run accel." if usable else "This machine cannot run accel yet.")
    return 0 if usable else 1


def _print(found: list[Diagnosis]) -> None:
    """Print the checks in three groups, wrapped to the terminal or, without one, to 100 columns. Commands stay whole."""
    width = shutil.get_terminal_size((100, 24)).columns
    column = min(max(len(check.name) for check in found), 24)
    wrapped = partial(textwrap.wrap, width=max(width - column - 4, 30), break_long_words=False, break_on_hyphens=False)
    for title, states in _GROUPS.items():
        members = [check for check in found if check.state in states]
        if members:
            print(title)
        for check in members:
            remedy = installable(check.remedy)
            is_command = "pip install" in remedy
            lines = [*wrapped(one_line(check.detail)), *([remedy] if is_command else wrapped(one_line(remedy)))]
            for name, line in zip_longest([check.name], lines or [""], fillvalue=""):
                print(f"  {name:<{column}}  {line}".rstrip())
        if members:
            print()


def checks() -> Iterator[Diagnosis]:
    """Look at everything but the running of a device. May block: it imports backends."""
    yield Diagnosis("accel", "ok", __version__)
    yield _python()
    yield Diagnosis("system", "ok", f"{platform.system()} {platform.release()} {platform.machine()}, {_cores()}")
    for distribution in CORE:
        version = version_of(distribution)
        yield (
            Diagnosis(distribution, "ok", version)
            if version
            else Diagnosis(distribution, "failed", "not installed", install_command(distribution))
        )
    yield from _kernel_features()
    for extra, modules in EXTRAS.items():
        yield _extra(extra, tuple(modules.values()))
    version = version_of("uvloop")
    yield (
        Diagnosis("uvloop", "ok", version)
        if version
        else Diagnosis("uvloop", "missing", "optional: a faster event loop", install_command("uvloop"))
    )
    yield from _families()
    yield from _backends()


def _families() -> Iterator[Diagnosis]:
    """Name the ops of each family, and what the parts that it brings itself need and lack."""
    for name, family in installed_families():
        if isinstance(family, Exception):
            detail = f"{type(family).__name__}: {family}"
            yield Diagnosis(f"family {name}", "failed", detail, "Repair or remove the package that brings the family.")
            continue
        detail = ", ".join(op.kind for op in family.ops)
        yield Diagnosis(f"family {family.name}", "ok", detail)
        for backend, part in family.parts.items():
            missing = [wheel for wheel in part.wheels if not version_of(wheel)]
            if missing:
                what = f"family {family.name} on {backend}"
                yield Diagnosis(what, "missing", f"not installed: {', '.join(missing)}", install_command(*missing))


def _python() -> Diagnosis:
    return Diagnosis("python", "ok", f"{platform.python_version()} ({platform.python_implementation()}) at {sys.executable}")


def _cores() -> str:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{allowed} of {os.cpu_count()} cores"


def _extra(extra: str, distributions: tuple[str, ...]) -> Diagnosis:
    if extra in UNUSED:
        return Diagnosis(f"extra {extra}", "unused", "not used in this release")
    versions = {name: version_of(name) for name in distributions}
    detail = ", ".join(f"{name} {version or '(missing)'}" for name, version in versions.items())
    if all(versions.values()):
        return Diagnosis(f"extra {extra}", "ok", detail)
    return Diagnosis(f"extra {extra}", "missing", detail, install_command(extra))


def _kernel_features() -> Iterator[Diagnosis]:
    def memfd() -> None:
        os.close(os.memfd_create("accel-doctor"))

    def timerfd() -> None:
        loop = asyncio.new_event_loop()
        try:
            TimerfdTimer(loop, lambda: None).close()
        finally:
            loop.close()

    def pidfd() -> None:
        os.close(os.pidfd_open(os.getpid()))

    uses: dict[str, tuple[Callable[[], None], Literal["failed", "missing"], str]] = {
        "memfd": (memfd, "failed", "device memory on the CPU backend and shared memory need it"),
        "timerfd": (timerfd, "missing", "without it, completion sleeps at the loop's resolution of 1 ms"),
        "pidfd": (pidfd, "failed", "process hosts need it"),
    }
    for name, (probe, state, use) in uses.items():
        try:
            probe()
        except Exception as error:
            yield Diagnosis(
                name,
                state,
                f"{type(error).__name__}: {error}; {use}",
                "Use Linux 5.4 or later, and allow the call in the sandbox's seccomp filter.",
            )
        else:
            yield Diagnosis(name, "ok", "works")


def _backends() -> Iterator[Diagnosis]:
    for name, found in list_devices().items():
        if isinstance(found, BackendUnavailableError):
            state: Literal["failed", "missing"] = "failed" if name == "cpu" else "missing"
            yield Diagnosis(f"backend {name}", state, found.message, found.remedy)
        elif not found:
            yield Diagnosis(f"backend {name}", "missing", "no device")
        else:
            text = "; ".join(f"{device.spec} {device.name} {memory_text(device.memory)}".strip() for device in found)
            yield Diagnosis(f"backend {name}", "ok", text)
        yield from _own_checks(name)


def _own_checks(name: str) -> Iterator[Diagnosis]:
    """Let a backend say itself what it found and what it misses."""
    try:
        own = getattr(load_backend(name), "checks", None)
        if own is not None:
            yield from own()
    except BackendUnavailableError:
        return  # it cannot even be imported, which was said
    except Exception as error:
        yield Diagnosis(f"checks of {name}", "failed", f"{type(error).__name__}: {error}", "This is a bug of the backend: report it.")


def _usable_beside_the_cpu() -> list[str]:
    return [found[0].spec for name, found in list_devices().items() if name != "cpu" and isinstance(found, list) and found]


def _of_self_test(spec: str, test: SelfTest) -> Diagnosis:
    times = ", ".join(f"{step} {milliseconds:.1f} ms" for step, milliseconds in test.steps.items())
    if test.is_ok:
        return Diagnosis(f"self-test {spec}", "ok", times)
    return Diagnosis(
        f"self-test {spec}",
        "failed",
        test.failure,
        "This is a bug, or a broken library: report it with the output of `accel doctor --json`.",
    )


# -- the self-test: a short trip through everything that must work


@dataclass(frozen=True, slots=True)
class SelfTest:
    """What the trip gave.

    Parameters
    ----------
    steps
        Step -> milliseconds, in order, as far as it came.
    failure
        What went wrong, or empty.
    """

    steps: dict[str, float]
    failure: str = ""

    @property
    def is_ok(self) -> bool:
        """Whether every step did what it should."""
        return not self.failure


async def self_test(spec: str = "cpu", *, with_fault: bool = True, limit: float = 20.0) -> SelfTest:
    """Run the trip on a device.

    Parameters
    ----------
    spec
        The device.
    with_fault
        Whether a fault is part of it. On a GPU it would end CUDA for the whole process.
    limit
        Seconds that it may take altogether.
    """
    steps: dict[str, float] = {}
    try:
        async with asyncio.timeout(limit):
            await _trip(spec, steps, with_fault)
    except Exception as error:
        return SelfTest(steps, f"after {', '.join(steps) or 'nothing'}: {type(error).__name__}: {error}")
    return SelfTest(steps)


async def _trip(spec: str, steps: dict[str, float], with_fault: bool) -> None:
    began = time.perf_counter()

    def done(step: str) -> None:
        nonlocal began
        now = time.perf_counter()
        steps[step] = round((now - began) * 1e3, 3)
        began = now

    rng = np.random.default_rng()
    a, b = rng.standard_normal((2, 64, 64)).astype(np.float32)
    async with System("doctor") as system:
        plan = FaultPlan().poison_at(2, op="gemm") if with_fault else None
        device = await system.open_device(spec, libraries=("blas",), faults=plan)
        done("open")
        x, y = await device.put(a), await device.put(b)
        product = await device.blas.gemm(x, y)
        done("gemm")
        _compare(await device.get(product), a, b)
        done("check")
        if with_fault:
            await _recover(device, a, b, done)
    done("close")


async def _recover(device: Device, a: _Matrix, b: _Matrix, done: Callable[[str], None]) -> None:
    x, y = await device.put(a), await device.put(b)
    try:
        await device.blas.gemm(x, y)
    except ContextPoisonedError:
        done("fault")
    else:
        raise AssertionError("the fault did not surface")
    x, y = await device.put(a), await device.put(b)
    _compare(await device.get(await device.blas.gemm(x, y)), a, b)
    if device.generation != 2:
        raise AssertionError(f"generation {device.generation} after one fault")
    done("recover")


def _compare(result: _Matrix, a: _Matrix, b: _Matrix) -> None:
    expected = a.astype(np.float64) @ b.astype(np.float64)
    if not np.allclose(result, expected, rtol=1e-4, atol=1e-3):
        raise AssertionError("the device computed a wrong product")
