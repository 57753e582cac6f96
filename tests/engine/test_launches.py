"""What the end of an op is predicted by."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import accel
from accel.engine.launches import OpSubmission
from accel.ops import Empty, Plan, Spec


@pytest.mark.parametrize("part", ["reads", "writes", "creates"])
def test_ops_that_move_about_as_much_are_of_a_kind(part: str) -> None:
    def kind(nbytes: int) -> Any:
        ref: Any = SimpleNamespace(nbytes=nbytes, buffer=1)
        spec = Spec((nbytes,), accel.DType.UINT8)
        plan = Plan((ref,) * (part == "reads"), (ref,) * (part == "writes"), (spec,) * (part == "creates"))
        future: Any = None
        submission = OpSubmission(Empty((1,), accel.DType.FLOAT32), plan, future, 1)
        submission.is_offloaded = False
        event: Any = object()
        submission.on_marked(event)
        assert submission.plan is submission.op is None
        return submission.kind

    assert kind(1000) == kind(600)
    assert kind(1000) != kind(1100)
