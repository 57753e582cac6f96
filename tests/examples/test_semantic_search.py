from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import accel
from accel.testing import FaultPlan
from examples.semantic_search import tokens
from examples.semantic_search.corpus import Document, read_documents
from examples.semantic_search.encoder import DIMENSIONS, MODEL, Encoder
from examples.semantic_search.encoding import load_torch_encoder
from examples.semantic_search.evaluate import evaluate, lexical_scores
from examples.semantic_search.index import Index, Query
from examples.semantic_search.pairs import Pairs
from examples.semantic_search.rank import ROW, TERMS
from tests.device_support import bounded, cancelled, opened, task, until

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[2]

WITHOUT_TORCH = """
import asyncio, sys
import accel
from examples.semantic_search.encoding import load_torch_encoder

async def main():
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process")
        texts = await load_torch_encoder(device)
        vector = (await texts.model.numpy([[1, 2, 3]]))[0]
        print(len(vector), "torch" in sys.modules)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    command = [sys.executable, "-m", "examples.semantic_search.corpus", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    return read_documents(done.stdout.splitlines())


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder()


def some_document(name: str, summary: str, body: str) -> Document:
    return Document(name, "(x)", summary, body)


def test_the_corpus_has_each_object_once_and_every_package(documents: list[Document]) -> None:
    assert len(documents) > 4500
    assert [document.name for document in documents] == sorted({document.name for document in documents})
    packages = Counter(document.name.split(".")[0] for document in documents)
    assert all(packages[name] > 1000 for name in ("numpy", "scipy", "sklearn")), packages
    by_name = {document.name: document for document in documents}
    norm = by_name["numpy.linalg.norm"]
    assert (norm.summary, norm.module) == ("Matrix or vector norm", "numpy.linalg")
    assert norm.signature.startswith("(x, ord=None")
    assert "Frobenius" in norm.body
    assert "scipy.fft.fft" in by_name
    assert "scipy.linalg.misc.norm" not in by_name, "an alias"
    assert not any("0x" in document.signature for document in documents), "an address differs in every run"


def test_tf_idf_equals_a_dense_product_in_higher_precision(rng: np.random.Generator) -> None:
    words = [f"word{chr(97 + n % 26)}{chr(97 + n // 26)}" for n in range(300)]
    texts = [[str(word) for word in rng.choice(words, size=rng.integers(1, 120))] for _ in range(40)]
    queries = [" ".join(rng.choice(words, size=6)) for _ in range(7)]
    found = lexical_scores(texts, queries)

    def weigh(rows: Sequence[Sequence[str]]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        counts = np.array([[row.count(word) for word in words] for row in rows], np.float64)
        weighed = np.where(counts > 0, 1 + np.log(np.maximum(counts, 1)), 0) * idf
        return np.asarray(weighed / np.linalg.norm(weighed, axis=1, keepdims=True))

    idf = np.log((1 + len(texts)) / (1 + np.array([sum(word in text for text in texts) for word in words], np.float64))) + 1
    expected = weigh([tokens.words(query) for query in queries]) @ weigh(texts).T
    # Two of 300 words may share one of 65536 terms; then a few scores differ.
    assert np.isclose(found, expected, atol=1e-5).mean() > 0.9


def test_training_pairs_say_no_held_out_summary() -> None:
    secret = "Rotate quickly all seven green wheels"
    other = some_document(
        "p.other", "Stop a wheel", f"One paragraph of some more words.\n\n{secret}, it says here.\n\nSee Also\n--------\nturn : {secret}."
    )
    documents = [
        some_document("p.turn", secret, "The first of two paragraphs in here.\n\nAnd this one is the second one."),
        some_document("p.same", "Turn one more wheel", "A text of some words, which is long enough."),
        other,
    ]
    held = tokens.tokens(secret)
    seen: set[tuple[int, ...]] = set()
    pairs = Pairs(documents, {0}, 0)
    for _ in range(300):
        indices, queries, answers = pairs.batch([0, 1, 2])
        assert len(indices) == len(queries) == len(answers) == 3
        seen.update(tuple(query) for query in queries)
    assert all(not set(held) <= set(query) for query in seen)
    assert all(held != row[place : place + len(held)] for row in pairs.whole[:1] for place in range(len(row))), (
        "the document has it no more"
    )
    assert tuple(tokens.tokens("Turn one more wheel")) in seen
    assert len(seen) > 4


def test_vectors_have_length_1_whatever_they_are_padded_to(encoder: Encoder, rng: np.random.Generator) -> None:
    rows = [list(map(int, rng.integers(1, tokens.VOCABULARY, size))) for size in (1, 7, 190, 48)]
    together, alone = encoder([*rows, []]), np.concatenate([encoder([row]) for row in rows])
    assert together.shape == (5, DIMENSIONS)
    assert np.allclose(np.linalg.norm(together.astype(np.float64), axis=1), 1, atol=1e-5)
    assert np.allclose(together[:4], alone, atol=1e-4)


async def test_the_torch_module_computes_what_the_onnx_file_does(device: accel.Device, encoder: Encoder, rng: np.random.Generator) -> None:
    rows = rng.integers(1, tokens.VOCABULARY, (5, 30))
    texts = await load_torch_encoder(device)
    found = await bounded(texts.model.numpy(rows))
    assert np.allclose(found, encoder(rows.tolist()), atol=1e-5)


def test_the_service_s_process_does_not_import_torch() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "128 False\n"), done.stderr


async def test_an_index_finds_what_numpy_does_also_while_rows_are_added_and_through_faults(rng: np.random.Generator) -> None:
    vectors = rng.standard_normal((60, DIMENSIONS)).astype(np.float32)
    terms = rng.integers(0, TERMS, (60, ROW)).astype(np.int32)
    weights = rng.random((60, ROW)).astype(np.float32)
    queries = [Query(rng.standard_normal(DIMENSIONS).astype(np.float32), rng.standard_normal(TERMS).astype(np.float32)) for _ in range(3)]

    async def check(index: Index, count: int) -> None:
        for query, (scores, rows) in zip(queries, await bounded(index.search(queries, 7)), strict=True):
            exact = vectors[:count].astype(np.float64) @ query.vector + 0.5 * (
                query.lexical[terms[:count]].astype(np.float64) * weights[:count]
            ).sum(axis=1)
            assert np.allclose(scores, np.sort(exact)[::-1][:7], rtol=1e-4, atol=1e-3)
            assert np.array_equal(rows, np.argsort(-exact)[:7])

    faults = FaultPlan()
    async with opened(faults) as device:
        index = await Index.create(device, 60)
        empty = await bounded(index.search(queries[:1], 7))
        assert [len(part) for part in empty[0]] == [0, 0]
        assert await index.add(vectors[:20], terms[:20], weights[:20]) == 0
        await check(index, 20)
        # The second of the three writes faults: it leaves its buffer torn, and all is written again.
        faults.poison_at(faults.count + 2)
        assert await bounded(index.add(vectors[20:50], terms[20:50], weights[20:50])) == 20
        assert device.generation == 2
        await check(index, 50)
        # An insertion that is cancelled between the fault and its repair leaves the buffer torn: the next search repairs it.
        faults.poison_at(faults.count + 2)
        adding = task(index.add(vectors[50:], terms[50:], weights[50:]))
        await until(lambda: device.state is not accel.DeviceState.READY, "the fault")
        await cancelled(adding)
        await check(index, 50)
        assert device.generation == 3
        with pytest.raises(accel.InvalidArgumentError, match="61 documents do not fit"):
            await index.add(vectors[:11], terms[:11], weights[:11])
        await check(index, 50)


def test_the_committed_model_finds_held_out_summaries_better_than_tf_idf_alone(documents: list[Document], encoder: Encoder) -> None:
    assert MODEL.stat().st_size <= 10_000_000
    result = evaluate(documents, int(encoder.metadata["seed"]), encoder)
    assert result.both >= result.lexical + 0.04, result
    assert result.dense > 0.3, result
    assert str(result).count("|") == 6
