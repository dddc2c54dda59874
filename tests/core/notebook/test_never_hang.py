"""Tests that nothing hangs for a user, with a real kernel and two real engines.

Whatever goes wrong in a cell, the cell ends on every replica with an error that explains it. The next cell works, and
earlier variables are still there. No test here measures a duration: each has a hard limit, which is far above the
promised second, and far below "for ever". `tests/soak` has the same tests with four engines.
"""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.kernel import Notebook, Ran

LIMIT_S = 45.0
pytestmark = [pytest.mark.processes, pytest.mark.timeout(170)]

SETUP = """
import itertools, operator, os, signal, time
import torch
import torch.distributed as dist
import torch.nn.functional as F
import distnb


class Slow(torch.utils.data.Dataset):
    def __init__(self, first_nap_s=0.0):
        self.first_nap_s = first_nap_s

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        if self.first_nap_s:
            time.sleep(self.first_nap_s)
        return torch.ones(2)


def meet(folder, name):
    # Report that this replica is about to wait, or (under the name "fails") wait for all reports.
    n = dist.get_world_size()
    open(os.path.join(folder, f"{name}{dist.get_rank()}"), "w").close()
    if name == "fails":
        while len(os.listdir(folder)) < n:
            time.sleep(0.005)


def deaf(folder, steps):
    # Replica 1 goes through the steps in C, where no signal is looked at. It is there before another says "ready".
    begun = os.path.join(folder, "begun")
    if dist.get_rank() == 1:
        all(itertools.chain(map(operator.not_, map(os.mkdir, [begun])), steps))
    else:
        while not os.path.exists(begun):
            time.sleep(0.005)
        print("ready", flush=True)
"""

KEPT = """%%distribute mirrored
torch.manual_seed(3)
with strategy.scope():
    kept = torch.nn.Linear(2, 2, bias=False)
before = kept.weight.detach().sum().item()
"""


class Notebooks:
    """A notebook that is kept as long as it works, so that a failing test does not affect the next one."""

    def __init__(self, engines: int) -> None:
        self.engines = engines
        self.current: Notebook | None = None

    def get(self) -> Notebook:
        if self.current is None:
            self.current = Notebook(self.engines).__enter__()
            processes.OF_MODULE.add(self.current.pid)
            self.current.run("import torch; torch.set_num_threads(1)")
            self.current.run(SETUP)
            self.current.run(KEPT)
        return self.current

    def close(self) -> None:
        if self.current is not None:
            self.current.close()
            self.current = None


@pytest.fixture(scope="module")
def engines() -> int:
    return 2


@pytest.fixture(scope="module")
def notebooks(engines: int) -> Iterator[Notebooks]:
    notebooks = Notebooks(engines)
    notebooks.get()
    yield notebooks
    notebooks.close()


@pytest.fixture
def notebook(notebooks: Notebooks, request: pytest.FixtureRequest) -> Iterator[Notebook]:
    """Return a notebook that works before the test, and check that it works afterwards."""
    notebook, failed_before = notebooks.get(), request.session.testsfailed
    yield notebook
    if request.session.testsfailed > failed_before:
        notebooks.close()
        return
    try:
        wait_until_idle(notebook)
        works(notebook, notebook.engines)
    except BaseException:
        notebooks.close()
        raise


def works(notebook: Notebook, replicas: int) -> None:
    """Check that the next cell works on this many replicas, and that earlier objects still exist."""
    ran = notebook.run(
        """%%distribute mirrored
total = torch.ones(1)
dist.all_reduce(total)
now = kept.weight.detach().sum().item()
x = torch.ones(1, 2)
strategy.run(lambda: distnb.nn.compute_average_loss(kept(x).sum(1), global_batch_size=4).backward())
print("replicas:", int(total))
""",
        timeout_s=LIMIT_S,
    )
    assert f"replicas: {replicas}\n" in ran.stdout
    assert notebook.value("now == before") is True


def failed(notebook: Notebook, source: str, error: str, limit_s: float = LIMIT_S) -> Ran:
    """Run a cell that must end with an error of this name."""
    ran = notebook.try_run(source, timeout_s=limit_s)
    assert ran.status == "error", ran
    assert ran.error_name == error, ran.traceback
    return ran


def wait_until_idle(notebook: Notebook) -> None:
    """Wait for replicas that end a little later than the notebook, on a slow machine."""
    processes.wait_until(lambda: "busy" not in notebook.run("%distnb status").text, timeout_s=LIMIT_S)


def summed_up(ran: Ran) -> set[int]:
    """Return the replicas whose end a traceback summarises, usually the same ones: "replicas 0, 2-3 ended"."""
    replicas = " ".join(re.findall(r"\breplicas? ([\d, -]+) ", ran.traceback))
    ranges = re.findall(r"(\d+)(?:-(\d+))?", replicas)
    return {replica for first, last in ranges for replica in range(int(first), int(last or first) + 1)}


