"""Random lives of durable buffers, through faults at random moments, against a model in numpy."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import numpy as np
import pytest

import accel
from tests.device_support import failure
from tests.durable_support import Way, opened, seeded

if TYPE_CHECKING:
    from tests.durable_support import Array, Patient

pytestmark = pytest.mark.usefixtures("nothing_left")


class Life:
    """Buffers and what is in them; ``None`` for what is torn."""

    def __init__(self, patient: Patient, rng: np.random.Generator, note: str) -> None:
        self.patient = patient
        self.device = patient.device
        self.rng = rng
        self.note = note
        self.model: dict[accel.AccelRef, Array | None] = {}
        self.sealed: set[accel.AccelRef] = set()

    def array(self) -> Array:
        return self.rng.integers(0, 255, int(2 ** self.rng.uniform(0, 18)), np.uint8)

    def pick(self) -> accel.AccelRef:
        refs = list(self.model)
        return refs[int(self.rng.integers(len(refs)))]

    async def make(self) -> None:
        array = self.array()
        ref = await self.device.put(array, durable=True)
        self.model[ref] = array

    async def seal(self) -> None:
        ref = self.pick()
        if self.model[ref] is not None:
            await self.device.keep_checksum(ref)
            self.sealed.add(ref)
            await failure(self.device.put(np.zeros(ref.shape, np.uint8), out=ref), accel.InvalidArgumentError)
            assert await self.device.verify_checksum(ref), self.note

    def open(self) -> accel.AccelRef | None:
        """Return one that is not sealed, if that is drawn."""
        ref = self.pick()
        return None if ref in self.sealed else ref

    async def drop(self) -> None:
        ref = self.pick()
        del self.model[ref]
        self.sealed.discard(ref)

    async def free(self) -> None:
        ref = self.pick()
        del self.model[ref]
        self.sealed.discard(ref)
        await self.device.free(ref)
        assert (await failure(self.device.get(ref), accel.StaleRefError)).reason == "freed", self.note

    async def rewrite(self) -> None:
        ref = self.open()
        if ref is None:
            return
        array = self.rng.integers(0, 255, ref.shape, np.uint8)
        await self.device.put(array, out=ref)
        self.model[ref] = array

    async def write_a_part(self) -> None:
        ref = self.open()
        if ref is None:
            return
        start = int(self.rng.integers(ref.shape[0]))
        part = self.rng.integers(0, 255, (ref.shape[0] - start,), np.uint8)
        if start == 0:
            return
        await self.device.put(part, out=ref[start:])
        array = self.model[ref]
        if array is not None:
            self.model[ref] = np.concatenate([array[:start], part])

    async def use_ordinary_memory(self) -> None:
        await self.device.put(self.array())

    async def fault(self) -> None:
        await self.patient.fault()
        await self.look()

    async def tear(self) -> None:
        ref, wanted = self.open(), self.device.generation + 1
        if ref is None:
            return
        await self.patient.poison("put", self.device.put(np.zeros(ref.shape, np.uint8), out=ref))
        self.model[ref] = None
        await self.patient.until(wanted)
        await self.look()

    async def look(self) -> None:
        for ref, array in self.model.items():
            if array is None:
                assert (await failure(self.device.get(ref), accel.StaleRefError)).reason == "torn", self.note
            else:
                np.testing.assert_array_equal(await self.device.get(ref), array, self.note)
        assert self.device.info().memory.durable >= sum(ref.nbytes for ref in self.model), self.note

    async def step(self) -> None:
        if not self.model:
            await self.make()
            return
        weights = {
            "make": 6,
            "seal": 2,
            "drop": 3,
            "free": 2,
            "rewrite": 3,
            "write_a_part": 3,
            "use_ordinary_memory": 3,
            "fault": 1,
            "tear": 1,
        }
        names = list(weights)
        chances = np.array([weights[name] for name in names], float)
        await getattr(self, str(self.rng.choice(names, p=chances / chances.sum())))()


@pytest.mark.parametrize(("way", "steps"), [("inline", 400), ("process", 60), ("killed", 60)])
async def test_random_lives(way: Way, steps: int) -> None:
    rng, note = seeded()
    async with opened(way) as patient:
        if way == "killed":
            patient.faults.armed = None
        life = Life(patient, rng, note)
        for _ in range(steps):
            await life.step()
        await life.look()
        life.model.clear()
        life.sealed.clear()
        gc.collect()  # errors that were caught hold frames, and those hold refs
        assert patient.device.info().memory.durable == 0, note
