"""All that a machine with a GPU has to show: ``python benchmarks/hardware.py [--out FOLDER] [--parts NAMES] [--seconds N] [--pack]``.

Each part is a command with a limit of its own; the most important ones come first, and what there is no time left for is said to be not run. The folder
gets ``record.md`` (for ``benchmarks/records/hardware.md``), ``record.json``, ``latency.png``, and what each part printed, with ``--pack`` in one archive. Where
a command may take ten minutes, each of :data:`CALLS` is one. ``--backend cpu`` runs those parts that need no GPU, with little work: so this script is tried
where there is none.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.hardware_record import read_json, read_junit, read_lines, render

ROOT = Path(__file__).resolve().parents[1]
_LEAST = 5.0
_GRACE = 10.0
_PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "junit_logging=system-out", "--durations=30")
_BUDGETS = "P1,P2,P3,P3-graph,P4,P5,P6,P7,P8,P9,P9-rate,P9-copy,P10,P12"
_RECOVERY = "standby or durable or isolation or hosts"  # files whose tests start processes: half of the time that all take
_PICTURE = "latency.png"
_FILES = ("record.md", "record.json", _PICTURE)

CALLS: dict[str, tuple[str, ...]] = {
    "checks": ("doctor", "tests", "memcheck"),
    "recovery": ("recovery",),
    "measures": ("bench", "lengths", "picture", "soak", "service", "demo", "kernels", "curves", "examples"),
    "mix": ("mixed",),
    "chaos": ("chaos",),
    "gpus": ("two_gpus", "worlds"),
}
"""Names that ``--parts`` takes too -> their parts, which need less than ten minutes together. Without ``--parts``: the first four."""


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


def _bench(name: str, what: str, limit: float, spec: str, only: str, *more: str) -> Part:
    def command(out: Path) -> tuple[str, ...]:
        return ("benchmarks/run.py", "--backend", spec, "--only", only, "--json", str(out / f"{name}.json"), *more)

    return Part(name, what, limit, command, lambda out, _: read_json(out / f"{name}.json"))


def _tests(name: str, limit: float, *which: str) -> Part:
    def command(out: Path) -> tuple[str, ...]:
        return (*_PYTEST, f"--junitxml={out / f'{name}.xml'}", "-m", *which)

    return Part(name, "the tests", limit, command, lambda out, _: read_junit(out / f"{name}.xml"))


def _printed(name: str, what: str, limit: float, *command: str) -> Part:
    return Part(name, what, limit, lambda _: command, lambda _, text: read_lines(text))


def _writing(name: str, limit: float, *command: str) -> Part:
    """Return a part that writes its numbers into a file of its name."""
    program = command[0] if command[0] != "-m" else " ".join(command[1:3])
    return Part(
        name, program, limit, lambda out: (*command, "--json", str(out / f"{name}.json")), lambda out, _: read_json(out / f"{name}.json")
    )


def _parts(backend: str) -> tuple[Part, ...]:
    """Return the parts in the order in which they run: what matters most comes first."""
    is_cuda = backend == "cuda"
    doctor = Part("doctor", "accel doctor", 30, lambda _: ("-m", "accel", "doctor", "--json"), lambda _, text: json.loads(text))
    served = ("benchmarks/service_requests.py", "--device", backend, "--requests", "500" if is_cuda else "50")
    service = Part("service", "the aiohttp example", 45, lambda _: served, lambda _, text: json.loads(text))
    shown = _writing("demo", 60, "-m", "accel", "demo", *(() if is_cuda else ("--device", "cpu", "--requests", "300")))
    chaos = ("benchmarks/chaos.py", "--device", backend)
    if not is_cuda:
        bench = _bench("bench", "the budgets", 60, "cpu", "P12", "--quick")
        example = _printed("examples", "the examples", 60, "examples/own_library.py")
        tests = _tests("tests", 60, "not gpu", "tests/ops/test_views.py")
        return doctor, tests, bench, service, shown, example, _writing("chaos", 60, *chaos, "--seconds", "2", "--clients", "10")
    drawn = Part(
        "picture",
        "the picture of latency by length",
        20,
        lambda out: ("benchmarks/plot.py", str(out / "lengths.json"), str(out / _PICTURE)),
        lambda _, text: read_lines(text),
    )
    of_two_gpus = ("benchmarks/worlds.py", "--device", "cuda")
    worlds = Part("worlds", "collectives of two GPUs", 150, lambda _: of_two_gpus, lambda _, text: json.loads(text))
    names = sorted(path.name for path in (ROOT / "examples").glob("cuda_*.py"))
    return (
        doctor,
        _tests("tests", 400, "gpu", "tests/accel_cuda", "-k", f"not ({_RECOVERY})"),
        _tests("recovery", 400, "gpu", "tests/accel_cuda", "-k", _RECOVERY),
        _printed("memcheck", "compute-sanitizer over the kernels", 150, "-m", "tests.accel_cuda.memcheck"),
        _bench("bench", "the budgets on asyncio and uvloop", 210, "cuda", _BUDGETS),
        _bench("mixed", "a service's mix", 200, "cuda", "P14"),
        _bench("lengths", "latency by length", 75, "cuda", "lengths"),
        drawn,
        _bench("soak", "a million ops", 90, "cuda", "P13"),
        service,
        shown,
        _writing("kernels", 90, "benchmarks/cuda_kernels.py"),
        _bench("curves", "copies and products by size", 120, "cuda", "copies,gemm"),
        *(_printed(name.removesuffix(".py"), f"examples/{name}", 30, f"examples/{name}") for name in names),
        _writing("chaos", 560, *chaos, "--seconds", "480", "--standby", "context", "--hang-timeout", "1.5"),
        _tests("two_gpus", 400, "gpu", "tests/accel_cuda", "-k", "two_gpus or cuda_world"),
        worlds,
    )


def _chosen(parts: tuple[Part, ...], names: list[str]) -> tuple[Part, ...]:
    """Return the parts that are named, alone or by a call.

    Raises
    ------
    KeyError
        For a name that there is none of; its argument says which there are.
    """
    examples = tuple(part.name for part in parts if part.what.startswith("examples/"))
    known = {part.name: (part.name,) for part in parts} | ({"examples": examples} if examples else {})
    calls = {name: tuple(part for member in members for part in known.get(member, ())) for name, members in CALLS.items()}
    wanted: set[str] = set()
    for name in names or list(CALLS)[:4]:
        found = known.get(name) or calls.get(name)
        if not found:
            raise KeyError(f"no part {name}; there are {', '.join((*calls, *known))}")
        wanted.update(found)
    return tuple(part for part in parts if part.name in wanted)


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


def _pack(work: Path, out: Path) -> None:
    """Put what was written so far where it is fetched from: the record as it is, all else in one archive."""
    with tarfile.open(out / "parts.tar.gz", "w:gz") as archive:
        for path in sorted(work.iterdir()):
            if path.name in _FILES:
                shutil.copyfile(path, out / path.name)
            else:
                archive.add(path, path.name)


def record(parts: tuple[Part, ...], out: Path, seconds: float, backend: str, *, pack: bool = False) -> dict[str, Any]:
    """Run the parts and write the record after each of them, so that it is there whenever this is ended."""
    began = time.perf_counter()
    found: dict[str, Any] = {
        "backend": backend,
        "commit": _commit(),
        "began": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "parts": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) if pack else out
        for part in parts:
            left = seconds - (time.perf_counter() - began)
            if left < _LEAST:
                entry = {"what": part.what, "command": "", "state": "not run: no time left", "seconds": 0.0, "data": None}
            else:
                print(f"{part.name}: {part.what} ...", end=" ", flush=True)
                entry = _run(part, work, min(left, part.limit))
                print(f"{entry['state']}, {entry['seconds']} s", flush=True)
            found["parts"][part.name] = entry
            found["seconds"] = round(time.perf_counter() - began, 1)
            (work / "record.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            (work / "record.md").write_text(render(found), encoding="utf-8")
            if pack:
                _pack(work, out)
    return found


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("hardware-record"), help="folder for the record (default: %(default)s)")
    parser.add_argument("--backend", choices=("cuda", "cpu"), default="cuda", help="what to run on (default: %(default)s)")
    parser.add_argument("--parts", default="", metavar="NAMES", help=f"some parts only, separated by commas; or {', '.join(CALLS)}")
    parser.add_argument("--seconds", type=float, help="for all parts together (default: what their limits allow)")
    parser.add_argument("--pack", action="store_true", help="put all but the record and the picture into one archive")
    parser.add_argument("--list", action="store_true", help="list the parts and their limits, and run nothing")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run it; return 0 if every part went well."""
    parser = _arguments()
    options = parser.parse_args(arguments)
    parts = _parts(options.backend)
    names = [name for name in options.parts.split(",") if name]
    try:
        chosen = _chosen(parts, names)
    except KeyError as error:
        parser.error(error.args[0])
    if options.list:
        for part in chosen if names else parts:
            print(f"{part.name:22} {part.limit:4.0f} s  python {' '.join(part.command(Path('OUT')))}")
        return 0
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    seconds = sum(part.limit for part in chosen) if options.seconds is None else options.seconds
    found = record(chosen, out, seconds, options.backend, pack=options.pack)
    print(f"{found['seconds']} s; {out / 'record.md'}")
    return 0 if all(entry["state"] == "ok" for entry in found["parts"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
