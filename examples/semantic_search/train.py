"""Train the encoder on what the documents say about themselves, export it to ONNX, and measure it.

To run it: ``nox -s search-train``, which trains on the corpus without the held-out summaries of seed 0 and writes ``model.onnx``;
``nox -s search-train -- --seeds 0 1 2`` measures two more models, which are not kept.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from onnx import TensorProto, checker, helper, numpy_helper, save
from torch import nn
from torch.nn import functional

from examples.semantic_search.corpus import Document, held_out, load_corpus, versions
from examples.semantic_search.encoder import DIMENSIONS, MODEL
from examples.semantic_search.encoder import Encoder as ExportedEncoder
from examples.semantic_search.evaluate import HEADER, evaluate
from examples.semantic_search.pairs import Ids, Pairs
from examples.semantic_search.tokens import VOCABULARY

if TYPE_CHECKING:
    from collections.abc import Sequence

STEPS, BATCH, RATE, TEMPERATURE, DROPPED = 600, 384, 3e-3, 0.03, 0.1


class Encoder(nn.Module):
    """The weighted mean of the embeddings of a text's tokens, two layers on it, and length 1.

    Parameters
    ----------
    frequency
        In how many of ``count`` documents each token is, float64 (VOCABULARY,); rare tokens weigh more to begin with.
    count
        Number of documents.
    """

    def __init__(self, frequency: np.ndarray[Any, Any], count: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIMENSIONS)
        nn.init.normal_(self.embedding.weight, std=0.1)
        idf = np.log((1 + count) / (1 + frequency))
        self.log_weight = nn.Parameter(torch.tensor(np.log(idf + 0.1)[:, None], dtype=torch.float32))
        self.layers = nn.Sequential(nn.Linear(DIMENSIONS, 2 * DIMENSIONS), nn.GELU(), nn.Linear(2 * DIMENSIONS, DIMENSIONS))

    def forward(self, rows: Sequence[Ids], dropped: float = 0.0) -> torch.Tensor:
        """Return the vectors, float32 (rows, DIMENSIONS), of rows of token ids, without the given share of the tokens."""
        lengths = torch.tensor([len(row) for row in rows])
        ids = torch.tensor(list(chain.from_iterable(rows)))
        row_of = torch.repeat_interleave(torch.arange(len(rows)), lengths)
        weights = functional.embedding(ids, self.log_weight).squeeze(1).exp() * (torch.rand(len(ids)) >= dropped)
        totals = torch.zeros(len(rows)).index_add(0, row_of, weights) + 1e-6
        mean = functional.embedding_bag(
            ids, self.embedding.weight, lengths.cumsum(0) - lengths, mode="sum", per_sample_weights=weights / totals[row_of]
        )
        return functional.normalize(mean + self.layers(mean), dim=-1)


def train(documents: Sequence[Document], seed: int, steps: int) -> Encoder:
    """Return an encoder that has not seen the held-out summaries of a seed."""
    torch.manual_seed(seed)
    pairs = Pairs(documents, set(held_out(documents, seed)), seed)
    frequency = np.zeros(VOCABULARY)
    for row in pairs.whole:
        frequency[list(set(row))] += 1
    model = Encoder(frequency, len(documents))
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, fused=True)
    order: list[int] = []
    for step in range(steps):
        if len(order) < BATCH:
            order = pairs.shuffled(len(documents))
        indices, queries, answers = pairs.batch(order[:BATCH])
        del order[:BATCH]
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 30) * (1 - step / steps)
        # One pass: each would fill a gradient of all embeddings.
        vectors = model([*queries, *answers, *(pairs.whole[index] for index in indices)], DROPPED)
        asked, answering, others = vectors.split(len(indices))
        own = asked @ answering.T / TEMPERATURE
        rivals = (asked @ others.T / TEMPERATURE).masked_fill(torch.eye(len(indices), dtype=torch.bool), -torch.inf)
        right = torch.arange(len(indices))
        loss = (functional.cross_entropy(torch.cat([own, rivals], dim=1), right) + functional.cross_entropy(own.T, right)) / 2
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1} of {steps}: loss {loss.item():.3f}", file=sys.stderr, flush=True)
    return model


def export(model: Encoder, path: Path, metadata: dict[str, str]) -> None:
    """Write the model as ONNX, its embeddings as float16, with ``input_ids``, int64 (batch, length), and ``vector``, float32 (batch, DIMENSIONS)."""
    state = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    weight = np.exp(state["log_weight"][:, 0])
    weight[0] = 0.0  # padding
    constants = {
        "embedding": state["embedding.weight"].astype(np.float16),
        "weight": weight,
        "w1": state["layers.0.weight"].T,
        "b1": state["layers.0.bias"],
        "w2": state["layers.2.weight"].T,
        "b2": state["layers.2.bias"],
        "tiny": np.float32(1e-6),
        "one": np.array([1]),
    }
    nodes = [
        helper.make_node("Gather", ["embedding", "input_ids"], ["half"]),
        helper.make_node("Cast", ["half"], ["embedded"], to=TensorProto.FLOAT),
        helper.make_node("Gather", ["weight", "input_ids"], ["weights"]),
        helper.make_node("Unsqueeze", ["weights", "one"], ["row"]),
        helper.make_node("MatMul", ["row", "embedded"], ["summed"]),
        helper.make_node("Squeeze", ["summed", "one"], ["sum"]),
        helper.make_node("ReduceSum", ["weights", "one"], ["total"]),
        helper.make_node("Add", ["total", "tiny"], ["divisor"]),
        helper.make_node("Div", ["sum", "divisor"], ["mean"]),
        helper.make_node("MatMul", ["mean", "w1"], ["product1"]),
        helper.make_node("Add", ["product1", "b1"], ["hidden"]),
        helper.make_node("Gelu", ["hidden"], ["active"]),
        helper.make_node("MatMul", ["active", "w2"], ["product2"]),
        helper.make_node("Add", ["product2", "b2"], ["change"]),
        helper.make_node("Add", ["mean", "change"], ["changed"]),
        helper.make_node("LpNormalization", ["changed"], ["vector"], axis=-1, p=2),
    ]
    graph = helper.make_graph(
        nodes,
        "encoder",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "length"])],
        [helper.make_tensor_value_info("vector", TensorProto.FLOAT, ["batch", DIMENSIONS])],
        [numpy_helper.from_array(np.ascontiguousarray(value), name) for name, value in constants.items()],
    )
    onnx = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    helper.set_model_props(onnx, metadata)
    checker.check_model(onnx, full_check=True)
    save(onnx, path)


def main() -> int:
    """Train, export and measure a model for each seed; the first is kept."""
    parser = argparse.ArgumentParser(description="Train the encoder of the semantic search.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="which summaries to hold out; the first seed's model is kept")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of the training")
    parser.add_argument("--output", type=Path, default=MODEL, help="where to write the first model")
    options = parser.parse_args()
    documents = load_corpus()
    corpus = ", ".join(f"{name} {number}" for name, number in versions().items())
    rows: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            started, used = time.perf_counter(), time.process_time()
            model = train(documents, seed, options.steps)
            spent = f"trained in {time.perf_counter() - started:.0f} s, {time.process_time() - used:.0f} s of CPU"
            path = options.output if seed == options.seeds[0] else Path(folder) / "model.onnx"
            export(model, path, {"seed": str(seed), "corpus": corpus, "steps": str(options.steps)})
            rows.append(str(evaluate(documents, seed, ExportedEncoder(path))))
            print(f"seed {seed}: {spent}", flush=True)
    print(f"{corpus}: {len(documents)} documents\n{HEADER}", *rows, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
