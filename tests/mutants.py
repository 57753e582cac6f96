"""Mutation testing: ``python -m tests.mutants ROOM`` breaks a room's code in one place at a time, and counts the breaks that its tests notice.

Cosmic Ray makes the mutants. A seed draws the sample: first the place, then what it is replaced by, so that an arithmetic operator with eleven
replacements counts no more than a comparison. Each mutant gets a run of the room's tests, in a copy of the tree, that ends with the first failure.

The sample leaves out mutants that no test can notice: those in annotations, in the bodies of protocols and in imports for type checkers, which
are not evaluated, and ``==`` for ``is`` or the reverse. It leaves out ``<`` and its kin for ``is``, too: that raises at once, and proves nothing.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.work_db import WorkDB
from cosmic_ray.work_item import TestOutcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cosmic_ray.work_item import MutationSpec

__all__ = ["ROOMS", "main"]

ROOT = Path(__file__).resolve().parents[1]

_BATCHER = ("tests/patterns/test_batcher*.py",)
_SEARCH = ("tests/patterns/test_quarantine.py", "tests/patterns/test_poison_memory.py", "tests/patterns/test_quarantine_properties.py")
_DISPATCHER = (
    "tests/engine/test_lane.py",
    "tests/engine/test_order.py",
    "tests/device/test_every_op.py",
    "tests/engine/test_commands.py",
    "tests/engine/test_cancel.py",
    "tests/engine/test_deadlines.py",
    "tests/engine/test_backpressure.py",
    "tests/engine/test_batch.py",
    "tests/engine/test_blocking.py",
    "tests/engine/test_faults.py",
    "tests/engine/test_late_work.py",
    "tests/engine/test_lost.py",
    "tests/engine/test_op_errors.py",
    "tests/engine/test_op_status.py",
    "tests/engine/test_graph.py",
    "tests/functions/test_kernel_op.py",
    "tests/libraries/test_kernel_library.py",
    "tests/ops/test_one_family.py",
    "tests/ops/test_strided.py",
    "tests/storage/test_durable.py",
    "tests/storage/test_durable_dropped.py",
    "tests/storage/test_durable_checksum.py",
)

ROOMS: dict[str, dict[str, tuple[str, ...]]] = {
    "actors": {
        "accel/actors/*.py": ("tests/actors/test_*.py",),
    },
    "completion": {
        "accel/completion/*.py": (
            "tests/completion/test_poller.py",
            "tests/completion/test_timer.py",
            "tests/completion/test_completion*.py",
        ),
    },
    "dispatcher": {
        "accel/engine/sender.py": _DISPATCHER,
        "accel/engine/submission.py": _DISPATCHER,
        "accel/engine/device_actor.py": _DISPATCHER,
        "accel/engine/stream_clock.py": _DISPATCHER,
        "accel/engine/lane.py": _DISPATCHER,
        "accel/engine/launches.py": _DISPATCHER,
    },
    "memory": {
        "accel/memory/*.py": (
            "tests/memory/test_usage.py",
            "tests/memory/test_slab.py",
            "tests/memory/test_allocator*.py",
            "tests/memory/test_host_arena.py",
            "tests/cpu/test_cpu_memory.py",
            "tests/storage/test_buffers.py",
            "tests/storage/test_pinned.py",
            "tests/memory/test_usage_properties.py",
            "tests/memory/test_host_arena_properties.py",
            "tests/engine/test_external_work.py",
            "tests/process/test_cgroup.py",
        ),
    },
    "patterns": {
        "accel/patterns/[!ipqs]*.py": (*_BATCHER, "tests/patterns/test_quarantine.py"),
        "accel/patterns/serving.py": ("tests/models/test_model.py",),
        "accel/patterns/[ipq]*.py": _SEARCH,
    },
}
"""For each room: the files to mutate, and the tests that must fail."""

_SAME = ("Is_Eq", "IsNot_NotEq", "Eq_Is", "NotEq_IsNot")
_ORDERS = tuple(f"{test}_{order}" for test in ("Is", "IsNot") for order in ("Lt", "LtE", "Gt", "GtE"))


def unevaluated(path: Path) -> set[tuple[int, int]]:
    """Return the positions (line and column) in a file whose code is for type checkers alone."""
    text = path.read_text(encoding="utf-8")
    found: set[tuple[int, int]] = set()
    for node in ast.walk(ast.parse(text)):
        parts = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).startswith("Protocol") for base in node.bases):
            parts += node.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            parts.append(node)
        for part in parts:
            if isinstance(part, (ast.expr, ast.stmt)):
                found |= positions(part)
    return found


def positions(node: ast.expr | ast.stmt) -> set[tuple[int, int]]:
    """Return the positions that a node covers, decorators included."""
    first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
    last, end = node.end_lineno or node.lineno, node.end_col_offset or 0
    return {
        (line, column)
        for line in range(first, last + 1)
        for column in range(node.col_offset if line == node.lineno else 0, end if line == last else 200)
    }


def mutants(paths: Sequence[Path]) -> list[MutationSpec]:
    """Return all mutants of these files that are worth a run."""
    with tempfile.TemporaryDirectory() as folder, closing(WorkDB(str(Path(folder) / "all.sqlite"), WorkDB.Mode.create)) as database:
        init(paths, database, {})
        found = [item.mutations[0] for item in database.work_items]
    hidden = {path: unevaluated(path) for path in paths}
    return [
        mutant
        for mutant in found
        if mutant.start_pos not in hidden[mutant.module_path] and not mutant.operator_name.endswith((*_SAME, *_ORDERS))
    ]


def sample(found: Sequence[MutationSpec], size: int, seed: int) -> list[MutationSpec]:
    """Draw places, and one mutant of each."""
    places: dict[tuple[str, tuple[int, int]], list[MutationSpec]] = defaultdict(list)
    for mutant in sorted(found, key=lambda each: (str(each.module_path), each.start_pos, each.operator_name, each.occurrence)):
        places[str(mutant.module_path), mutant.start_pos].append(mutant)
    rng = random.Random(seed)
    drawn = rng.sample(sorted(places), min(size, len(places)))
    return [rng.choice(places[place]) for place in drawn]


def files(glob: str) -> list[Path]:
    """Return the files of a pattern; there must be some, so that no room is skipped when its files move."""
    found = sorted(Path().glob(glob))
    if not found:
        raise SystemExit(f"no file matches {glob}: see ROOMS in {Path(__file__).name}")
    return found


def tests_of(room: dict[str, tuple[str, ...]], path: Path) -> tuple[str, ...]:
    """Return the tests for one of a room's files."""
    patterns = next(tests for glob, tests in room.items() if path in files(glob))
    found = [str(test) for pattern in patterns for test in files(pattern)]
    return tuple(sorted(found, key=lambda test: path.stem not in test))  # what was written for the file notices it soonest


