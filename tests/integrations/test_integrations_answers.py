from __future__ import annotations

import logging
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import accel
from accel import errors
from accel.device import DeviceState
from accel.integrations._answers import error_answer

SECRET = "cuModuleLoadData(0x7f00dead) of /opt/secret"


class ServiceError(accel.ContextPoisonedError):
    """A service's own subclass."""


def device(state: DeviceState = DeviceState.READY, generation: int = 7) -> Any:
    return SimpleNamespace(state=state, generation=generation)


EXPECTED: dict[type[accel.AccelError], tuple[int, bool]] = {
    accel.MailboxFullError: (429, True),
    accel.ContextPoisonedError: (503, True),
    accel.WorldChangedError: (503, True),
    ServiceError: (503, True),
    accel.StaleRefError: (503, True),
    accel.HostDiedError: (503, True),
    accel.OutOfMemoryError: (503, True),
    accel.DeviceLostError: (503, False),
    accel.ClosedError: (503, False),
    accel.ActorStoppedError: (503, False),
    accel.DeadlineExceededError: (504, True),
    accel.InvalidArgumentError: (422, False),
    accel.UnknownTenantError: (403, False),
    accel.UnsupportedError: (422, False),
    accel.PoisonedInputError: (422, False),
    accel.DriverError: (500, False),
    accel.KernelFaultError: (500, False),
    accel.LibraryError: (500, False),
    accel.LinAlgError: (500, False),
    accel.NonFiniteError: (500, False),
    accel.CompileError: (500, False),
    accel.NotInitializedError: (500, False),
    accel.BackendUnavailableError: (500, False),
    accel.AccelError: (500, False),
}


@pytest.mark.parametrize(("kind", "expected"), EXPECTED.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_each_class_has_its_status(kind: type[accel.AccelError], expected: tuple[int, bool]) -> None:
    answer = error_answer(kind(SECRET, generation=3), device())
    assert (answer.status, answer.body["retryable"]) == expected
    assert answer.body["error"] == kind.__name__
    assert answer.body["generation"] == 3
    assert answer.body.keys() == {"error", "detail", "retryable", "generation"}
    assert ("Retry-After" in answer.headers) == (expected[1] and expected[0] in (429, 503))
    assert answer.headers["Cache-Control"] == "no-store"


def test_the_fault_that_lost_the_device_is_not_to_be_tried_again() -> None:
    answer = error_answer(accel.ContextPoisonedError("dead", retryable=False), device(DeviceState.LOST))
    assert (answer.status, answer.body["retryable"]) == (503, False)
    assert "Retry-After" not in answer.headers


def test_a_request_that_expired_as_a_suspect_of_a_fault_is_not_to_be_sent_again() -> None:
    answer = error_answer(accel.DeadlineExceededError("in quarantine", retryable=False), device())
    assert (answer.status, answer.body["retryable"]) == (504, False)


def test_every_public_error_class_is_decided_on_purpose() -> None:
    assert {getattr(errors, name) for name in errors.__all__} - {errors.FaultScope} == EXPECTED.keys() - {ServiceError}


@pytest.mark.parametrize("kind", EXPECTED, ids=lambda kind: kind.__name__)
def test_no_error_is_told_in_its_own_words(kind: type[accel.AccelError]) -> None:
    answer = error_answer(kind(SECRET, library="driver", code=999, remedy=SECRET), device())
    assert not {"cuModule", "0x7f", "/opt", "999", "driver"} & set(str(answer.body).split()), answer
    assert SECRET not in str(answer.body)


def test_only_what_is_wrong_with_the_clients_own_input_is_told_and_not_at_any_length() -> None:
    answer = error_answer(accel.InvalidArgumentError("input 'x'[3] is 300", argument="x"), device())
    assert (answer.status, answer.body["detail"], answer.body["field"]) == (422, "input 'x'[3] is 300", "x")
    long = "x" * 1_000_000
    assert len(str(error_answer(accel.InvalidArgumentError(long, argument=long), device()).body)) < 1000


def test_what_a_refused_client_is_not_told_is_logged_for_the_operator(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "accel"):
        error_answer(accel.UnsupportedError(SECRET), device())
        error_answer(accel.InvalidArgumentError("told", argument="x"), device())
    [record] = caplog.records
    assert (record.levelno, SECRET in record.getMessage()) == (logging.INFO, True)


@pytest.mark.parametrize("state", [state for state in DeviceState if state is not DeviceState.READY])
def test_a_full_queue_means_503_unless_the_device_is_ready(state: DeviceState) -> None:
    answer = error_answer(accel.MailboxFullError("full", retry_after=0.2), device(state))
    assert answer.status == 503
    assert answer.headers["Retry-After"] == "1"


@pytest.mark.parametrize(
    ("seconds", "header"), [(None, "1"), (0.0, "1"), (0.2, "1"), (1.0, "1"), (1.01, "2"), (12.5, "13"), (1e9, "60"), (float("inf"), "60")]
)
def test_retry_after_is_whole_seconds_and_bounded(seconds: float | None, header: str) -> None:
    assert error_answer(accel.MailboxFullError(retry_after=seconds), device()).headers["Retry-After"] == header


@pytest.mark.parametrize("scope", list(accel.FaultScope))
def test_the_scope_decides_about_classes_without_a_rule(scope: accel.FaultScope) -> None:
    answer = error_answer(accel.DriverError("x", scope=scope), device())
    assert answer.status == (500 if scope is accel.FaultScope.OP else 503)


def test_a_full_mailbox_of_an_actor_without_a_device_is_429() -> None:
    answer = error_answer(accel.MailboxFullError("full"), None)
    assert (answer.status, answer.body["generation"]) == (429, None)


def test_what_the_client_is_not_told_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "accel"):
        error_answer(accel.LibraryError(SECRET), device())
        error_answer(accel.ContextPoisonedError("the device has logged this one"), device())
    [record] = caplog.records
    assert SECRET in record.getMessage()


@pytest.mark.parametrize(("name", "framework"), [("fastapi", "fastapi"), ("aiohttp", "aiohttp")])
def test_without_the_framework_the_import_says_what_to_install(name: str, framework: str) -> None:
    program = f"import sys; sys.modules[{framework!r}] = None; import accel.integrations; import accel.integrations.{name}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("pip install '.[web]'")
