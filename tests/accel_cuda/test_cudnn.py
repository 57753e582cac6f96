"""cuDNN's plans and handles without a GPU: who builds, what is kept, what is copied, and what becomes of refusals and of a helper process that ends."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import json
import math
import pickle
from collections import deque
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from accel import AccelRef, BackendUnavailableError, DType, LibraryError, UnsupportedError, ops
from accel_cuda.core.family import derived
from accel_cuda.core.libraries import VendorLibrary
from accel_cuda.core.transfers import StreamTransfers
from accel_cuda.families import cudnn as module
from accel_cuda.families.attention import AttentionWork
from accel_cuda.families.cudnn import Cudnn
from accel_cuda.families.dnn import DnnLibrary
from tests.cuda_support import Context

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_NUMBERS = itertools.count(1)
BUILDER = """
import json, os, sys
for line in sys.stdin:
    request = json.loads(line)
    if request.get("stride") == [13, 13]:
        os._exit(3)
    refused = request["op"] != "convolution" and request["causal"] == "TOP_LEFT"
    tensors = [1, 2, 3, 4, 5, 6, 7, 8, 9] if request["op"] == "attention_grad" else [4, 1, 2] + [3] * bool(request.get("bias"))
    tensors += [11] * bool(request.get("has_stats")) + [6, 7] * bool(request.get("has_lengths")) + [10] * bool(request.get("pages"))
    plan = b"" if refused else json.dumps([tensors, 1000]).encode()
    reply = {"error": "not on this device\\nsee the log"} if refused else {"nbytes": len(plan)}
    sys.stdout.buffer.write(json.dumps(reply).encode() + b"\\n" + plan)
    sys.stdout.buffer.flush()
"""


class Graph:
    """A plan: numbers of its tensors, and bytes that it works in, in JSON."""

    ran: list[tuple[list[int], int, int]] = []  # noqa: RUF012  # cleared by the fixture
    fails = ""

    def __init__(self, handle: int) -> None:
        self.made: Any = None

    def deserialize(self, handle: int, plan: bytearray) -> None:
        self.made = json.loads(bytes(plan))

    def _prepare_variant_pack_template(self) -> None:
        assert self.made is not None

    def _get_variant_pack_uids_sorted(self) -> list[int]:
        return sorted(self.made[0])

    def get_workspace_size(self) -> int:
        return int(self.made[1])

    def _execute_with_raw_ptrs(self, array: int, count: int, workspace: int, handle: int) -> None:
        if Graph.fails:
            raise RuntimeError(Graph.fails)
        Graph.ran.append((list((ctypes.c_uint64 * count).from_address(array)), workspace, handle))


class Library:
    """cuDNN's functions: handles are numbers."""

    def __init__(self) -> None:
        self.made = self.ended = self._handle = 0

    def cudnnCreate(self, handle: Any) -> int:  # noqa: N802  # cuDNN's name
        self.made += 1
        ctypes.cast(handle, ctypes.POINTER(ctypes.c_void_p))[0] = 100 + self.made
        return 0

    def cudnnSetStream(self, handle: Any, stream: Any) -> int:  # noqa: N802
        return 0

    def cudnnDestroy(self, handle: Any) -> int:  # noqa: N802
        self.ended += 1
        return 0


class Kept(dict[bytes, tuple[bytes, bytes]]):
    """The program cache."""

    def put(self, key: bytes, code: bytes, notes: bytes) -> None:
        self[key] = code, notes


