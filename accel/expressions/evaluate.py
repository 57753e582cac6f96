"""The evaluation of expressions: what is not computed yet is sent as one batch, and chains of functions of elements as one op each.

Small expressions that are awaited again and again become recorded graphs: see :mod:`accel.expressions.recordings`.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from accel.actors.turns import CHECK_EVERY, Turn, release
from accel.dtype import FLOATS
from accel.enums import CAPABILITIES, BinaryOp, UnaryOp
from accel.errors import AccelError, InvalidArgumentError, StaleRefError
from accel.expressions.array import SHOWN, Array, Cut
from accel.expressions.linear import product
from accel.ops import Binary, Cast, Fused, Unary, Where
from accel.ops.fused import CONVERSIONS, OPERANDS
from accel.ref import AccelRef

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accel.ops import FamilyOp
    from accel.ops.linalg import Activation

__all__ = ["evaluate"]

_INSTRUCTIONS: Final = 64
"""How many functions are fused at most: each takes registers of a GPU's thread."""

_ACTIVATIONS: dict[str, Activation] = {"gelu_tanh": "gelu", "relu": "relu"}
"""Functions that products of matrices apply to their results -> what they call them."""

_BIASED = frozenset(FLOATS)
"""Dtypes of products that a library adds a bias to."""

_NUMBER = attrgetter("number")

Order: TypeAlias = "dict[Array, tuple[Any, tuple[Any, ...], tuple[Any, ...]]]"
"""What is to be computed, each array behind those that it is computed from: its step, inputs and arguments, which it loses if another task computes it."""

_OFFERED = CAPABILITIES
_UNARY = {op.value: (op, _OFFERED[f"unary.{op.value}"]) for op in UnaryOp}
_BINARY = {op.value: (op, _OFFERED[f"binary.{op.value}"]) for op in BinaryOp}


async def evaluate(*arrays: Array) -> tuple[Array, ...]:
    """Compute several arrays of one device in one batch, and return them; what they have in common is computed once.

    The batch is cut only where the host must know a size that depends on values: at ``nonzero``, ``unique_all`` and its kin, and ``x[mask]``.

    Raises
    ------
    InvalidArgumentError
        If one is no array, or they are of several devices.
    AccelError
        What an op raises; none of the arrays has its result then, and awaiting them again computes them anew.
    """
    for each in arrays:
        if not isinstance(each, Array):
            raise InvalidArgumentError(f"{each!r:.100} is no array of an expression", remedy="Give what functions of device.xp return.")
        if each.xp is not arrays[0].xp:
            raise InvalidArgumentError("the arrays are of several devices", remedy="Evaluate those of each device on their own.")
    while True:
        wanted: list[Array] = []
        running = None
        for each in arrays:
            if each.result is None:
                wanted.append(each)
                running = running or each.running
        if not wanted:
            if hasattr(sys, "ps1"):  # an interactive session, which shows what it gets
                await _bring_values(arrays)
            return arrays
        if running is None:
            await _compute(wanted)
        else:  # by another task; if that fails, this one computes
            await asyncio.wait((running,))


async def _bring_values(arrays: tuple[Array, ...]) -> None:
    """Copy the values of small results to the host, where ``repr`` finds them: it cannot wait."""
    for array in arrays:
        if array.values is None and (array.size or 0) <= SHOWN and isinstance(array.result, AccelRef):
            with contextlib.suppress(AccelError):  # it says what became of the array when that is used
                await array.numpy()


