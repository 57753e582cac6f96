"""The program of a helper process that builds plans of cuDNN: a build holds the GIL for up to a second.

It is run by its path and imports nothing of accel's, so that it starts fast. It makes no context on the device: plans are built for the properties of a
device, which it is told. Requests are lines of JSON on its standard input; it ends with that. It answers each with a line of JSON, and the plan's bytes.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["build", "main"]

_LARGEST_WORKSPACE = 1 << 30


def _strides(dims: Sequence[int], *, is_last: bool = False) -> list[int]:
    """Return the strides of a C-contiguous array; with ``is_last``, of one whose axis 1 lies innermost."""
    order = [*range(len(dims) - 1, -1, -1)]
    if is_last:
        order.remove(1)
        order.insert(0, 1)
    strides, step = [0] * len(dims), 1
    for axis in order:
        strides[axis] = step
        step *= dims[axis]
    return strides


def _graph(cudnn: Any, request: Mapping[str, Any], dtype: Any) -> Any:
    wide = cudnn.data_type.DOUBLE if request["dtype"] == "DOUBLE" else cudnn.data_type.FLOAT
    return cudnn.pygraph(
        io_data_type=dtype,
        intermediate_data_type=wide,
        compute_data_type=wide,
        sm_version=request["sm_version"],
        device_property=cudnn.create_device_properties(request["device"]),
    )


def _convolution(cudnn: Any, request: Mapping[str, Any]) -> Any:
    """Return the graph of a convolution: 1 is the input, 2 the filter, 3 the bias, 4 the result. The gradient of the result takes the place of what is made."""
    dtype = cudnn.data_type.__members__[request["dtype"]]
    graph = _graph(cudnn, request, dtype)

    def tensor(name: str, uid: int) -> Any:
        dims = request[name]
        return graph.tensor(dim=dims, stride=_strides(dims, is_last=request["channels_last"]), data_type=dtype, uid=uid)

    made = request["makes"]
    steps = {
        "pre_padding": request["before"],
        "post_padding": request["after"],
        "stride": request["stride"],
        "dilation": request["dilation"],
    }
    if made == "input":
        result = graph.conv_dgrad(loss=tensor("output", 1), filter=tensor("filter", 2), **steps)
    elif made == "filter":
        result = graph.conv_wgrad(image=tensor("input", 1), loss=tensor("output", 2), **steps)
    else:
        result = graph.conv_fprop(image=tensor("input", 1), weight=tensor("filter", 2), **steps)
    if request["bias"] is not None:
        result = graph.bias(input=result, bias=tensor("bias", 3))
    dims = request[made]
    result.set_output(True).set_data_type(dtype).set_uid(4).set_dim(dims).set_stride(_strides(dims, is_last=request["channels_last"]))
    return graph


def _attention(cudnn: Any, request: Mapping[str, Any]) -> Any:
    """Return the graph of attention.

    1 to 4 are q, k, v and the result, 5 the bias, 6 and 7 lengths, 8 and 9 where sequences begin, 10 the pages, 11 the statistics.
    """
    dtype, whole = cudnn.data_type.__members__[request["dtype"]], cudnn.data_type.INT32
    graph = _graph(cudnn, request, dtype)
    batch = request["q"]["dims"][0]

    def numbers(uid: int, *dims: int) -> Any:
        return graph.tensor(dim=list(dims), stride=_strides(dims), data_type=whole, uid=uid)

    begins = {"q": numbers(8, batch + 1, 1, 1, 1), "k": numbers(9, batch + 1, 1, 1, 1)} if request["is_ragged"] else {}

    def tensor(name: str, uid: int) -> Any:
        offset = begins.get("q" if name == "q" else "k")
        return graph.tensor(dim=request[name]["dims"], stride=request[name]["strides"], data_type=dtype, uid=uid, ragged_offset=offset)

    options: dict[str, Any] = {}
    if request["bias"] is not None:
        dims = request["bias"]["dims"]
        kind = cudnn.data_type.__members__[request["bias"]["dtype"]]
        options["bias"] = graph.tensor(dim=dims, stride=_strides(dims), data_type=kind, uid=5)
    if request["has_lengths"]:
        options |= {"use_padding_mask": True, "seq_len_q": numbers(6, batch, 1, 1, 1), "seq_len_kv": numbers(7, batch, 1, 1, 1)}
    if request["pages"] is not None:
        table = numbers(10, batch, 1, request["pages"], 1)
        longest = request["pages"] * request["k"]["dims"][2]
        options |= {"paged_attention_k_table": table, "paged_attention_v_table": table, "paged_attention_max_seq_len_kv": longest}
    options |= _seen(cudnn, request)
    q, k, v = (tensor(name, uid) for uid, name in enumerate("qkv", 1))
    has_stats = request["has_stats"]
    result, stats = graph.sdpa(name="attention", q=q, k=k, v=v, attn_scale=request["scale"], generate_stats=has_stats, **options)
    result.set_output(True).set_data_type(dtype).set_uid(4).set_dim(request["out"]["dims"]).set_stride(request["out"]["strides"])
    if begins:
        result.set_ragged_offset(begins["q"])
    if has_stats:
        _made(stats, cudnn.data_type.FLOAT, 11, [*request["q"]["dims"][:3], 1])
    return graph


def _seen(cudnn: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that say which keys a query sees."""
    options: dict[str, Any] = {}
    if request["causal"] is not None:
        options |= {"diagonal_alignment": cudnn.diagonal_alignment.__members__[request["causal"]], "diagonal_band_right_bound": 0}
    if request["window"] is not None:
        options["diagonal_band_left_bound"] = request["window"]
    return options


