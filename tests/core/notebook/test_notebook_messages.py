"""Messages between the notebook and its user: debuggers, questions and errors, in a real kernel."""

from __future__ import annotations

import base64
import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import needs
from tests.support.kernel import Notebook, lines_of_each

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


@pytest.fixture(scope="module", autouse=True)
def _names(notebook: Notebook) -> None:
    notebook.run("import distnb")


# -- cells in the notebook's own process -----------------------------------------------------------------------------

FAILS = """%%distribute default
def half(number):
    remainder = number % 2
    return number / remainder


half(4)
"""


def test_debug_works_after_a_failing_default_cell(notebook: Notebook) -> None:
    failed = notebook.try_run(FAILS)
    assert failed.error_name == "ZeroDivisionError"
    debugged, asked = notebook.converse("%debug", "p ('remainder', remainder)", "up", "p strategy", "q")
    assert asked == ["ipdb> "] * 4
    assert "('remainder', 0)" in debugged.check().stdout
    assert "return number / remainder" in debugged.stdout
    assert "half(4)" in debugged.stdout, "`up` shows the cell's own line"
    assert "DefaultStrategy()" in debugged.stdout


@pytest.mark.parametrize("word", ["default", "one_device"])
def test_the_traceback_of_a_local_failure_shows_no_line_of_distnb(notebook: Notebook, word: str) -> None:
    failed = notebook.try_run(f"%%distribute {word}\ndef f(x):\n    return x.foo\n\nstrategy.run(f, args=(1,))")
    assert "----> 5 strategy.run" in failed.traceback
    assert "----> 3     return x.foo" in failed.traceback
    assert "strategies/" not in failed.traceback
    assert "runtime/" not in failed.traceback


def test_a_breakpoint_works_in_a_default_cell(notebook: Notebook) -> None:
    source = "%%distribute default\nx = 1\nbreakpoint()\nx = x + 41\n"
    ran, asked = notebook.converse(source, "p ('x', x)", "!x = 59", "continue")
    assert len(asked) == 3
    assert "('x', 1)" in ran.check().stdout
    assert "x = x + 41" in ran.stdout
    assert notebook.value("x") == 100


def test_a_breakpoint_works_in_a_function_run_by_the_default_strategy(notebook: Notebook) -> None:
    source = (
        "%%distribute default\n"
        "def step(batch):\n"
        "    doubled = batch * 2\n"
        "    breakpoint()\n"
        "    return doubled\n"
        "result = strategy.run(step, args=(21,))\n"
    )
    ran, _ = notebook.converse(source, "p ('doubled', doubled)", "continue")
    assert "('doubled', 42)" in ran.check().stdout
    assert notebook.value("result") == 42


def test_input_works_in_a_default_cell(notebook: Notebook) -> None:
    _, asked = notebook.converse("%%distribute default\nname = input('who? ')", "me")
    assert asked == ["who? "]
    assert notebook.value("name") == "me"


def test_a_replica_refuses_to_control_the_cluster(notebook: Notebook) -> None:
    failed = notebook.try_run("%%distribute mirrored\n%distnb status")
    assert "Write it in a cell of its own, without %%distribute" in failed.error_text
    assert "already loaded" in notebook.run("%%distribute mirrored\n%load_ext distnb").stdout


