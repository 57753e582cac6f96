from __future__ import annotations

import logging

import pytest

import accel
from accel._log import get_logger


def test_a_record_names_the_code_that_logs(caplog: pytest.LogCaptureFixture) -> None:
    get_logger().warning("told", count=3, text="100%\nnext")
    get_logger().log(logging.ERROR, "told", level="pair", self="pair")
    assert [(record.filename, record.funcName) for record in caplog.records] == [
        ("test_log.py", "test_a_record_names_the_code_that_logs")
    ] * 2
    assert caplog.messages[0] == r"told count=3 text='100%\nnext'"
    assert getattr(caplog.records[0], "accel") == {"event": "told", "count": 3, "text": "100%\nnext"}  # noqa: B009 - of `extra`


@pytest.mark.parametrize(("error", "shown"), [(ValueError("odd"), True), (accel.LibraryError("broken"), False)])
def test_the_traceback_of_an_error_of_accel_is_shown_for_an_exception_only(
    error: Exception, shown: bool, caplog: pytest.LogCaptureFixture
) -> None:
    get_logger().error("failed", error=error, count=1)
    get_logger().exception("failed", error=error, count=1)
    assert [record.exc_info and record.exc_info[1] for record in caplog.records] == [error if shown else None, error]
    assert all(f"{type(error).__name__}: {str(error)[:4]}" in text for text in caplog.messages)
