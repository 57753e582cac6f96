"""``examples/semantic_search`` on a device: documents encoded, queries answered, a poisonous request, and all of it compared with the CPU's numbers.

``python benchmarks/search_service.py [--backend cpu] [--encoders committed,folder] [--documents N] [--seconds 5] [--clients 32] [--standby model]
[--json FILE]``; needs numpy, scipy, scikit-learn and onnxruntime, for ``folder`` also torch and transformers, and on a GPU torch and onnx. Nothing is
downloaded.

- ``committed`` is the trained encoder: by ONNX Runtime on the CPU, as a torch module with CUDA graphs on a GPU. Its vectors are compared with ONNX Runtime's.
- ``folder`` is a BERT of MiniLM's shape with random weights and a tokenizer trained on the corpus, saved by ``transformers``; its vectors are compared with
  those of the module itself on the CPU. Without ``--documents`` the CPU takes some of the corpus alone, for it encodes only about ten in a second.

The documents that a query returns are compared with a ranking by numpy in double precision of all documents: each must have the score that it was returned
with, and the best of them must score what the best documents do. Clients go on while the poison is sent. The program fails if something differs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # children import this file by its name in the package

import numpy as np

import accel
from examples.semantic_search import service
from examples.semantic_search.corpus import held_out, load_corpus
from examples.semantic_search.encoder import Encoder
from examples.semantic_search.rank import LEXICAL_WEIGHT, Lexicon, lexical_words

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from examples.semantic_search.corpus import Document
    from examples.semantic_search.encoding import TextEncoder
    from examples.semantic_search.service import Search

    Array = np.ndarray[Any, Any]

ROOT = Path(__file__).resolve().parents[1]
SHAPE: Any = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
BEST = 10
CHECKED = 50
"""Queries whose results are compared."""
TOLERANCE = {"committed": 1e-4, "folder": 2e-3}
"""Of vectors of length 1, and of scores."""
FEW = 128
"""Documents for a BERT on the CPU."""
RECOVERY = 60.0
"""Seconds until the first answer after the poison, at most."""


def make_folder(folder: Path) -> None:
    """Save a BERT with random weights, and a tokenizer of the words of the corpus."""
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer: Any = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    texts = [f"{document.name} {document.summary} {document.body}" for document in load_corpus()]
    tokenizer.train_from_iterator(texts, trainers.WordPieceTrainer(vocab_size=8000, special_tokens=special, show_progress=False))
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=tokenizer.get_vocab_size(), **SHAPE)).eval().save_pretrained(folder)


def reference(folder: Path | None) -> Callable[[Sequence[Any]], Array]:
    """Return what computes the vectors of a text encoder's items on the CPU."""
    if folder is None:
        return Encoder()
    import torch
    from transformers import AutoModel

    module: Any = AutoModel.from_pretrained(folder, local_files_only=True).eval()

    def vectors(items: Sequence[Any]) -> Array:
        lengths = np.array([len(item["input_ids"]) for item in items])
        found = np.zeros((len(items), module.config.hidden_size))
        for length in np.unique(lengths):  # together, so that nothing is padded
            (rows,) = np.nonzero(lengths == length)
            for start in range(0, len(rows), 64):
                part = rows[start : start + 64]
                given = {name: torch.from_numpy(np.stack([items[row][name] for row in part])) for name in items[0]}
                with torch.inference_mode():
                    found[part] = module(**given).last_hidden_state.double().mean(1).numpy()
        return np.asarray(found / np.linalg.norm(found, axis=1, keepdims=True))

    return vectors