def test_a_captured_cell_shows_no_output_and_no_error(notebook: Notebook) -> None:
    source = "import time\nfor i in range(8):\n    time.sleep(0.1)\n    distnb.live(loss=i)\nprint('said')"
    ran = notebook.run(f"%%capture captured\n%%distribute mirrored\n{source}")
    assert (ran.stdout, ran.stderr) == ("", "")
    # Lines that come within a moment are merged. On a busy machine a replica may be later than that.
    assert set(notebook.value("captured.stdout").splitlines()) in ({"[0-1] said"}, {"[0] said", "[1] said"})


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        # The first to fail ends the other, unless that was about to raise the same error.
        ("sys.exit(3)", r"SystemExit: 3\n.*replica (0 of 2 \(cpu:0\)|1 of 2 \(cpu:1\)) ended by it; replica [01] "),
        ("distnb.replica_id() and exit('sorry')", r"SystemExit: sorry\n.*replica 1 of 2 \(cpu:1\) ended by it"),
    ],
)
def test_a_failing_exit_status_is_reported_and_a_plain_exit_ends_the_cell(
    notebook: Notebook, statement: str, message: str
) -> None:
    notebook.run("import sys")
    failed = notebook.try_run(f"%%distribute mirrored\n{statement}")
    assert failed.error_name == "SystemExit"
    assert re.search(message, failed.traceback)
    notebook.run("%%distribute mirrored\nbefore = 2\nexit()\nnever = 1")
    assert notebook.value("(before, 'never' in globals())") == (2, False)


def test_a_batch_made_by_a_cell_can_be_an_argument_of_calls(notebook: Notebook) -> None:
    notebook.run(
        "%%distribute mirrored\nimport torch\n"
        "data = torch.utils.data.TensorDataset(torch.ones(4, 2), torch.arange(4))\n"
        "for batch in strategy.distribute_dataset(torch.utils.data.DataLoader(data, batch_size=4)):\n    pass"
    )
    assert notebook.value("strategy.run(lambda pair: int(pair[1].sum()), args=(batch,)).values") == (1, 5)
    assert notebook.value("strategy.reduce('sum', batch, axis=None)[0].numpy().tolist()") == [[2.0, 2.0], [2.0, 2.0]]
    assert notebook.value("strategy.gather(batch, axis=0)[1].numpy().tolist()") == [0, 1, 2, 3]


# -- what replicas write, and their errors ---------------------------------------------------------------------------

CALL = """
import torch
strategy = distnb.MirroredStrategy()
def speak(text):
    replica = distnb.get_replica_context().replica_id_in_sync_group
    print(f"{text} {replica}")
    if text == "bad":
        torch.distributed.barrier()  # one that is late has written, too, before the other's error ends it
        raise ValueError("no")
"""


def test_output_of_a_failing_call_appears_above_its_traceback(notebook: Notebook) -> None:
    notebook.run(CALL)
    for _ in range(5):
        message = notebook.start("strategy.run(speak, args=('good',))\nstrategy.run(speak, args=('bad',))")
        order = []
        for kind, content in notebook.events(message, 60):
            if kind == "stream":
                order += [line.split("] ")[-1] for line in content["text"].splitlines()]
            elif kind == "error":
                order.append(content["ename"])
        notebook.reply(message)
        assert order[4:] == ["ValueError"]
        for replica in "01":  # a replica's second line may come before the other's first
            assert [line for line in order[:4] if line[-1] == replica] == [f"good {replica}", f"bad {replica}"]


def test_output_of_a_caught_failure_appears_before_later_output(notebook: Notebook) -> None:
    notebook.run(CALL)
    source = "try:\n    strategy.run(speak, args=('bad',))\nexcept ValueError:\n    print('caught')"
    assert notebook.run(source).stdout.splitlines()[-1] == "caught"


def test_a_failing_call_shows_the_cells_line_and_debug_opens_there(notebook: Notebook) -> None:
    notebook.run(CALL)
    failed = notebook.try_run("def say(word):\n    return strategy.run(speak, args=(word,))\n\nsay('bad')")
    where = [
        failed.traceback.index(text) for text in ("----> 4 say('bad')", "----> 2     return strategy.run", "raised:")
    ]
    assert where == sorted(where), failed.traceback
    on_the_replica = failed.traceback[where[-1] :]
    assert "Cell In[" in on_the_replica, on_the_replica  # where `speak` was defined
    assert "ipykernel_" not in failed.traceback
    debugged, _ = notebook.converse("%distnb debug --here", "p ('word', word)", "q")
    assert "('word', 'bad')" in debugged.check().stdout
    failed = notebook.try_run("strategy.reduce('sum', 1, axis=None)")
    assert "----> 1 strategy.reduce" in failed.traceback
    assert "distnb/" not in failed.traceback.replace("/tests/", "")


