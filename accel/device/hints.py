"""Names that users of other libraries try on a device, a batch or a system, and what to use."""

from __future__ import annotations

from accel.ops.families import FAMILIES
from accel.ops.namespace import calls_of

__all__ = ["DEVICE_HINTS", "RECORDER_HINTS", "SYSTEM_HINTS"]

_OPS = {name: call for family in reversed(FAMILIES) for name, call in calls_of(family.namespace).items()}

DEVICE_HINTS = {
    **{name: f"Use await device.{call}." for name, call in _OPS.items()},
    **dict.fromkeys(("array", "asarray", "tensor", "from_numpy", "upload", "to_device"), "Use await device.put(array)."),
    **dict.fromkeys(("numpy", "fetch", "download", "to_host"), "Use await device.get(ref)."),
    **dict.fromkeys(("alloc", "malloc", "allocate"), "Use await device.empty(shape, dtype)."),
    **dict.fromkeys(("synchronize", "sync", "wait"), "Await the ops: each is over when its await ends."),
    **dict.fromkeys(("memory", "stats", "status"), "Use device.info() or device.health()."),
    "ones": "Use await device.full(shape, 1, dtype).",
    "compile": "Use await device.compiler.compile(source, name).",
    "close": "Use await device.aclose().",
    "restart": "Use await device.reopen(), once it is lost.",
    "spawn": "Use await system.spawn(Actor).",
}

RECORDER_HINTS = {
    **{name: f"Use {call} of the batch or graph." for name, call in _OPS.items()},
    "put": "Put the array before the block, and change it in place: await device.put(array, out=ref).",
    "get": "Use await device.get(ref) after the block, once the graph was replayed.",
    "free": "Drop the ref, or use await device.free(ref) after the block.",
    "timeout": "Use device.batch(timeout=...).",
    **dict.fromkeys(("commit", "execute", "flush", "run_all", "send", "submit"), "The batch is sent when its block ends."),
}

SYSTEM_HINTS = {
    **dict.fromkeys(("open", "device", "get_device"), "Use await system.open_device('auto')."),
    **dict.fromkeys(("close", "shutdown", "stop"), "Use await system.aclose(), or leave the `async with` block."),
    **dict.fromkeys(
        ("run", "submit"),
        "Use system.portal.run(coroutine_function) from other threads, or await system.run_blocking(function) for one that blocks.",
    ),
    **dict.fromkeys(("open_devices", "pool"), "Use await system.open_pool('cuda')."),
    "actor_of": "Use await system.spawn(Actor).",
}
