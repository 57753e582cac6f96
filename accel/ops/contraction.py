"""How sums of products are contracted: which operands in which order, and each two of them as one product of matrices with as little copied as can be.

Labels are ints, one for each index that is summed over or kept. All of this is arithmetic on shapes and strides.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from accel.errors import InvalidArgumentError
from accel.views import is_contiguous, steps_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["Contraction", "Layout", "Matrices", "Path", "Products", "Step", "Sums", "Term", "contraction", "parsed", "sizes_of"]

Shape = tuple[int, ...]
Labels: TypeAlias = tuple[int, ...]
Path: TypeAlias = tuple[Shape, ...]

_SUBSCRIPTS = "Give subscripts as numpy.einsum takes them: 'ij,jk->ik', '...ij->...ji'."
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_SEARCHED = 5
"""How many operands are contracted in the best of all orders; of more, a greedy search finds a good one."""
_TILE = 128
"""Rows and columns of a result, about, for which a library reads its operands once."""
_SCATTERED = 6
"""How much longer a copy takes that does not read neighbours one after the other: 3 to 11 times on an H100."""


class Term(NamedTuple):
    """An operand: its labels, and the length and stride of each."""

    labels: Labels
    lengths: Shape
    strides: Shape

    def ordered(self, labels: Iterable[int]) -> Layout:
        """Return how its elements lie in the order of ``labels``; a label that it lacks has length 1."""
        places = {label: (length, stride) for label, length, stride in zip(*self, strict=True)}
        found = [places.get(label, (1, 0)) for label in labels]
        return Layout(tuple([length for length, _ in found]), tuple([stride for _, stride in found]))

    def in_memory(self) -> Labels:
        """Return its labels as they lie in memory, the one with the largest stride first."""
        return tuple([label for label, _ in sorted(zip(self.labels, self.strides, strict=True), key=lambda each: -each[1])])


class Layout(NamedTuple):
    """Lengths and strides of a view of an operand."""

    lengths: Shape
    strides: Shape


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a contraction.

    Attributes
    ----------
    of
        The places of its operands.
    terms
        What each operand is, without axes of one element.
    result
        What the result is: it lies in C-order.
    """

    of: Shape
    terms: tuple[Term, ...]
    result: Term

    @property
    def is_regular(self) -> bool:
        """Whether there are elements, and all strides lead forward: what libraries take."""
        return all(0 not in term.lengths and min(term.strides, default=1) > 0 for term in self.terms)


@dataclass(frozen=True, slots=True)
class Sums(Step):
    """Sums of one operand over its last axes; with none of them, a copy in another order.

    Attributes
    ----------
    layout
        The operand's axes, those that are kept first.
    summed
        How many are summed over.
    """

    layout: Layout
    summed: int

    @property
    def is_moving(self) -> bool:
        """Whether elements are summed, or copied, in another order than they lie in."""
        return not is_contiguous(*self.layout)

    @classmethod
    def copy(cls, layout: Layout) -> Sums:
        """Return the step that copies a view into one run."""
        axes = [each for each in zip(range(len(layout.lengths)), *layout, strict=True) if each[1] != 1]
        term = Term(*zip(*axes, strict=True)) if axes else Term((), (), ())
        return cls((0,), (term,), Term(tuple(range(len(layout.lengths))), layout.lengths, steps_of(layout.lengths)), layout, 0)


@dataclass(frozen=True, slots=True)
class Products(Step):
    """Products of elements of two operands, broadcast."""

    layouts: tuple[Layout, Layout]

    @property
    def is_moving(self) -> bool:
        """Whether one operand lies as the result does, and the other one in another order."""
        lying = [is_contiguous(*layout) and layout.lengths == self.result.lengths for layout in self.layouts]
        return lying.count(True) == 1 and not _is_in_order(self.layouts[1 if lying[0] else 0])


@dataclass(frozen=True, slots=True)
class Matrices(Step):
    """A product of matrices.

    Attributes
    ----------
    layouts
        How left and right operand lie as the matrices that they are.
    shapes
        The stack, rows and columns of each, as they lie.
    transposed
        Whether each is transposed.
    copied
        Whether each is copied first: its view is not one run.
    lengths
        The product's axes: what its rows and columns are of.
    turned
        How the product lies in the order in which the result is wanted, if that is another one.
    is_moving
        Whether more elements are read and written for copies than for the product: a library that
        contracts without copies is quicker then.
    """

    layouts: tuple[Layout, Layout]
    shapes: tuple[Shape, Shape]
    transposed: tuple[bool, bool]
    copied: tuple[bool, bool]
    lengths: Shape
    turned: Layout | None
    is_moving: bool