SCOPED = """class Trainer:
    def work(self, strategy, kind):
        with strategy.scope():
            model = torch.nn.Linear(1, 1)
            def check():
                assert kind != "scope", 'here'
            check()
        def step(batch):
            loss = model(batch).mean()
            assert kind != "step", 'here'
            loss.backward()
        for batch in strategy.distribute_dataset(torch.ones(4, 1), batch_size=4):
            strategy.run(step, args=(batch,))
        self.step = step
"""


@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        (
            "scope",
            (", line 7, in Trainer.work(", ", line 6, in Trainer.work.<locals>.check", "----> 7             check()"),
        ),
        ("step", (", line 10, in Trainer.work.<locals>.step", """---> 10             assert kind != "step", 'here'""")),
        ("mean", (", line 11: loss.backward()",)),
    ],
)
def test_a_function_with_a_scope_shows_its_own_lines_each_time(
    notebook: Notebook, kind: str, shown: tuple[str, ...]
) -> None:
    notebook.run("import torch\nstrategy = distnb.MirroredStrategy()")
    notebook.run(SCOPED)
    for _ in range(2):
        failed = notebook.try_run(f"Trainer().work(strategy, {kind!r})")
        assert all(line in failed.traceback for line in shown), failed.traceback
        assert "_block_" not in failed.traceback
        assert "_made_" not in failed.traceback


# -- modules that change meanwhile -------------------------------------------------------------------------------------


def test_a_submodule_imported_on_one_side_is_available_on_the_other(notebook: Notebook) -> None:
    notebook.run("import wsgiref\ndef parse():\n    import wsgiref.handlers\nstrategy = distnb.MirroredStrategy()")
    assert not notebook.value("[name for name in ('headers', 'handlers') if hasattr(wsgiref, name)]")
    notebook.run("%%distribute mirrored\nif 0 == 1:\n    import wsgiref.validate\nimport wsgiref.headers\n")
    assert notebook.value("(wsgiref.headers.__name__, hasattr(wsgiref, 'validate'))") == ("wsgiref.headers", False)
    notebook.run("strategy.run(parse)")
    assert notebook.value("wsgiref.handlers.__name__") == "wsgiref.handlers"
    notebook.run("import wsgiref.simple_server\n")
    ran = notebook.run("%%distribute mirrored\nprint(wsgiref.simple_server.__name__)")
    assert ran.stdout.splitlines() == ["[0-1] wsgiref.simple_server"]


def test_an_ordinary_cell_hands_over_seeds(notebook: Notebook) -> None:
    notebook.run(
        "import random\nimport numpy as np\nstrategy = distnb.MirroredStrategy()\ndef draw():\n"
        "    return random.random(), float(np.random.rand()), str(np.array([1 / 3]))"
    )
    for seed in (1, 2):
        seeding = f"random.seed({seed}); np.random.seed({seed}); np.set_printoptions(precision={seed})"
        notebook.run(f"{seeding}\nexpected = [draw() for _ in range(3)]\n{seeding}")
        notebook.run("assert [strategy.run(draw) for _ in range(2)] == expected[:2]")
        notebook.run("%%distribute mirrored\nthird = draw()")
        notebook.run("assert third == expected[2]\nassert random.random() not in [drawn[0] for drawn in expected]")
    notebook.run("np.set_printoptions(precision=8)")


