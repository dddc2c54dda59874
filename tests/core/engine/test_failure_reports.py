"""A replica's report of an exception."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from distnb.engine.debugging import error_reports
from distnb.topology import parse_device
from distnb.wire.messages import ErrorReport


def report_of(raising: Callable[[], object]) -> ErrorReport:
    with pytest.raises(BaseException) as raised:  # noqa: PT011
        raising()
    return error_reports.report(raised.value)


def test_an_exception_whose_message_fails_is_reported() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise LookupError

    def raising() -> None:
        raise Mute

    report = report_of(raising)
    assert report.type_name.endswith("Mute")
    assert "cannot be shown: LookupError" in report.text
    assert report.rendered


def test_an_infinite_recursion_shows_its_two_ends() -> None:
    def again(n: int) -> int:
        return again(n + 1)

    report = report_of(lambda: again(0))
    assert "RecursionError" in report.rendered[-2]
    assert "frames in the middle are left out" in report.traceback[-1]
    assert len("".join(report.traceback)) < 3000


def test_frames_of_distnb_are_hidden_for_all_errors_in_the_chain() -> None:
    def users() -> None:
        try:
            parse_device("cuda:x")
        except ValueError as error:
            raise RuntimeError("outer") from error

    report = report_of(users)
    assert "direct cause" in "\n".join(report.traceback)
    assert "topology.py" not in "\n".join(report.traceback)
    with pytest.raises(ValueError, match="is not a device") as raised:
        parse_device("cuda:x")
    raised.value.__traceback__ = raised.value.__traceback__.tb_next  # type: ignore[union-attr]
    alone = error_reports.report(raised.value)
    assert raised.value.__traceback__ is not None
    assert "topology.py" not in "\n".join(alone.traceback)
    assert "is not a device" in alone.traceback[-1]


def test_a_group_shows_its_members() -> None:
    def raising() -> None:
        raise ExceptionGroup("many", [ValueError("one"), TypeError("two")])

    report = report_of(raising)
    assert "ValueError: one" in "\n".join(report.traceback)
    assert "TypeError: two" in "\n".join(report.traceback)


def test_only_the_rendered_form_has_colours() -> None:
    report = report_of(lambda: 1 / 0)
    assert "\x1b[" in "".join(report.rendered)
    assert "\x1b[" not in "".join(report.traceback)
    assert "ZeroDivisionError: division by zero" in report.traceback[-1]
