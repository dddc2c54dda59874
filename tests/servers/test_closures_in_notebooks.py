"""Closures in a notebook: the display while they run, afterwards, and on demand; and the stop button."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import processes
from tests.support.kernel import Notebook

pytestmark = [pytest.mark.processes, pytest.mark.timeout(170)]

_SETUP = """%%distribute parameter_server
import time, torch
from pathlib import Path
with strategy.scope():
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train_step(held):
    while Path(held).exists():
        time.sleep(0.01)
    optimizer.zero_grad()
    loss = model(torch.ones(3, 4)).sum()
    loss.backward()
    optimizer.step()
    distnb.live(loss=loss)
    print("stepped")
"""


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    with Notebook(env={"OMP_NUM_THREADS": "1"}) as made:
        processes.OF_MODULE.add(made.pid)
        made.run("import distnb\n%distnb start --workers 2 --ps 1", timeout_s=120)
        made.run(_SETUP)
        yield made


def shown_when(notebook: Notebook, message: str, text: str) -> tuple[str, list[dict[str, Any]]]:
    """Read a running cell's messages until a display contains a text. Return its output and displays."""
    printed, displays = "", []
    for kind, content in notebook.events(message, 60):
        if kind == "stream":
            printed += content["text"]
        elif kind in ("display_data", "update_display_data"):
            displays.append(content["data"])
            if text in str(content["data"].get("text/plain")):
                return printed, displays
    raise AssertionError(f"the cell ended before {text!r} was shown: {displays}")


