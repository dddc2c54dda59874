"""A notebook killed before each message of a replacement or a resize: the next one finds the model, and goes on."""

from __future__ import annotations

import os
import signal

import pytest

from tests.support import processes
from tests.support.kernel import Notebook
from tests.support.trained_model import FOUND, MODEL, STEP

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

KILLED = """
import os, signal
from distnb.wire.channel import Programs
send_frames, sent = Programs.send_frames, 0
def send_one_by_one(programs, peers, frames):
    global sent
    unreached = []
    for peer in peers:
        if sent == {last}:
            os.kill(os.getpid(), signal.SIGKILL)
        sent += 1
        unreached += send_frames(programs, (peer,), frames)
    return unreached
Programs.send_frames = send_one_by_one
{change}
Programs.send_frames = send_frames
"""


@pytest.mark.soak  # long; test_ownership.py tests every sequence of the owner's events
@pytest.mark.parametrize(
    ("size", "change"), [(3, "%distnb restart --missing"), (2, "%distnb resize 3"), (3, "%distnb resize 2")]
)
def test_the_next_notebook_finds_the_model(size: int, change: str) -> None:
    with Notebook() as notebook:
        notebook.run(f"%distnb start -n {size} --detach --name killed", timeout_s=120)
        notebook.run(MODEL)
        notebook.run(STEP)
        before = notebook.value(FOUND)
    sizes: list[int] = []
    survived = False
    while not survived:
        with Notebook() as notebook:
            notebook.run("%distnb connect killed\nimport distnb.notebook.compose as compose")
            assert notebook.value(FOUND) == before, len(sizes)
            if "restart" in change:
                assert notebook.run(change).stdout == "No engine is missing.\n"
            notebook.run(STEP)
            sizes.append(notebook.value("history[-1]"))
            pids = notebook.value("[each.pid for each in compose.require().status()]")
            assert len(pids) == sizes[-1]
            if len(pids) != size:
                notebook.run(f"%distnb resize {size}")
            if "restart" in change:
                os.kill(pids[1], signal.SIGKILL)
                # The survivors get another key when the end is known, and again with the replacement.
                notebook.run("while compose.require().status()[1].state == 'idle':\n    pass\nmodel.training")
            before = notebook.value(FOUND)
            survived = notebook.survives(KILLED.format(last=len(sizes) - 1, change=change))
    assert len(sizes) > 5
    assert set(sizes) == ({2, 3} if "resize" in change else {3})
    with Notebook() as notebook:
        notebook.run("%distnb connect killed")
        assert notebook.value(FOUND) == before
        notebook.run(STEP)
        assert notebook.value("history[-1]") == int(change[-1] if "resize" in change else size)
        notebook.run("%distnb stop")
    processes.wait_until(lambda: not processes.children_of_this_run(), 15.0, "processes are left")
