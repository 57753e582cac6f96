"""The encoder on a device, the committed one or a user's: a model that is loaded once, and served in batches to many tasks."""

from __future__ import annotations

import asyncio
import ctypes
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import accel
from accel.models.adapters.onnx import OnnxAdapter
from examples.semantic_search.corpus import Document
from examples.semantic_search.encoder import MODEL, exported_weights
from examples.semantic_search.tokens import DOCUMENT_LENGTH, QUERY_LENGTH, VOCABULARY, document_tokens, prose, tokens
from examples.semantic_search.transformer import Tokenizer, modules_of, pooled

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def fresh_poison() -> list[int]:
    """Return a row that the tokenizer never makes, another one each time.

    It names an embedding far behind the last one, also to kernels that read 32 bits of an index.
    """
    return [1 << 50 | 1 << 30 | secrets.randbits(20)]


_IDS = accel.TensorSpec(("batch", "length"), "int64", pad=0)
_BUCKETS = {"batch": (1, 8, 64), "length": (8, QUERY_LENGTH, DOCUMENT_LENGTH)}


class UncheckedEncoder(OnnxAdapter):
    """The encoder, with a lookup that trusts its indices.

    ONNX Runtime checks them, and such a request would merely fail. Many kernels do not, and then it ends the process: this class reads where a wrong
    index says.
    """

    def run(self, inputs: Mapping[str, accel.Operand]) -> Any:
        """Compute the vectors."""
        highest = int(np.asarray(inputs["input_ids"]).max())
        if highest >= VOCABULARY:
            ctypes.string_at(4 * highest, 4)
        return super().run(inputs)


@dataclass(frozen=True, slots=True)
class TextEncoder:
    """An encoder on a device, and what makes its inputs of texts.

    Attributes
    ----------
    model
        Gives vectors of length 1.
    query, document
        Make an item of the model. Any thread may call them.
    poison
        Makes an item that no text does, a new one each time, which ends the process of the model where
        lookups are not checked.
    """

    model: accel.Model
    query: Callable[[str], Any]
    document: Callable[[Document], Any]
    poison: Callable[[], Any]

    @property
    def dimensions(self) -> int:
        """Numbers in a vector."""
        (found,) = self.model.outputs.item_shapes[0]
        assert isinstance(found, int)
        return found


async def load_encoder(device: accel.Device, folder: Path | None = None) -> TextEncoder:
    """Load an encoder, ready for batches of up to 64 queries or documents.

    Parameters
    ----------
    device
        Where it computes. With ``host="process"`` the process of the service imports no framework.
    folder
        Of a ``transformers`` model. Without it the committed encoder is loaded: by ONNX Runtime on a CPU, by torch elsewhere.
    """
    if folder is not None:
        return await _load_transformer(device, folder)
    if device.info().backend != "cpu":
        return await load_torch_encoder(device)
    return _committed(await device.load_model(UncheckedEncoder, options={"path": MODEL}, inputs={"input_ids": _IDS}, buckets=_BUCKETS))


async def load_torch_encoder(device: accel.Device) -> TextEncoder:
    """Load the committed encoder as a torch module, as :func:`load_encoder` does on a GPU. Needs the packages onnx and torch."""
    weights = await asyncio.to_thread(exported_weights)
    # By its name: the device's process alone imports torch.
    model = "examples.semantic_search.torch_encoder:TorchEncoder"
    return _committed(await device.load_model(model, weights=weights, inputs={"input_ids": _IDS}, buckets=_BUCKETS))


def _committed(model: accel.Model) -> TextEncoder:
    return TextEncoder(
        model,
        lambda text: np.array(tokens(text) or [0]),
        lambda document: np.array(document_tokens(document)),
        lambda: np.array(fresh_poison()),
    )


async def _load_transformer(device: accel.Device, folder: Path) -> TextEncoder:
    tokenizer = await asyncio.to_thread(Tokenizer, folder)
    model = await device.load_model(
        partial(pooled, str(folder)),
        weights=folder / "model.safetensors",
        inputs={"input_ids": _IDS, "attention_mask": _IDS},
        buckets=_BUCKETS,
        imports=await asyncio.to_thread(modules_of, folder),
    )

    def document_item(document: Document) -> Any:
        return tokenizer(f"{document.name} {document.summary} {document.signature} {prose(document)}", DOCUMENT_LENGTH)

    def poison() -> Any:
        return {"input_ids": np.array(fresh_poison()), "attention_mask": np.ones(1, np.int64)}

    return TextEncoder(model, lambda text: tokenizer(text, QUERY_LENGTH), document_item, poison)