async def some(read: Callable[[], Awaitable[list[Document]]], count: int | None) -> list[Document]:
    """Return a number of documents, taken from all of the corpus."""
    documents = await read()
    return documents if count is None else documents[:: max(1, len(documents) // count)][:count]


@contextlib.asynccontextmanager
async def opened(
    backend: str, folder: Path | None, standby: Any, documents: int | None
) -> AsyncIterator[tuple[accel.Device, Search, TextEncoder]]:
    """Have the service on a device, as the example's application has it, with a number of documents taken from all of the corpus."""
    if folder is None:
        os.environ.pop(service.FOLDER, None)
    else:
        os.environ[service.FOLDER] = str(folder)
    async with accel.System() as system:
        device = await system.open_device(backend, host="process", standby=standby, overload="reject")
        with mock.patch.object(service, "_read_corpus", partial(some, service._read_corpus, documents)):
            async with service.open_search(device) as search:
                yield device, search, search._texts


async def index_all(search: Search) -> dict[str, float]:
    """Wait until all documents are there, and return how fast they were encoded."""
    async with asyncio.timeout(300):
        while search.phase == "reading":  # noqa: ASYNC110 - a process and a thread bring it about
            await asyncio.sleep(0.002)
        began = time.perf_counter()
        while search.phase == "encoding":  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.002)
    assert search.phase == "ready", "the corpus could not be loaded: see the log"
    took = time.perf_counter() - began
    return {"documents": search.index.count, "encoding_s": took, "documents_per_s": search.index.count / took}


async def drive(search: Search, queries: Sequence[str], clients: int, seconds: float) -> dict[str, float]:
    """Return how fast many tasks are answered."""
    latencies: list[float] = []
    end = time.perf_counter() + seconds

    async def client(number: int) -> None:
        place = number
        while time.perf_counter() < end:
            began = time.perf_counter()
            await search.find(queries[place % len(queries)], BEST)
            latencies.append(1e3 * (time.perf_counter() - began))
            place += clients

    began = time.perf_counter()
    await asyncio.gather(*map(client, range(clients)))
    took = time.perf_counter() - began
    p50, p99 = np.percentile(latencies, (50, 99))
    return {"queries_per_s": len(latencies) / took, "p50_ms": float(p50), "p99_ms": float(p99)}


async def poison(device: accel.Device, search: Search, queries: Sequence[str]) -> dict[str, Any]:
    """Send the poison while clients ask, and return what became of it, of them, and how long none was answered."""
    before, answers, failed = device.generation, [time.perf_counter()], dict[str, int]()
    stop = asyncio.Event()

    async def client(number: int) -> None:
        place = number
        while not stop.is_set():
            try:
                await search.find(queries[place % len(queries)], BEST)
            except accel.AccelError as error:
                failed[type(error).__name__] = failed.get(type(error).__name__, 0) + 1
                await asyncio.sleep(0.02)
            else:
                answers.append(time.perf_counter())
            place += 8

    async with asyncio.TaskGroup() as group:
        for number in range(8):
            group.create_task(client(number))
        sent = time.perf_counter()
        outcomes: list[str] = []
        for _ in range(2):
            try:
                await search.send_poison()
            except (accel.PoisonedInputError, accel.LibraryError) as error:
                outcomes.append(type(error).__name__)
            else:
                raise AssertionError("the poison was answered")
        named = time.perf_counter() - sent
        async with asyncio.timeout(RECOVERY):
            await search.find(queries[0], BEST)
        again = time.perf_counter()
        await asyncio.sleep(0.5)
        stop.set()
    gaps = np.diff([*answers, time.perf_counter()])
    return {
        "outcomes": outcomes,
        "generations": device.generation - before,
        "named_s": named,
        "answered_after_s": again - sent,
        "longest_without_answer_s": float(gaps.max()),
        "queries_failed": failed,
        "documents_after": search.index.count,
    }


async def compare(
    search: Search, texts: TextEncoder, queries: Sequence[str], vectors: Callable[[Sequence[Any]], Array], tolerance: float
) -> Any:
    """Compare vectors and rankings with those of the CPU; return the largest differences."""
    documents = search._documents
    asked = list(queries[:CHECKED])
    items, query_items = [texts.document(document) for document in documents], [texts.query(query) for query in asked]
    found = np.stack(await asyncio.gather(*map(search.encoder.submit, query_items)))
    wanted = await asyncio.to_thread(vectors, query_items)
    worst = float(np.abs(found - wanted).max())
    assert worst <= tolerance, f"vectors of queries differ by {worst:g}"
    dense = await asyncio.to_thread(vectors, items)
    lexicon = Lexicon([lexical_words(document) for document in documents])
    rows = [lexicon.row(lexical_words(document)) for document in documents]
    terms, weights = np.stack([row[0] for row in rows]), np.stack([row[1] for row in rows]).astype(np.float64)
    same_first, off = 0, 0.0
    place = {document.name: number for number, document in enumerate(documents)}
    for query, vector in zip(asked, wanted.astype(np.float64), strict=True):
        scores = dense.astype(np.float64) @ vector + LEXICAL_WEIGHT * (lexicon.query(query)[terms] * weights).sum(1)
        best = np.sort(scores)[::-1][:BEST]
        returned = await search.find(query, BEST)
        own = scores[[place[document.name] for document, _ in returned]]
        off = max(off, float(np.abs(own - [score for _, score in returned]).max()), float(np.abs(own - best).max()))
        same_first += place[returned[0][0].name] == int(scores.argmax())
    assert off <= 2 * tolerance, f"scores differ by {off:g}"
    return {"vectors_differ_by": worst, "scores_differ_by": off, "same_first_of": [same_first, len(asked)]}


async def measured(name: str, given: argparse.Namespace, folder: Path | None) -> dict[str, Any]:
    """Measure one encoder."""
    few = given.backend == "cpu" and folder is not None
    async with opened(given.backend, folder, given.standby, given.documents or (FEW if few else None)) as (device, search, texts):
        found: dict[str, Any] = {"device": device.info().name, "graphs": texts.model.outputs.is_captured}
        found |= await index_all(search)
        chosen = await asyncio.to_thread(held_out, search._documents, 0)
        queries = [search._documents[index].summary for index in chosen]
        await drive(search, queries, given.clients, min(1.0, given.seconds))
        found["alone"] = await drive(search, queries, 1, given.seconds)
        found["clients"] = await drive(search, queries, given.clients, given.seconds)
        if given.standby != "none":
            async with asyncio.timeout(120):
                assert await device.spare_ready()
        found["poison"] = await poison(device, search, queries)
        assert "torch" not in sys.modules, "the service's process has imported torch"
        vectors = await asyncio.to_thread(reference, folder)
        found["compared"] = await compare(search, texts, queries, vectors, TOLERANCE[name])
    check_poison(given.backend, name, found)
    return found


def check_poison(backend: str, name: str, found: dict[str, Any]) -> None:
    """Raise if the poison was not what it is on such a device."""
    poisoned = found["poison"]
    # On the CPU torch checks its indices, and the poison is merely refused.
    wanted = ["LibraryError"] * 2 if (backend, name) == ("cpu", "folder") else ["PoisonedInputError"] * 2
    assert poisoned["outcomes"] == wanted, poisoned
    assert poisoned["documents_after"] == found["documents"], "documents were lost"
    assert backend == "cpu" or found["graphs"], "the forwards were not captured into graphs: see the log"


def main() -> None:
    """Measure, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--encoders", default="committed,folder", help="which (default %(default)s)")
    parser.add_argument("--documents", type=int, help="how many (default: all)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each block of queries")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--standby", choices=("none", "imports", "context", "model"), default="model")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    parser.add_argument("--make-folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.make_folder is not None:
        make_folder(given.make_folder)
        return
    # The corpus is read by a process of its own.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as path:
        for name in given.encoders.split(","):
            folder = Path(path) if name == "folder" else None
            if folder is not None:
                subprocess.run([sys.executable, __file__, "--make-folder", str(folder)], check=True)
            rows[name] = asyncio.run(measured(name, given, folder))
            print(f"{name}:", json.dumps(rows[name], indent=1), flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps({"backend": given.backend, "standby": given.standby, "encoders": rows}, indent=1))


if __name__ == "__main__":
    main()
