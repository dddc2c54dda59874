"""The magics in an IPython shell, against a session that only records its calls."""

from __future__ import annotations

import atexit
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

import distnb
from distnb.cluster.start_options import StartOptions
from distnb.cluster_resolver import (
    KubernetesClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
)
from distnb.errors import OptionError
from distnb.magics import load_ipython_extension
from distnb.magics.cell_request import read_request
from distnb.magics.cell_text import lines_above, padded
from distnb.magics.commands import COMMANDS
from distnb.notebook import compose as sessions
from distnb.notebook.front_end import FrontEnd
from distnb.options import StrategySpec
from distnb.runtime.this_process import this_process
from distnb.widgets.front import Front
from tests.browser.replay import ReplaySession, install


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    made = InteractiveShell()
    load_ipython_extension(made)
    yield made
    sessions._session = None
    sessions.attach(FrontEnd())
    this_process.remote = None
    made.history_manager.end_session()
    made.history_manager.close()
    atexit.unregister(made.atexit_operations)  # it would clear itself again, slowly


@pytest.fixture
def session(shell: InteractiveShell) -> ReplaySession:
    return install(2)


def run(shell: InteractiveShell, source: str) -> tuple[Any, str]:
    """Run a cell, and return its result and output."""
    with capture_output() as captured:
        result = shell.run_cell(source)
    return result, re.sub(r"\x1b\[[0-9;]*m", "", captured.stdout + captured.stderr)


def error_of(shell: InteractiveShell, source: str) -> str:
    """Return the text that a failing cell shows, once and without frames of ours."""
    result, text = run(shell, source)
    assert not result.success
    message = str(result.error_before_exec or result.error_in_exec)
    assert text.count(message) == 1
    assert "distnb/magics" not in text
    return message


# -- stop ------------------------------------------------------------------------------------------------------------


