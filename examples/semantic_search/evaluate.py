"""Measure how well a document is found by its own summary, which neither the index nor the training has seen.

To run it on the committed model: ``python -m examples.semantic_search.evaluate``.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy import sparse

from examples.semantic_search.corpus import Document, held_out, load_corpus, versions
from examples.semantic_search.encoder import Encoder
from examples.semantic_search.rank import LEXICAL_WEIGHT, ROW, TERMS, Array, Lexicon, lexical_words, mean_reciprocal_rank
from examples.semantic_search.tokens import document_tokens, tokens

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Result:
    """Mean reciprocal ranks of the 500 queries of a seed: by TF-IDF, by the encoder, and by both."""

    seed: int
    lexical: float
    dense: float
    both: float

    def __str__(self) -> str:
        return f"| {self.seed} | {self.lexical:.3f} | {self.dense:.3f} | {self.both:.3f} | {self.both - self.lexical:+.3f} |"


HEADER = "| seed | TF-IDF | dense | both | both - TF-IDF |\n|---|---|---|---|---|"


def evaluate(documents: Sequence[Document], seed: int, encoder: Encoder) -> Result:
    """Rank all documents for the held-out summaries of a seed. The encoder must have been trained without them."""
    targets = held_out(documents, seed)
    without = set(targets)
    queries = [documents[target].summary for target in targets]
    vectors = encoder([document_tokens(document, summary=index not in without) for index, document in enumerate(documents)])
    dense = encoder([tokens(query) for query in queries]) @ vectors.T
    lexical = lexical_scores([lexical_words(document, summary=index not in without) for index, document in enumerate(documents)], queries)
    ranks = [mean_reciprocal_rank(scores, targets) for scores in (lexical, dense, dense + LEXICAL_WEIGHT * lexical)]
    return Result(seed, *ranks)


def lexical_scores(documents: Sequence[Sequence[str]], queries: Sequence[str]) -> Array:
    """Return the TF-IDF cosines, float32 (queries, documents)."""
    lexicon = Lexicon(documents)
    terms, weights = zip(*(lexicon.row(document) for document in documents), strict=True)
    rows = sparse.csr_array(
        (np.concatenate(weights), np.concatenate(terms), range(0, ROW * len(documents) + 1, ROW)), (len(documents), TERMS)
    )
    asked = sparse.csr_array(np.stack([lexicon.query(query) for query in queries]))
    return np.asarray((asked @ rows.T).toarray())


def main() -> int:
    """Print the table of the committed model."""
    encoder = Encoder()
    seed = int(encoder.metadata["seed"])
    print(", ".join(f"{name} {number}" for name, number in versions().items()))
    print(f"{HEADER}\n{evaluate(load_corpus(), seed, encoder)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
