"""The ``streams=`` option as a value: which libraries share streams, and which go first."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest

import accel
from accel.cpu.backend import CpuDevice
from accel.engine.streams import resolve_streams
from tests.device_support import failure, opened

if TYPE_CHECKING:
    from accel.cpu.stream import CpuStream

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        ("balanced", accel.StreamStrategy("balanced", 8)),
        ("balanced(1)", accel.StreamStrategy("balanced", 1)),
        ("per_actor", accel.StreamStrategy()),
        ("single", accel.StreamStrategy("single")),
        ("pooled(3)", accel.StreamStrategy("pooled", 3)),
    ],
)
async def test_names_stand_for_strategies(text: str, strategy: accel.StreamStrategy) -> None:
    assert resolve_streams(text) == strategy == resolve_streams(strategy)
    assert hash(resolve_streams(text)) == hash(strategy)
    assert pickle.loads(pickle.dumps(strategy)) == strategy
    async with opened(streams=strategy, libraries=("blas", "elementwise", "reduce")) as device:
        count = {"balanced": 1 + (strategy.n or 0), "per_actor": 5, "single": 1, "pooled": 3}
        assert len(device._host.context.lanes) == count[strategy.kind]


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "many"},
        {"kind": None},
        {"kind": "pooled"},
        {"kind": "pooled", "n": 0},
        {"kind": "pooled", "n": True},
        {"kind": "balanced", "n": 0},
        {"kind": "balanced", "priorities": {"blas": -1}},
        {"kind": "single", "n": 2},
        {"n": 2},
        {"kind": "single", "priorities": {"blas": -1}},
        {"kind": "pooled", "n": 2, "priorities": {"blas": -1}},
        {"priorities": {"astrology": -1}},
        {"priorities": {"blas": "high"}},
        {"priorities": {"blas": True}},
        {"priorities": ["blas"]},
    ],
    ids=repr,
)
def test_what_does_not_go_together_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(accel.InvalidArgumentError) as caught:
        accel.StreamStrategy(**wrong)
    assert caught.value.remedy


def test_a_strategy_keeps_its_own_priorities() -> None:
    mine = {"blas": -1}
    strategy = accel.StreamStrategy(priorities=mine)
    mine["blas"] = 5
    assert strategy.priorities == {"blas": -1}


async def test_streams_are_made_with_their_priorities_in_every_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    original = CpuDevice.create_stream

    def create(self: CpuDevice, *, priority: int = 0) -> CpuStream:
        asked.append(priority)
        return original(self)

    monkeypatch.setattr(CpuDevice, "create_stream", create)
    strategy = accel.StreamStrategy(priorities={"reduce": -2, "batch": 1})
    async with opened(accel.testing.FaultPlan().poison_at(1), streams=strategy) as device:
        assert sorted(asked) == [-2, 0, 1], "the memory's stream, and those that were named"
        await failure(device.zeros(1), accel.ContextPoisonedError)
        await device.zeros(1)
        assert sorted(asked) == [-2, -2, 0, 0, 1, 1]


async def test_a_device_without_priorities_refuses_them() -> None:
    async with accel.System() as system:
        strategy = accel.StreamStrategy(priorities={"blas": -1})
        error = await failure(system.open_device("cpu", streams=strategy), accel.UnsupportedError)
        assert "priorities" in error.message
        wrong = await failure(system.open_device("cpu", streams=strategy, debug=True), accel.InvalidArgumentError)
        assert "debug" in wrong.message


@pytest.mark.parametrize("streams", ["balanced", "per_actor", "single", "pooled(2)"])
async def test_each_named_library_is_prepared_in_the_stream_that_it_runs_in(monkeypatch: pytest.MonkeyPatch, streams: str) -> None:
    """Also where it shares the stream with others, which was made for the first of them."""
    prepared: list[tuple[str, Any]] = []
    monkeypatch.setattr(CpuDevice, "prepare", lambda self, library, compute: prepared.append((library, compute)), raising=False)
    libraries = ("blas", "elementwise", "reduce", "fft")
    async with opened(streams=streams, libraries=libraries) as device:
        ports, pool = device._host.context.ports, device._host.context.pool
        lanes = {
            library: [ports[library].lane] if pool is None or library == "memory" else [port.lane for port in pool.ports]
            for library in ports
        }
        assert prepared == [(library, lane.compute) for library in ("memory", *libraries, "batch") for lane in lanes[library]]
        prepared.clear()
        await device.rng.normal(3)
        assert not prepared, "others are made at their first use"
