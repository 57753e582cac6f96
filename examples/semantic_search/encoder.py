"""The trained encoder, run by ONNX Runtime: ids of tokens in, vectors of length 1 out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from examples.semantic_search.tokens import padded

if TYPE_CHECKING:
    from collections.abc import Sequence

Array = np.ndarray[Any, Any]

MODEL = Path(__file__).with_name("model.onnx")
"""The committed model: see README.md for how it was trained and measured."""

DIMENSIONS = 128
"""Numbers in a vector."""

_WEIGHTS = ("embedding", "weight", "w1", "b1", "w2", "b2")


class Encoder:
    """An exported encoder.

    Parameters
    ----------
    path
        The ONNX file.
    """

    def __init__(self, path: Path = MODEL) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 2
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    @property
    def metadata(self) -> dict[str, str]:
        """What the training wrote into the file: the seed of the held-out queries, and the versions of the corpus."""
        return dict(self._session.get_modelmeta().custom_metadata_map)

    def __call__(self, rows: Sequence[Sequence[int]]) -> Array:
        """Return the vectors, float32 (rows, DIMENSIONS), of rows of token ids, in batches of 256."""
        batches = [self._session.run(None, {"input_ids": padded(rows[start : start + 256])})[0] for start in range(0, len(rows), 256)]
        return np.concatenate(batches) if batches else np.zeros((0, DIMENSIONS), np.float32)


def exported_weights() -> dict[str, Array]:
    """Return the weights in ``model.onnx``, by name. Needs the package onnx."""
    import onnx

    return {each.name: onnx.numpy_helper.to_array(each) for each in onnx.load(MODEL).graph.initializer if each.name in _WEIGHTS}
