"""A small convolutional network trained on handwritten digits, through a fault, on any device; checked against torch, where that is installed.

Run: ``pip install .``, in a checkout, then ``python examples/train_digits.py``.

Parameters, momenta and the number of steps done lie in one durable buffer, of which there are two. A step reads one and writes the other, whole, with its last
op. So a fault leaves at least one as it was: training goes on from the step that it holds.
"""

from __future__ import annotations

import asyncio
import importlib
import math
import sys
from typing import Any

import numpy as np

import accel
from accel.cli.digits import Digits, load_digits
from accel.testing import FaultPlan

BATCH, STEPS, FAULT_IN_STEP = 64, 220, 100
RATE, MOMENTUM = np.float32(0.1), np.float32(0.9)
SHAPES = {"filter1": (8, 1, 3, 3), "bias1": (8,), "filter2": (16, 8, 3, 3), "bias2": (16,), "weight": (256, 10), "bias": (10,)}
COUNT = sum(math.prod(shape) for shape in SHAPES.values())
STATE = 2 * COUNT + 1

# d + momentum * m, and p - rate * that. The elements where a layer's result is positive take its gradient.
MOVE = (("mul", 1, 2), ("add", 3, 0))
STEP = (("mul", 1, 2), ("sub", 0, 3))
RELU_GRAD = (("greater", 0, 1), ("where", 3, 2, 1))

Array = np.ndarray[Any, Any]
Refs = dict[str, accel.AccelRef]


def initial(rng: np.random.Generator) -> dict[str, Array]:
    """Return the parameters: normally distributed, scaled by how many inputs a result has; biases are 0."""
    inputs = {"filter1": 9, "filter2": 72, "weight": 256}
    return {
        name: (rng.standard_normal(shape) * math.sqrt(2 / inputs[name]) if name in inputs else np.zeros(shape)).astype(np.float32)
        for name, shape in SHAPES.items()
    }


def parameters(state: accel.AccelRef) -> Refs:
    """Return the parameters in a state, as views."""
    found: Refs = {}
    begin = 0
    for name, shape in SHAPES.items():
        end = begin + math.prod(shape)
        found[name], begin = state[begin:end].reshape(shape), end
    return found


def forward(to: accel.Batch, images: accel.AccelRef, p: Refs) -> tuple[accel.AccelRef, ...]:
    """Record the network: the results of its layers, the scores last."""
    first = to.dnn.conv2d(images, p["filter1"], bias=p["bias1"], padding=1, activation="relu")
    second = to.dnn.conv2d(first, p["filter2"], bias=p["bias2"], padding=1, activation="relu")
    pooled = to.dnn.max_pool(second, 2).reshape(-1, 256)
    return first, second, pooled, to.linalg.matmul(pooled, p["weight"], bias=p["bias"])


def record_step(
    to: accel.Batch, images: accel.AccelRef, labels: accel.AccelRef, state: accel.AccelRef, target: accel.AccelRef
) -> accel.AccelRef:
    """Record a step of gradient descent with momentum from ``state`` into ``target``; return the mean loss before it."""
    p, zero = parameters(state), np.float32(0)
    first, second, pooled, scores = forward(to, images, p)
    losses = to.dnn.cross_entropy(scores, labels)
    shares = to.elementwise.fused((("mul", 0, 1), ("add", 3, 2)), (losses, zero, np.float32(1 / BATCH)))

    def through_relu(grad: accel.AccelRef, result: accel.AccelRef) -> accel.AccelRef:
        return to.elementwise.fused(RELU_GRAD, (result, zero, grad))

    of_scores = to.dnn.cross_entropy_grad(shares, scores, labels)
    of_pooled = to.linalg.matmul(of_scores, p["weight"], transpose_b=True)
    of_second = through_relu(to.dnn.max_pool_grad(of_pooled.reshape(-1, 16, 4, 4), second, 2), second)
    of_first = through_relu(to.dnn.conv2d_input_grad(of_second, p["filter2"], first.shape, padding=1), first)
    grads = (
        to.dnn.conv2d_filter_grad(images, of_first, SHAPES["filter1"], padding=1),
        to.reduce("sum", of_first, axis=(0, 2, 3)),
        to.dnn.conv2d_filter_grad(first, of_second, SHAPES["filter2"], padding=1),
        to.reduce("sum", of_second, axis=(0, 2, 3)),
        to.linalg.matmul(pooled, of_scores, transpose_a=True),
        to.reduce("sum", of_scores, axis=0),
    )
    grad = to.arrays.concatenate([each.reshape(-1) for each in grads])
    momenta = to.elementwise.fused(MOVE, (grad, state[COUNT : 2 * COUNT], MOMENTUM))
    moved = to.elementwise.fused(STEP, (state[:COUNT], momenta, RATE))
    done = to.elementwise.fused((("add", 0, 1),), (state[2 * COUNT :], np.float32(1)))
    to.arrays.concatenate([moved, momenta, done], out=target)
    return to.reduce("mean", losses)