@dataclass(frozen=True, slots=True)
class Contraction:
    """All steps. Each takes operands, or results of earlier steps, by their places; its result has the next place. The last one's is the whole's.

    Attributes
    ----------
    shape
        Of the result.
    """

    steps: tuple[Sums | Products | Matrices, ...]
    shape: Shape


def parsed(subscripts: str, shapes: Sequence[Shape]) -> tuple[tuple[Labels, ...], Labels]:
    """Return the labels of operands and result; those of an ellipsis are below 0.

    Raises
    ------
    InvalidArgumentError
        If these are no subscripts, or do not fit the operands.
    """
    if not isinstance(subscripts, str):
        raise InvalidArgumentError(f"subscripts is {subscripts!r}", remedy=_SUBSCRIPTS)
    left, arrow, right = subscripts.replace(" ", "").partition("->")
    words = left.split(",")
    if len(words) != len(shapes):
        raise InvalidArgumentError(f"{subscripts!r} has {len(words)} operand(s), and {len(shapes)} are given", remedy=_SUBSCRIPTS)
    terms = tuple([_labels(word, len(shape), subscripts) for word, shape in zip(words, shapes, strict=True)])
    every = [label for term in terms for label in term]
    hidden = sorted({label for label in every if label < 0})
    if not arrow:
        return terms, (*hidden, *sorted(label for label in set(every) if label >= 0 and every.count(label) == 1))
    output = _labels(right, len(right.replace("...", "")) + len(hidden) * ("..." in right), subscripts)
    if len(set(output)) < len(output) or not set(output) <= set(every):
        raise InvalidArgumentError(f"the result of {subscripts!r} has an index twice, or one of no operand", remedy=_SUBSCRIPTS)
    if hidden and "..." not in right:
        raise InvalidArgumentError(f"the result of {subscripts!r} has no '...' for the operands' other axes", remedy=_SUBSCRIPTS)
    return terms, output


def _labels(word: str, ndim: int, subscripts: str) -> Labels:
    before, dots, after = word.partition("...")
    letters = before + after
    hidden = ndim - len(letters)
    if not all(letter in _LETTERS for letter in letters):
        raise InvalidArgumentError(f"{subscripts!r} has other than letters, ',', '...' and '->'", remedy=_SUBSCRIPTS)
    if hidden < 0 or (hidden and not dots):
        raise InvalidArgumentError(f"{word!r} of {subscripts!r} is for an operand of {ndim} dimension(s)", remedy=_SUBSCRIPTS)
    return (*map(ord, before), *range(-hidden, 0), *map(ord, after))


def sizes_of(labels: Sequence[Labels], lengths: Sequence[Shape]) -> dict[int, int]:
    """Return how many elements the axes of each label have; a length of 1 is broadcast.

    Raises
    ------
    InvalidArgumentError
        If lengths of one label differ.
    """
    sizes: dict[int, int] = {}
    for each, those in zip(labels, lengths, strict=True):
        own: dict[int, int] = {}
        for label, length in zip(each, those, strict=True):
            if own.setdefault(label, length) != length or (sizes.get(label, 1) not in (1, length) and length != 1):
                raise InvalidArgumentError(
                    f"axes of one index have {own[label] if own[label] != length else sizes[label]} and {length} elements (shapes {tuple(lengths)})",
                    remedy="Give axes of one index as many elements.",
                )
            sizes[label] = length if length != 1 else sizes.get(label, 1)
    return sizes


@lru_cache(maxsize=1024)
def contraction(
    labels: tuple[Labels, ...], lengths: tuple[Shape, ...], strides: tuple[Shape, ...], output: Labels, optimize: str | Path
) -> Contraction:
    """Return how the sums of products are computed.

    Parameters
    ----------
    labels, lengths, strides
        Of each operand's axes. A length of 1 is broadcast.
    output
        The labels of the result.
    optimize
        ``"auto"``, ``"greedy"``, ``"optimal"``, or a path: the places of the operands of each step, whose result goes behind all that are left.

    Raises
    ------
    InvalidArgumentError
        If lengths of one label differ, or the path is none.
    """
    sizes = sizes_of(labels, lengths)
    made = _Steps(output, len(labels))
    for place, operand in enumerate(zip(labels, lengths, strides, strict=True)):
        made.terms[place] = _distinct(*operand)
    if len(labels) == 1:
        made.sum(0, output)
    else:
        made.sum_alone()
        for chosen in _path(made, sizes, optimize):
            made.contract(chosen)
    return Contraction(tuple(made.steps), tuple([sizes[label] for label in output]))