class Stream:
    """Takes down what is enqueued."""

    def __init__(self, context: Any) -> None:
        self.context, self.handle, self.pointer, self.is_capturing = context, 7, None, False
        self.functions = {f"attention_{name}": name for name in ("any_bf16", "ragged_bf16", "numbers_bf16")}
        self.functions["unary_relu_bf16"] = "unary_relu_bf16"
        self.functions |= {f"backward_{name}": name for name in ("queries_bf16", "keys_bf16")}
        self.transfers = StreamTransfers(context.staging)
        self.enqueued: list[tuple[Any, ...]] = []
        self.closing: list[Callable[[], object]] = []

    def ready(self) -> Any:
        return self.context

    def at_close(self, release: Callable[[], object]) -> None:
        self.closing.append(release)

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        self.enqueued.append(("copy", destination, source, nbytes))

    def fill(self, destination: int, pattern: bytes, count: int) -> None:
        self.enqueued.append(("fill", destination, pattern, count))

    def launch(self, function: Any, blocks: int, threads: int, *arguments: int) -> None:
        self.enqueued.append((function, *arguments))

    def launch_with(self, function: Any, grid: Any, block: Any, argument: Any, shared: int = 0) -> None:
        self.enqueued.append((function, grid, block, shared))

    def find_fault(self, call: str) -> None:
        return None


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Library:
    made = Library()
    script = tmp_path / "builder.py"
    script.write_text(BUILDER)
    frontend = SimpleNamespace(
        backend_version=lambda: 91900,
        _set_dlhandle_cudnn=lambda handle: None,
        cudnnGraphNotSupportedError=KeyError,
        create_device_properties=lambda index: SimpleNamespace(serialize=lambda: "{}"),
        pygraph=Graph,
    )
    kept = Kept()
    monkeypatch.setattr(module, "_BUILDER", script)
    monkeypatch.setattr(module, "_load_parts", lambda folder: None)
    monkeypatch.setattr(module, "load_library", lambda *names: "/nowhere/libcudnn.so.9")
    monkeypatch.setattr(module, "load_module", lambda *names: None)
    monkeypatch.setattr(module, "ProgramCache", lambda utils: kept)
    monkeypatch.setattr(VendorLibrary, "load", lambda self: frontend)
    monkeypatch.setattr(ctypes, "CDLL", lambda path: made)
    Graph.ran.clear()
    Graph.fails = ""
    return made


@pytest.fixture
def context() -> Any:
    made: Any = Context(None)  # type: ignore[arg-type]  # nothing is staged
    made.capability, made.shared_limit = (9, 0), 227 << 10
    made.description = SimpleNamespace(spec="cuda:0", index=0)
    return made


@pytest.fixture
def dnn(context: Any, library: Library) -> Iterator[DnnLibrary]:
    made = DnnLibrary(context)
    yield made
    made.close()


def ref(*shape: int, dtype: DType = DType.BFLOAT16, skipped: int = 0) -> Any:
    """Return a ref that lies ``skipped`` elements behind an aligned address."""
    owner: Any = SimpleNamespace(dropped=deque(), identity="", live_generation=1)
    whole = AccelRef(owner, next(_NUMBERS), (math.prod(shape) + skipped,) if skipped else shape, dtype, 1)
    return whole[skipped:].reshape(shape) if skipped else whole


def run(dnn: DnnLibrary, stream: Stream, op: Any, *addresses: int, results: int = 1) -> None:
    lane: Any = SimpleNamespace(stream=stream)
    if dnn.scratch_nbytes(op) is None:
        dnn.measure(op)
    dnn.kernels[op.kind](lane, op, op.plan(), addresses[:-results], (*addresses[-results:], 1 << 20))


def test_what_cudnn_refuses_is_unsupported_or_computed_by_the_kernel(dnn: DnnLibrary, context: Any) -> None:
    stream, q = Stream(context), ref(1, 2, 5, 64)
    run(dnn, stream, ops.Attention(q, q, q, causal=True), 0x1000, 0x1000, 0x1000, 0x2000)
    assert [name for name, *_ in stream.enqueued] == ["any_bf16"]
    assert Graph.ran == []
    work = dnn.loaded()
    work._built = lambda request: "no such engine\nat all"  # type: ignore[method-assign]
    with pytest.raises(UnsupportedError, match="no such engine"):
        run(dnn, stream, ops.Conv2d(ref(1, 8, 9, 9), ref(8, 8, 3, 3)), 0x1000, 0x2000, 0x3000)


@pytest.mark.parametrize("is_gradient", [False, True])
def test_the_kernel_of_what_cudnn_refuses_is_loaded_beside_the_loop(dnn: DnnLibrary, context: Any, is_gradient: bool) -> None:
    q, stats = ref(1, 4, 5, 64), ref(1, 4, 5, dtype=DType.FLOAT32)
    op: Any = ops.AttentionGrad(q, q, q, q, q, stats, causal=True) if is_gradient else ops.Attention(q, q, q, causal=True)
    blocks: list[bool] = []
    lane: Any = SimpleNamespace(stream=Stream(context))

    class Loading(dict[str, str]):
        """Kernels, of which one that is looked up may be compiled meanwhile."""

        def __getitem__(self, name: str) -> str:
            blocks.append(dnn.may_block(lane, op))
            return super().__getitem__(name)

    lane.stream.functions = Loading(lane.stream.functions)
    for _ in range(2):
        run(dnn, lane.stream, op, *range(0x1000, 0xA000 if is_gradient else 0x5000, 0x1000), results=3 if is_gradient else 1)
    half = len(blocks) // 2
    assert blocks == [True] * half + [False] * half, "an op of another stream would wait for the compiler on the loop"