def test_a_stop_before_a_cell_begins_ends_it(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> None:
    begin_cell = Front.begin_cell

    def pressed(front: Front, number: int) -> None:
        signal.raise_signal(signal.SIGINT)
        begin_cell(front, number)

    with monkeypatch.context() as patch:
        patch.setattr(Front, "begin_cell", pressed)
        result, text = run(shell, "import time\ntime.sleep(60)\nran = True")
        assert isinstance(result.error_in_exec or result.error_before_exec, KeyboardInterrupt)
    assert "Error in callback" not in text
    assert "ran" not in shell.user_ns
    assert run(shell, "ran = True")[0].success


# -- loading ---------------------------------------------------------------------------------------------------------


def test_loading_twice_changes_nothing(shell: InteractiveShell) -> None:
    before = len(shell.input_transformer_manager.cleanup_transforms), len(shell.ast_transformers)
    load_ipython_extension(shell)
    assert (len(shell.input_transformer_manager.cleanup_transforms), len(shell.ast_transformers)) == before


def test_loading_needs_no_torch() -> None:
    code = "import sys, distnb.magics.extension as e; assert not {'torch', 'anywidget', 'jedi'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# -- %distnb start ---------------------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the options with which the magic starts a cluster; none is started."""
    given: dict[str, Any] = {}

    def start(options: StartOptions, on_progress: object) -> None:
        given.update(vars(options))
        raise OptionError("nothing is started here")

    monkeypatch.setattr("distnb.notebook.compose.start_with", start)
    return given


@pytest.mark.features
def test_start_accepts_launchers_and_resolvers(
    shell: InteractiveShell, started: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "--launcher mpi --hosts a,b --per-host 2 --launcher-args '--mca x y' --interface eth0"
    assert "nothing is started here" in run(shell, f"%distnb start {line}")[1]
    assert started["on"] == distnb.MPI("a,b", 2, arguments=["--mca", "x", "y"], interface="eth0")
    run(shell, "%distnb start --workers 3 --ps 2")
    assert (started["on"], started["workers"], started["ps"]) == (None, 3, 2)
    for name, value in {"JOB_ID": "7", "JOB_NODELIST": "n[1-2]"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    run(shell, "%distnb start --resolver slurm")
    assert isinstance(started["on"], distnb.Slurm)
    assert isinstance(started["on"].machines, SlurmClusterResolver)
    run(shell, "%distnb start --resolver tfconfig --secret s")
    assert isinstance(started["on"].cluster_resolver, TFConfigClusterResolver)
    assert started["on"].secret == "s"
    run(shell, "%distnb start --resolver kubernetes")
    assert isinstance(started["on"].cluster_resolver, KubernetesClusterResolver)
    shell.user_ns["mine"] = made = SimpleClusterResolver({"worker": ["a:1"]})
    run(shell, "%distnb start --resolver mine")
    assert started["on"] == distnb.Servers(made)
    shell.user_ns["mine"] = 5
    started.clear()
    assert "--resolver mine: mine is a int" in run(shell, "%distnb start --resolver mine")[1]
    assert "there is no slrum (did you mean slurm?)" in run(shell, "%distnb start --resolver slrum")[1]
    assert not started


# -- lines of %%distribute -------------------------------------------------------------------------------------------


def test_names_make_the_specs_of_their_classes() -> None:
    assert read_request("default", {}).spec == StrategySpec(kind="default")
    assert read_request("one_device --devices /gpu:1", {}).spec == StrategySpec(kind="one_device", devices=("cuda:1",))
    assert read_request("mirrored", {}).spec == StrategySpec(kind="mirrored")
    coordinated = read_request("parameter_server", {})
    assert coordinated.spec == StrategySpec(kind="parameter_server")
    assert coordinated.local
    assert read_request("central_storage -n 2", {}).spec == StrategySpec(
        kind="central_storage", devices=(), num_replicas=2
    )
    assert read_request("mirrored -n 3", {}).spec == StrategySpec(kind="mirrored", devices=(), num_replicas=3)
    assert read_request("mirrored --gradients sum", {}).spec == StrategySpec(kind="mirrored")
    request = read_request("mirrored --devices cuda:0,cuda:0 --oversubscribe --gradients mean", {})
    assert request.spec == StrategySpec(
        kind="mirrored",
        devices=("cuda:0", "cuda:0"),
        num_replicas=0,
        options=(("gradient_reduction", "mean"), ("oversubscribe", True)),
    )


def test_the_name_and_the_class_make_the_same_object() -> None:
    from distnb.strategies import resolve

    this_process.remote = None
    made = distnb.MirroredStrategy(devices=["cuda:0", "cuda:1"], gradient_reduction="mean")
    assert resolve(read_request("mirrored --devices cuda:0,cuda:1 --gradients mean", {}).spec) is made
    central = distnb.CentralStorageStrategy("cpu:0,cpu:1", gradient_reduction="mean")
    assert resolve(read_request("central_storage --devices cpu:0,cpu:1 --gradients mean", {}).spec) is central
    assert resolve(read_request("one_device --devices cpu:0", {}).spec) is distnb.OneDeviceStrategy("cpu:0")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", ["needs a strategy", "default, one_device, mirrored"]),
        ("mirorred", ["mirorred", "did you mean mirrored"]),
        ("tpu --devices cpu:0", ["cpu:0 is no tpu device"]),
        ("x", ["'x' is a int", "not a strategy"]),
        ("mirrored -n 0", ["-n: 0", "1 or more"]),
        ("mirrored -n two", ["two", "whole number"]),
        ("mirrored -n", ["-n", "expected one argument"]),
        ("mirrored --gradients max", ["max", "sum", "mean"]),
        ("mirrored --device cuda:0", ["--device", "did you mean --devices"]),
        ("mirrored --devices gpu:x", ["gpu:x", "cuda:1"]),
        ("mirrored --devices cuda:0,cuda:0", ["twice", "--oversubscribe"]),
        ("central_storage --oversubscribe", ["cannot honour --oversubscribe"]),
        ("central_storage --devices cpu:0,cpu:0", ["twice", "Name each once"]),
        ("central_storage --devices cpu:0,cuda:1", ["in the host's memory", "one kind"]),
        ("mirrored -n 3 --devices cuda:0,cuda:1", ["contradict"]),
        ("mirrored extra", ["extra"]),
        ("mirrored 'open", ["cannot be read"]),
        ("default -n 2", ["cannot honour -n", "own process"]),
        ("default --gradients mean", ["cannot honour --gradients"]),
        ("one_device --devices cuda:0,cuda:1", ["one device", "got 2"]),
        ("one_device --oversubscribe", ["cannot honour --oversubscribe"]),
        ("parameter_server -n 2", ["cannot honour -n", "own process"]),
    ],
)
def test_the_error_for_invalid_options_names_the_cure(line: str, words: list[str]) -> None:
    with pytest.raises(OptionError) as caught:
        read_request(line, {"x": 1})
    for word in words:
        assert word in str(caught.value)


# -- cells on replicas -----------------------------------------------------------------------------------------------


def test_a_cell_keeps_its_line_numbers(shell: InteractiveShell, session: ReplaySession) -> None:
    result, text = run(shell, "%%distribute mirrored -n 2\nx = 1\n# replay: lines\n")
    assert result.success
    source, spec, keywords = session.played[0]
    assert source.split("\n")[:3] == ["# %%distribute mirrored -n 2", "x = 1", "# replay: lines"]
    assert spec == StrategySpec(kind="mirrored", devices=(), num_replicas=2)
    assert keywords["label"] == f"Cell In[{shell.execution_count}]"
    assert keywords["only"] is None
    assert text == "[0-1] hello\n[0] I am 0\n[1] I am 1\n"


def test_a_cell_is_named_by_its_number_in_the_notebook(shell: InteractiveShell, session: ReplaySession) -> None:
    for number in (1, 2):
        with capture_output():
            shell.run_cell("%%distribute mirrored\n# replay: lines\n", store_history=True)
        assert session.played[-1][2]["label"] == f"Cell In[{number}]"


def test_output_of_a_new_cluster_appears_in_its_own_cell(shell: InteractiveShell, session: ReplaySession) -> None:
    for _ in range(3):
        assert "[0-1] hello" in run(shell, "%%distribute mirrored\n# replay: lines\n")[1]
    install(2)  # counts its programs from one again
    for _ in range(3):
        assert "[0-1] hello" in run(shell, "%%distribute mirrored\n# replay: lines\n")[1]


def test_a_syntax_error_is_found_before_a_cluster_is_started(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "start_with", lambda *_, **__: pytest.fail("a cluster was started"))
    for body, line, message in (
        ("x = (1\n", "x = (1", "'(' was never closed"),
        ("x = 1\nreturn x\n", "return x", "'return' outside function"),
        ("if True:\n    x = 1\n  y = 2\n", "y = 2", "unindent does not match"),
    ):
        result, text = run(shell, f"%%distribute mirrored\n{body}")
        assert isinstance(result.error_in_exec, SyntaxError)
        assert f":{result.error_in_exec.lineno}\n    {line}\n" in text
        assert text.count(message) == 1
        assert "Traceback" not in text
        assert "distnb/" not in text


def test_ipythons_syntax_is_accepted(shell: InteractiveShell, session: ReplaySession) -> None:
    assert run(shell, "%%distribute mirrored\n# replay: lines\n%time x = 1\nawait x\n!ls\n")[0].success


def test_other_syntax_errors_look_as_usual(shell: InteractiveShell) -> None:
    source = "exec('x = (1')"
    _, ours = run(shell, source)
    shell.set_custom_exc((), None)  # type: ignore[arg-type]
    _, theirs = run(shell, source)
    assert ours == theirs


def test_line_numbers_are_right_under_another_magic() -> None:
    body = "a\nb\n"
    assert lines_above("%%time\n%%distribute mirrored\na\nb\n", body) == 2
    assert padded(2, "mirrored", body) == "\n# %%distribute mirrored\na\nb\n"
    assert lines_above("something else", body) is None
    assert lines_above(body, body) == 0, "%autodistribute"


def test_a_cell_that_calls_the_magic_keeps_its_lines_in_tracebacks(
    shell: InteractiveShell, session: ReplaySession
) -> None:
    call = "get_ipython().run_cell_magic('distribute', 'mirrored', '# replay: lines' + 5 * chr(10))"
    _, text = run(shell, f"{call}\ndef f():\n    raise ValueError\nf()")
    assert "[0-1] hello" in text
    assert re.search(r"-> \S*4\S* \S*f", text), text
    assert re.search(r"-> \S*3\S* .*raise", text), text


@pytest.mark.parametrize(
    ("magics", "shown"),
    [
        ("%%time", "Wall time"),
        ("%%timeit -n 1 -r 1", "per loop"),
        ("%%prun", "[0-1] hello"),
        ("%%capture captured", "[0-1] hello"),
        ("%%time\n%%capture captured", "Wall time"),
    ],
)
@pytest.mark.parametrize("word", ["mirrored", "default"])
def test_magics_that_run_a_cell_may_precede(
    shell: InteractiveShell, session: ReplaySession, magics: str, shown: str, word: str
) -> None:
    shown = shown if word == "mirrored" else shown.replace("[0-1] ", "")
    result, text = run(shell, f"{magics}\n%%distribute {word}\n# replay: lines\nprint('hello')")
    assert result.success
    captured = shell.user_ns["captured"].stdout if "captured" in magics else ""
    assert shown in text + captured
    assert "hello" in (captured if "captured" in magics else text)
    if word == "mirrored":
        above = magics.count("\n") + 1
        assert session.played[0][0].split("\n")[above - 1 : above + 2] == [
            "",
            "# %%distribute mirrored",
            "# replay: lines",
        ]


def test_output_appears_before_the_error(shell: InteractiveShell, session: ReplaySession) -> None:
    result, text = run(shell, "%%distribute mirrored\n# replay: train 1 1\n")
    assert not result.success
    assert isinstance(result.error_in_exec, ValueError)
    assert text.index("epoch 1") < text.index("ValueError: wrong shape")
    assert text.count("ValueError: wrong shape") == 1


def test_a_cell_without_a_cluster_starts_one_and_reports_it(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def start(options: StartOptions, on_progress: object) -> Any:
        asked.append((options.n, options.devices))
        return install(2)

    monkeypatch.setattr(sessions, "start_with", start)
    _, text = run(shell, "%%distribute mirrored -n 2\n# replay: lines\n")
    assert "No cluster is running: starting one with 2 engines." in text
    assert asked == [(2, None)]
    assert "[0-1] hello" in text


def test_replicas_that_the_cluster_would_lack_are_refused_before_it_starts(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "start_with", lambda *_, **__: pytest.fail("a cluster was started"))
    for options in ("--replicas 5", "-n 3 --replicas 0,3", "--devices cpu:0,cpu:1 --replicas 2-3"):
        assert "There is no replica" in error_of(shell, f"%%distribute mirrored {options}\n1")


def test_misspelt_magics_are_named(shell: InteractiveShell) -> None:
    for magic, meant in {
        "%%distributed": "%%distribute",
        "%%distirbute": "%%distribute",
        "%distributed": "%%distribute",
        "%%distnb": "%distnb",
        "%distbn": "%distnb",
        "%%autodistribute": "%autodistribute",
        "%autodistributed": "%autodistribute",
    }.items():
        for end in ("", "\n") if magic.startswith("%%") else ("",):
            assert error_of(shell, f"{magic} mirrored\n1{end}").endswith(f"Did you mean {meant}?")
    assert "Did you mean" not in error_of(shell, "%%nothing\n1")


def test_nested_cell_magics_are_refused_by_name(shell: InteractiveShell, session: ReplaySession) -> None:
    message = error_of(shell, "%%distribute mirrored\nx = 1\n%%time\ny = 2\n")
    assert "%%time in line 3" in message
    assert "above %%distribute" in message
    assert session.played == []


def test_text_that_resembles_a_nested_magic_is_allowed(shell: InteractiveShell) -> None:
    result, _ = run(shell, '%%distribute default\nx = """\n%%time\n"""\n# %%time\n"%%time"\n%time y = 1\n')
    assert result.success
    assert "%%bash in line 4" in error_of(shell, "%%distribute default\nx = 1\n\n%%bash\nls\n")


def test_code_above_the_magic_is_refused_with_the_cure(shell: InteractiveShell, session: ReplaySession) -> None:
    for source in (
        "# train\n%%distribute mirrored\nx",
        "\n# a\n\n%%distribute default\nx",
        "import os\n%%distribute mirrored\nx",
        "for i in range(3):\n    pass\n\n%%distribute mirrored -n 2\nx",
        "%distribute mirrored",
    ):
        assert "must be the first line" in error_of(shell, source)
    assert session.played == []


def test_text_that_contains_the_magic_is_left_unchanged(shell: InteractiveShell, tmp_path: Any) -> None:
    result, _ = run(shell, 'text = """\n%%distribute mirrored\n"""\ntext')
    assert result.result == "\n%%distribute mirrored\n"
    run(shell, f"%%writefile {tmp_path}/text\n%%distribute mirrored\n")
    assert (tmp_path / "text").read_text() == "%%distribute mirrored\n"


def test_a_typo_is_reported_with_a_suggestion(shell: InteractiveShell) -> None:
    assert "did you mean mirrored" in error_of(shell, "%%distribute miror\nx = 1")


# -- cells in the notebook -------------------------------------------------------------------------------------------


def test_default_runs_locally_with_plain_objects(shell: InteractiveShell) -> None:
    result, text = run(shell, "%%distribute default\nx = [1]\nprint(strategy)\nx")
    assert result.result == [1]
    assert text.startswith("DefaultStrategy()")
    assert shell.user_ns["x"] == [1]


def test_default_fetches_only_names_in_its_own_lines(
    shell: InteractiveShell, session: ReplaySession, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(session.namespace, "localise", lambda text: asked.append(text) or nullcontext())
    assert run(shell, "%%distribute default\ny = x if False else 1\n")[0].success
    assert asked == ["# %%distribute default\ny = x if False else 1\n"]


def test_default_errors_are_those_of_the_cell(shell: InteractiveShell) -> None:
    result, text = run(shell, "%%distribute default\nx = 1\n1 / 0\n")
    assert isinstance(result.error_in_exec, ZeroDivisionError)
    assert text.count("ZeroDivisionError: division by zero") == 1
    assert "----> 3 1 / 0" in text
    assert "%%distribute default" in text
    assert "distnb/" not in text
    assert "run_cell_magic" not in text


def test_default_supports_await_and_future_imports(shell: InteractiveShell) -> None:
    result, _ = run(shell, "%%distribute default\nimport asyncio\nawait asyncio.sleep(0)\ny = 5")
    assert result.success
    source = "%%distribute default\n'doc'\nfrom __future__ import annotations  # why\ndef f(x: nothing) -> None: ...\n"
    result, text = run(shell, source)
    assert result.success, text
    assert run(shell, "strategy")[0].result.spec.kind == "default"


def test_one_device_sets_its_device(shell: InteractiveShell) -> None:
    result, _ = run(shell, "%%distribute one_device --devices cpu:0\nstrategy")
    assert result.result is distnb.OneDeviceStrategy("cpu:0")


def test_a_strategy_object_can_be_named(shell: InteractiveShell, session: ReplaySession) -> None:
    run(shell, "import distnb\nmine = distnb.OneDeviceStrategy('cpu:0')\nmy_default = distnb.get_strategy()")
    assert run(shell, "%%distribute mine\nstrategy is mine")[0].result is True
    assert run(shell, "%%distribute my_default\nstrategy is my_default")[0].result is True
    assert "whose options were set when it was created" in error_of(shell, "%%distribute mine -n 2\nx")


def test_the_users_strategy_variable_is_kept(shell: InteractiveShell) -> None:
    run(shell, "import distnb\nstrategy = 'mine'")
    run(shell, "%%distribute default\nkind = strategy.spec.kind")
    assert shell.user_ns["kind"] == "default"
    assert shell.user_ns["strategy"] == "mine"


def test_a_cell_that_assigns_strategy_keeps_what_it_assigned(shell: InteractiveShell) -> None:
    run(shell, "strategy = 'mine'")
    run(shell, "%%distribute default\nstrategy = 'new'")
    assert shell.user_ns["strategy"] == "new"


def test_default_can_be_called_as_a_function(shell: InteractiveShell) -> None:
    with capture_output() as captured:
        shell.run_cell_magic("distribute", "default", "z = 3\nprint(z, strategy)\n")
    assert captured.stdout == "3 DefaultStrategy()\n"
    with pytest.raises(ZeroDivisionError):
        shell.run_cell_magic("distribute", "default", "1/0\n")


# -- %distnb ---------------------------------------------------------------------------------------------------------


@pytest.mark.features
def test_help_and_unknown_commands_are_answered(shell: InteractiveShell) -> None:
    for line in ("%distnb", "%distnb help", "%distnb -h", "%distnb --help", "%distnb?"):
        text = run(shell, line)[1]
        assert "%distnb start [-n N]" in text
        assert "--launcher-args" in text
        for command in COMMANDS:
            assert f"%distnb {command}" in text
    assert "did you mean start" in error_of(shell, "%distnb strat")
    assert "whole number" in error_of(shell, "%distnb start -n many")
    assert "'now' is not understood" in error_of(shell, "%distnb stop now")
    assert "whole number" in error_of(shell, "%distnb restart first")
    assert "not both" in error_of(shell, "%distnb restart 1 --missing")
    assert "invalid choice: 'loud'" in error_of(shell, "%distnb live loud")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_does_nothing_else(
    shell: InteractiveShell, session: ReplaySession, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(sessions, "start_with", lambda *_, **__: pytest.fail("a cluster was started"))
    monkeypatch.setattr(session, "stop", lambda: pytest.fail("the cluster was stopped"))
    for line in (f"%distnb {command} -h", f"%distnb {command} --help"):
        result, text = run(shell, line)
        assert result.success
        assert f"%distnb {command}" in text
    assert sessions.current() is session


def test_distribute_prints_its_help(shell: InteractiveShell, session: ReplaySession) -> None:
    cells = ["%%distribute -h", "%%distribute --help\nx = 1", "%%distribute mirrored -h\n1 / 0", "%%distribute?"]
    cells += ["%%distribute default -h\n1 / 0", "%%distribute default -h"]
    for cell in cells:
        result, text = run(shell, cell)
        assert result.success
        for word in ("--devices", "--gradients {sum,mean}", "central_storage", "mirrored"):
            assert word in text
    assert session.played == []
    assert "x" not in shell.user_ns


def test_a_cell_without_a_body_is_an_error_for_every_strategy(shell: InteractiveShell) -> None:
    for word in ("default", "mirrored"):
        assert "the cell is empty below its first line" in error_of(shell, f"%%distribute {word}")


def test_commands_without_a_cluster_report_it(shell: InteractiveShell) -> None:
    assert "No cluster is running" in run(shell, "%distnb status")[1]
    assert "No cluster is running" in run(shell, "%distnb stop")[1]
    assert "%distnb start" in error_of(shell, "%distnb restart")
    assert "cpu:0" in run(shell, "%distnb devices")[1] or "cuda" in run(shell, "%distnb devices")[1]


def test_the_users_strategy_variable_is_kept_after_such_cells_too(shell: InteractiveShell) -> None:
    run(shell, "import distnb\nmine = strategy = distnb.OneDeviceStrategy('cpu:0')")
    run(shell, "%%distribute strategy\npass")
    run(shell, "%%distribute default\nassert strategy is not mine")
    assert run(shell, "strategy is mine")[0].result is True


def test_a_cell_without_an_end_event_ends_when_the_next_begins(
    shell: InteractiveShell, session: ReplaySession, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(shell, "strategy = 'mine'")
    trigger = shell.events.trigger

    def stopped(event: str, *args: Any) -> None:
        if event == "post_execute":
            monkeypatch.undo()
            raise KeyboardInterrupt  # between two steps of IPython's own
        trigger(event, *args)

    monkeypatch.setattr(shell.events, "trigger", stopped)
    with pytest.raises(KeyboardInterrupt):
        shell.run_cell("%%distribute default\nassert strategy != 'mine'")
    assert run(shell, "strategy")[0].result == "mine"
    assert "[0-1] hello" in run(shell, "%%distribute mirrored\n# replay: lines\n")[1]


def test_status_and_output_are_printed(shell: InteractiveShell, session: ReplaySession, tmp_path: Any) -> None:
    assert "cpu:1" in run(shell, "%distnb status")[1]
    run(shell, "%%distribute mirrored\n# replay: lines\n")
    run(shell, "%%distribute mirrored\n# replay: quiet\n")
    text = run(shell, "%distnb output")[1]
    assert "── replica 1 ──\nhello\nI am 1\n" in text
    assert "I am 0" not in run(shell, "%distnb output 1")[1]
    assert "The replicas with output: 0, 1" in error_of(shell, "%distnb output 7")
    run(shell, f"%distnb output --save {tmp_path / 'all.txt'}")
    assert "I am 1" in (tmp_path / "all.txt").read_text()


def test_drift_can_be_checked_after_each_cell(shell: InteractiveShell, session: ReplaySession) -> None:
    assert "Nothing is mirrored." in run(shell, "%distnb check")[1]
    assert "`nothing` is not a variable" in error_of(shell, "%distnb check nothing")
    run(shell, "here = 1")
    assert "`here` lives in the notebook" in error_of(shell, "%distnb check here")


# -- the live view in a terminal -------------------------------------------------------------------------------------


def test_a_terminal_shows_a_final_line(shell: InteractiveShell, session: ReplaySession) -> None:
    _, text = run(shell, "%%distribute mirrored\n# replay: train 0.5\n")
    assert "mirrored · 2 replicas · ended" in text
    assert "loss: " in text


def test_live_values_work_in_an_ordinary_cell(shell: InteractiveShell) -> None:
    _, text = run(shell, "import distnb\nfor i in range(3): distnb.live(loss=3 - i)")
    assert "loss: 3 → 1" in text


def test_a_quick_cell_shows_no_view(shell: InteractiveShell, session: ReplaySession) -> None:
    assert run(shell, "%%distribute mirrored\n# replay: lines\n")[1].count("\n") == 3


# -- completion ------------------------------------------------------------------------------------------------------


def complete(shell: InteractiveShell, text: str) -> set[str]:
    with provisionalcompleter():
        return {completion.text for completion in shell.Completer.completions(text, len(text))}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("%%distribute mi", {"mirrored"}),
        ("%%distribute ", {"default", "one_device", "mirrored", "my_strategy"}),
        ("%%distribute mirrored --g", {"--gradients"}),
        ("%%distribute mirrored --gradients m", {"mean"}),
        ("%distnb sta", {"start", "status"}),
        ("%distnb live w", {"widget"}),
        ("%autodistribute m", {"mirrored", "multi_worker"}),
        ("%autodistribute o", {"off", "one_device"}),
        ("%autodistribute mirrored --t", {"--time"}),
    ],
)
def test_magics_complete_their_arguments(shell: InteractiveShell, line: str, expected: set[str]) -> None:
    shell.user_ns["my_strategy"] = distnb.OneDeviceStrategy("cpu:0")
    assert expected <= complete(shell, line)


@pytest.mark.features
def test_every_option_of_start_completes(shell: InteractiveShell) -> None:
    options = set(re.findall(r"--[a-z-]+", run(shell, "%distnb start -h")[1]))
    assert {"--hosts", "--launcher", "--secret"} <= options <= complete(shell, "%distnb start --")


def test_autodistribute_applies_until_it_is_off(shell: InteractiveShell, session: ReplaySession) -> None:
    """Check that cells reach the replicas with the notebook's own lines, and commands to IPython stay here."""
    assert "run in the notebook" in run(shell, "%autodistribute")[1]
    run(shell, "%autodistribute mirrored -n 2")
    assert "%%distribute mirrored -n 2" in run(shell, "%autodistribute")[1]
    run(shell, "\nx = 1\nfor y in ():\n    pass")
    run(shell, "%distnb status")
    run(shell, "# only looking\nx?")
    run(shell, "!true")
    run(shell, "%%distribute mirrored\nz = 2")
    run(shell, "x = 1")
    texts = [source for source, _, _ in session.played]
    assert texts[1:] == ["# %%distribute mirrored\nz = 2\n", "x = 1\n"]
    assert texts[0].splitlines()[1:] == ["x = 1", "for y in ():", "    pass"], "line numbers are the cell's own"
    assert session.played[0][1].num_replicas == 2
    run(shell, "%autodistribute off")
    run(shell, "here = 3")
    assert shell.user_ns["here"] == 3
    assert "own process" in error_of(shell, "%autodistribute default")
    assert "mirrored" in error_of(shell, "%autodistribute mirored")


def test_a_cell_keeps_its_history_and_options(shell: InteractiveShell, session: ReplaySession) -> None:
    run(shell, "%%distribute mirrored --replicas 0,2-3\nprint(1)")
    assert session.played[0][2]["only"] == (0, 2, 3)
    assert "not a list of replicas" in error_of(shell, "%%distribute mirrored --replicas 3-1\nprint(1)")
    for option in "--time", "--replicas 0":
        assert "own process" in error_of(shell, f"%%distribute default {option}\nprint(1)")
    run(shell, "1 + 1")
    text = run(shell, "%distnb history")[1]
    rows = text.splitlines()[1:]
    assert rows[0].split()[1:3] == ["mirrored", "2"]
    assert rows[0].split()[-2:] == ["ok", "print(1)"]
    assert len(rows) == 1, "a cell that reached no engine is not counted"
    assert "1 + 1" not in text


def test_curves_of_a_cell_can_be_named_or_switched_off(shell: InteractiveShell, session: ReplaySession) -> None:
    training = "\n# replay: train 0.3"
    assert "loss" in run(shell, f"%%distribute mirrored --name slow{training}")[1]
    assert "loss" not in run(shell, f"%%distribute mirrored --quiet --name quiet{training}")[1]
    number = shell.execution_count
    with capture_output():
        shell.run_cell(f"%%distribute mirrored{training}", store_history=True)
    assert set(distnb.history()["run"]) == {"slow", "quiet", f"In[{number}]"}


def test_the_first_magic_loads_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that `import distnb` is enough: the first magic loads the rest."""
    program = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
import distnb
shell.run_cell("%%distribute default\\nprint(strategy)").raise_error()
shell.run_cell("%distnb status").raise_error()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert "DefaultStrategy" in done.stdout
    assert "No cluster is running" in done.stdout


def test_names_complete_inside_a_distributed_cell(shell: InteractiveShell) -> None:
    shell.user_ns["learning_rate"] = 0.1
    assert "learning_rate" in complete(shell, "%%distribute mirrored\nx = learning_r")
