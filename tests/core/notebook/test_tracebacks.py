"""An error of distnb in an ordinary cell shows the user's line, and none of distnb's own."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import pickle
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

import distnb
from distnb.frames import OWN, frames_of, frames_without
from distnb.magics import tracebacks
from distnb.notebook.programs.failures import raise_failure
from distnb.notebook.programs.outcome import Outcome
from distnb.topology import Device, Team, parse_device
from distnb.wire.messages import ErrorReport, Reply

TEAM = Team(engines=(0,), devices=(Device("cpu"),), generation=1, store_host="", store_port=0)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def test_the_traceback_ends_at_the_users_line() -> None:
    try:
        parse_device("cuda:x")
    except ValueError as error:
        trimmed = tracebacks.users_part(error.__traceback__)
    assert trimmed is not None
    assert trimmed.tb_next is None
    assert trimmed.tb_frame.f_code.co_filename == __file__


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    shell = InteractiveShell()
    tracebacks.show_plainly(shell)
    yield shell
    shell.history_manager.end_session()
    shell.history_manager.close()
    atexit.unregister(shell.atexit_operations)  # it would clear itself again, slowly


def shown(shell: InteractiveShell, capsys: pytest.CaptureFixture[str], source: str) -> str:
    """Return the traceback of a failing cell."""
    capsys.readouterr()
    assert shell.run_cell(source).error_in_exec is not None
    return _COLOURS.sub("", capsys.readouterr().out)


def test_a_shell_shows_the_shortened_traceback(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(shell, capsys, "from distnb.topology import parse_device\nparse_device('cuda:x')")
    assert "is not a device" in text
    assert "topology.py" not in text
    assert shell.run_cell("%tb").success
    assert "topology.py" in capsys.readouterr().out, "`%tb` shows it in full"


def test_causes_of_a_users_error_are_shortened_too(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    source = """
from distnb.topology import parse_device
try:
    parse_device('cuda:x')
except ValueError as error:
    raise RuntimeError('mine') from error
"""
    text = shown(shell, capsys, source)
    assert "is not a device" in text
    assert "----> 3     parse_device('cuda:x')" in text
    assert "----> 5     raise RuntimeError('mine') from error" in text
    assert "topology.py" not in text


@pytest.mark.parametrize("strategy", ["distnb.OneDeviceStrategy('cpu')", "distnb.get_strategy()"])
def test_an_error_of_a_dataset_shows_the_loop_and_the_dataset(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str], strategy: str
) -> None:
    source = f"""
import distnb, torch
class Five(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return 1 / (index - 5)
for _ in {strategy}.distribute_dataset(Five(), batch_size=4):
    pass
"""
    text = shown(shell, capsys, source)
    assert "return 1 / (index - 5)" in text
    assert "----> 7 for _ in" in text
    assert os.path.join("distnb", "input") not in text
    assert "ZeroDivisionError" in text


def test_frames_of_torch_are_omitted_for_errors_of_distnb(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    source = """
import distnb, torch
torch.nn.Linear(2, 2)(distnb.PerReplica([torch.ones(2)] * 2))
"""
    text = shown(shell, capsys, source)
    assert "----> 2 torch.nn.Linear" in text
    assert "module.py" not in text
    assert "strategy.run(step, args=(value,))" in text
    assert torch.__file__ not in text


def test_a_defect_of_distnb_is_shown_in_full_and_a_builtins_error_is_not(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "errors.py" in shown(shell, capsys, "from distnb.errors import closest\nclosest(5, [])")
    text = shown(shell, capsys, "import distnb\ndistnb.OneDeviceStrategy('cpu').run(len, args=(5,))")
    assert "in_process.py" not in text
    assert "has no len()" in text
    plain = shown(shell, capsys, "import json\njson.loads('{')")
    assert "json" in plain
    assert "decoder.py" in plain


_MANAGER = """
import contextlib

@contextlib.contextmanager
def manager():
    yield
    raise ValueError("on purpose")
"""


@pytest.mark.parametrize(("file", "shown"), [("users.py", True), (os.path.join(OWN, "strategies", "made.py"), False)])
def test_frames_of_contextlib_are_shown_with_the_users_context_managers_only(file: str, shown: bool) -> None:
    made: dict[str, Any] = {}
    exec(compile(_MANAGER, file, "exec"), made)
    with pytest.raises(ValueError, match="on purpose") as raised, made["manager"]():
        pass
    kept = [each.tb_frame.f_code.co_filename for each in frames_without(frames_of(raised.value.__traceback__), (OWN,))]
    assert (contextlib.__file__ in kept, file in kept, kept[0]) == (shown, shown, __file__)


def test_a_function_called_by_distnb_is_shown_without_its_callers() -> None:
    def fails() -> None:
        parse_device("cuda:x")

    with pytest.raises(ValueError, match="is not a device") as raised:
        distnb.OneDeviceStrategy("cpu").run(fails)
    trimmed = tracebacks.users_part(raised.value.__traceback__)
    names = []
    while trimmed is not None:
        names.append(trimmed.tb_frame.f_code.co_name)
        trimmed = trimmed.tb_next
    assert names == ["test_a_function_called_by_distnb_is_shown_without_its_callers", "fails"]


def test_a_replicas_error_shows_the_call_in_the_cell() -> None:
    shell = InteractiveShell()
    shell.user_ns["raising"] = functools.partial(raise_failure, _failed(), TEAM, callers_lines=lambda error: [])
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


def test_a_replicas_error_is_as_short_as_xmode_asks(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.user_ns["raising"] = functools.partial(raise_failure, _failed(), TEAM)
    assert shown(shell, capsys, "raising()").splitlines()[:2] == ["Replica 0 of 1 (cpu:0) raised:", "where"]
    shell.run_line_magic("xmode", "Plain")
    assert shown(shell, capsys, "raising()").splitlines()[:2] == ["Replica 0 of 1 (cpu:0) raised:", "where"]
    shell.run_line_magic("xmode", "Minimal")
    assert shown(shell, capsys, "raising()").strip() == "RuntimeError: there"


def _failed() -> Outcome:
    outcome = Outcome(1, (0,))
    error = pickle.dumps(RuntimeError("there"))
    outcome.receive(
        0,
        Reply(
            program=1,
            status="error",
            error=ErrorReport(
                pickled=error, type_name="RuntimeError", text="there", traceback=("where",), rendered=("where",)
            ),
        ),
    )
    return outcome