def line_of(source: str, text: str) -> int:
    return next(number for number, line in enumerate(source.splitlines(), 1) if text in line)


# -- (a) one replica raises while the others wait ---------------------------------------------------------------------

FAIL = 'raise ValueError("mine")'
WAITS = {
    "our collective": """
def step():
    context = distnb.get_replica_context()
    if context.replica_id_in_sync_group == 1:
        meet(FOLDER, "fails")
        raise ValueError("mine")
    meet(FOLDER, "waits")
    return context.all_reduce("sum", torch.ones(3))
strategy.run(step)
""",
    "reduce": """
values = strategy.run(lambda: torch.ones(3) * (1 + distnb.replica_id()))
if distnb.replica_id() == 1:
    meet(FOLDER, "fails")
    raise ValueError("mine")
meet(FOLDER, "waits")
strategy.reduce("sum", values, axis=None)
""",
    "raw all_reduce": """
if distnb.replica_id() == 1:
    meet(FOLDER, "fails")
    raise ValueError("mine")
meet(FOLDER, "waits")
dist.all_reduce(torch.ones(3))
""",
    "raw barrier": """
if distnb.replica_id() == 1:
    meet(FOLDER, "fails")
    raise ValueError("mine")
meet(FOLDER, "waits")
dist.barrier()
""",
    "backward": """
with strategy.scope():
    net = torch.nn.Linear(2, 1)
def step():
    loss = distnb.nn.compute_average_loss(net(torch.ones(3, 2)).sum(1), global_batch_size=12)
    if distnb.replica_id() == 1:
        meet(FOLDER, "fails")
        raise ValueError("mine")
    meet(FOLDER, "waits")
    loss.backward()
strategy.run(step)
""",
    "DistributedDataParallel's backward": """
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
loss = net(torch.ones(3, 2)).sum()
if distnb.replica_id() == 1:
    meet(FOLDER, "fails")
    raise ValueError("mine")
meet(FOLDER, "waits")
loss.backward()
""",
}
_TWINS = ("reduce", "raw barrier")  # they wait as "our collective" and "raw all_reduce" do
WORKERS = """
loader = torch.utils.data.DataLoader(Slow(), num_workers=1)
alive = iter(loader)
next(alive)
"""


@pytest.mark.parametrize(
    ("where", "workers"),
    [
        *(pytest.param(each, False, marks=pytest.mark.soak if each in _TWINS else ()) for each in WAITS),
        *(pytest.param(each, True, marks=() if each == "raw all_reduce" else pytest.mark.soak) for each in WAITS),
    ],
)
def test_one_replica_raises_while_the_others_wait(
    notebook: Notebook, tmp_path: Path, where: str, workers: bool
) -> None:
    source = (
        "%%distribute mirrored" + (WORKERS if workers else "") + WAITS[where].replace("FOLDER", repr(str(tmp_path)))
    )
    ran = failed(notebook, source, "ValueError")
    assert ran.error_text == "mine"
    assert FAIL in ran.traceback, "its source line is shown"
    assert f"line {line_of(source, FAIL)}" in ran.traceback, "with the line number of the notebook's cell"
    assert ran.traceback.index("Replica 1") < ran.traceback.index(FAIL), "the failing replica is named first"
    assert summed_up(ran) == set(range(notebook.engines)) - {1}, ran.traceback
    assert ran.traceback.count("Traceback (most recent call last)") <= 1, "no other replica's traceback"


def test_a_context_that_an_abort_left_open_changes_no_mode(notebook: Notebook) -> None:
    # The signal of an abort can strike where an `__exit__` begins, as if there were none.
    notebook.run(
        "class LeftOpen(torch.no_grad):\n    def __exit__(self, *reason):\n        pass\n"
        "values = torch.ones(2, requires_grad=True)"
    )
    source = (
        "%%distribute mirrored\nif distnb.replica_id() == 1:\n    raise ValueError('mine')\n"
        "with LeftOpen():\n    dist.all_reduce(torch.ones(1))"
    )
    failed(notebook, source, "ValueError")
    ran = notebook.run("%%distribute mirrored\nprint(torch.is_grad_enabled(), (2 * values).requires_grad)")
    assert set(ran.stdout.split()[1:]) == {"True"}
    assert notebook.run("print(torch.is_grad_enabled())").stdout == "True\n"


