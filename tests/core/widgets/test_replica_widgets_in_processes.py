"""Widgets that replicas create, as the kernel's pages receive them: comm messages, and displays that refer to them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.kernel import Notebook

pytestmark = pytest.mark.processes

VIEW = "application/vnd.jupyter.widget-view+json"
MAKES = """%%distribute mirrored
import distnb, ipywidgets
from tqdm.notebook import tqdm
me = distnb.replica_id()
bar = ipywidgets.IntProgress(value=0, max=10_000)
box = ipywidgets.HBox([ipywidgets.Image(value=b"picture %d" % me), bar, ipywidgets.IntSlider()])
display(box)
for bar.value in range(10_001):
    pass
out = ipywidgets.Output()
display(out)
with out:
    print("of", me)
    display(ipywidgets.Label(f"label {me}"))
print("outside")
label = ipywidgets.Label("gone")
label.close()
for _ in tqdm(range(3), desc=f"tqdm {me}"):
    pass
"""
OUT = "import time, ipywidgets\nout = ipywidgets.Output()\ndisplay(out)"


class Page:
    """A front end's widget models, built from a kernel's messages."""

    def __init__(self) -> None:
        self.states: dict[str, dict[str, Any]] = {}
        self.displayed: list[dict[str, Any]] = []
        self.messages: list[str] = []

    def take(self, events: Iterator[tuple[str, dict[str, Any]]]) -> Page:
        for kind, content in events:
            data = content.get("data", {})
            if kind == "comm_open" and content["target_name"] == "jupyter.widget":
                self.states[content["comm_id"]] = data["state"]
            elif kind == "comm_msg" and data.get("method") == "update" and content["comm_id"] in self.states:
                self.states[content["comm_id"]].update(data["state"])
                self.messages.append(content["comm_id"])
            elif kind == "comm_close":
                self.states.pop(content["comm_id"], None)
            elif kind == "display_data" and VIEW in data:
                self.displayed.append(self.states[data[VIEW]["model_id"]])  # the widget must be known already
            elif kind == "error":
                raise AssertionError("\n".join(content["traceback"]))
        return self

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [state for state in self.states.values() if state["_model_name"] == kind]


def test_pages_receive_widgets_of_replicas_and_their_changes(notebook: Notebook) -> None:
    page = Page().take(notebook.events(notebook.start(MAKES), 60))
    live = [state for state in page.displayed if state["_model_name"] == "AnyModel"]
    assert [state["_model_name"] for state in page.displayed if state not in live].count("HBoxModel") == 4
    assert [state["value"] for state in page.of("IntProgressModel")] == [10_000, 10_000]
    assert len(page.messages) < 200, "of 20,000 changes"
    assert all("buffer" not in str(state.get("value")) for state in page.of("ImageModel"))
    assert [state["disabled"] for state in page.of("IntSliderModel")] == [True, True]
    assert "gone" not in str(page.states)
    bars = sorted(text["value"].replace("\u2007", " ") for text in page.of("HTMLModel") if "tqdm" in text["value"])
    assert bars == ["tqdm 0: 100%", "tqdm 1: 100%"]
    shown = {state["outputs"][0]["text"]: state["outputs"][1:] for state in page.of("OutputModel")}
    assert sorted(shown) == ["of 0\n", "of 1\n"]
    for text, (label,) in shown.items():
        assert "label " + text[3] == page.states[label["data"][VIEW]["model_id"]]["value"]

    page.take(notebook.events(notebook.start("%%distribute mirrored\nbar.value = 5 + me"), 60))
    assert sorted(state["value"] for state in page.of("IntProgressModel")) == [5, 6], "a later cell changes them"


def test_text_outside_a_widget_belongs_to_the_cell_and_a_widget_remains_on_its_replica(notebook: Notebook) -> None:
    ran = notebook.run(MAKES)
    assert "outside" in ran.stdout
    assert "of 0" not in ran.stdout
    assert "IntProgress(value=10000, max=10000)" in notebook.run("print(repr(bar))").stdout


def test_an_error_within_an_output_widget_is_shown_there_and_stop_ends_its_block(notebook: Notebook) -> None:
    raises = "with out:\n    print('last')\n    raise ValueError('in it')\nprint('goes on')"
    page = Page().take(notebook.events(notebook.start(f"%%distribute mirrored\n{OUT}\n{raises}"), 60))
    for state in page.of("OutputModel"):
        text, error = (each["text"] for each in state["outputs"])
        assert text == "last\n"
        assert "ValueError" in error
        assert "in it" in error
    cell = notebook.start("%%distribute mirrored\nprint('begun')\nwith out:\n    while True:\n        time.sleep(0.01)")
    notebook.wait_for_output(cell, "begun")
    notebook.interrupt()
    notebook.finish(cell).check()  # as in an ordinary cell, the widget catches the interrupt
    assert "after" in notebook.run("%%distribute mirrored\nprint('after')").stdout