def _made(tensor: Any, dtype: Any, uid: int, dims: Sequence[int]) -> None:
    """Say that a tensor is a result, which is contiguous."""
    tensor.set_output(True).set_data_type(dtype).set_uid(uid).set_dim(dims).set_stride(_strides(dims))


def _attention_grad(cudnn: Any, request: Mapping[str, Any]) -> Any:
    """Return the graph of the gradients of attention: 1 to 3 are q, k and v, 4 to 6 their gradients, 7 and 8 the result and its gradient, 9 the statistics."""
    dtype = cudnn.data_type.__members__[request["dtype"]]
    graph = _graph(cudnn, request, dtype)

    def tensor(name: str, uid: int) -> Any:
        return graph.tensor(dim=request[name]["dims"], stride=request[name]["strides"], data_type=dtype, uid=uid)

    q, k, v, o, grad = (tensor(name, uid) for name, uid in (("q", 1), ("k", 2), ("v", 3), ("out", 7), ("out", 8)))
    rows = [*request["q"]["dims"][:3], 1]
    stats = graph.tensor(dim=rows, stride=_strides(rows), data_type=cudnn.data_type.FLOAT, uid=9)
    scale, options = request["scale"], _seen(cudnn, request)
    made = graph.sdpa_backward(name="attention_grad", q=q, k=k, v=v, o=o, dO=grad, stats=stats, attn_scale=scale, **options)
    for uid, (each, name) in enumerate(zip(made, "qkv", strict=True), 4):
        _made(each, dtype, uid, request[name]["dims"])
    return graph


_GRAPHS = {"convolution": _convolution, "attention": _attention, "attention_grad": _attention_grad}


def build(cudnn: Any, request: Mapping[str, Any]) -> bytes:
    """Return a serialized plan."""
    graph = _GRAPHS[request["op"]](cudnn, request)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    notes = cudnn.numerical_note.__members__
    graph.deselect_numeric_notes([notes[name] for name in request["without"]])
    graph.deselect_workspace_greater_than(_LARGEST_WORKSPACE)
    graph.check_support()
    graph.build_plans()
    return bytes(graph.serialize())


def main() -> None:
    """Answer requests until there are no more."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no reply
    for library in sys.argv[1:]:
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    sys.modules["torch"] = None  # type: ignore[assignment]  # the frontend would import it, for 3 seconds
    cudnn: Any = importlib.import_module("cudnn")
    for line in sys.stdin:
        try:
            plan = build(cudnn, json.loads(line))
            reply: dict[str, Any] = {"nbytes": len(plan)}
        except Exception as error:
            plan = b""
            reply = {"error": str(error), "is_unsupported": isinstance(error, cudnn.cudnnGraphNotSupportedError)}
        replies.write(json.dumps(reply).encode() + b"\n" + plan)
        replies.flush()


if __name__ == "__main__":
    main()