@pytest.mark.parametrize("end", ["finally", "except ValueError"])
def test_the_error_that_leaves_others_waiting_is_reported_first(notebook: Notebook, tmp_path: Path, end: str) -> None:
    """Check this also if the failing replica reports last: it is slow to end, or has caught its error."""
    source = f"""%%distribute mirrored
def step():
    if distnb.replica_id() == 1:
        meet({str(tmp_path)!r}, "fails")
        raise ValueError("mine")
    meet({str(tmp_path)!r}, "waits")
    dist.all_reduce(torch.ones(3))
try:
    strategy.run(step)
{end}:
    if distnb.replica_id() == 1:
        time.sleep(60)
"""
    ran = failed(notebook, source, "ValueError")
    assert ran.error_text == "mine"
    assert FAIL in ran.traceback, "its source line is shown"
    assert ran.traceback.index("Replica 1") < ran.traceback.index(FAIL), "the failing replica is named first"


# -- (b) collectives that do not match --------------------------------------------------------------------------------

MISMATCHES = {
    "different operations": (
        "if distnb.replica_id() == 0:\n    dist.all_reduce(torch.ones(4))\nelse:\n    dist.broadcast(torch.ones(4), 0)",
        ("all_reduce", "broadcast"),
    ),
    "different shapes": (
        "dist.all_reduce(torch.ones(4 if distnb.replica_id() == 0 else 5))",
        ("float32[4]", "float32[5]", "different collectives"),
    ),
    "different dtypes": (
        "dist.all_reduce(torch.ones(4, dtype=torch.float32 if distnb.replica_id() == 0 else torch.int32))",
        ("float32", "int32"),
    ),
    "different order, same size": (
        "a, b = torch.ones(4), torch.full((4,), 10.0)\n"
        "def first():\n    dist.all_reduce(a)\n"
        "def second():\n    dist.all_reduce(b)\n"
        "for reduce in (first, second) if distnb.replica_id() == 0 else (second, first):\n    reduce()",
        ("different order",),
    ),
    "one calls more": (
        "dist.all_reduce(torch.ones(4))\nif distnb.replica_id() == 0:\n    dist.all_reduce(torch.ones(4))",
        ("line 4",),
    ),
    "ours, in run": (
        "def step():\n    context = distnb.get_replica_context()\n"
        "    if context.replica_id_in_sync_group == 0:\n        return context.all_reduce('sum', torch.ones(4))\n"
        "    return context.all_gather(torch.ones(4), 0)\nstrategy.run(step)",
        (),
    ),
}


@pytest.mark.parametrize("what", MISMATCHES)
def test_collectives_that_do_not_match_are_an_error(notebook: Notebook, what: str) -> None:
    body, texts = MISMATCHES[what]
    ran = failed(notebook, f"%%distribute mirrored\n{body}\nprint('went on')", "CollectiveMismatchError")
    for text in texts:
        assert text in ran.traceback
    assert "went on" not in ran.stdout or what == "one calls more", "no replica continued with a wrong sum"


# -- (c) the user interrupts ------------------------------------------------------------------------------------------

INTERRUPTED = {
    "pure Python": "print('ready', flush=True)\nwhile True:\n    pass",
    "a sleep": "print('ready', flush=True)\ntime.sleep(600)",
    "a collective": (
        "print('ready', flush=True)\nif distnb.replica_id() == 0:\n    time.sleep(600)\ndist.all_reduce(torch.ones(3))"
    ),
    "our collective": (
        "def step():\n    if distnb.replica_id() == 0:\n        time.sleep(600)\n"
        "    return distnb.get_replica_context().all_reduce('sum', torch.ones(3))\n"
        "print('ready', flush=True)\nstrategy.run(step)"
    ),
    "a DataLoader with workers": (
        "loader = torch.utils.data.DataLoader(Slow(600.0), num_workers=2)\n"
        "print('ready', flush=True)\nfor batch in loader:\n    pass"
    ),
    "except Exception": (
        "print('ready', flush=True)\nwhile True:\n"
        "    try:\n        time.sleep(600)\n    except Exception:\n        pass"
    ),
}


# Both interrupt the replicas in the same way.
@pytest.mark.parametrize(
    ("what", "by"),
    [
        *((what, "stop button") for what in INTERRUPTED),
        *(
            pytest.param(what, "magic", marks=[] if what == "a collective" else pytest.mark.soak)
            for what in INTERRUPTED
        ),
    ],
)
def test_an_interrupt_ends_the_cell(notebook: Notebook, tmp_path: Path, what: str, by: str) -> None:
    before = set(processes.children_of_this_run())
    if by == "magic":  # from a thread: the main one is busy with the cell
        go = tmp_path / "go"
        notebook.run(
            "import threading\n"
            "def _stop():\n"
            f"    while not os.path.exists({str(go)!r}):\n        time.sleep(0.01)\n"
            "    get_ipython().run_line_magic('distnb', 'interrupt')\n"
            "stopper = threading.Thread(target=_stop); stopper.start()"
        )
    source = f"%%distribute mirrored\n{INTERRUPTED[what]}"
    message = notebook.start(source)
    notebook.wait_for_output(message, "ready", timeout_s=LIMIT_S)
    if by == "magic":
        go.touch()
    else:
        notebook.interrupt()
    ran = notebook.finish(message, source, timeout_s=LIMIT_S)
    assert ran.error_name == "KeyboardInterrupt", ran
    if by == "magic":
        notebook.run("stopper.join(); del stopper, _stop")
    processes.wait_until(lambda: not new_workers(before), LIMIT_S, "DataLoader workers are still there")
    wait_until_idle(notebook)


