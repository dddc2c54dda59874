"""Pages and second terminals see replicas, and control them, while the kernel is busy with a cell."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.kernel import Notebook
from tests.support.page import LIMIT_S, Page, new_page

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

HANG = """%%distribute mirrored
import time
print("begun")
while True:
    distnb.live(loss=1.0)
    time.sleep(0.01)
"""


def terminal(notebook: Notebook, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `distnb …` in a second terminal of the same user."""
    folder = notebook._env.get("TMPDIR") or os.environ.get("TMPDIR", "/tmp")
    return subprocess.run(
        [sys.executable, "-m", "distnb", *words],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, "TMPDIR": folder},
    )


def test_a_page_and_a_terminal_show_and_end_a_hanging_cell(notebook: Notebook) -> None:
    notebook.run("import distnb")
    cell = notebook.start(HANG)
    notebook.wait_for_output(cell, "begun")
    with new_page(notebook) as page:  # it requests nothing, and receives everything it needs
        state = page.wait_for(["running", "running"])
        while not (
            state["curves"] and len(state["curves"][0]["lines"][0]["points"]) > 1 and state["engines"][0]["memory"]
        ):
            state = next(page.snapshots())
        assert state["running"]
        head = state["head"]
        assert (head["title"], head["count"], head["state"]) == ("mirrored", "2 replicas", "running")
        assert [engine["place"] for engine in state["engines"]] == ["cpu:0", "cpu:1"]
        (loss,) = state["curves"]
        assert (loss["name"], [line["mark"] for line in loss["lines"]]) == ("loss", ["[0-1]"])
        assert len(loss["lines"][0]["points"]) <= 60

        text = page.request("stacks")["text"]
        assert text.count("time.sleep(0.01)") == 2, text
        states = (m["content"]["execution_state"] for m in page.received() if m["msg_type"] == "status")
        assert (next(states), next(states), next(states)) == ("busy", "idle", "busy"), (
            "the cell continues, and is shown as running"
        )
        assert page.request("nonsense")["error"] == "distnb has no action 'nonsense'."

        seen = terminal(notebook, "stacks")
        assert seen.returncode == 0, seen
        assert f"process {notebook.pid} in " in seen.stdout
        assert seen.stdout.endswith("\n\n")
        assert text in seen.stdout.replace("\n\n", "\n") + "\n"
        assert "has no cluster" in terminal(notebook, "stacks", "1").stderr

        assert page.request("interrupt") == {"interrupted": True}
        assert notebook.finish(cell, HANG).error_name == "KeyboardInterrupt"
        state = page.request("snapshot")["snapshot"]
        assert not state["running"]
        assert state["head"]["state"] == "interrupted"
        assert page.request("interrupt") == {"interrupted": False}
    assert "idle" in terminal(notebook, "stacks").stdout


def test_engines_can_be_started_and_ended_from_a_page_while_cells_run() -> None:
    with Notebook() as notebook, new_page(notebook) as page:
        notebook.run("import distnb, time")
        assert page.request("snapshot")["snapshot"]["engines"] is None
        assert "No cluster is running" in page.request("stacks")["error"]
        waits = notebook.start("while distnb.notebook.compose.current() is None:\n    time.sleep(0.01)")
        assert page.request("start", n=2) == {}
        state = next(each for each in page.snapshots() if each["doing"])
        assert state["doing"].startswith(("starting", "0 of 2 engines"))
        page.wait_for(["idle", "idle"])
        notebook.finish(waits).check()

        cell = notebook.start(HANG)
        notebook.wait_for_output(cell, "begun")
        assert page.request("stop") == {}
        ran = notebook.finish(cell, HANG)
        assert ran.error_name == "KeyboardInterrupt", ran
        next(each for each in page.snapshots() if each["engines"] is None and not each["doing"])
        # Others may run on this machine.
        assert f"process {notebook.pid} in " not in terminal(notebook, "stacks").stdout
        assert page._client.comm_info(target_name="distnb", reply=True, timeout=30)["content"]["comms"]

        assert page.request("start", n=2) == {}
        next(each for each in page.snapshots() if each["doing"])
        ran = notebook.run("%%distribute mirrored\nprint(strategy.num_replicas_in_sync)", timeout_s=LIMIT_S)
        assert ran.stdout.endswith("[0-1] 2\n"), "the cell waits for the engines"
        new_engines_have_no_old_failure(notebook, page)


def new_engines_have_no_old_failure(notebook: Notebook, page: Page) -> None:
    notebook.run("%autodistribute mirrored")
    ran = notebook.try_run("if distnb.replica_id() == 1: raise ValueError('boom')")
    assert ran.error_name == "ValueError"
    state = page.request("snapshot")["snapshot"]
    assert (state["engines"][1]["kind"], state["head"]["state"]) == ("error", "failed")
    assert page.request("start", n=2) == {}
    assert "is running already" in next(each for each in page.snapshots() if each["error"])["error"]
    notebook.run("%distnb stop")
    notebook.run("%distnb start -n 3", timeout_s=LIMIT_S)
    state = page.request("snapshot")["snapshot"]
    assert [engine["kind"] for engine in state["engines"]] == ["idle"] * 3
    assert (state["head"], state["error"]) == (None, "")