def _distinct(labels: Labels, lengths: Shape, strides: Shape) -> Term:
    """Return an operand's axes of more than one element; those of one label are its diagonal."""
    axes: dict[int, tuple[int, int]] = {}
    for label, length, stride in zip(labels, lengths, strides, strict=True):
        if length != 1:
            axes[label] = length, stride + (axes[label][1] if label in axes else 0)
    return Term(tuple(axes), tuple([length for length, _ in axes.values()]), tuple([stride for _, stride in axes.values()]))


class _Steps:
    """Steps so far.

    Attributes
    ----------
    terms
        Operands and results by their places.
    left
        Places of those that are still to be contracted, in the order that paths count them in.
    """

    def __init__(self, output: Labels, count: int) -> None:
        self.output = output
        self.terms: dict[int, Term] = {}
        self.left = list(range(count))
        self.steps: list[Sums | Products | Matrices] = []
        self._next = count

    def _add(self, step: Sums | Products | Matrices) -> int:
        self.steps.append(step)
        self.terms[self._next] = step.result
        self._next += 1
        return self._next - 1

    def sum(self, place: int, kept: Labels) -> int:
        """Sum an operand over all labels but ``kept``, and let the result have these in order."""
        term = self.terms[place]
        summed = tuple([label for label in term.in_memory() if label not in kept])
        layout = term.ordered(kept + summed)
        lengths = layout.lengths[: len(kept)]
        made = Term(kept, lengths, steps_of(lengths))
        return self._add(Sums((place,), (term,), made, layout, len(summed)))

    def sum_alone(self) -> None:
        """Sum each operand over what no other one, nor the result, has."""
        for n, place in enumerate(self.left):
            term = self.terms[place]
            others = set(self.output).union(*[self.terms[other].labels for other in self.left if other != place])
            if not set(term.labels) <= others:
                self.left[n] = self.sum(place, tuple([label for label in term.labels if label in others]))

    def contract(self, chosen: Shape) -> None:
        """Contract some of what is left, counted from the first."""
        places = [self.left[n] for n in chosen]
        self.left = [place for n, place in enumerate(self.left) if n not in chosen]
        while len(places) > 1:
            first, second = places[:2]
            others = set(self.output).union(*[self.terms[place].labels for place in self.left + places[2:]])
            is_last = not self.left and len(places) == 2
            places[:2] = [self._pair(first, second, others, self.output if is_last else None)]
        self.left += places

    def _pair(self, first: int, second: int, others: set[int], order: Labels | None) -> int:
        a, b = self.terms[first], self.terms[second]
        if not any(label in b.labels and label not in others for label in a.labels):
            labels = order if order is not None else a.labels + tuple([label for label in b.labels if label not in a.labels])
            layouts = a.ordered(labels), b.ordered(labels)
            lengths = tuple([max(pair) if 0 not in pair else 0 for pair in zip(layouts[0].lengths, layouts[1].lengths, strict=True)])
            return self._add(Products((first, second), (a, b), Term(labels, lengths, steps_of(lengths)), layouts))
        _, step = min(_candidates((first, second), (a, b), others, order), key=lambda each: each[0])
        return self._add(step)


def _path(made: _Steps, sizes: dict[int, int], optimize: str | Path) -> Path:
    count = len(made.left)
    if not isinstance(optimize, str):
        return _checked(optimize, count)
    if count == 2:
        return ((0, 1),)
    terms = [made.terms[place].labels for place in made.left]
    every = tuple(dict.fromkeys(label for term in terms for label in term))
    if len(every) > len(_LETTERS):
        raise InvalidArgumentError(f"the operands have {len(every)} different axes", remedy=f"Give up to {len(_LETTERS)}.")
    names = dict(zip(every, _LETTERS, strict=False))
    words = ",".join("".join(names[label] for label in term) for term in terms)
    # Nothing of the arrays is read. Of axes without elements the search would divide by 0.
    shapes = [np.broadcast_to(np.zeros(()), [max(sizes[label], 1) for label in term]) for term in terms]
    how: Any = ("optimal" if count <= _SEARCHED else "greedy") if optimize == "auto" else optimize
    found, _ = np.einsum_path(f"{words}->{''.join(names[label] for label in made.output if label in names)}", *shapes, optimize=how)
    return tuple([tuple(step) for step in found[1:]])


def _checked(path: Path, count: int) -> Path:
    for step in path:
        if len(set(step)) < max(len(step), 2) or not all(0 <= n < count for n in step):
            break
        count -= len(step) - 1
    else:
        if count == 1:
            return path
    raise InvalidArgumentError(
        f"optimize is {path}", remedy="Give places of operands for each step, as opt_einsum.contract_path returns, until one is left."
    )