def stop_when_ready(notebook: Notebook, source: str) -> Ran:
    """Run a cell, and press stop when it has written "ready". It must end as interrupted."""
    message = notebook.start(source)
    notebook.wait_for_output(message, "ready", timeout_s=LIMIT_S)
    notebook.interrupt()
    ran = notebook.finish(message, source, timeout_s=LIMIT_S)
    assert ran.error_name == "KeyboardInterrupt", ran
    return ran


def test_an_interrupt_between_calls_ends_pending_ones(notebook: Notebook) -> None:
    source = (
        "def naps():\n    print('ready', flush=True)\n    time.sleep(600)\n"
        "distnb.MirroredStrategy().run(naps, options=distnb.RunOptions(wait=False))\n"
        "time.sleep(600)"
    )
    stop_when_ready(notebook, source)


INTERRUPTED_WAITS = {
    "a sleep": "time.sleep(600)",
    "a collective": "if distnb.replica_id() == 0:\n    time.sleep(600)\ndist.all_reduce(torch.ones(3))",
    "a step": "def step():\n    if distnb.replica_id() == 0:\n        time.sleep(600)\n"
    "    distnb.get_replica_context().all_reduce('sum', torch.ones(3))\nstrategy.run(step)",
}
_CATCHES = "except KeyboardInterrupt:"
HANDLES = """%%distribute mirrored
seen = []
try:
    print("ready", flush=True)
{waits}
{ends}
    while not os.path.exists({go!r}):
        time.sleep(0.01)
    seen.append("whole")
"""


def shown(notebook: Notebook, message: str, text: str) -> None:
    """Wait until a running cell's view shows a text."""
    assert any(text in str(content) for _, content in notebook.events(message, LIMIT_S))


@pytest.mark.parametrize(
    ("waits", "ends"),
    [("a sleep", "finally:"), ("a collective", _CATCHES), ("a step", _CATCHES), ("a step", "finally:")],
)
def test_handlers_of_an_interrupt_have_time(notebook: Notebook, tmp_path: Path, waits: str, ends: str) -> None:
    go = tmp_path / "go"
    source = HANDLES.format(waits=textwrap.indent(INTERRUPTED_WAITS[waits], "    "), ends=ends, go=str(go))
    message = notebook.start(source)
    notebook.wait_for_output(message, "ready", timeout_s=LIMIT_S)
    notebook.interrupt()
    shown(notebook, message, "stop again to end it now")
    go.touch()
    ran = notebook.finish(message, source, timeout_s=LIMIT_S)
    # As in any notebook, a cell that catches the interrupt succeeds.
    assert ran.error_name == ("" if ends.startswith("except") else "KeyboardInterrupt"), ran
    assert notebook.value("seen") == ["whole"]


def test_a_second_interrupt_ends_the_handlers(notebook: Notebook, tmp_path: Path) -> None:
    source = HANDLES.format(waits="    time.sleep(600)", ends="finally:", go=str(tmp_path / "never"))
    message = notebook.start(source)
    notebook.wait_for_output(message, "ready", timeout_s=LIMIT_S)
    notebook.interrupt()
    shown(notebook, message, "cleaning up")
    time.sleep(0.6)  # presses in quick succession are one
    notebook.interrupt()
    assert notebook.finish(message, source, timeout_s=LIMIT_S).error_name == "KeyboardInterrupt"
    assert notebook.value("seen") == []
    wait_until_idle(notebook)


def test_handlers_of_an_interrupt_in_a_called_function_have_time(notebook: Notebook, tmp_path: Path) -> None:
    go = tmp_path / "go"
    source = f"""
def stops():
    try:
        print("ready", flush=True)
        time.sleep(600)
    except KeyboardInterrupt:
        while not os.path.exists({str(go)!r}):
            time.sleep(0.01)
        return "whole"
result = distnb.MirroredStrategy().run(stops)
"""
    message = notebook.start(source)
    notebook.wait_for_output(message, "ready", timeout_s=LIMIT_S)
    notebook.interrupt()
    shown(notebook, message, "cleaning up")
    go.touch()
    notebook.finish(message, source, timeout_s=LIMIT_S).check()
    assert notebook.value("result") == "whole"


def new_workers(before: set[int]) -> list[str]:
    """Return the processes that engines have forked since."""
    new = [processes.describe(p) for pid, p in processes.children_of_this_run().items() if pid not in before]
    return [line for line in new if "distnb.engine" in line]


