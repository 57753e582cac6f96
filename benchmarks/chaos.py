"""A service under load while faults arrive at random: ``python benchmarks/chaos.py [--device cpu|cuda] [--seconds N] [--seed N] [--clients N] ...``.

Clients compare every answer with numpy's. At the end each request must have been answered once, right or with an error that it could get, every device that
should live must answer, and nothing may be left: no process, thread, task, descriptor, shared memory, nor device memory. Exits with 1 if anything is not so.
The seed decides all that is random; it is printed, with the command that repeats the run.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.chaos_parts.plants import PLANTS
from benchmarks.chaos_parts.run import run_chaos
from benchmarks.chaos_parts.schedule import FAULTS, Options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0].partition(":")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long faults arrive (default 60)")
    parser.add_argument("--seed", type=int, help="what all that is random is drawn from (default: a new one)")
    parser.add_argument("--clients", type=int, default=200, help="tasks that send requests (default 200)")
    parser.add_argument(
        "--suspects", type=int, default=Options.suspects, help="tasks that send poison now and then (default %(default)s; 0: none)"
    )
    parser.add_argument(
        "--model",
        type=int,
        default=Options.models,
        help="tasks that ask a served model, with poison and while its weights are swapped (default %(default)s; 0: none)",
    )
    parser.add_argument(
        "--replicas", type=int, default=Options.replicas, help="devices of a pool with one service (default %(default)s; 0: none)"
    )
    parser.add_argument("--ranks", type=int, default=Options.ranks, help="devices of a world (default %(default)s; 0: none)")
    parser.add_argument(
        "--node",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask a device of a node, whose agent is killed and whose link is cut; on the CPU (default: yes)",
    )
    parser.add_argument("--hosts", default="process,auto", help="hosts of the devices that faults are sent to (default process,auto)")
    parser.add_argument("--faults", default=",".join(FAULTS), help="kinds of faults (default: all)")
    parser.add_argument("--gap", type=int, default=400, help="answers between two faults, on average (default 400)")
    parser.add_argument("--standby", choices=("none", "imports", "context"), default="none", help="spare children of the devices")
    parser.add_argument(
        "--hang-timeout", type=float, default=0.0, help="the devices' hang_timeout; 0 for none: then hung children are killed from outside"
    )
    parser.add_argument(
        "--durable", action=argparse.BooleanOptionalAction, default=True, help="keep durable data on the devices (default: yes)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the report there too")
    parser.add_argument("--log", metavar="FILE", default="", help="write what accel logged there")
    parser.add_argument("--list", action="store_true", help="say what kinds of faults there are, and end")
    parser.add_argument("--plant", choices=PLANTS, default="", help=argparse.SUPPRESS)
    parser.add_argument(
        "--patience", type=float, default=60.0, help="seconds after which a request counts as lost, and a process as left (default 60)"
    )
    return parser


def _options(parser: argparse.ArgumentParser, arguments: list[str] | None) -> tuple[Options, argparse.Namespace]:
    given = parser.parse_args(arguments)
    kinds, hosts = tuple(filter(None, given.faults.split(","))), tuple(given.hosts.split(","))
    if unknown := [kind for kind in kinds if kind not in FAULTS]:
        parser.error(f"there is no fault {unknown[0]!r}; see --list")
    if wrong := [host for host in hosts if host not in ("process", "auto")]:
        parser.error(f"faults cannot be sent to host {wrong[0]!r}, only to process and auto")
    seed = secrets.randbits(32) if given.seed is None else given.seed
    options = Options(
        device=given.device,
        seconds=given.seconds,
        seed=seed,
        clients=given.clients,
        suspects=given.suspects,
        models=given.model,
        replicas=given.replicas,
        ranks=given.ranks,
        node=given.node,
        hosts=hosts,
        faults=kinds,
        gap=given.gap,
        standby=given.standby,
        durable=given.durable,
        hang_timeout=given.hang_timeout or None,
        patience=given.patience,
        plant=given.plant,
        log=given.log,
    )
    return options, given


def main(arguments: list[str] | None = None) -> int:
    """Run once and return the exit status."""
    options, given = _options(_parser(), arguments)
    if given.list:
        print("\n".join(f"{kind:14s}{what}" for kind, what in FAULTS.items()))
        return 0
    print(f"seed {options.seed}", flush=True)
    report = run_chaos(options, lambda line: print(line, flush=True))
    print(report.text(), flush=True)
    if given.json:
        Path(given.json).write_text(json.dumps(report.as_json(), indent=1), encoding="utf-8")
    return 1 if report.violated else 0


if __name__ == "__main__":
    sys.exit(main())
