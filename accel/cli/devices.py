"""``accel devices``: list what can be opened."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from accel import BackendUnavailableError, DeviceDescription
from accel.backend import KnowsPeers
from accel.cli.console import print_table
from accel.registry import backend_names, load_backend

if TYPE_CHECKING:
    import argparse

__all__ = ["Listing", "add_arguments", "list_devices", "memory_text", "run"]

Listing = dict[str, list[DeviceDescription] | BackendUnavailableError]
"""Backend -> its devices, or why it has none."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print all devices; 1 if there is none."""
    listing = list_devices()
    devices = [device for found in listing.values() if isinstance(found, list) for device in found]
    if arguments.json:
        print(json.dumps([_as_json(device, _peers_of(device, devices)) for device in devices], indent=2))
    elif devices:
        rows = [(device.spec, device.name, device.uuid, memory_text(device.memory)) for device in devices]
        print_table("", ("spec", "name", "uuid", "memory"), rows)
        for device in devices:
            if peers := _peers_of(device, devices):
                print(f"{device.spec} can reach the memory of {', '.join(peers)}")
    for backend, found in listing.items():
        if isinstance(found, BackendUnavailableError):
            print(f"{backend}: {found.message.rstrip('.')}. {found.remedy}", file=sys.stderr)
    return 0 if devices else 1


def list_devices() -> Listing:
    """Ask every backend for its devices. May block: it imports them."""
    listing: Listing = {}
    for name in backend_names():
        try:
            listing[name] = list(load_backend(name).devices())
        except BackendUnavailableError as error:
            listing[name] = error
    return listing


def memory_text(nbytes: int) -> str:
    """Return a size as people say it; empty where it is not known."""
    return f"{nbytes / 2**30:.1f} GiB" if nbytes else ""


def _peers_of(device: DeviceDescription, devices: list[DeviceDescription]) -> list[str]:
    """Return the devices whose memory this one can reach without the host. May block."""
    backend = load_backend(device.backend)
    if not isinstance(backend, KnowsPeers):
        return []
    others = [other for other in devices if other.backend == device.backend and other.index != device.index]
    return [other.spec for other in others if backend.can_access_peer(device.index, other.index)]


def _as_json(device: DeviceDescription, peers: list[str]) -> dict[str, str | int | list[str]]:
    return {
        "spec": device.spec,
        "backend": device.backend,
        "index": device.index,
        "name": device.name,
        "uuid": device.uuid,
        "memory": device.memory,
        "peers": peers,
    }