UNSPEAKABLE = """
class Unspeakable(Exception):
    def __str__(self):
        print("ready", flush=True)
        while True:
            time.sleep(0.01)

def fail():
    raise Unspeakable
"""


@pytest.mark.parametrize("where", ["cell", "call"])
def test_an_error_whose_message_never_returns_is_interrupted(notebook: Notebook, where: str) -> None:
    notebook.run(UNSPEAKABLE)
    source = "%%distribute mirrored\nfail()" if where == "cell" else "distnb.MirroredStrategy().run(fail)"
    stop_when_ready(notebook, source)
    wait_until_idle(notebook)


def test_an_error_whose_message_never_returns_does_not_hide_the_others(notebook: Notebook) -> None:
    notebook.run(UNSPEAKABLE)
    source = "%%distribute mirrored\nif distnb.replica_id() == 1:\n    raise ValueError('this')\nfail()"
    assert "this" in failed(notebook, source, "ValueError").error_text
    wait_until_idle(notebook)


UNPICKLED = """
class Unpickled:
    def __reduce__(self):
        print("ready", flush=True)
        while True:
            time.sleep(0.01)

def make(then=id):
    global found, made
    found, made = 1, Unpickled()
    then(made)

def goes_on(made):
    print("ready", flush=True)
    time.sleep(600)
"""
MAKES_UNPICKLED = {
    "cell": "%%distribute mirrored\nfound, made = 1, Unpickled()",
    "call": "distnb.MirroredStrategy().run(make)",
    "cell that goes on": "%%distribute mirrored\nfound, made = 1, Unpickled()\ngoes_on(made)",
    "call that goes on": "distnb.MirroredStrategy().run(make, args=(goes_on,))",
}


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=() if "goes on" in what else pytest.mark.soak) for what in MAKES_UNPICKLED]
)
def test_an_object_that_never_finishes_pickling_is_interrupted_and_dropped(notebook: Notebook, what: str) -> None:
    notebook.run(UNPICKLED)
    stop_when_ready(notebook, MAKES_UNPICKLED[what])
    wait_until_idle(notebook)
    there = notebook.run("%%distribute mirrored\nprint({'found', 'made'} & globals().keys())")
    assert "set()" in there.stdout
    assert notebook.value("{'found', 'made'} & globals().keys()") == set()


def test_a_loop_that_catches_everything_is_interrupted(notebook: Notebook) -> None:
    source = """%%distribute mirrored
print("ready", flush=True)
while True:
    try:
        time.sleep(0.01)
    except:
        pass
"""
    stop_when_ready(notebook, source)
    wait_until_idle(notebook)


def test_loops_of_short_calls_are_interrupted_and_their_objects_remain(notebook: Notebook) -> None:
    for number in range(2):
        source = f"""
def nap{number}():
    time.sleep(0.001)
    return {number}
print("ready", flush=True)
while True:
    distnb.MirroredStrategy().run(nap{number})
"""
        stop_when_ready(notebook, source)
        wait_until_idle(notebook)
        assert notebook.value(f"distnb.MirroredStrategy().run(nap{number})") == number


@pytest.mark.parametrize(("where", "event"), [("Condition.__enter__", "return"), ("Condition.__exit__", "call")])
def test_an_interrupt_during_a_change_of_a_lock_leaves_it_free(notebook: Notebook, where: str, event: str) -> None:
    # The kernel's sending thread sets the Event that a flush waits for, and would wait for the Event's lock.
    source = f"""
import sys, threading
def press(frame, event, argument):
    if frame.f_code is threading.{where}.__code__ and event == "{event}":
        sys.settrace(None)
        signal.raise_signal(signal.SIGINT)
    return press
sys.settrace(press)
sys.stdout.flush()
time.sleep(600)
"""
    ran = notebook.try_run(source, timeout_s=LIMIT_S)
    assert ran.error_name == "KeyboardInterrupt", ran
    assert notebook.run("print('shown', flush=True)", timeout_s=LIMIT_S).text == "shown\n"


def test_an_interrupt_of_an_import_does_not_affect_imports_of_other_threads(notebook: Notebook) -> None:
    source = """
import importlib, sys, threading
lines = []
def press(frame, event, argument):
    if frame.f_code is importlib._bootstrap._get_module_lock.__code__ and event == "line":
        lines.append(frame.f_lineno)
        if len(lines) == 2:  # the lock of all imports is taken
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)
    return press
sys.settrace(press)
import tabnanny
time.sleep(600)
"""
    ran = notebook.try_run(source, timeout_s=LIMIT_S)
    assert ran.error_name == "KeyboardInterrupt", ran
    other = (
        "other = threading.Thread(target=__import__, args=('colorsys',), daemon=True)\nother.start()\nother.join(20)"
    )
    assert notebook.run(f"{other}\nprint(other.is_alive(), len(lines))", timeout_s=LIMIT_S).text == "False 2\n"