def test_an_error_of_a_plan_is_the_ops(dnn: DnnLibrary, context: Any) -> None:
    Graph.fails = "CUDNN_STATUS_EXECUTION_FAILED"
    with pytest.raises(LibraryError, match="EXECUTION_FAILED"):
        run(dnn, Stream(context), ops.Conv2d(ref(1, 8, 9, 9), ref(8, 8, 3, 3)), 0x1000, 0x2000, 0x3000)


def test_a_helper_process_that_ends_fails_the_op_and_is_started_again(dnn: DnnLibrary, context: Any) -> None:
    stream = Stream(context)
    with pytest.raises(LibraryError, match="helper process") as caught:
        run(dnn, stream, ops.Conv2d(ref(1, 8, 30, 30), ref(8, 8, 3, 3), stride=13), 0x1000, 0x2000, 0x3000)
    assert caught.value.retryable
    run(dnn, stream, ops.Conv2d(ref(1, 8, 9, 9), ref(8, 8, 3, 3)), 0x1000, 0x2000, 0x3000)
    assert len(Graph.ran) == 1
    helper = dnn.loaded()._builder
    assert helper is not None
    helper._process.kill()
    helper._process.wait()
    run(dnn, stream, ops.Conv2d(ref(1, 8, 8, 8), ref(8, 8, 3, 3)), 0x1000, 0x2000, 0x3000)
    assert len(Graph.ran) == 2, "one that ended between two builds costs no op"


def test_another_release_of_the_frontend_is_refused(context: Any, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VendorLibrary, "load", lambda self: SimpleNamespace(pygraph=object))
    with pytest.raises(BackendUnavailableError, match=r"1\.22 to 1\.26") as caught:
        Cudnn(context)
    assert "pip install '.[dnn]'" in caught.value.remedy


def test_handles_are_kept_for_the_next_stream_and_given_back(context: Any, library: Library) -> None:
    found = Cudnn(context)
    first: Any = Stream(context)
    handle = found.prepare(first)
    assert found.prepare(first) == handle
    assert found.has_handle(first)
    for release in first.closing:
        release()
    assert not found.has_handle(first)
    assert found.prepare(Stream(context)) in (handle, handle + 1)  # type: ignore[arg-type]
    found.close()
    assert library.made == 3
    assert library.ended >= 2


def test_heads_and_types_that_cudnn_takes() -> None:
    def works(op: Any) -> bool:
        return AttentionWork.of(op).is_for_cudnn

    q, odd, wide = ref(1, 2, 5, 64), ref(1, 2, 5, 63), ref(1, 2, 5, 64, dtype=DType.FLOAT32)
    assert works(ops.Attention(q, q, q))
    assert not works(ops.Attention(odd, odd, odd))
    assert not works(ops.Attention(wide, wide, wide)), "it would be TF32's"
    assert not works(ops.Attention(q, q, q, scale=0.0)), "-infinity times 0 is NaN"
    assert not works(ops.Attention(q, q, q, scale=-1.0))
    assert not works(ops.Attention(q, ref(1, 2, 0, 64), ref(1, 2, 0, 64)))


def test_what_is_worked_out_of_an_op_is_worked_out_once_and_stays_with_it() -> None:
    op = ops.Empty((2, 3), DType.FLOAT32)
    asked: list[object] = []

    def work_out(given: object) -> int:
        asked.append(given)
        return len(asked)

    def other(given: object) -> str:
        return "other"

    assert [derived(op, work_out) for _ in range(3)] == [1, 1, 1]
    assert asked == [op]
    assert (derived(op, other), derived(op, work_out)) == ("other", 2)
    for copy in (dataclasses.replace(op), pickle.loads(pickle.dumps(op))):
        assert not hasattr(copy, "derived")
