"""A folder of the user's own ``transformers`` model as the encoder: its vectors are the means of the last layer's, over the tokens of a text.

The folder is what ``save_pretrained`` of a base model and its fast tokenizer writes: ``config.json``, ``model.safetensors``, ``tokenizer.json`` and others.
Nothing is downloaded, and no code of the folder is run. The process in which the model lives imports torch and ``transformers``; the service's process imports
``tokenizers`` alone.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Tokenizer", "modules_of", "pooled"]

Array = np.ndarray[Any, Any]


def pooled(folder: str) -> nn.Module:
    """Return a model of the folder's configuration, whose forward returns vectors of length 1. Its parameters have the names that they have in the file."""
    from torch.nn import functional
    from transformers import AutoConfig, AutoModel

    module: Any = AutoModel.from_config(AutoConfig.from_pretrained(folder, local_files_only=True))

    class Pooled(type(module)):  # type: ignore[misc]  # of the configuration
        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            hidden = super().forward(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
            mean = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)
            return functional.normalize(mean.float(), dim=-1)

    module.__class__ = Pooled
    return module  # type: ignore[no-any-return]


def modules_of(folder: Path) -> tuple[str, ...]:
    """Return the modules that :func:`pooled` imports, which takes seconds: a child that is forked from a process that has them need not."""
    kind = (json.loads((folder / "config.json").read_text()).get("model_type") or "").replace("-", "_")
    package = importlib.util.find_spec("transformers")
    models = Path((package and package.origin) or "").parent / "models"
    found = [(part, f"modeling_{part}") for part in ("auto", kind)]
    return tuple([f"transformers.models.{part}.{name}" for part, name in found if (models / part / f"{name}.py").is_file()])


class Tokenizer:
    """Makes the model's inputs of texts. Any thread may call it.

    Parameters
    ----------
    folder
        Of the model.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
        # The file may have both, and __call__ cuts as the buckets want it.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def __call__(self, text: str, length: int) -> dict[str, Array]:
        """Return the ids of a text, at most ``length``, and their mask."""
        ids = self._tokenizer.encode(text).ids
        if len(ids) > length:
            ids = [*ids[: length - 1], ids[-1]]  # the last one says that the text ends
        found = np.array(ids or [0])
        return {"input_ids": found, "attention_mask": np.ones_like(found)}
