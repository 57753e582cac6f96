"""The tables of statuses against what is installed: the enums of the bindings, and the headers of the libraries that have no bindings here."""

from __future__ import annotations

import importlib
import importlib.util
import re
import site
import sys
from pathlib import Path

import pytest

from accel_cuda import errors

pytestmark = pytest.mark.gpu

_ENUMS = {
    "driver": ("cuda.bindings.driver", "CUresult", "CUDA_ERROR_"),
    "nvrtc": ("cuda.bindings.nvrtc", "nvrtcResult", "NVRTC_ERROR_"),
    "cublas": ("nvmath.bindings.cublas", "Status", ""),
    "cufft": ("nvmath.bindings.cufft", "Result", ""),
    "curand": ("nvmath.bindings.curand", "Status", ""),
    "cusolver": ("nvmath.bindings.cusolver", "Status", ""),
    "cusparse": ("nvmath.bindings.cusparse", "Status", ""),
    "cudss": ("nvmath.bindings.cudss", "Status", ""),
    "cutensor": ("nvmath.bindings.cutensor", "Status", ""),
}
_HEADERS = {
    "cudnn": ("nvidia/cudnn/include/cudnn_graph.h", r"CUDNN_STATUS_(\w+)\s*=\s*(\d+)"),
    "nccl": ("nvidia/nccl/include/nccl.h", r"\bnccl(\w+)\s*=\s*(\d+)\s*,"),
}


@pytest.mark.parametrize("library", _ENUMS)
def test_no_status_of_the_installed_bindings_is_missing(library: str) -> None:
    module, name, prefix = _ENUMS[library]
    found = {int(each): each.name.removeprefix(prefix) for each in getattr(importlib.import_module(module), name) if int(each)}
    assert found, "an enum without members"
    table = errors.TABLES[library]
    assert {code: getattr(table.get(code), "name", None) for code in found} == found


@pytest.mark.parametrize("library", _HEADERS)
def test_no_status_of_the_installed_headers_is_missing(library: str) -> None:
    path, pattern = _HEADERS[library]
    folders = [Path(each) for each in (*site.getsitepackages(), *sys.path)]
    header = next((folder / path for folder in folders if (folder / path).is_file()), None)
    if header is None:
        pytest.skip(f"{library} is not installed as a wheel")
    text = header.read_text(errors="replace")
    if library == "nccl":
        text = text[text.index("ncclSuccess") :].partition("}")[0] + ","
    found = {int(code): name for name, code in re.findall(pattern, text) if int(code)}
    assert found, "no status in the header"
    table = errors.TABLES[library]
    assert {code: getattr(table.get(code), "name", None) for code in found if name_of(found[code])} == {
        code: name for code, name in found.items() if name_of(name)
    }


def name_of(name: str) -> bool:
    """Tell statuses from counts (``ncclNumResults``) and from the names of older releases that cuDNN keeps beside the new ones."""
    return name != "NumResults" and not name.endswith("_DEPRECATED")
