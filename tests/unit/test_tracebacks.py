"""An error of distnb in an ordinary cell shows the user's line, and none of distnb's own."""

from __future__ import annotations

import atexit
import functools
import pickle
import re
import sys

import pytest
from IPython.core.interactiveshell import InteractiveShell

import distnb
from distnb.magics import tracebacks
from distnb.session.dispatch import Outcome
from distnb.session.failures import raise_failure
from distnb.topology import Device, Team, parse_device
from distnb.wire.messages import ErrorReport, Reply

TEAM = Team((0,), (Device("cpu"),), 1, "", 0)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def test_the_traceback_ends_at_the_users_line() -> None:
    try:
        parse_device("cuda:x")
    except ValueError as error:
        trimmed = tracebacks.users_part(error.__traceback__)
    assert trimmed is not None
    assert trimmed.tb_next is None
    assert trimmed.tb_frame.f_code.co_filename == __file__


def test_it_is_shown_so_in_a_shell(capsys: pytest.CaptureFixture[str]) -> None:
    shell = InteractiveShell()
    tracebacks.install(shell)
    try:
        result = shell.run_cell("from distnb.topology import parse_device\nparse_device('cuda:x')")
        assert type(result.error_in_exec).__name__ == "OptionError"
    finally:
        tracebacks.remove(shell)
        shell.history_manager.end_session()
        shell.history_manager.close()
        atexit.unregister(shell.atexit_operations)  # it would clear itself again, slowly
    shown = capsys.readouterr().out
    assert "is no device" in shown
    assert "topology.py" not in shown
    assert shell.custom_exceptions == ()


def test_a_function_that_distnb_calls_is_shown_and_not_what_calls_it() -> None:
    def fails() -> None:
        parse_device("cuda:x")

    with pytest.raises(ValueError, match="is no device") as raised:
        distnb.OneDeviceStrategy("cpu").run(fails)
    trimmed = tracebacks.users_part(raised.value.__traceback__)
    names = []
    while trimmed is not None:
        names.append(trimmed.tb_frame.f_code.co_name)
        trimmed = trimmed.tb_next
    assert names == ["test_a_function_that_distnb_calls_is_shown_and_not_what_calls_it", "fails"]


def test_a_replicas_error_shows_where_the_cell_called_it() -> None:
    shell = InteractiveShell()
    shell.user_ns["raising"] = functools.partial(raise_failure, _failed(), TEAM, called=True)
    drawn: list[str] = []

    def show(_shell: object, _kind: object, error: BaseException, *_: object, **__: object) -> None:
        drawn.extend(tracebacks.callers_lines(shell, error))

    shell.set_custom_exc((RuntimeError,), show)
    try:
        shell.run_cell("def f(x):\n    return raising()\n\nf(3)", store_history=True)
        with pytest.raises(RuntimeError) as raised:
            raise_failure(_failed(), TEAM)
        assert tracebacks.callers_lines(shell, raised.value) == []
    finally:
        shell.history_manager.end_session()
        shell.history_manager.close()
        atexit.unregister(shell.atexit_operations)
    text = _COLOURS.sub("", "\n".join(drawn))
    assert "----> 4 f(3)" in text
    assert "----> 2     return raising()" in text
    assert "failures.py" not in text
    assert "Traceback" not in text
    assert sys.last_traceback is not None
    assert sys.last_traceback.tb_next.tb_frame.f_locals["x"] == 3


def _failed() -> Outcome:
    outcome = Outcome(1, (0,))
    error = pickle.dumps(RuntimeError("there"))
    outcome.take(0, Reply(1, "error", ErrorReport(error, "RuntimeError", "there", ("where",), ("where",))))
    return outcome
