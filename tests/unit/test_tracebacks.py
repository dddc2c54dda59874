"""An error of distnb in an ordinary cell shows the user's line, and none of distnb's own."""

from __future__ import annotations

import atexit

import pytest
from IPython.core.interactiveshell import InteractiveShell

from distnb.magics import tracebacks
from distnb.topology import parse_device


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