def test_modules_changed_by_autoreload_change_on_the_replicas(notebook: Notebook, tmp_path: Path) -> None:
    outer, inner = tmp_path / "distnb_talk_outer.py", tmp_path / "distnb_talk_inner.py"
    outer.write_text("from distnb_talk_inner import add\ndef f():\n    return add(1)\n")
    inner.write_text("def add(x):\n    return x + 1\n")
    notebook.run("%load_ext autoreload\n%autoreload 2")
    notebook.run(f"import sys, torch\nsys.path.insert(0, {str(tmp_path)!r})\nfrom distnb_talk_outer import f")
    notebook.run("strategy = distnb.MirroredStrategy()\ndef step():\n    return f()")
    try:
        cell, call = "%%distribute mirrored\nfound = f()", "found = strategy.run(step)"
        for size, expected in ((1, 2), (100, 101), (10_000, 10_001)):
            inner.write_text(f"def add(x):\n    return x + {size}\n")
            os.utime(inner, (size, time.time() + size))  # a different modification time, even if the test is fast
            for source in (cell, call):
                notebook.run(source)
                assert notebook.value("found") == expected, (source, size)
    finally:
        notebook.run("%autoreload 0\nsys.path.pop(0)")


def test_classes_keep_their_identity_when_autoreload_changes_their_module(notebook: Notebook, tmp_path: Path) -> None:
    file = tmp_path / "distnb_talk_classes.py"

    def write(version: int) -> None:
        file.write_text(f"class Thing:\n    def value(self):\n        return {version}\n")
        os.utime(file, (version, time.time() + version))

    write(1)
    notebook.run(f"%load_ext autoreload\n%autoreload 2\nimport sys\nsys.path.insert(0, {str(tmp_path)!r})")
    try:
        # Only the replicas import the module, which is edited before the next cell.
        notebook.run(
            "%%distribute mirrored\nimport distnb_talk_classes as classes\nfrom distnb_talk_classes import Thing"
        )
        notebook.run("old = Thing()")
        for version in (2, 3):
            write(version)
            notebook.run("here = old.value(), type(old) is Thing is classes.Thing")
            notebook.run("%%distribute mirrored\nthere = old.value(), type(old) is Thing is classes.Thing")
            assert notebook.value("[here, there]") == [(version, True), (version, True)]
    finally:
        notebook.run("%autoreload 0\nsys.path.pop(0)")


def test_a_replica_unpickles_instances_of_classes_that_its_cell_does_not_name(
    notebook: Notebook, tmp_path: Path
) -> None:
    file = tmp_path / "pickled"
    notebook.run(f"""
import pickle, torch
class Part:
    pass
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.part = Part()
def act(x):
    return x
torch.save(Net(), {str(file)!r})
def read():
    return type(torch.load({str(file)!r}, weights_only=False).part) is Part
strategy = distnb.MirroredStrategy()
""")
    notebook.run(f"%%distribute mirrored\nloaded = torch.load({str(file)!r}, weights_only=False)")
    assert notebook.value("[type(loaded).__name__, strategy.run(read)]") == ["RemoteMirrored", True]
    notebook.run(f"with open({str(file)!r}, 'wb') as file: pickle.dump(act, file)")
    failed = notebook.try_run(f"%%distribute mirrored\nwith open({str(file)!r}, 'rb') as file: pickle.load(file)")
    assert failed.error_name == "AttributeError"
    assert "If `act` is a class or function of the notebook, name it in the cell" in failed.traceback


def errors_of(notebook: Notebook, source: str) -> list[str]:
    message = notebook.start(source)
    errors = [content["ename"] for kind, content in notebook.events(message, 60) if kind == "error"]
    notebook.reply(message)
    return errors


LATER = "late = strategy.run(speak, args=('bad',), options=distnb.RunOptions(wait=False))\n"


def test_a_pending_failure_is_raised_once_and_in_its_cell(notebook: Notebook) -> None:
    notebook.run(CALL)
    for use in ("late.result()", "print('on the way')", "late", "strategy.run(speak, args=(late,))"):
        assert errors_of(notebook, LATER + use) == ["ValueError"], use
    assert errors_of(notebook, LATER + "1 / 0") == ["ZeroDivisionError", "ValueError"]
    assert notebook.run("print('the next cell')").stdout == "the next cell\n"


def test_a_failing_cell_with_await_shows_only_its_own_lines(notebook: Notebook) -> None:
    failed = notebook.try_run("%%distribute mirrored\nimport asyncio\nawait asyncio.sleep(0)\n1 / 0\n")
    assert "----> 4 1 / 0" in failed.traceback
    assert "base_events.py" not in failed.traceback


