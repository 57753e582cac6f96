"""A folder of a user's own transformers model as the encoder of the search: with the package where it is installed, and with a stand-in for it everywhere."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import accel
from examples.semantic_search.corpus import Document
from examples.semantic_search.encoding import load_encoder
from tests.device_support import bounded, child_pid

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("nothing_left")

Array = np.ndarray[Any, Any]

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "sparse", "matrix", "eigen", "value", "a", "of", "the"]
TEXTS = ["sparse matrix", "the eigen value of a sparse matrix", "value " * 9, "a"]

STAND_IN = """
import json
from pathlib import Path
from types import SimpleNamespace

import torch

WORDS = {words!r}


class Base(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embeddings = torch.nn.Embedding(len(WORDS), config["hidden"])
        self.layer = torch.nn.Linear(config["hidden"], config["hidden"])
        self.register_buffer("places", torch.arange(512), persistent=False)

    def forward(self, input_ids, attention_mask):
        places = self.places[: input_ids.shape[1]].unsqueeze(-1)
        return SimpleNamespace(last_hidden_state=torch.tanh(self.layer(self.embeddings(input_ids)) + 0.1 * places))


class AutoConfig:
    @staticmethod
    def from_pretrained(folder, local_files_only):
        assert local_files_only
        return json.loads((Path(folder) / "config.json").read_text())


class AutoModel:
    @staticmethod
    def from_config(config):
        return Base(config)
"""

STAND_IN_TOKENIZERS = """
import json
from types import SimpleNamespace


class Tokenizer:
    @classmethod
    def from_file(cls, path):
        with open(path) as file:
            found = cls()
            found.words, found.truncated, found.padded = json.load(file), True, True
            return found

    def no_truncation(self):
        self.truncated = False

    def no_padding(self):
        self.padded = False

    def encode(self, text):
        assert not self.truncated and not self.padded
        return SimpleNamespace(ids=[2, *map(self.words.index, text.split()), 3])
"""


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[int]], Array]:
    """Write a package and a model, and return what the model computes."""
    (folder / "packages").mkdir()
    (folder / "packages" / "transformers.py").write_text(STAND_IN.format(words=WORDS))
    (folder / "packages" / "tokenizers.py").write_text(STAND_IN_TOKENIZERS)
    (folder / "tokenizer.json").write_text(json.dumps(WORDS))
    monkeypatch.syspath_prepend(folder / "packages")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder / "packages"), *filter(None, [os.environ.get("PYTHONPATH")])]))
    for name in ("transformers", "tokenizers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    weights = {"embeddings.weight": torch.randn(len(WORDS), 24), "layer.weight": torch.randn(24, 24), "layer.bias": torch.randn(24)}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"hidden": 24}))
    table, matrix, bias = (each.double().numpy() for each in weights.values())

    def hidden(ids: list[int]) -> Array:
        found: Array = np.tanh(table[ids] @ matrix.T + bias + 0.1 * np.arange(len(ids))[:, None])
        return found

    return hidden


def installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[int]], Array]:
    """Save a small BERT, and return what it computes."""
    for name in ("transformers", "tokenizers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    transformers = importlib.import_module("transformers")
    config = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, initializer_range=0.5
    )
    module = transformers.BertModel(config).eval()
    module.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)

    def hidden(ids: list[int]) -> Array:
        with torch.inference_mode():
            found: Array = module(input_ids=torch.tensor([ids])).last_hidden_state[0].double().numpy()
        return found

    return hidden


def expected(hidden: Any, text: str, length: int) -> Array:
    """Return the vector of a text."""
    ids = [2, *map(WORDS.index, text.split()), 3]
    mean = hidden(ids if len(ids) <= length else [*ids[: length - 1], 3]).mean(axis=0)
    found: Array = mean / np.linalg.norm(mean)
    return found


MAKERS = [
    pytest.param(stand_in, id="stand-in"),
    pytest.param(
        installed,
        id="installed",
        marks=pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed"),
    ),
]


@pytest.mark.parametrize("make", MAKERS)
async def test_a_folder_of_a_transformers_model_encodes_texts(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = make(tmp_path, monkeypatch)
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process")
        texts = await load_encoder(device, tmp_path)
        assert texts.dimensions == 24
        async with accel.serve(texts.model) as served:
            for number in (1, 2):
                answers = await asyncio.wait_for(asyncio.gather(*[served.submit(texts.query(text)) for text in (*TEXTS, "of " * 60)]), 60)
                for text, answer in zip((*TEXTS, "of " * 60), answers, strict=True):
                    np.testing.assert_allclose(answer, expected(hidden, text, 48), atol=2e-5, err_msg=text)
                if number == 1:
                    os.kill(child_pid(device), signal.SIGKILL)
                    async with asyncio.timeout(60):  # importing transformers takes many seconds
                        async for reached in device.generations():
                            if reached == 2:
                                break
            document = Document("a", "the", "sparse matrix", "value " * 300)
            answer = await bounded(served.submit(texts.document(document)))
            text = "a sparse matrix the " + "value " * 300
            np.testing.assert_allclose(answer, expected(hidden, text, 192), atol=2e-5)