def test_a_cell_shows_the_queue_while_it_waits_and_keeps_the_last_state(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run("%distnb live picture")
    held = tmp_path / "held"
    held.touch()
    message = notebook.start(
        f"for _ in range(20):\n    coordinator.schedule(train_step, args=({str(held)!r},))\ncoordinator.join()"
    )
    _, displays = shown_when(notebook, message, "ps 0: 2 shards, 40 B")
    (head, queue, *workers), page = displays[-1]["text/plain"].splitlines(), displays[-1]["text/html"]
    assert head.startswith("parameter_server · 2 workers · running · ")
    assert queue.endswith(" waiting")
    assert " running · " in queue
    assert workers[:2] == ["worker 0: 0 done, train_step", "worker 1: 0 done, train_step"]
    assert "data:image/svg+xml" in page
    assert "[2, 4]" in page
    held.unlink()
    ran = notebook.finish(message)
    assert ran.status == "ok"
    last = ran.displays[-1]
    lines = last["text/plain"].splitlines()
    assert lines[0].startswith("parameter_server · 2 workers · ended · ")
    assert " · 20 steps" in lines[0]
    assert "steps</th>" in last["text/html"], "the workers count their own"
    assert lines[1].startswith("loss: ")
    assert lines[2].startswith("closures: 20 done · staleness ")
    assert sum(int(line.split()[2]) for line in lines[3:5]) == 20
    assert last["text/html"].count(">20</td>") >= 2, "both variables have had so many updates"
    printed = ran.stdout.splitlines()
    assert {line.partition("]")[0] for line in printed} <= {"[worker 0", "[worker 1", "[worker 0-1"}
    assert sum(2 if line.startswith("[worker 0-1]") else 1 for line in printed) == 20


def test_a_cell_that_joins_shows_closures_of_an_earlier_cell(notebook: Notebook, tmp_path: Path) -> None:
    held = tmp_path / "held"
    held.touch()
    ran = notebook.run(f"for _ in range(6):\n    coordinator.schedule(train_step, args=({str(held)!r},))")
    assert ran.displays == []
    assert "train_step for " in notebook.run("%distnb status").text
    message = notebook.start("coordinator.join()")
    shown_when(notebook, message, "worker 1: 0 done, train_step")
    held.unlink()
    ran = notebook.finish(message)
    assert "closures: 6 done" in ran.displays[-1]["text/plain"]


def test_placement_and_status_list_the_servers_contents(notebook: Notebook) -> None:
    rows = notebook.value("[(row.name, row.shape, str(row.dtype), row.nbytes) for row in strategy.placement()]")
    assert rows == [("weight", (2, 4), "torch.float32", 32), ("bias", (2,), "torch.float32", 8)]
    assert notebook.value("{row.device for row in strategy.placement()}") == {"/job:ps/replica:0/task:0/device:CPU:0"}
    before = notebook.value("[row.updates for row in strategy.placement()]")
    notebook.run("coordinator.schedule(train_step, args=('/nowhere',)).fetch()")
    assert notebook.value("[row.updates for row in strategy.placement()]") == [each + 1 for each in before]
    text = notebook.run("%distnb status").text
    assert "2 shards, 40 B" in text
    assert " done" in text


def test_a_short_cell_shows_no_view(notebook: Notebook) -> None:
    ran = notebook.run("coordinator.schedule(lambda: 1).fetch()")
    assert [each for each in ran.displays if "closures" in str(each)] == []


_STEP = """
class Mine(Exception):
    pass
def step(n):
    print("step", n)
    if n < 0:
        raise Mine(n)
    return n
"""


def test_prints_and_errors_of_closures_appear_in_the_cell(notebook: Notebook) -> None:
    notebook.run(_STEP)
    ran = notebook.run("values = [coordinator.schedule(step, args=(n,)) for n in (1, 2)]\ncoordinator.join()")
    assert ran.stdout.count("step 1") == 1
    assert ran.stdout.count("step 2") == 1
    ran = notebook.try_run("coordinator.schedule(step, args=(-1,))\ncoordinator.join()")
    assert ran.error_name == "Mine"
    assert "raise Mine(n)" in ran.traceback
    assert re.search(r"Cell In\[\d+\], line", ran.traceback)
    assert "orker" in ran.traceback


def test_a_worker_unpickles_instances_of_classes_that_its_function_does_not_name(
    notebook: Notebook, tmp_path: Path
) -> None:
    notebook.run(f"""
import pickle
class Part:
    def __init__(self, x):
        self.x = x
with open({str(tmp_path / "part")!r}, "wb") as file:
    pickle.dump(Part(3), file)
def read():
    with open({str(tmp_path / "part")!r}, "rb") as file:
        return pickle.load(file)
part = distnb.coordinator.ClusterCoordinator(distnb.ParameterServerStrategy()).schedule(read).fetch()
""")
    assert notebook.value("[type(part) is Part, part.x]") == [True, 3]


def test_the_stop_button_ends_closures(notebook: Notebook) -> None:
    notebook.run("values = [coordinator.schedule(time.sleep, args=(60,)) for _ in range(8)]")
    cell = notebook.start("coordinator.join()")
    processes.wait_until(lambda: "Waiter.wait" in processes.stacks([notebook.pid]), 60)
    notebook.interrupt()
    assert notebook.finish(cell).error_name == "KeyboardInterrupt"
    assert notebook.value("[value.state for value in values]") == ["cancelled"] * 8
    assert notebook.value("coordinator.schedule(abs, args=(-3,)).fetch()") == 3


def test_variables_are_drawn_with_their_servers(notebook: Notebook) -> None:
    text = notebook.run("distnb.visualize(model)").text
    assert "ps 0: 40 B" in text
    assert "weight  (2, 4)  float32  all   ps 0  cpu     32 B  on a parameter server" in text
    text = notebook.run("distnb.visualize(strategy)").text
    assert "worker 0" in text
    assert "weight  (2, 4)  float32" in text
    assert "ps 0" in notebook.run("%distnb devices").text
    ran = notebook.run("import torch\nvalue = coordinator.schedule(lambda: torch.arange(3.0))\nvalue.fetch()\nvalue")
    assert "RemoteValue of &lt;lambda&gt;" in ran.displays[-1]["text/html"]
    assert "histogram from 0 to 2" in ran.displays[-1]["text/html"]
