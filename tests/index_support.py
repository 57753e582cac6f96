"""Corrupt index operands: what every op with integer operands must answer, whatever these say."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

import accel
from accel.ops.families import FAMILIES
from accel.testing.conformance.families import samples_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accel.family import Sample
    from accel.ops import Family

__all__ = ["check_attention_numbers", "check_corrupt_operands"]

_SAMPLES, _OTHERS = 5, 1
"""How many of each kind: of one that must refuse some, and of one that need not."""

_REFUSED = {
    *("take", "take_along_axis", "put_along_axis", "scatter_add"),
    *("segment_reduce", "segment_sort", "bincount", "lu_solve"),
    *("spmv", "spmm", "todense", "diagonal", "tocsr", "tocsc", "tocoo", "spsolve_triangular", "solve"),
    *("sddmm", "add", "spgemm", "spgemm_size"),
}
"""Kinds that raise for an index out of range. All others have numbers that are no index, or say what such an index stands for."""


def _chosen(family: Family, rng: np.random.Generator) -> Iterator[Sample]:
    """Yield some samples of each kind that has operands of integers."""
    kinds = defaultdict(list)
    for sample in samples_of(family, rng):
        if any(each.dtype.kind in "iu" and each.size for each in sample.operands):
            kinds[sample.name.split()[0]].append(sample)
    for kind, samples in kinds.items():
        refusing = [each for each in samples if kind in _REFUSED and _must_refuse(each)]
        for some, count in ((refusing, _SAMPLES), ([each for each in samples if each not in refusing], _OTHERS)):
            yield from [some[i] for i in rng.choice(len(some), min(len(some), count), replace=False)]


def _must_refuse(sample: Sample) -> bool:
    """Return whether there are places that indices name, and no mode that says what one out of range stands for."""
    return all(each.size for each in sample.operands) and not {"wrap", "clip"} & set(sample.name.split())


def _corrupted(rng: np.random.Generator, array: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
    """Yield copies with numbers that are out of every range, or just beyond one."""
    least, most, beyond = *map(int, (np.iinfo(array.dtype).min, np.iinfo(array.dtype).max)), int(array.max()) + int(rng.integers(1, 4))
    for numbers in ((most,), ((least, most), (max(least, -beyond), min(most, beyond)))[rng.integers(2)]):
        made = array.copy()
        places = rng.integers(made.size, size=rng.integers(1, 4))
        made.flat[places] = rng.choice(np.array(numbers, array.dtype), places.size)
        yield made


async def check_attention_numbers(device: accel.Device, rng: np.random.Generator, dtype: str) -> None:
    """See that lengths, tables and offsets out of range give what the nearest ones in range do, bit by bit."""
    attention, kind = device.dnn, accel.DType.of(dtype).numpy
    q, k, v, cache = [rng.standard_normal(shape).astype(kind) for shape in ((3, 4, 5, 16), (3, 2, 7, 16), (3, 2, 7, 16), (6, 2, 4, 16))]
    far = 2**31 - 1

    async def both(call: Any, *operands: np.ndarray[Any, Any], wrong: tuple[Any, ...], right: tuple[Any, ...]) -> None:
        refs = [await device.put(each) for each in operands]
        made = [await call(*refs, *[await device.put(np.array(each, np.int32)) for each in numbers]) for numbers in (wrong, right)]
        found, expected = [await device.get(each) for each in made]
        np.testing.assert_array_equal(found, expected)

    def of_lengths(q: Any, k: Any, v: Any, lengths_q: Any, lengths_kv: Any) -> Any:
        return attention.attention(q, k, v, causal="bottom_right", lengths_q=lengths_q, lengths_kv=lengths_kv)

    await both(of_lengths, q, k, v, wrong=((-far, 6, 3), (far, -1, 8)), right=((0, 5, 3), (7, 0, 7)))
    table = rng.integers(0, 6, (3, 2))
    table[0], table[2, 1] = (0, 5), 5
    corrupt = table.copy()
    corrupt[0], corrupt[2, 1] = (-far - 1, far), 6
    await both(attention.paged_attention, q, cache, cache, wrong=(corrupt, (7, far, 9)), right=(table, (7, 8, 8)))
    await both(attention.paged_attention, q, cache, cache, wrong=(table, (-1, -far, 5)), right=(table, (0, 0, 5)))

    def of_sequences(q: Any, k: Any, v: Any, offsets_q: Any, offsets_kv: Any) -> Any:
        return attention.ragged_attention(q, k, v, offsets_q, offsets_kv, longest_q=9, longest_kv=9)

    tokens = [rng.standard_normal(shape).astype(kind) for shape in ((9, 4, 16), (8, 2, 16), (8, 2, 16))]
    await both(of_sequences, *tokens, wrong=((-5, 4, far), (-far, 3, 9)), right=((0, 4, 9), (0, 3, 8)))
    await both(of_sequences, *tokens, wrong=((0, 4, 9), (0, 5, 3)), right=((0, 4, 9), (0, 5, 5)))


async def check_corrupt_operands(device: accel.Device, rng: np.random.Generator) -> int:
    """Call ops of all families with corrupt operands of integers; return how many calls were refused.

    Each call is answered, or refused for its arguments. No context is lost, no memory of others is written, and what must be refused is.
    """
    kept = rng.integers(0, 255, 1 << 20).astype(np.uint8)
    guard = await device.put(kept)
    refused: dict[str, int] = defaultdict(int)
    seen = set()
    for family in FAMILIES:
        if family.name == "rng":  # it takes no indices, and its samples take longest to make
            continue
        for sample in _chosen(family, rng):
            kind = sample.name.split()[0]
            for place, operand in enumerate(sample.operands):
                if operand.dtype.kind not in "iu" or not operand.size:
                    continue
                for wrong in _corrupted(rng, operand):
                    operands = [wrong if i == place else each for i, each in enumerate(sample.operands)]
                    what = f"{sample.name}, operand {place}: {np.unique(wrong)[[0, -1]].tolist()}"
                    try:
                        refs = await asyncio.gather(*map(device.put, operands))
                        await sample.call(device.family(family.namespace), *refs)
                        # Those of sparse matrices are indices all.
                        assert family.name != "sparse" or wrong.max() < np.iinfo(wrong.dtype).max, f"{what} was not refused"
                    except (accel.UnsupportedError, accel.BackendUnavailableError):
                        continue
                    except (accel.InvalidArgumentError, accel.LinAlgError, accel.OutOfMemoryError) as error:
                        refused[f"{family.name}.{kind}"] += isinstance(error, accel.InvalidArgumentError)
                    except Exception as error:
                        raise AssertionError(f"{what} raised {error!r}") from error
                    seen.add(f"{family.name}.{kind}")
                    assert (device.generation, device.state) == (1, accel.DeviceState.READY), what
    assert device.info().in_flight == 0
    np.testing.assert_array_equal(await device.get(guard), kept)
    unchecked = [name for name in seen if name.split(".")[1] in _REFUSED and not refused[name]]
    assert not unchecked, f"no corrupt index was refused by {sorted(unchecked)}"
    return sum(refused.values())
