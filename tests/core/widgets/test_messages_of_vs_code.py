"""The messages of front ends without our extension, as VS Code sends them: interrupts by message, hidden requests, and
requests for the states of widgets. Its debugger attaches to the kernel."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.kernel import Notebook
from tests.support.page import Page, new_page

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

LIVES = "%%distribute mirrored\nfor step in range(5):\n    distnb.live(loss=step)\nprint('drawn', flush=True)\n"
HOLDS = "while True:\n    time.sleep(0.05)"


@pytest.fixture(scope="module")
def page(notebook: Notebook) -> Iterator[Page]:
    # These kernels are forked from a process that has loaded ipywidgets, which then misses that it is in a kernel.
    notebook.run("import distnb, time, torch, ipywidgets\nipywidgets.register_comm_target()")
    with new_page(notebook) as opened:
        yield opened


@pytest.mark.parametrize("source", [LIVES + HOLDS, "%%distribute mirrored\nname = input('who? ')"])
def test_an_interrupt_by_message_ends_a_cell_and_a_prompt(notebook: Notebook, page: Page, source: str) -> None:
    message = notebook.start(source, allow_stdin=True)
    if "input" in source:
        assert notebook.asked().endswith("who? ")
    else:
        notebook.wait_for_output(message, "drawn")
    assert page.control("interrupt_request") == {"status": "ok"}
    assert notebook.finish(message).error_name == "KeyboardInterrupt"
    assert notebook.run("%%distribute mirrored\nprint(int(torch.ones(1)))").stdout == "[0-1] 1\n"


def execute(page: Page, code: str, *, hidden: bool) -> list[dict[str, Any]]:
    """Run a cell whose id is an address, or a request that the viewer of variables sends without the user."""
    content = {"code": code, "silent": hidden, "store_history": not hidden, "allow_stdin": False}
    address = {"cellId": "vscode-notebook-cell:/home/me/my%20notebook.ipynb#W2sZmlsZQ%3D%3D"}
    message = page.send("execute_request", content, {} if hidden else address)
    return [each for each in page.until_idle(message) if each["parent_header"].get("msg_id") == message]


def test_a_hidden_request_changes_no_cell(notebook: Notebook, page: Page) -> None:
    execute(page, "%%distribute mirrored\ndiffers = torch.ones(2) * distnb.replica_id()", hidden=False)
    before, count = page.request("snapshot")["snapshot"], notebook.value("len(In)")
    assert [mark["state"] for mark in before["cells"].values()] == ["ended"]
    reads = "print(len(differs), differs.shape, type(differs).__name__)\n"
    for hidden in (reads, "%%distribute mirrored\nprint('hidden')", "distnb.MirroredStrategy().run(lambda: 1 / 0)"):
        got = execute(page, hidden, hidden=True)
        assert {each["msg_type"] for each in got} in ({"status", "stream"}, {"status", "error"}), got
    assert page.request("snapshot")["snapshot"]["cells"] == before["cells"]
    assert notebook.value("len(In)") == count + 1, "only `value` has added one"


def states(page: Page, subshell: str | None = None) -> list[tuple[dict[str, Any], Any]]:
    """Request the states of all widgets, and return the live views' with the points of their curves."""
    comm = uuid.uuid4().hex
    opens = {"comm_id": comm, "target_name": "jupyter.widget.control", "data": {}}
    page.send("comm_open", opens, {"version": "1.0.0"}, subshell)
    message = page.send("comm_msg", {"comm_id": comm, "data": {"method": "request_states"}}, subshell=subshell)
    replies = [each for each in page.until_idle(message) if each["content"].get("comm_id") == comm]
    data, buffers = replies[-1]["content"]["data"], replies[-1]["buffers"]
    assert data["method"] == "update_states"
    points = {path[0]: buffer for path, buffer in zip(data["buffer_paths"], buffers, strict=True)}
    return [
        (model["state"], points[name]) for name, model in data["states"].items() if model["model_name"] == "AnyModel"
    ]


def test_a_late_page_gets_the_live_view_during_the_cell_and_after_it(notebook: Notebook, page: Page) -> None:
    subshell = page.control("create_subshell_request")["subshell_id"]
    message = notebook.start(LIVES + HOLDS)
    assert any(kind == "display_data" for kind, _ in notebook.events(message, 60)), "the live view"
    state, points = states(page, subshell)[-1]
    assert (state["ended"], state["curves"]["charts"][0]["name"], len(points) > 0) == (False, "loss", True)
    page.control("interrupt_request")
    notebook.finish(message)
    state, points = states(page)[-1]
    assert (state["ended"], state["written"], len(points)) == (True, "[0-1] drawn\n", 5 * 4 * 4)
    page.control("delete_subshell_request", {"subshell_id": subshell})


@pytest.mark.soak  # debugpy takes long to attach
def test_the_front_ends_debugger_stops_in_the_line_of_a_default_cell() -> None:
    source = "%%distribute default\none = 1\nbreakpoint()\ntwo = 2\nprint('done')"
    with Notebook() as notebook, new_page(notebook) as page:
        requests = iter(range(1, 100))

        def debug(command: str, **arguments: Any) -> Any:
            content = {"type": "request", "seq": next(requests), "command": command, "arguments": arguments}
            reply = page.control("debug_request", content)
            assert reply["success"], reply
            return reply.get("body")

        debug("initialize", clientID="vscode", adapterID="", linesStartAt1=True, pathFormat="path")
        debug("attach", justMyCode=True)
        debug("configurationDone")
        path = debug("dumpCell", code=source)["sourcePath"]
        message = notebook.start(source)
        stopped = next(each for each in page.received() if each["content"].get("event") == "stopped")
        thread = stopped["content"]["body"]["threadId"]
        frame = debug("stackTrace", threadId=thread)["stackFrames"][0]
        assert (frame["source"]["path"], frame["line"]) == (path, 4)
        debug("continue", threadId=thread)
        assert notebook.finish(message).check().stdout == "done\n"
        debug("disconnect", restart=False, terminateDebuggee=False)
        _, asked = notebook.converse(source, "c")
        assert asked == ["ipdb> "]
    shutil.rmtree(Path(path).parent)  # the kernel leaves it