def test_a_function_defined_on_replicas_shows_its_source_everywhere(notebook: Notebook) -> None:
    notebook.run("%%distribute mirrored\ndef divide(n):\n    zero = n - n\n    return n / zero\n")
    here = notebook.try_run("divide(1)")
    assert "----> 4     return n / zero" in here.traceback
    there = notebook.try_run("distnb.MirroredStrategy().run(divide, args=(1,))")
    assert "----> 4     return n / zero" in there.traceback
    assert notebook.value("__import__('inspect').getsource(divide)").startswith("def divide(n):\n    zero")


def test_a_restarted_cluster_writes_into_the_right_cells(notebook: Notebook) -> None:
    notebook.run("%distnb stop\n%distnb start -n 2", timeout_s=90)
    for text in ("one", "two", "three"):
        wrote = notebook.run(f"%%distribute mirrored\nprint({text!r})").stdout
        assert lines_of_each(wrote) == [[text], [text]]


def test_objects_of_a_distributed_cell_can_be_used_in_ordinary_cells(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run("import pickle, torch\npairs = torch.utils.data.TensorDataset(torch.arange(10.0), torch.arange(10))")
    notebook.run(
        "%%distribute mirrored\n"
        "batches = strategy.distribute_dataset(pairs, batch_size=4)\n"
        "with strategy.scope():\n    model = torch.nn.Linear(2, 1)"
    )
    source = """
strategy = distnb.MirroredStrategy()
sums = [strategy.run(lambda batch: float((batch[0] * batch[1]).sum()), args=(batch,)) for batch in batches]
"""
    notebook.run(source)
    assert notebook.value("len(batches)") == 3
    assert notebook.value("[each.values for each in sums]") == [(1.0, 13.0), (41.0, 85.0), (64.0, 81.0)]
    notebook.run(f"torch.save(model, {str(tmp_path / 'model.pt')!r})")
    here = f"torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)"
    assert notebook.value(f"type({here}) is type(pickle.loads(pickle.dumps(model))) is torch.nn.Linear") is True
    assert "in_features=2" in notebook.run("%%distribute mirrored\nmodel?").stdout
    for call in ("torch.optim.SGD(model.parameters(), lr=0.1)", "torch.nn.Sequential(model, torch.nn.ReLU())"):
        refused = notebook.try_run(call)
        assert refused.error_name == "ContextError", call
        assert "strategy.scope()" in refused.error_text
    assert "was given `model`, which is a handle" in refused.error_text
    refused = notebook.try_run("', '.join([model])")
    assert "RemoteMirrored is a handle" in refused.traceback, "an error of another library says so, too"


# -- what the live view shows -------------------------------------------------------------------------------------

TRAINS = """
strategy = distnb.MirroredStrategy()
with strategy.scope():
    model = torch.nn.Linear(1, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam(model.parameters())]

def train(x):
    for optimizer in optimizers:
        optimizer.zero_grad()
        loss = distnb.nn.compute_average_loss(model(x).square()[:, 0])
        loss.backward()
        optimizer.step()
    distnb.live(inner=loss)
    return loss

def evaluate(x):
    with torch.no_grad():
        return model(x).sum()

batches = strategy.distribute_dataset(torch.ones(12, 1), batch_size=4)
"""
LOOP = """
for epoch in range(2):
    for batch in batches:
        loss = strategy.reduce("sum", strategy.run(train, (batch,)), axis=None)
        distnb.live(loss=loss, double=2 * loss)
        distnb.live(rate=0.1)
    for batch in batches:
        strategy.run(evaluate, (batch,))
    distnb.live(accuracy=0.5)
"""


@pytest.mark.parametrize("magic", ["", "%%distribute strategy\n"])
def test_the_view_counts_training_steps_in_both_kinds_of_cells(notebook: Notebook, magic: str) -> None:
    notebook.run("import torch\n" + TRAINS)
    shown = notebook.run(magic + LOOP).displays[-1]
    html = shown["text/html"]
    for text in ("2 replicas", "step 6", "strategy ·" if magic else "mirrored ·"):
        assert text in shown["text/plain"]
    for text in ("cpu:0", "cpu:1", "inner", "loss", "double", "rate", "accuracy"):
        assert f">{text}<" in html
    pictures = [base64.b64decode(each).decode() for each in re.findall(r"base64,([A-Za-z0-9+/=]+)", html)]
    ticks = [float(tick) for picture in pictures for tick in re.findall(r'y="177"[^>]*>([\d.]+)<', picture)]
    assert 0 < max(ticks) <= 6


def test_a_default_cell_shows_no_replicas(notebook: Notebook) -> None:
    notebook.run("import torch\n" + TRAINS)
    ran = notebook.run("%%distribute default\nfor value in model.parameters():\n    distnb.live(value=value.sum())")
    shown = ran.displays[-1]
    assert "default · ended" in shown["text/plain"]
    assert "cpu:0" not in shown["text/html"]


def test_a_default_cell_runs_before_it_draws(notebook: Notebook) -> None:
    notebook.run("import time\nimport distnb")
    ran = notebook.run("%%distribute default\ntime.sleep(1)\ndistnb.live(value=1.0)")
    seconds = re.search(r"default · ended · ([\d.]+) s", ran.displays[-1]["text/plain"])
    assert seconds is not None
    assert float(seconds[1]) >= 1


def test_the_view_shows_the_failing_line_of_a_replica(notebook: Notebook) -> None:
    notebook.run("import time")
    failed = notebook.try_run(
        "%%distribute mirrored\ndistnb.live(x=1.0)\n\ntime.sleep(0.5)\n"
        "if distnb.replica_id() == 1:\n    raise ValueError('no')\nstrategy.run(lambda: torch.ones(()))\n"
        "strategy.reduce('sum', torch.ones(()), axis=None)"
    )
    assert failed.error_name == "ValueError"
    cells = re.findall(r"cell \d+, line (\d+)", failed.displays[-1]["text/html"])
    assert cells == ["7", "6"]  # replica 0 waits for what replica 1's call returns


def test_completion_prints_nothing(notebook: Notebook) -> None:
    notebook.run(
        "%%distribute mirrored\n"
        "class Loud:\n"
        "    @property\n"
        "    def volume(self):\n"
        "        print('loud')\n"
        "        return 11\n"
        "loud, mark = Loud(), object()\n"
        "print('cell')\n"
    )
    assert "volume" in notebook.complete("loud.")
    assert "bit_length" in notebook.complete("loud.volume.")
    notebook.run("mark.__class__")  # all earlier output has arrived
    assert set(re.findall(r"cell|loud", notebook.run("%distnb output").stdout)) == {"cell"}
    assert "loud" in notebook.run("loud.volume").stdout


# -- other users of the machine ---------------------------------------------------------------------------------------


def test_a_session_listens_on_loopback_only(notebook: Notebook) -> None:
    notebook.run("%%distribute mirrored\nimport torch, torch.distributed as dist\ndist.all_reduce(torch.ones(3))")
    ours = notebook.processes()
    listed = subprocess.run([needs("ss"), "-ltnpH"], capture_output=True, text=True, check=True).stdout
    lines = [line for line in listed.splitlines() if any(f"pid={pid}," in line for pid in ours)]
    assert len(lines) >= 2, "the two channels"
    assert [line for line in lines if not line.split()[3].startswith("127.0.0.1:")] == []


def test_underscore_is_the_last_value_of_a_distributed_cell(notebook: Notebook) -> None:
    notebook.run("%%distribute mirrored\nx = 5\nx * 2")
    assert notebook.run("%%distribute mirrored\n_ + 1").text.endswith("11\n")
    assert notebook.value("_ + 1") == 12
    assert notebook.value("list(Out.values())[-2:]") == [10, 11]