async def steps_done(device: accel.Device, state: accel.AccelRef) -> int:
    """Return how many steps a state has behind it, -1 if it is torn."""
    try:
        return int((await device.get(state))[-1])
    except accel.StaleRefError as error:
        if error.reason != "torn":
            raise
        return -1


async def train(device: accel.Device, digits: Digits, batches: Array, start: dict[str, Array]) -> tuple[accel.AccelRef, dict[int, float]]:
    """Train; return the last state, and the loss before each step."""
    state = np.concatenate([*(each.ravel() for each in start.values()), np.zeros(COUNT + 1, np.float32)])
    # The slot of a step's number, modulo 2, holds what it begins from.
    slots = [await device.put(state, durable=True), await device.put(state, durable=True)]
    losses, step = {}, 0
    while step < STEPS:
        chosen = batches[step]
        try:
            images = await device.put(digits.train_images[chosen].reshape(-1, 1, 8, 8))
            labels = await device.put(digits.train_labels[chosen])
            async with device.batch() as batch:
                loss = record_step(batch, images, labels, slots[step % 2], slots[(step + 1) % 2])
            losses[step] = float(await device.get(loss))
            step += 1
        except (accel.ContextPoisonedError, accel.HostDiedError, accel.StaleRefError):
            found = [await steps_done(device, slot) for slot in slots]
            print(f"a fault in step {step}: the states hold steps {found}, and training goes on in generation {device.generation}")
            step = max(found)
            if step < 0:
                raise
    return slots[step % 2], losses


async def accuracy(device: accel.Device, digits: Digits, state: accel.AccelRef) -> float:
    """Return the share of the digits held out that are told apart rightly."""
    images = await device.put(digits.held_out_images.reshape(-1, 1, 8, 8))
    async with device.batch() as batch:
        *_, scores = forward(batch, images, parameters(state))
        found = batch.reduce("argmax", scores, axis=1)
    return float((await device.get(found) == digits.held_out_labels).mean())


def losses_of_torch(torch: Any, digits: Digits, batches: Array, start: dict[str, Array]) -> list[float]:
    """Return the losses of the same steps by torch."""
    torch.set_num_threads(1)
    p = {name: torch.tensor(each, requires_grad=True) for name, each in start.items()}
    optimizer = torch.optim.SGD(p.values(), lr=float(RATE), momentum=float(MOMENTUM))
    functional, losses = torch.nn.functional, []
    for chosen in batches:
        images = torch.tensor(digits.train_images[chosen].reshape(-1, 1, 8, 8))
        first = functional.relu(functional.conv2d(images, p["filter1"], p["bias1"], padding=1))
        second = functional.relu(functional.conv2d(first, p["filter2"], p["bias2"], padding=1))
        scores = functional.max_pool2d(second, 2).reshape(-1, 256) @ p["weight"] + p["bias"]
        loss = functional.cross_entropy(scores, torch.tensor(digits.train_labels[chosen]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


async def main() -> int:
    """Run the example and return its exit status."""
    digits, rng = load_digits(), np.random.default_rng(0)
    start = initial(rng)
    batches = np.stack([rng.choice(len(digits.train_labels), BATCH, replace=False) for _ in range(STEPS)])
    # The second concatenation of a step writes the state: the fault comes while it does.
    faults = FaultPlan().poison_at(2 * FAULT_IN_STEP + 2, op="concatenate")
    async with accel.System() as system:
        device = await system.open_device("auto", libraries=("dnn", "linalg", "elementwise", "reduce", "arrays"), faults=faults)
        state, losses = await train(device, digits, batches, start)
        share = await accuracy(device, digits, state)
        print(f"{device.name}: loss {losses[0]:.3f}, after {STEPS} steps {losses[STEPS - 1]:.3f}; accuracy on digits held out {share:.3f}")
    is_right = share >= 0.97 and device.generation == 2
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        return 0 if is_right else 1
    theirs = losses_of_torch(torch, digits, batches, start)
    error = max(abs(losses[step] - theirs[step]) for step in losses)
    print(f"losses of {len(losses)} steps are off by at most {error:.1e} of torch's")
    # Where two pixels of a window are nearly the same, rounding decides which of them learns.
    return 0 if is_right and error < 0.05 else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
