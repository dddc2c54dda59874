"""A user at a replica's prompt, in a real notebook: debuggers, `input`, and ways to end them."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from tests.support.kernel import Notebook, Ran, lines_of_each

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

ONE, OTHER = "replica 1 (cpu:1)> ", "replica 0 (cpu:0)> "
SUM = "total = torch.tensor(1.0 + x)\ndist.all_reduce(total)\ntotal = total.item()\n"


@pytest.fixture(scope="module", autouse=True)
def _names(notebook: Notebook) -> None:
    notebook.run("import distnb, torch\nimport torch.distributed as dist\nme = distnb.replica_id")


def works(notebook: Notebook) -> None:
    """Check that the next cell works, with collectives."""
    ran = notebook.run("%%distribute mirrored\nx = 1\n" + SUM + "print(total)")
    assert lines_of_each(ran.stdout) == [["4.0"], ["4.0"]]


# -- after a failure ---------------------------------------------------------------------------------------------------

FAILS = """%%distribute mirrored
def half(number):
    remainder = (number + me()) % 2
    return number / remainder

half(1)
"""


def test_the_debugger_opens_at_the_failed_line_with_its_variables(notebook: Notebook) -> None:
    failed = notebook.try_run(FAILS)
    assert failed.error_name == "ZeroDivisionError"
    assert "(%debug opens a debugger there; the variables are kept until the next program.)" in failed.traceback
    lines = ("p ('remainder', remainder)", "w", "up", "p half(2) if me() else 'wrong replica'", "down", "l 1,3", "q")
    debugged, asked = notebook.converse("%distnb debug", *lines)
    assert asked == [ONE] * len(lines)
    text = debugged.check().stdout
    assert "('remainder', 0)" in text
    assert "> Cell In[" in text
    assert "half(1)" in text
    assert "2.0" in text
    assert "distnb/" not in text
    assert "ipykernel" not in text
    assert "kept until the next program" in text
    again, asked = notebook.converse("%debug", "remainder", "c")
    assert asked == [ONE, ONE]
    assert "\n0\n" in again.check().stdout
    notebook.run("remainder = 5")  # an ordinary cell is not a program
    assert notebook.converse("%debug", "q")[1] == [ONE]
    works(notebook)
    assert "the latest distributed cell or call succeeded" in notebook.try_run("%distnb debug").error_text


def test_the_kept_frame_is_released_before_the_next_program(notebook: Notebook) -> None:
    notebook.try_run(
        "%%distribute mirrored\nimport sys\nclass Held:\n    def __del__(self):\n        sys.let_go = True\n"
        "def fails():\n    held = Held()\n    dist.barrier()\n    1 / 0\nsys.let_go = False\nfails()"
    )
    notebook.converse("%debug", "p held", "w", "up", "q")
    ran = notebook.run("%%distribute mirrored\nprint(sys.let_go)")
    assert lines_of_each(ran.stdout) == [["True"], ["True"]]


def test_the_debugger_can_switch_to_a_replica_that_was_ended(notebook: Notebook) -> None:
    notebook.try_run("%%distribute mirrored\nif me() == 1:\n    raise KeyError('k')\nx = me()\n" + SUM)
    debugged, asked = notebook.converse("%distnb debug --replica 0", "p x", "q")
    assert asked == [OTHER, OTHER]
    assert "dist.all_reduce(total)" in debugged.check().stdout
    assert "There is no replica 7" in notebook.try_run("%distnb debug --replica 7").error_text


def test_a_figure_that_is_drawn_at_the_prompt_is_shown(notebook: Notebook) -> None:
    source = "%matplotlib inline\nimport matplotlib.pyplot as plt\nvalues = [1, 2]\nif me():\n    1 / 0\ndist.barrier()"
    notebook.try_run(f"%%distribute mirrored\n{source}")
    debugged, _ = notebook.converse("%debug", "_ = plt.plot(values)", "p 'drawn'", "q")
    assert any("image/png" in str(shown) for shown in debugged.check().displays)


def test_a_failing_call_can_be_debugged_on_the_replica_and_at_its_call(notebook: Notebook) -> None:
    notebook.run("strategy = distnb.MirroredStrategy()\ndef step(a):\n    b = a + me()\n    return 1 / (1 - b)")
    failed = notebook.try_run("mine = 7\ndef call(given):\n    return strategy.run(step, args=(0,))\ncall(mine)")
    assert failed.error_name == "ZeroDivisionError"
    debugged, asked = notebook.converse("%debug", "p ('b', b)", "q")
    assert asked == [ONE, ONE]
    assert "('b', 1)" in debugged.check().stdout
    debugged, asked = notebook.converse("%distnb debug --here", "p ('given', given)", "q")
    assert asked == ["ipdb> "] * 2
    assert "('given', 7)" in debugged.check().stdout


def test_pdb_on_opens_the_debugger_at_once(notebook: Notebook) -> None:
    notebook.run("%pdb on")
    try:
        failed, asked = notebook.converse(FAILS, "p ('number', number)", "q")
    finally:
        notebook.run("%pdb off")
    assert asked == [ONE, ONE]
    assert failed.error_name == "ZeroDivisionError"
    assert "('number', 1)" in failed.stdout


@pytest.mark.parametrize(
    ("mode", "there", "missing"),
    [
        ("Plain", ", line 4 in half\n", "---->"),
        ("Verbose", "half(number=1)", "distnb/"),
        ("Minimal", "ZeroDivisionError", "half"),
        ("Context", "----> 4", "number=1"),
    ],
)
def test_xmode_applies_to_replicas(notebook: Notebook, mode: str, there: str, missing: str) -> None:
    notebook.run(f"%xmode {mode}")
    try:
        failed = notebook.try_run(FAILS)
    finally:
        notebook.run("%xmode Context")
    assert there in failed.traceback
    assert missing not in failed.traceback


# -- breakpoints -------------------------------------------------------------------------------------------------------

TO_NEXT_LINE = ["n"] if sys.version_info >= (3, 13) else []  # since 3.13 pdb stops in the breakpoint's own line
STOPS = "%%distribute mirrored\nx = me()\nif me() == 1:\n    {}\n" + SUM + "print(x, total)\n"


@pytest.mark.parametrize("call", ["breakpoint()", "__import__('pdb').set_trace()"])
def test_one_replica_stops_at_a_breakpoint_and_continues(notebook: Notebook, call: str) -> None:
    ran, asked = notebook.converse(STOPS.format(call), "p ('x', x)", "!x = 41", "c")
    assert asked == [ONE] * 3
    assert "('x', 1)" in ran.check().stdout
    assert "Replica 1 (cpu:1) stopped. The other replicas continue until they need this one" in ran.stdout
    assert "[0] 0 43.0" in ran.stdout
    assert "[1] 41 43.0" in ran.stdout


def test_a_breakpoint_accepts_a_header_and_commands(notebook: Notebook) -> None:
    call = "breakpoint(header='Look here.', commands=[\"p ('x', x)\"])"
    ran, asked = notebook.converse(STOPS.format(call), "c")
    assert asked == [ONE]
    assert "Look here.\n" in ran.check().stdout
    assert "('x', 1)" in ran.stdout


def test_several_replicas_stop_and_prompt_one_after_another(notebook: Notebook) -> None:
    source = "%%distribute mirrored\nx = me()\nbreakpoint()\n" + SUM + "print(total)\n"
    first = notebook.start(source, allow_stdin=True)
    order = [notebook.asked()]
    # The first `n` makes the tensor, the second calls the collective. That needs the other replica, which asks now.
    for answer in (*TO_NEXT_LINE, "n", "n", "c"):
        notebook.answer(answer)
        order.append(notebook.asked())
    notebook.answer("c")
    ran = notebook.finish(first).check()
    one, other = (ONE, OTHER) if order[0] == ONE else (OTHER, ONE)
    assert order == [one, *[one] * len(TO_NEXT_LINE), one, other, one]
    assert "all_reduce" in ran.stdout
    assert "this replica waits until every other replica has called it" in ran.stdout
    assert "[0-1] 3.0" in ran.stdout or ("[0] 3.0" in ran.stdout and "[1] 3.0" in ran.stdout)


@pytest.mark.parametrize("leave", ["q", "\x04"])
def test_quitting_the_debugger_ends_the_cell_on_all_replicas(notebook: Notebook, leave: str) -> None:
    ran, _ = notebook.converse(STOPS.format("breakpoint()"), leave)
    assert ran.error_name == "BdbQuit"
    assert "You ended the cell at the debugger's prompt" in ran.error_text
    assert "total" not in ran.stdout.split("\n")[-1]
    again, asked = notebook.converse("%distnb debug", "p x", "q")
    assert asked == [ONE, ONE]
    assert "\n1\n" in again.check().stdout
    works(notebook)


def test_stepping_remains_in_the_users_code(notebook: Notebook) -> None:
    source = (
        "%%distribute mirrored\ndef inner(x):\n    y = x + 1\n    return y\n"
        "def step():\n    if me() == 1:\n        breakpoint()\n    z = inner(1)\n    return z\n"
        "result = strategy.run(step)\nlast = 2\n"
    )
    ran, asked = notebook.converse(
        source, *TO_NEXT_LINE, "s", "n", "n", "p ('y', y)", "u", "w", "r", "n", "n", "n", "n", "p last", "c"
    )
    text = ran.check().stdout
    assert "('y', 2)" in text
    assert "distnb/" not in text
    assert set(asked) == {ONE}


def test_a_breakpoint_works_in_an_ordinary_cells_call(notebook: Notebook) -> None:
    notebook.run(
        "strategy = distnb.MirroredStrategy()\n"
        "def step(a):\n    b = a + me()\n    if me() == 0:\n        breakpoint()\n    return b"
    )
    ran, asked = notebook.converse("out = strategy.run(step, args=(1,))", "p ('b', b)", "!b = 10", "c")
    assert asked == [OTHER] * 3
    assert "('b', 1)" in ran.check().stdout
    assert notebook.value("list(map(int, strategy.local_results(out)))") == [10, 2]
    late = "pending = strategy.run(step, args=(2,), options=distnb.RunOptions(wait=False))\nprint('sent')"
    ran, asked = notebook.converse(late, "c")
    assert asked == [OTHER]
    assert ran.check().stdout.startswith("sent")


def test_no_time_limit_applies_while_a_replica_waits_for_the_user(notebook: Notebook) -> None:
    source = (
        "%%distribute mirrored\nfrom datetime import timedelta\n"
        "dist.init_process_group(timeout=timedelta(seconds=0.5))\nx = me()\ndist.barrier()\nif x:\n    breakpoint()\n"
    )
    # The other replica waits for longer than its limit.
    ran, _ = notebook.converse(source + SUM + "print(total)", "__import__('time').sleep(1.5)", "c")
    assert "3.0" in ran.check().stdout
    notebook.run("%%distribute mirrored\ndist.init_process_group()")


# -- prompts -----------------------------------------------------------------------------------------------------------


def test_every_replica_can_call_input(notebook: Notebook) -> None:
    source = "%%distribute mirrored\nprint('before', end=' ')\nname = input(f'who is {me()}? ')\nprint(name, me())"
    ran, asked = notebook.converse(source, "first", "second")
    assert sorted(asked) == ["[0] who is 0? ", "[1] who is 1? "]
    first = asked[0][1]
    assert f"[{first}] first {first}" in ran.check().stdout
    assert "before" in ran.stdout


def test_end_of_file_and_getpass_work_on_replicas(notebook: Notebook) -> None:
    source = (
        "%%distribute mirrored\nimport getpass\nif me():\n    try:\n        input()\n    except EOFError:\n"
        "        print('nothing came')\n    print(len(getpass.getpass('secret: ')))"
    )
    ran, asked = notebook.converse(source, "\x04", "abc")
    assert asked == ["[1] ", "[1] secret: "]
    assert "nothing came" in ran.check().stdout
    assert "[1] 3" in ran.stdout


@pytest.mark.parametrize("question", ["input('who? ')", "breakpoint()"])
def test_a_front_end_without_prompts_is_an_error(notebook: Notebook, question: str) -> None:
    failed = notebook.try_run(f"%%distribute mirrored\nx = 1\nif me():\n    {question}\ny = 2\n")
    assert failed.error_name == "RuntimeError"
    assert "the user cannot be asked here" in failed.error_text
    assert question in failed.traceback


# -- ends of prompts ---------------------------------------------------------------------------------------------------


def at_the_prompt(notebook: Notebook, source: str) -> str:
    message = notebook.start(source, allow_stdin=True)
    assert notebook.asked() == ONE
    return message


@pytest.mark.parametrize("source", [STOPS.format("breakpoint()"), "%distnb debug"])
def test_the_stop_button_ends_the_prompt_on_all_replicas(notebook: Notebook, source: str) -> None:
    if source == "%distnb debug":
        notebook.try_run(FAILS)
    message = at_the_prompt(notebook, source)
    notebook.interrupt()
    assert notebook.finish(message).error_name == "KeyboardInterrupt"
    assert notebook.converse("%debug", "q")[1] == [ONE], "the user's position"
    works(notebook)


def test_a_breakpoint_in_the_last_line_stops_at_that_line(notebook: Notebook) -> None:
    message = at_the_prompt(notebook, "%%distribute mirrored\nx = me()\nif x:\n    breakpoint()\n")
    notebook.interrupt()
    assert notebook.finish(message).error_name == "KeyboardInterrupt"
    debugged, _ = notebook.converse("%debug", "p ('x', x)", "q")
    assert "('x', 1)" in debugged.check().stdout


def test_the_stop_button_ends_an_input_call(notebook: Notebook) -> None:
    message = notebook.start("%%distribute mirrored\nname = input('who? ')", allow_stdin=True)
    notebook.asked()
    notebook.interrupt()
    assert notebook.finish(message).error_name == "KeyboardInterrupt"
    works(notebook)


def test_another_replicas_failure_closes_the_prompt(notebook: Notebook, tmp_path: object) -> None:
    there = f"{tmp_path}/there"
    source = (
        "%%distribute mirrored\nimport os, time\nif me() == 1:\n    breakpoint()\nelse:\n"
        f"    while not os.path.exists({there!r}):\n        time.sleep(0.01)\n    raise KeyError('other')\nx = 1"
    )
    message = at_the_prompt(notebook, source)
    open(there, "w").close()
    failed = notebook.finish(message)
    assert failed.error_name == "KeyError"
    debugged, asked = notebook.converse("%distnb debug --replica 1", "p me()", "q")
    assert asked == [ONE, ONE]
    assert "1\n" in debugged.check().stdout
    works(notebook)


def test_an_engine_that_is_killed_at_the_prompt_ends_the_cell(notebook: Notebook) -> None:
    pid = notebook.value("[row.pid for row in distnb.notebook.compose.require().status()][1]")
    message = at_the_prompt(notebook, STOPS.format("breakpoint()"))
    os.kill(pid, signal.SIGKILL)
    ended: Ran = notebook.finish(message)
    assert ended.error_name == "EngineDied"
    refused = notebook.try_run("%distnb debug")
    assert "The process of the replica that failed has ended" in refused.error_text
    assert notebook.converse("%distnb debug --replica 0", "q")[1] == [OTHER]
    notebook.run("%distnb restart --missing")
    works(notebook)