def copy_tree(target: Path) -> None:
    """Copy what git knows of this checkout, or does not ignore."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def command_for(tests: Sequence[str]) -> str:
    """Return the command that runs tests until the first that fails."""
    return shlex.join((sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests))


def seconds_without_mutant(tests: Sequence[str]) -> float:
    """Run the tests on the code as it is, which they must pass; return how long that takes."""
    began = time.monotonic()
    done = subprocess.run(shlex.split(command_for(tests)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"these tests fail without a mutant:\n{done.stdout[-5000:]}")
    return time.monotonic() - began


def outcomes(room: dict[str, tuple[str, ...]], drawn: Sequence[MutationSpec]) -> Iterator[tuple[MutationSpec, bool, str]]:
    """Try each mutant, in the copy that is the current folder; yield whether it was noticed, and its difference."""
    limits: dict[frozenset[str], float] = {}
    for mutant in drawn:
        tests = tests_of(room, mutant.module_path)
        if frozenset(tests) not in limits:
            limits[frozenset(tests)] = 60 + 3 * seconds_without_mutant(tests)
        result = mutate_and_test([mutant], command_for(tests), limits[frozenset(tests)])
        if result.test_outcome is None or result.test_outcome is TestOutcome.INCOMPETENT:
            raise RuntimeError(f"{mutant} was not tried: {result.output}")
        yield mutant, result.test_outcome is TestOutcome.KILLED, result.diff or ""


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description="Break the code of rooms, and count what their tests notice.")
    parser.add_argument("rooms", nargs="*", metavar="ROOM", help=f"of {', '.join(ROOMS)}; all of them if none is named")
    parser.add_argument("--sample", type=int, default=100, help="mutants of each room (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=15, help="draws the sample (default: %(default)s)")
    options = parser.parse_args()
    unknown = set(options.rooms) - ROOMS.keys()
    if unknown:
        parser.error(f"no such room: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy_tree(Path(folder))
        os.chdir(folder)
        os.environ["PYTHONPATH"] = folder
        for name in options.rooms or ROOMS:
            room = ROOMS[name]
            found = mutants([path for glob in room for path in files(glob)])
            drawn = sample(found, options.sample, options.seed)
            print(f"{name}: {len(drawn)} of {len(found)} mutants, seed {options.seed}", flush=True)
            killed = 0
            for mutant, noticed, difference in outcomes(room, drawn):
                killed += noticed
                where = f"{mutant.module_path}:{mutant.start_pos[0]} {mutant.operator_name}"
                print(f"killed   {where}" if noticed else f"SURVIVED {where}\n{difference}", flush=True)
            print(f"{name}: {killed} of {len(drawn)} killed, {killed / len(drawn):.0%}", flush=True)


if __name__ == "__main__":
    main()