async def _compute(roots: list[Array]) -> None:
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    for each in roots:
        each.running = done
    try:
        device, recordings = roots[0].device, roots[0].xp.recordings
        known = recordings.find(roots)
        if known is not None and (function := known.structure.function) is not None:
            try:
                found = await known.call()
            except StaleRefError:
                if not function.is_stale:
                    raise
                # Rebuilt meanwhile; the batch says what became of the operands.
            else:
                for root, result in zip(roots, found, strict=True):
                    root.settle(result)
                return
        order = await _order(roots)
        while (cut := next((each for each, (step, *_) in order.items() if type(step) is Cut), None)) is not None:
            # It is the first one: what it is computed from has none.
            step, inputs, arguments = order[cut]
            operands = [each for each in inputs if each.result is None]
            await _send(device, operands, await _order(operands))
            cut.settle(await step.run(device, *[each.result for each in inputs], *arguments))
            order = await _order(roots)
        await _send(device, roots, order, known)
    finally:
        for each in roots:
            each.running = None
        done.set_result(None)


async def _order(roots: Sequence[Array]) -> Order:
    """Return what is not computed yet."""
    turn = Turn()
    found = [root for root in dict.fromkeys(roots) if root.result is None]
    known = set(found)
    for number, each in enumerate(found, 1):  # which grows
        if not number % CHECK_EVERY and turn.is_over:
            await turn.next()
        for i in each.inputs:
            if isinstance(i, Array) and i.result is None and i not in known:
                known.add(i)
                found.append(i)
    found.reverse()  # about in order: sorting takes less time
    found.sort(key=_NUMBER)
    order: Order = {}
    for number, each in enumerate(found, 1):
        if not number % CHECK_EVERY and turn.is_over:
            await turn.next()
        if each.result is None:  # else another task has computed it meanwhile
            order[each] = each.step, each.inputs, each.arguments
    return order


class _Group:
    """Functions of elements that one op computes.

    Attributes
    ----------
    arrays
        Their results, the last one first.
    operands
        The identities of what they are computed from: numbers, and arrays of other ops.
    product, bias
        The product of matrices that a bias is added to, if that, and perhaps an activation, is all that the op does.
    """

    __slots__ = ("arrays", "bias", "operands", "product")

    def __init__(self, result: Array, inputs: tuple[Any, ...]) -> None:
        self.arrays = [result]
        self.product: Array | None = None
        self.bias: Array | None = None
        self.operands = {id(each) for each in inputs}


async def _send(device: Any, roots: Sequence[Array], order: Order, known: Any = None) -> None:
    """Compute what ``order`` has as one batch, and let ``roots`` keep their results. It may be recorded then, if its structure is ``known``."""
    if not order:
        return
    async with device.batch() as batch:
        found = await record(batch, roots, order, {})
    if known is not None:
        await roots[0].xp.recordings.learn(known, roots, order, record)
    for root in roots:
        if root.result is None:
            root.settle(found[root])
    await release(found, order)


async def record(recorder: Any, roots: Sequence[Array], order: Order, refs: dict[Array, Any]) -> dict[Array, Any]:
    """Record the ops of ``order`` in a batch or graph, and return their results. Long work is done in turns.

    Parameters
    ----------
    recorder
        The batch or graph.
    roots
        What is awaited; nothing else of ``order`` is kept.
    order
        What is to be computed.
    refs
        What stands for arrays that are computed already; their own results where it has none.
    """
    turn = Turn()
    groups = await _grouped(order, roots, turn)
    absorbed = {group.product for group in groups.values()}
    for number, (each, (step, inputs, arguments)) in enumerate(order.items(), 1):
        if not number % CHECK_EVERY and turn.is_over:
            await turn.next()
        if each in absorbed:
            continue
        if not isinstance(step, str):
            assert callable(step)  # cuts are computed
            refs[each] = step(recorder, *[_value(i, refs) for i in inputs], *arguments)
        elif (group := groups.get(each)) is None:
            continue
        elif group.product is not None:
            a, b, bias = (_value(i, refs) for i in (*order[group.product][1], group.bias))
            refs[each] = product(recorder, a, b, bias, _ACTIVATIONS.get(step))
        else:
            refs[each] = recorder.run(_op_of(group, order, refs))
    return refs


