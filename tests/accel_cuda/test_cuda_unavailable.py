"""What the CUDA backend says where something that it needs is missing: what it is, and the command that fixes it."""

from __future__ import annotations

import ctypes
import sys
import types
from typing import Any

import pytest

from accel.errors import AccelError, BackendUnavailableError
from accel_cuda import CudaBackend
from accel_cuda.core import driver

INSTALL = "pip install '.[cuda]'"


class FakeLibrary:
    """A driver of any version."""

    def __init__(self, version: int) -> None:
        self._version = version

    def cuDriverGetVersion(self, pointer: Any) -> int:  # noqa: N802 - the driver's name
        pointer._obj.value = self._version
        return 0


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_loaded", [])


def without_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cuda", "cuda.bindings", "cuda.bindings.driver"):
        monkeypatch.setitem(sys.modules, name, None)


def with_bindings(monkeypatch: pytest.MonkeyPatch, status: int = 0) -> None:
    """Bindings whose cuInit answers ``status``."""
    for name in ("cuda", "cuda.bindings", "cuda.bindings.driver"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules["cuda.bindings"], "__version__", "13.3.1", raising=False)
    monkeypatch.setattr(sys.modules["cuda.bindings.driver"], "cuInit", lambda flags: (status,), raising=False)


def missing() -> BackendUnavailableError:
    with pytest.raises(BackendUnavailableError) as caught:
        CudaBackend().devices()
    assert caught.value.remedy in str(caught.value)
    return caught.value


def test_without_the_bindings_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    without_bindings(monkeypatch)
    error = missing()
    assert "cuda-bindings cannot be imported" in error.message
    assert INSTALL in error.remedy


def test_without_a_driver_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with_bindings(monkeypatch)
    monkeypatch.setattr(driver, "_LIBRARY", "libcuda-that-is-not-there.so.1")
    error = missing()
    assert "there is no NVIDIA driver" in error.message
    assert "580" in error.remedy
    assert "--gpus all" in error.remedy


def test_with_a_driver_that_is_too_old_it_names_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    with_bindings(monkeypatch)
    monkeypatch.setattr(ctypes, "PyDLL", lambda name: FakeLibrary(12040))
    error = missing()
    assert "supports CUDA 12.4, cuda-bindings 13.3.1 needs 13.0" in error.message
    assert "580" in error.remedy


@pytest.mark.parametrize("hidden", ["", "-1", "7"])
def test_with_every_gpu_hidden_it_says_what_hides_them(hidden: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_bindings(monkeypatch, 100)
    monkeypatch.setattr(ctypes, "PyDLL", lambda name: FakeLibrary(13000))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    error = missing()
    assert error.message == f"CUDA_VISIBLE_DEVICES is {hidden!r}, which hides every GPU"
    assert "Unset CUDA_VISIBLE_DEVICES" in error.remedy


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with_bindings(monkeypatch, 100)
    monkeypatch.setattr(ctypes, "PyDLL", lambda name: FakeLibrary(13000))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "finds no GPU" in missing().message


@pytest.mark.parametrize(
    ("status", "words"), [(100, "nvidia-smi -L"), (46, "compute mode"), (805, "nvidia-cuda-mps-control"), (34, "stubs")]
)
def test_what_the_driver_refuses_with_is_explained(status: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_bindings(monkeypatch, status)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(ctypes, "PyDLL", lambda name: FakeLibrary(13000))
    error = missing()
    assert (error.code, error.library) == (status, "driver")
    assert words in error.remedy


def test_the_error_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    without_bindings(monkeypatch)
    first: AccelError = missing()
    monkeypatch.undo()
    monkeypatch.setattr(driver, "_loaded", [])
    with_bindings(monkeypatch, 100)
    monkeypatch.setattr(ctypes, "PyDLL", lambda name: FakeLibrary(13000))
    assert missing().code == 100 != first.code
