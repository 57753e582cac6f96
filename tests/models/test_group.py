"""Collectives within a model: of torch and numpy, along any dimension, against the arrays of all ranks."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import accel
from accel.cpu.group import Rendezvous
from accel.models.adapters.base import source_of
from accel.models.adapters.group import ModelGroup
from tests.model_support import Affine

if TYPE_CHECKING:
    from collections.abc import Callable


class Here:
    """A stream whose work is done at once."""

    fault = None

    def submit(self, work: Callable[[], object]) -> None:
        work()


def on_ranks(size: int, work: Callable[[ModelGroup], Any]) -> list[Any]:
    """Return what each of several ranks, which are threads, makes."""
    rendezvous, revoked = Rendezvous(), threading.Event()
    name = rendezvous.unique_id()

    def run(rank: int) -> Any:
        group = ModelGroup(rank, size)
        group.launcher = rendezvous.join(name, rank, size, time.monotonic() + 10, revoked)
        group.stream = Here()
        try:
            return work(group)
        except BaseException:
            group.launcher.revoke()  # the others wait
            raise

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))


def made(kind: str, rank: int, shape: tuple[int, ...], dtype: str = "float64") -> Any:
    array = np.random.default_rng(rank).integers(-9, 9, shape).astype(dtype)
    turned = array.T.copy().T  # not contiguous
    return torch.from_numpy(turned) if kind == "torch" else turned


def check(array: Any, wanted: Any) -> None:
    np.testing.assert_array_equal(array.numpy() if isinstance(array, torch.Tensor) else array, wanted)


@pytest.mark.parametrize("kind", ["torch", "numpy"])
@pytest.mark.parametrize("size", [2, 3])
def test_each_collective_gives_what_numpy_does(kind: str, size: int) -> None:
    shape = (6, 12, 18)
    arrays = [made("numpy", rank, shape) for rank in range(size)]
    total = np.sum(arrays, axis=0)

    def work(group: ModelGroup) -> None:
        mine = made(kind, group.rank, shape)
        before = arrays[group.rank].copy()
        check(group.all_reduce(mine), total)
        check(group.all_reduce(mine, "max"), np.max(arrays, axis=0))
        check(group.broadcast(mine, root=1), arrays[1])
        for axis in (0, 1, -1):
            check(group.all_gather(mine, axis), np.concatenate(arrays, axis))
            check(group.reduce_scatter(mine, axis), np.split(total, size, axis)[group.rank])
            parts = [np.split(array, size, axis)[group.rank] for array in arrays]
            check(group.all_to_all(mine, axis), np.concatenate(parts, axis))
        if group.rank == 0:
            group.send(mine, 1)
        elif group.rank == 1:
            check(group.receive(mine, 0), arrays[0])
        check(mine, before)

    on_ranks(size, work)


def test_the_result_is_of_the_same_kind_and_dtype() -> None:
    def work(group: ModelGroup) -> None:
        tensor = group.all_reduce(torch.ones(3, 2, dtype=torch.bfloat16))
        assert isinstance(tensor, torch.Tensor)
        assert (tensor.dtype, tensor.tolist()) == (torch.bfloat16, [[2.0, 2.0]] * 3)
        array = group.all_gather(np.zeros((1, 2), np.int8))
        assert (type(array), array.dtype, array.shape) == (np.ndarray, np.int8, (2, 2))
        assert group.all_reduce(torch.ones(())).item() == 2.0

    on_ranks(2, work)


def test_a_mark_tells_which_forward_a_rank_has_come_to() -> None:
    def work(group: ModelGroup) -> int:
        group.number = 7 + group.rank
        group.mark()
        launcher: Any = group.launcher
        return int(launcher.reached)

    assert on_ranks(2, work) == [7, 8]
    ModelGroup(0, 2).mark()  # a rehearsal tells nothing


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_without_the_others_it_is_rehearsed(kind: str) -> None:
    """Shapes are those of the real ones, and values such as others of the same arrays would give."""
    group, mine = ModelGroup(1, 3), made(kind, 0, (6, 4))
    array = made("numpy", 0, (6, 4))
    check(group.all_reduce(mine), array)
    check(group.all_gather(mine, 1), np.concatenate([array] * 3, 1))
    check(group.reduce_scatter(mine), array[2:4])
    check(group.broadcast(mine, 2), array)
    assert group.all_to_all(mine, 0).shape == (6, 4)
    group.send(mine, 0)
    check(group.receive(mine, 0), array)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda group: group.all_reduce([1.0]), "is no array"),
        (lambda group: group.all_reduce(torch.ones(3), "median"), "op"),
        (lambda group: group.all_reduce(torch.ones(3, dtype=torch.bool)), "bool cannot be reduced"),
        (lambda group: group.all_gather(torch.ones(3), 1), "axis is 1, and the array has 1 dimensions"),
        (lambda group: group.reduce_scatter(torch.ones(4, 3)), "cannot be cut into 3 equal parts along dimension 0"),
        (lambda group: group.all_to_all(torch.ones(3, 4), 1), "cannot be cut into 3 equal parts along dimension 1"),
        (lambda group: group.broadcast(torch.ones(3), 3), "root is 3, and there are 3 ranks"),
        (lambda group: group.send(torch.ones(3), -1), "to"),
    ],
)
def test_what_fits_no_collective_is_refused(call: Callable[[ModelGroup], Any], said: str) -> None:
    for launcher in (None, SimpleNamespace(launch=lambda *_: pytest.fail("it was launched"))):
        group = ModelGroup(0, 3)
        group.launcher = launcher
        with pytest.raises(accel.AccelError, match=said):
            call(group)


def test_what_is_not_built_for_a_group_is_refused() -> None:
    for target, said in (("model.onnx", "is the model of one device"), (Affine(), "is the model of one rank")):
        with pytest.raises(accel.InvalidArgumentError, match=said):
            source_of(target).adapter(ModelGroup(0, 2))


def test_no_rank_sends_to_itself() -> None:
    group = ModelGroup(1, 2)
    for call in (lambda: group.send(np.ones(3), 1), lambda: group.receive(np.ones(3), 1)):
        with pytest.raises(accel.InvalidArgumentError, match="is this rank"):
            call()
