"""Signals filtered by their spectra on any device: mains hum is cut out of recordings, the delay between them is found, and noise is smoothed.

Run: ``pip install .``, in a checkout, then ``python examples/spectral_filter.py``.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import numpy as np

import accel

SENSORS, RATE, SECONDS = 8, 1000, 16
HUM, TONE = 50.0, 7.0
"""Hertz of what is cut out, and of what is to stay."""

Array = np.ndarray[Any, Any]


def recordings(rng: np.random.Generator) -> tuple[Array, Array, Array]:
    """Return what sensors record, what it would be without hum, and by how many samples each is behind the first."""
    time = np.arange(RATE * SECONDS) / RATE
    burst = np.sin(2 * np.pi * TONE * time) * np.exp(-(((time - SECONDS / 2) / 1.5) ** 2))
    delays = np.concatenate(([0], rng.integers(-200, 200, SENSORS - 1)))
    clean = np.stack([np.roll(burst, delay) for delay in delays]) + 0.05 * rng.standard_normal((SENSORS, len(time)))
    hum = rng.uniform(1, 3, (SENSORS, 1)) * np.sin(2 * np.pi * HUM * time + rng.uniform(0, 6, (SENSORS, 1)))
    return (clean + hum).astype(np.float32), clean, delays


async def without_hum(device: accel.Device, signals: accel.AccelRef) -> accel.AccelRef:
    """Return the signals without the frequencies within 1 Hz of the hum: one batch of a transform, a product and the transform back."""
    length = signals.shape[-1]
    frequencies = await device.get(await device.fft.rfftfreq(length, 1 / RATE))
    kept = await device.put((np.abs(frequencies - HUM) > 1).astype(np.complex64))
    async with device.batch() as batch:
        spectra = batch.elementwise.binary("mul", batch.fft.rfft(signals), kept)
        return batch.fft.irfft(spectra, n=length)


async def delays_of(device: accel.Device, signals: accel.AccelRef) -> Array:
    """Return by how many samples each signal is behind the first: where their correlation is largest."""
    async with device.batch() as batch:
        correlations = batch.fft.correlate(signals, signals[:1], axes=-1)
        places = batch.reduce("argmax", correlations, axis=1)
    found: Array = await device.get(places) - (signals.shape[-1] - 1)
    return found


async def main() -> int:
    """Run the example and return its exit status."""
    recorded, clean, delays = recordings(np.random.default_rng())
    window = np.hanning(101)
    async with accel.System() as system:
        device = await system.open_device("auto", libraries=("fft", "elementwise", "reduce"))
        filtered = await without_hum(device, await device.put(recorded))
        found = await delays_of(device, filtered)
        bell = await device.put((window / window.sum()).astype(np.float32)[None])
        smooth = await device.get(await device.fft.convolve(filtered, bell, "same", axes=-1))
        got, name = await device.get(filtered), device.name
    expected = np.stack([np.convolve(row, window / window.sum(), "same") for row in got.astype(np.float64)])
    print(f"{name}: {SENSORS} recordings without hum, as recorded without it:", float(np.std(got - clean)) < 0.02)
    print("their delays:", bool(np.all(np.abs(found - delays) <= 3)))
    print("smoothed by a window of 101 samples:", np.allclose(smooth, expected, atol=1e-5))
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
