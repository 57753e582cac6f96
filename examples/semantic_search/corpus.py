"""The corpus: what the installed numpy, scipy and scikit-learn say about their functions, classes and methods.

``python -m examples.semantic_search.corpus`` prints the versions and a count; with ``--json`` it writes each document as a line of JSON. The service reads
them so: the imports and the walk hold the GIL for seconds, so they run in a process of their own.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import json
import pkgutil
import re
import sys
import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import ModuleType

PACKAGES = {"numpy": "numpy", "scipy": "scipy", "sklearn": "scikit-learn"}
"""Each package that is imported, and the distribution that it comes from."""

_SKIPPED = re.compile(
    r"\.(_|tests?\b|testing\b|conftest|setup|__main__)|^numpy\.(distutils|f2py)\b|^sklearn\.(externals|experimental)\b|\bcython_"
)
_SIGNATURE = re.compile(r"[\w.]+\(.*\)( *->.*)?(\s*--)?", re.DOTALL)
_SENTENCE = re.compile(r"(?<=[a-z0-9)`'\"])\.(?=\s|$)")


@dataclass(frozen=True, slots=True)
class Document:
    """One docstring, taken apart.

    Attributes
    ----------
    name
        The shortest public name, as ``numpy.linalg.norm``.
    signature
        Its parameters in parentheses; empty where Python knows none.
    summary
        The first sentence of the first paragraph, on one line.
    body
        All that follows the summary.
    """

    name: str
    signature: str
    summary: str
    body: str

    @property
    def module(self) -> str:
        """The package and its first submodule: ``numpy.linalg``."""
        return ".".join(self.name.split(".")[:-1][:2])


def versions() -> dict[str, str]:
    """Return the installed version of each distribution."""
    return {distribution: version(distribution) for distribution in PACKAGES.values()}


def load_corpus() -> list[Document]:
    """Return every document once, sorted by name.

    Notes
    -----
    An object with several names is one document, under the name of the module that it says it is from, else under its shortest name. So are several
    objects with the same docstring, such as a method that subclasses repeat.
    """
    found: dict[str, Document] = {}
    seen: set[int] = set()
    for name, value in sorted(_public_objects(), key=_preference):
        text = inspect.cleandoc(value.__doc__)
        if id(value) in seen or text in found:
            continue
        seen.add(id(value))
        if (document := _parse(name, value, text)) is not None:
            found[text] = document
    return sorted(found.values(), key=lambda document: document.name)


def held_out(documents: Sequence[Document], seed: int, count: int = 500) -> list[int]:
    """Return the indices of ``count`` documents whose summaries are the queries of an evaluation.

    Parameters
    ----------
    documents
        The corpus.
    seed
        Which queries; the choice depends on names alone, so it hardly changes with the corpus.
    count
        How many.

    Notes
    -----
    A summary that two documents share, or of fewer than four words, asks for no document in particular; a body of fewer than 100 characters leaves
    nothing to find.
    """
    shared = Counter(document.summary for document in documents)
    fit = [
        index
        for index, document in enumerate(documents)
        if shared[document.summary] == 1 and len(document.summary.split()) >= 4 and len(document.body) >= 100
    ]
    fit.sort(key=lambda index: hashlib.sha256(f"{seed} {documents[index].name}".encode()).digest())
    return fit[:count]


def _public_objects() -> Iterator[tuple[str, Any]]:
    """Yield the name and the object of everything public that has a docstring; an object comes once for each of its names."""
    for package in PACKAGES:
        for module in _public_modules(package):
            for name, value in sorted(vars(module).items()):
                if name.startswith("_") or not callable(value) or _home(value, package).split(".")[0] != package:
                    continue
                if _is_documented(value):
                    yield f"{module.__name__}.{name}", value
                if isinstance(value, type):
                    for attribute, member in sorted(vars(value).items()):
                        member = member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
                        if not attribute.startswith("_") and _is_documented(member):
                            yield f"{module.__name__}.{name}.{attribute}", member


def _public_modules(package: str) -> Iterator[ModuleType]:
    """Import and yield a package and the public modules below it; those whose names begin with an underscore are not even imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated modules say so when they are imported
        pending = [importlib.import_module(package)]
        while pending:
            parent = pending.pop()
            yield parent
            for info in pkgutil.iter_modules(getattr(parent, "__path__", ()), f"{parent.__name__}."):
                if not _SKIPPED.search(info.name):
                    with contextlib.suppress(ImportError):  # something optional is missing
                        pending.append(importlib.import_module(info.name))


def _home(value: Any, default: str) -> str:
    """Return the public module that an object says it is from; functions in C say nothing."""
    module = getattr(value, "__module__", None)
    return re.sub(r"\._.*", "", module) if isinstance(module, str) else default


def _is_documented(value: Any) -> bool:
    """Whether an object has a docstring of its own, and not that of its type. BLAS's thin wrappers have one that says nothing."""
    text = getattr(value, "__doc__", None)
    return isinstance(text, str) and text != type(value).__doc__ and type(value).__name__ != "fortran"


def _preference(named: tuple[str, Any]) -> tuple[bool, int, str]:
    name, value = named
    home = _home(value, "")
    return not (home and name.startswith(f"{home}.")), name.count("."), name


def _parse(name: str, value: Any, text: str) -> Document | None:
    paragraphs = [paragraph.strip() for paragraph in re.split(r"\n\s*\n", text)]
    # Functions in C begin with one or more signatures.
    signature = ""
    while paragraphs and _SIGNATURE.fullmatch(paragraphs[0]):
        signature = signature or re.sub(r"^[\w.]+", "", " ".join(paragraphs[0].split()))
        paragraphs = paragraphs[1:]
    if not paragraphs or not paragraphs[0]:
        return None
    first = " ".join(paragraphs[0].split())
    end = _SENTENCE.search(first)
    summary, rest = (first[: end.start()], first[end.end() :].strip()) if end else (first, "")
    if not signature:
        try:
            signature = str(inspect.signature(value))
        except (TypeError, ValueError):
            signature = ""
    # A default that is an object shows its address, which differs in every run.
    signature = re.sub(r" at 0x[0-9a-f]+", "", signature)
    return Document(name, signature, summary, "\n\n".join([rest, *paragraphs[1:]]).strip())


def read_documents(lines: Iterable[str]) -> list[Document]:
    """Return the documents that ``--json`` wrote."""
    return [Document(**json.loads(line)) for line in lines]


def main(arguments: Sequence[str]) -> None:
    """Write the documents as lines of JSON, or print what the corpus is."""
    documents = load_corpus()
    if "--json" in arguments:
        for document in documents:
            print(json.dumps(asdict(document)))
        return
    print(", ".join(f"{name} {number}" for name, number in versions().items()))
    print(f"{len(documents)} documents:", dict(Counter(document.name.split(".")[0] for document in documents)))


if __name__ == "__main__":
    main(sys.argv[1:])
