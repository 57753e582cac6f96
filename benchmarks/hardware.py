"""All that a machine with a GPU has to show, in one command: ``python benchmarks/hardware.py [--out FOLDER] [--parts NAMES] [--seconds N]``.

Each part is a command with a limit of its own; the most important ones come first, and what there is no time left for is said to be not run. The folder
gets ``record.md`` (for ``docs/hardware.md``), ``record.json``, ``latency.png``, and what each part printed. ``--backend cpu`` runs those parts that need no
GPU, with little work: so this script is tried where there is none.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.hardware_record import read_json, read_junit, read_lines, render

ROOT = Path(__file__).resolve().parents[1]
_SECONDS = 540.0
_LEAST = 5.0
_GRACE = 10.0
_PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "junit_logging=system-out")
_BUDGETS = "P1,P2,P3,P3-graph,P4,P5,P6,P7,P8,P12"


@dataclass(frozen=True)
class Part:
    """One command.

    Parameters
    ----------
    name, what
        For ``--parts``, and for the record.
    limit
        Seconds.
    command
        Arguments of Python's, by the output folder.
    read
        Takes the folder and what was printed, and returns what is to be recorded.
    """

    name: str
    what: str
    limit: float
    command: Callable[[Path], tuple[str, ...]]
    read: Callable[[Path, str], Any]


def _bench(name: str, what: str, limit: float, spec: str, only: str, *more: str, plot: bool = False) -> Part:
    def command(out: Path) -> tuple[str, ...]:
        picture = ("--plot", str(out / "latency.png")) if plot else ()
        return ("-m", "accel", "bench", "--backend", spec, "--only", only, "--json", str(out / f"{name}.json"), *picture, *more)

    return Part(name, what, limit, command, lambda out, _: read_json(out / f"{name}.json"))


def _tests(limit: float, *which: str) -> Part:
    def command(out: Path) -> tuple[str, ...]:
        return (*_PYTEST, f"--junitxml={out / 'tests.xml'}", "-m", *which)

    return Part("tests", "the tests", limit, command, lambda out, _: read_junit(out / "tests.xml"))


def _printed(name: str, what: str, limit: float, *command: str) -> Part:
    return Part(name, what, limit, lambda _: command, lambda _, text: read_lines(text))


def _parts(backend: str) -> tuple[Part, ...]:
    """Return the parts in the order in which they run: what matters most comes first."""
    is_cuda = backend == "cuda"
    doctor = Part("doctor", "accel doctor", 60, lambda _: ("-m", "accel", "doctor", "--json"), lambda _, text: json.loads(text))
    served = ("benchmarks/service_requests.py", "--device", backend, "--requests", "500" if is_cuda else "50")
    service = Part("service", "the aiohttp example", 45, lambda _: served, lambda _, text: json.loads(text))

    def demo(out: Path) -> tuple[str, ...]:
        return ("-m", "accel", "demo", "--json", str(out / "demo.json"), *(() if is_cuda else ("--device", "cpu", "--requests", "300")))

    shown = Part("demo", "accel demo", 60, demo, lambda out, _: read_json(out / "demo.json"))
    if not is_cuda:
        bench = _bench("bench", "the budgets", 60, "cpu", "P12", "--quick")
        example = _printed("examples", "the examples", 60, "examples/own_library.py")
        return doctor, _tests(60, "not gpu", "tests/core/test_views.py"), bench, service, shown, example
    kernels = Part(
        "kernels",
        "benchmarks/cuda_kernels.py",
        90,
        lambda out: ("benchmarks/cuda_kernels.py", "--json", str(out / "kernels.json")),
        lambda out, _: read_json(out / "kernels.json"),
    )
    names = sorted(path.name for path in (ROOT / "examples").glob("cuda_*.py"))
    examples = (_printed(name.removesuffix(".py"), f"examples/{name}", 40, f"examples/{name}") for name in names)
    return (
        doctor,
        _tests(180, "gpu", "tests/gpu"),
        _bench("bench", "the budgets on asyncio and uvloop", 210, "cuda", _BUDGETS),
        service,
        shown,
        _bench("soak", "a million ops", 90, "cuda", "P13"),
        _printed("memcheck", "compute-sanitizer over the kernels", 150, "-m", "tests.gpu.memcheck"),
        kernels,
        *examples,
        _bench("curves", "latency by length, copies and products by size", 120, "cuda", "lengths,copies,gemm", plot=True),
    )


def _run(part: Part, out: Path, limit: float) -> dict[str, Any]:
    """Run a part within ``limit`` seconds, and return its entry of the record. On time it is interrupted, so that it may write what it has."""
    command = (sys.executable, *part.command(out))
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    began, text = time.perf_counter(), out / f"{part.name}.txt"
    with text.open("w") as printed, (out / f"{part.name}.err").open("w") as complained:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=printed, stderr=complained, start_new_session=True)
        try:
            state = "ok" if process.wait(limit) == 0 else "failed"
        except subprocess.TimeoutExpired:
            state = "out of time"
            for number in (signal.SIGINT, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_GRACE)
                    break
    seconds = round(time.perf_counter() - began, 1)
    try:
        data = part.read(out, text.read_text())
    except (OSError, ValueError, SyntaxError) as error:  # it did not come so far as to write that
        data, state = None, state if state != "ok" else f"failed: {error}"
    shown = " ".join(argument.replace(str(out), "OUT") for argument in command[1:])
    return {"what": part.what, "command": f"python {shown}", "state": state, "seconds": seconds, "data": data}


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def record(parts: tuple[Part, ...], out: Path, seconds: float, backend: str) -> dict[str, Any]:
    """Run the parts and write the record after each of them, so that it is there whenever this is ended."""
    began = time.perf_counter()
    found: dict[str, Any] = {
        "backend": backend,
        "commit": _commit(),
        "began": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "parts": {},
    }
    for part in parts:
        left = seconds - (time.perf_counter() - began)
        if left < _LEAST:
            found["parts"][part.name] = {"what": part.what, "command": "", "state": "not run: no time left", "seconds": 0.0, "data": None}
        else:
            print(f"{part.name}: {part.what} ...", end=" ", flush=True)
            found["parts"][part.name] = entry = _run(part, out, min(left, part.limit))
            print(f"{entry['state']}, {entry['seconds']} s", flush=True)
        found["seconds"] = round(time.perf_counter() - began, 1)
        (out / "record.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        (out / "record.md").write_text(render(found), encoding="utf-8")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run it; return 0 if every part went well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("hardware-record"), help="folder for the record (default: %(default)s)")
    parser.add_argument("--backend", choices=("cuda", "cpu"), default="cuda", help="what to run on (default: %(default)s)")
    parser.add_argument("--parts", default="", metavar="NAMES", help="some parts only, separated by commas")
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="for all parts together (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="list the parts and their limits, and run nothing")
    options = parser.parse_args(arguments)
    parts = _parts(options.backend)
    wanted = [name for name in options.parts.split(",") if name]
    if unknown := set(wanted) - {part.name for part in parts}:
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(part.name for part in parts)}")
    chosen = tuple(part for part in parts if not wanted or part.name in wanted)
    if options.list:
        for part in chosen:
            print(f"{part.name:22} {part.limit:4.0f} s  python {' '.join(part.command(Path('OUT')))}")
        return 0
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    found = record(chosen, out, options.seconds, options.backend)
    print(f"{found['seconds']} s; {out / 'record.md'}")
    return 0 if all(entry["state"] == "ok" for entry in found["parts"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