async def _grouped(order: Order, roots: Sequence[Array], turn: Turn) -> dict[Array, _Group]:
    """Return the ops of functions of elements, by their results.

    A function joins the op that uses its result, if nothing else does, it has the op's shape, and the op does not get too large.
    """
    groups: dict[Array, _Group] = {}
    users: dict[Array, _Group | None] = dict.fromkeys(roots)  # None: used by several ops, or kept
    for number, (each, (step, inputs, _)) in enumerate(reversed(order.items()), 1):
        if not number % CHECK_EVERY and turn.is_over:
            await turn.next()
        group = None
        if isinstance(step, str):
            group = users.get(each)
            if group is not None and (each.shape != group.arrays[0].shape or len(group.arrays) == _INSTRUCTIONS):
                group = None
            operands = set() if group is None else group.operands | {id(i) for i in inputs}
            operands.discard(id(each))
            if group is None or len(operands) > OPERANDS:
                group = groups[each] = _Group(each, inputs)
            else:
                group.arrays.append(each)
                group.operands = operands
        for i in inputs:
            if isinstance(i, Array) and i in order and users.setdefault(i, group) is not group:
                users[i] = None
    for group in groups.values():
        if order[group.arrays[-1]][0] == "add":
            _join_product(group, order, users)
    return groups


def _join_product(group: _Group, order: Order, users: dict[Array, _Group | None]) -> None:
    """Let a product of matrices compute the op, if it can: a bias that is added to each row, and an activation."""
    first, last = group.arrays[-1], group.arrays[0]
    if len(group.arrays) > 2 or (last is not first and order[last][0] not in _ACTIVATIONS) or first.dtype not in _BIASED:
        return
    inputs = order[first][1]
    for made, bias in (inputs, inputs[::-1]):
        if (
            isinstance(made, Array)
            and isinstance(bias, Array)
            and made in order
            and order[made][0] is product
            and users.get(made) is group
            and made.shape == first.shape
            and bias.shape == made.shape[-1:] != (None,)
            and order[made][1][0].shape[-1]  # sums of no products take no bias
        ):
            group.product, group.bias = made, bias
            return


def _op_of(group: _Group, order: Order, refs: dict[Array, Any]) -> FamilyOp:
    """Return the op of a group: of one function the op that there is for it, else a fused one."""
    members = group.arrays
    if len(members) == 1:
        step, inputs, _ = order[members[0]]
        if (single := _single(step, [_value(i, refs) for i in inputs])) is not None:
            return single
    # By identity: arrays compare elements, and numbers that are equal may differ in sign.
    places = {id(each): -1 for each in members}
    operands: list[Any] = []
    for each in members:
        for i in order[each][1]:
            if id(i) not in places:
                places[id(i)] = len(operands)
                operands.append(_value(i, refs))
    program: list[tuple[Any, ...]] = []
    for number, each in enumerate(reversed(members), len(operands)):
        step, inputs, _ = order[each]
        program.append((step, *[places[id(i)] for i in inputs]))
        places[id(each)] = number
    return Fused(tuple(program), tuple(operands))


def _value(value: Any, refs: dict[Array, Any]) -> Any:
    """Return the ref of an array, or the number that ``value`` is."""
    if not isinstance(value, Array):
        return value
    found = refs.get(value)
    return value.result if found is None else found


def _single(name: str, values: list[Any]) -> FamilyOp | None:
    """Return the op that computes one function, if there is one besides a fused one: its kernel need not be compiled for it."""
    first = values[0]
    if name in CONVERSIONS:
        return Cast(first, CONVERSIONS[name])
    if len(values) == 1 and name in _UNARY:
        unary, dtypes = _UNARY[name]
        return Unary(unary, first) if first.dtype in dtypes else None
    if len(values) == 2 and name in _BINARY:
        binary, dtypes = _BINARY[name]
        return Binary(binary, *values) if next(each.dtype for each in values if isinstance(each, AccelRef)) in dtypes else None
    if name == "where" and isinstance(first, AccelRef) and any(isinstance(each, AccelRef) for each in values[1:]):
        return Where(*values)
    return None