def test_replicas_still_communicate_after_a_caught_interrupt(notebook: Notebook, tmp_path: Path) -> None:
    go = tmp_path / "go"
    notebook.run(f"""%%distribute mirrored
class Catching:
    def __repr__(self):
        if os.path.exists({str(go)!r}):
            print("ready", flush=True)
            try:
                time.sleep(600)
            except KeyboardInterrupt:
                pass
        return f"number {{self.number}}"

catching = Catching()
catching.number = distnb.replica_id()
""")
    notebook.run("%%distribute mirrored\npass")  # the output may have changed
    go.touch()
    stop_when_ready(notebook, "repr(catching)")
    go.unlink()
    wait_until_idle(notebook)
    notebook.run("%%distribute mirrored\ntotal = torch.ones(1)\ndist.all_reduce(total)")
    assert notebook.value("float(total) == distnb.MirroredStrategy().num_replicas_in_sync")


def test_code_that_ignores_signals_releases_the_prompt(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run("%%distribute mirrored\nseen = torch.ones(2)")
    source = f"""%%distribute mirrored
deaf({str(tmp_path)!r}, itertools.repeat(True))
dist.all_reduce(torch.ones(1))
"""
    ran = stop_when_ready(notebook, source)
    assert re.search(r"replace it with %distnb restart ([02] )?1( \d)*", ran.error_text), ran.error_text
    # The others end, too, on a slow machine a little later.
    processes.wait_until(lambda: notebook.value("distnb.notebook.compose.current().stuck") == (1,), LIMIT_S)
    assert "busy" in notebook.run("%distnb status").text
    assert "Engine 1: still busy" in notebook.run("%distnb interrupt").text
    assert "does not answer" in notebook.run("%distnb stacks").text  # `all` never releases Python's lock
    failed(notebook, "%%distribute mirrored\npass", "ReplicaStuck")
    assert "[1., 1.]" in (shown := notebook.run("print(seen)").stdout)
    assert "as last seen" in shown
    notebook.run("%distnb restart 1", timeout_s=60)


def test_an_object_that_a_replica_never_unpickled_is_sent_again(notebook: Notebook, tmp_path: Path) -> None:
    go_on = tmp_path / "go on"
    notebook.run(f"""%%distribute mirrored
def come_late():
    from distnb.engine.programs.team_programs import TeamPrograms
    def late(programs, *team, join=TeamPrograms.join, **options):
        TeamPrograms.join = join
        checks = map(os.access, itertools.repeat({str(go_on)!r}), itertools.repeat(os.F_OK))
        deaf({str(tmp_path)!r}, map(operator.not_, checks))
        join(programs, *team, **options)
    if dist.get_rank() == 1:
        TeamPrograms.join = late
come_late()
""")
    notebook.run("class Brought:\n    word = 'brought'\nnumbers = [1, 2, 3]")
    stop_when_ready(
        notebook,
        f"%%distribute mirrored\nfirst = Brought.word\nnumbers.append(4)\ndeaf({str(tmp_path)!r}, ())\ndist.barrier()",
    )
    go_on.touch()
    wait_until_idle(notebook)
    notebook.run("%%distribute mirrored\nsecond = Brought.word, sum(numbers)")
    assert notebook.value("second") == ("brought", 10)


def test_a_slow_replica_is_waited_for(notebook: Notebook, tmp_path: Path) -> None:
    go_on = tmp_path / "go on"
    source = f"""%%distribute mirrored
checks = map(os.access, itertools.repeat({str(go_on)!r}), itertools.repeat(os.F_OK))
deaf({str(tmp_path)!r}, map(operator.not_, checks))
"""
    stop_when_ready(notebook, source)
    # The replica continues at the first poll of the thread that waits for it, and not before.
    notebook.run(
        f"""import types
import distnb.notebook.programs.dispatch as dispatch
def look(seconds):
    open({str(go_on)!r}, "w").close()
    time.sleep(seconds)
dispatch.time = types.SimpleNamespace(monotonic=time.monotonic, sleep=look)
late_s, dispatch._LATE_S = dispatch._LATE_S, {LIMIT_S}"""
    )
    assert "torch.Size([2, 2])" in notebook.run("%%distribute mirrored\nprint(kept.weight.shape)").text
    assert go_on.exists()
    notebook.run("dispatch.time, dispatch._LATE_S = time, late_s")


def test_a_destructor_after_a_failed_cell_may_hang_and_be_interrupted(notebook: Notebook, tmp_path: Path) -> None:
    """Check that it is released before the next cell begins, and that this cell waits and can be interrupted."""
    begun = tmp_path / "begun"
    failed(
        notebook,
        f"""%%distribute mirrored
class Endless:
    def __del__(self):
        open({str(begun)!r} + str(distnb.replica_id()), "w").close()
        while True:
            time.sleep(0.01)
def fails():
    endless = Endless()
    torch.distributed.barrier()  # before one fails all have what may hang
    1 / 0
fails()
""",
        "ZeroDivisionError",
    )
    notebook.run(f"""
import os
import threading
import time
import distnb.notebook.compose

def stop():
    while not all(os.path.exists(f"{begun}{{replica}}") for replica in range(2)):
        time.sleep(0.01)
    distnb.notebook.compose.current().interrupt()

stopper = threading.Thread(target=stop)
stopper.start()
""")
    failed(notebook, "%%distribute mirrored\nprint('never')", "KeyboardInterrupt")
    wait_until_idle(notebook)
    notebook.run("stopper.join()\ndel stopper, stop, Endless, fails")


def test_stacks_show_the_current_line_of_each_replica(notebook: Notebook, tmp_path: Path) -> None:
    seen = str(tmp_path / "seen")
    notebook.run(f"""
import threading
import distnb.notebook.compose

def watch():
    while True:
        found = distnb.notebook.compose.current().stacks()
        if len(found) == {notebook.engines} and all("line 5" in text for text in found.values()):
            with open({seen!r} + ".part", "w") as file:
                file.write(found[1])
            os.rename({seen!r} + ".part", {seen!r})
            return

watcher = threading.Thread(target=watch)
watcher.start()
""")
    ran = notebook.run(f"""%%distribute mirrored
def waits_here():
    while not os.path.exists({seen!r}):
        time.sleep(0.01)
waits_here()
""")
    assert ran.status == "ok", ran
    text = Path(seen).read_text()
    assert "waits_here()" in text, text
    assert re.match(r"  cell \d+, line 5, in <module>", text), text
    assert "distnb" not in text, text
    assert "idle" in notebook.run("watcher.join()\n%distnb stacks").text


def test_the_stack_of_a_replica_in_a_collective_ends_with_the_users_line(notebook: Notebook, tmp_path: Path) -> None:
    seen = str(tmp_path / "seen")
    notebook.run(f"""
import threading
import distnb.notebook.compose

def watch():
    until = time.monotonic() + 20
    while True:
        text = distnb.notebook.compose.current().stacks().get(0, "")
        if text.rstrip().endswith("loss.backward()") or time.monotonic() > until:
            with open({seen!r} + ".part", "w") as file:
                file.write(text)
            os.rename({seen!r} + ".part", {seen!r})
            return

watcher = threading.Thread(target=watch)
watcher.start()
""")
    notebook.run(f"""%%distribute mirrored
def step():
    loss = kept(torch.ones(1, 2)).sum(1).sum()
    while distnb.replica_id() == 1 and not os.path.exists({seen!r}):
        time.sleep(0.01)
    loss.backward()
strategy.run(step)
""")
    text = Path(seen).read_text()
    assert text.rstrip().endswith("loss.backward()"), text
    assert "strategy.run(step)" in text, text
    notebook.run("watcher.join()")


def test_the_error_names_a_replica_that_returned_early(notebook: Notebook) -> None:
    ran = failed(
        notebook,
        """%%distribute mirrored
def step():
    if distnb.replica_id() == 1:
        return None
    return distnb.get_replica_context().all_reduce("sum", torch.ones(3))
strategy.run(step)
""",
        "CollectiveMismatchError",
    )
    text = re.sub(r"\s+", " ", "".join(ran.traceback))
    assert "replica 1 has returned from the function of strategy.run at " in text, text
    assert re.search(r"replica \d called distnb's all_reduce\S*\(.*?\) at [^;]*, line 5", text), text


def test_an_unreadable_message_is_an_error(notebook: Notebook) -> None:
    notebook.run("""%%distribute mirrored
if distnb.replica_id() == 1:
    from distnb.wire import unix_socket

    def fails(frames, decode=unix_socket.decode):
        unix_socket.decode = decode
        raise OSError("no memory left")

    unix_socket.decode = fails
""")
    ran = failed(notebook, "%%distribute mirrored\ndist.all_reduce(torch.ones(3))", "OSError")
    assert "no memory left" in ran.error_text
    # Several programs are under way, and their functions are new to the engines.
    notebook.run("strategy = distnb.MirroredStrategy()\ndef seven():\n    return 7")
    assert notebook.run("print(strategy.run(seven), strategy.run(seven))").stdout == "7 7\n"


SCOPES = {
    "in a distributed cell": "%%distribute mirrored\nstep = 1\nwith strategy.scope():\n",
    "at the top level": "strategy = distnb.MirroredStrategy()\nstep = 1\nwith strategy.scope():\n",
}


# All replicas meet before it fails: a replica that is ended before it has begun has assigned nothing.
_HALF_WAY = """\
    half = torch.nn.Linear(2, 2)
    whole = half
    torch.distributed.barrier()
    1 / 0
"""


_HALF_A_STEP = """\
%%distribute mirrored
import torch
with strategy.scope():
    stepped = torch.nn.Linear(2, 1)
    steps = torch.optim.SGD(stepped.parameters(), lr=0.1)
def step(stops):
    steps.zero_grad()
    stepped(torch.ones(1, 2)).sum().backward()
    if stops and distnb.get_replica_context().replica_id_in_sync_group:
        raise ValueError("between")
    steps.step()
strategy.run(step, args=(False,))"""


@pytest.mark.parametrize("ordinary", [False, True])
def test_replicas_that_ended_at_different_steps_are_reported(notebook: Notebook, ordinary: bool) -> None:
    notebook.run(_HALF_A_STEP)
    first = "strategy = distnb.MirroredStrategy()" if ordinary else "%%distribute mirrored"
    failed = notebook.try_run(f"{first}\nstrategy.run(step, args=(True,))")
    assert failed.error_name == "ValueError"
    assert "the replicas ended at different steps" in failed.stderr
    assert "(4 on replica 0, 2 on replica 1" in failed.stderr
    after = notebook.run(f"{first}\nstrategy.run(step, args=(False,))\nstrategy.assert_in_sync(stepped)")
    assert "drifted" not in after.stderr + after.stdout, "a cell without a cause gets no warning"


_TRAINED = """\
    made = torch.nn.Linear(2, 2)
    strategy.run(lambda: made(torch.ones(1, 2)))
    seen = 1
    {then}
    1 / 0
"""


@pytest.mark.parametrize("begins", SCOPES.values(), ids=SCOPES)
def test_names_of_an_unfinished_scope_are_not_bound(notebook: Notebook, begins: str) -> None:
    notebook.run("whole = 7")
    failed(notebook, begins + _HALF_WAY, "ZeroDivisionError")
    assert notebook.run("print('half' in globals(), step, whole)").stdout == "False 1 7\n"
    ran = notebook.run("%%distribute mirrored\nprint('half' in globals(), step, whole)")
    assert "False 1 7" in ran.text
    # The objects that `run` has used are complete, and remain.
    failed(notebook, begins + _TRAINED.format(then="torch.distributed.barrier()"), "ZeroDivisionError")
    assert notebook.run("print(type(made).__name__, seen)").stdout == "RemoteMirrored 1\n"
    failed(notebook, begins + _TRAINED.format(then=_HALF_WAY.strip()), "ZeroDivisionError")
    assert notebook.run("print('half' in globals(), type(made).__name__, whole)").stdout == "False RemoteMirrored 7\n"
    notebook.run("%%distribute mirrored\nstrategy.assert_in_sync(made)\ndel made, seen")


def test_an_error_in_a_coalescing_block_does_not_swallow_later_collectives(notebook: Notebook) -> None:
    failed = notebook.try_run(
        "%%distribute mirrored\nimport torch, torch.distributed as dist\nwith dist._coalescing_manager():\n"
        "    dist.all_reduce(torch.ones(1))\n    raise ValueError('mine')"
    )
    assert failed.error_name == "ValueError"
    notebook.run("%%distribute mirrored\ntotal = torch.ones(1)\ndist.all_reduce(total)\ntotal = total.item()")
    assert notebook.value("total") == notebook.engines


# -- (d) an engine dies -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("waits", "workers"),
    [
        pytest.param("dist.all_reduce(torch.ones(3))", True, id="collective, workers alive"),
        pytest.param("time.sleep(600)", False, id="sleep"),
        pytest.param("dist.all_reduce(torch.ones(3))", False, id="collective", marks=pytest.mark.soak),
        pytest.param("time.sleep(600)", True, id="sleep, workers alive", marks=pytest.mark.soak),
    ],
)
def test_a_killed_engine_ends_the_cell(notebook: Notebook, tmp_path: Path, waits: str, workers: bool) -> None:
    source = (
        "%%distribute mirrored"
        + (WORKERS if workers else "\n")
        + f"""
if distnb.replica_id() == 1:
    meet({str(tmp_path)!r}, "fails")
    os.kill(os.getpid(), signal.SIGKILL)
meet({str(tmp_path)!r}, "waits")
{waits}
"""
    )
    ran = failed(notebook, source, "EngineDied")
    assert "ngine 1" in ran.error_text
    assert "SIGKILL" in ran.error_text or "signal 9" in ran.error_text
    left = notebook.engines - 1
    wait_until_idle(notebook)
    said = notebook.run("%%distribute mirrored\npass").stdout
    assert f"engine 1 ended; this runs on {left} replica" in said
    works(notebook, left)  # on the survivors
    notebook.run("%distnb restart --missing", timeout_s=60)  # and, after this, on all: see the fixture
