"""``split=``: each rank has its part of each weight, bit for bit, and no more of the file is read for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors.torch
import torch

import accel
from accel.files.regular_file import RegularFile
from accel.models import weights
from accel.models.split import Split
from accel.models.weights import collect, load_weights

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("nothing_left")

AXES = {"*.up.weight": 0, "*.down.weight": 1, "*.middle": 1, "*.last": -1}


def tensors_of(rng: np.random.Generator) -> dict[str, torch.Tensor]:
    """Return weights of which each can be divided by 4; a part of a row of those named ``down`` has more than a page."""
    shapes = {"a.up.weight": (64, 100), "b.up.weight": (8, 3, 5), "a.down.weight": (40, 8192), "b.middle": (6, 4, 7), "c.last": (3, 5, 8)}
    found = {name: torch.from_numpy(rng.standard_normal(shape).astype(np.float32)) for name, shape in shapes.items()}
    found["b.down.weight"] = found["a.down.weight"].to(torch.bfloat16)
    found["bias"] = torch.from_numpy(rng.standard_normal(33))
    return found


def part_of(name: str, tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    axis = {"up.weight": 0, "down.weight": 1, "middle": 1, "last": 2}.get(name[2:])
    return tensor if axis is None else tensor.chunk(ranks, axis)[rank]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("way", ["safetensors", "torch", "mapping"])
async def test_each_rank_has_its_part(
    device: accel.Device, ranks: int, way: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(weights, "_CHUNK", 50_001)
    tensors = tensors_of(rng)
    source: Any = {"mapping": tensors}.get(way, tmp_path / f"weights.{way[:2]}")
    if way == "safetensors":
        source = tmp_path / "weights.safetensors"
        safetensors.torch.save_file(tensors, source)
    elif way == "torch":
        source = tmp_path / "weights.pt"
        torch.save({name: tensor.T if tensor.ndim == 2 else tensor for name, tensor in tensors.items()}, source)
        tensors = {name: tensor.T if tensor.ndim == 2 else tensor for name, tensor in tensors.items()}
    collected = await collect(device._core.system, source)
    for rank, part in enumerate(Split(AXES, ranks).parts(collected)):
        refs = await load_weights(device, part, system=device._core.system)
        assert refs.keys() == tensors.keys()
        for name, ref in refs.items():
            wanted = part_of(name, tensors[name], rank, ranks).contiguous()
            found = np.asarray(await device.get(ref))
            assert (found.shape, str(found.dtype)) == (tuple(wanted.shape), str(wanted.dtype).removeprefix("torch.")), name
            assert found.tobytes() == wanted.reshape(-1).view(torch.uint8).numpy().tobytes(), name


async def test_no_more_is_read_than_the_parts(
    device: accel.Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Parts of columns are read row by row, where a part of a row has a page; all others at once, as what they are."""
    tensors = {name: tensor for name, tensor in tensors_of(rng).items() if name.endswith(("up.weight", "down.weight", "bias"))}
    safetensors.torch.save_file(tensors, tmp_path / "weights.safetensors")
    read: list[int] = []
    fill = RegularFile.fill

    def counted(self: RegularFile, start: int, out: memoryview) -> None:
        read.append(len(out))
        fill(self, start, out)

    monkeypatch.setattr(RegularFile, "fill", counted)
    parts = Split({"*.up.weight": 0, "*.down.weight": 1}, 4).parts(await collect(device._core.system, tmp_path / "weights.safetensors"))
    for rank, part in enumerate(parts):
        read.clear()
        await load_weights(device, part, system=device._core.system)
        wanted = [part_of(name, tensor, rank, 4) for name, tensor in tensors.items()]
        assert sum(read) == sum([tensor.numel() * tensor.element_size() for tensor in wanted]) == part.nbytes


async def test_tied_weights_are_divided_once(device: accel.Device, rng: np.random.Generator) -> None:
    table = rng.standard_normal((8, 4))
    parts = Split({"*": 0}, 2).parts(await collect(device._core.system, {"embedding": table, "head": table}))
    for part, rows in zip(parts, (table[:4], table[4:]), strict=True):
        refs = await load_weights(device, part, system=device._core.system)
        assert refs["embedding"] is refs["head"]
        np.testing.assert_array_equal(await device.get(refs["head"]), rows)


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        ({"b": 0}, r"weight 'b' of shape \(3,\) cannot be divided among 2 ranks along dimension 0"),
        ({"w": 2}, r"weight 'w' of shape \(4, 6\) has no dimension 2"),
        ({"w": -3}, r"weight 'w' of shape \(4, 6\) has no dimension -3"),
        ({"w": 0, "?": 1}, r"weight 'w' of shape \(4, 6\) is divided in two ways|weight 'b' .* has no dimension 1"),
        ({"w": 0, "w*": 1}, r"weight 'w' of shape \(4, 6\) is divided in two ways"),
        ({"up.*": 0}, r"the pattern 'up\.\*' of split matches no weight"),
        ({"w": True}, "split is"),
        ({"w": None}, "split is"),
        ({3: 0}, "split is"),
        ("w", "split is"),
    ],
)
async def test_what_cannot_be_divided_is_named(device: accel.Device, axes: Any, said: str) -> None:
    collected = await collect(device._core.system, {"w": np.zeros((4, 6)), "b": np.zeros(3)})
    with pytest.raises(accel.InvalidArgumentError, match=said) as caught:
        Split(axes, 2).parts(collected)
    assert caught.value.argument == "split"
    assert caught.value.remedy


async def test_patterns_that_agree_are_taken(device: accel.Device) -> None:
    collected = await collect(device._core.system, {"w": np.zeros((4, 6))})
    assert [part.weights[0].shape for part in Split({"w": 1, "w*": -1}, 2).parts(collected)] == [(4, 3), (4, 3)]
