"""What the CUDA backend says while it is a name only."""

from __future__ import annotations

import pytest

from accel.backend import find_device
from accel.errors import BackendUnavailableError
from accel_cuda import CudaBackend


def test_listing_says_what_is_missing_and_what_to_install() -> None:
    with pytest.raises(BackendUnavailableError) as caught:
        CudaBackend().devices()
    assert "not part of this release" in caught.value.message
    assert "pip install --upgrade 'accel-actors[cuda]'" in caught.value.remedy
    assert caught.value.remedy in str(caught.value)


def test_opening_names_the_device() -> None:
    with pytest.raises(BackendUnavailableError) as caught:
        CudaBackend().open(3)
    assert caught.value.device == "cuda:3"


@pytest.mark.parametrize("spec", ["cuda", "cuda:0", "cuda:7"])
def test_asking_for_a_cuda_device_gives_the_same_error(spec: str) -> None:
    with pytest.raises(BackendUnavailableError, match="accel-actors\\[cuda\\]"):
        find_device(spec)