def _candidates(
    places: tuple[int, int], terms: tuple[Term, Term], others: set[int], order: Labels | None
) -> Iterator[tuple[int, Matrices]]:
    """Yield the ways to compute a pair by one product of matrices, and about how many elements are read and written for each.

    Labels are those of a stack (in both, and kept), of rows (in the left operand), of columns (in the right one), and those that are summed over. The order of
    each kind may be that of an operand or of the result. What would have to be copied only because rows or columns come first may be a stack too.
    """
    for swapped in (False, True):
        (left, right), of = (terms[::-1], places[::-1]) if swapped else (terms, places)
        orders = [left.in_memory(), right.in_memory()]
        if order is not None:
            orders.append(order)
        both = [label for label in orders[0] if label in right.labels]
        stack, summed = ([label for label in both if (label in others) is is_kept] for is_kept in (True, False))
        rows, columns = ([label for label in each.labels if label not in both] for each in (left, right))
        choices = [
            dict.fromkeys(_sorted(which, by) for by in those)
            for which, those in ((stack, orders), (rows, orders[::2]), (columns, orders[1:]), (summed, orders[:2]))
        ]
        for chosen in itertools.product(*choices):
            yield _matrices(of, (left, right), ((), *chosen), order)
        if not stack:
            for chosen in itertools.product(*choices[1:]):
                for which in (0, 1):  # a stack of rows of the left operand, or of columns of the right one
                    for n in range(1, len(chosen[which]) + 1):
                        parts = list(chosen)
                        ahead, parts[which] = chosen[which][:n], chosen[which][n:]
                        yield _matrices(of, (left, right), (ahead, (), *parts), order)


def _sorted(labels: Iterable[int], by: Labels) -> Labels:
    return tuple(sorted(labels, key=by.index))


def _is_in_order(layout: Layout) -> bool:
    """Return whether axes lie in the order in which they are named; those of stride 0 lie anywhere."""
    steps = [stride for length, stride in zip(*layout, strict=True) if length > 1 and stride]
    return steps == sorted(steps, reverse=True)


def _cost_of_copy(layout: Layout) -> int:
    is_scattered = bool(layout.strides) and layout.strides[-1] != 1
    return 2 * math.prod(layout.lengths) * (_SCATTERED if is_scattered else 1)


def _cost_as_it_lies(layout: Layout) -> int:
    return 0 if is_contiguous(*layout) else _cost_of_copy(layout)


def _matrices(of: tuple[int, int], terms: tuple[Term, Term], parts: tuple[Labels, ...], order: Labels | None) -> tuple[int, Matrices]:
    ahead, stack, rows, columns, summed = parts
    cost = moved = 0
    found: list[tuple[Layout, Shape, bool, bool]] = []
    for term, first, last in zip(terms, (rows, summed), (summed, columns), strict=True):
        own = tuple([label for label in ahead if label in term.labels]) + stack
        plain, across = term.ordered(own + first + last), term.ordered(own + last + first)
        is_turned = _cost_as_it_lies(across) < _cost_as_it_lies(plain)
        layout = across if is_turned else plain
        counts = [len(own), len(own) + len(last if is_turned else first)]
        groups = layout.lengths[: counts[0]], layout.lengths[counts[0] : counts[1]], layout.lengths[counts[1] :]
        is_copied = not is_contiguous(*layout)
        cost += _cost_as_it_lies(layout)
        moved += 2 * math.prod(layout.lengths) * is_copied
        found.append((layout, tuple([math.prod(group) for group in groups[0 if own else 1 :]]), is_turned, is_copied))
    lengths = {label: length for term in terms for label, length in zip(term.labels, term.lengths, strict=True)}
    labels = ahead + stack + rows + columns
    count, m, n, k = (math.prod([lengths[label] for label in each]) for each in (ahead + stack, rows, columns, summed))
    work = count * k * (m * -(-n // _TILE) + n * -(-m // _TILE))
    shape = tuple([lengths[label] for label in labels])
    made = Term(labels, shape, steps_of(shape))
    turned: Layout | None = None
    if order is not None:
        result = made.ordered(order)
        if labels != tuple([label for label in order if label in lengths]):
            turned = result
            cost += _cost_of_copy(result)
            moved += 2 * count * m * n
        else:
            shape = result.lengths
        made = Term(order, result.lengths, steps_of(result.lengths))
    layouts, shapes, transposed, copied = zip(*found, strict=True)
    return cost + work, Matrices(of, terms, made, layouts, shapes, transposed, copied, shape, turned, moved > work)
