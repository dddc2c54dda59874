"""Widgets of replicas, without a replica: messages to the notebook and to its pages."""

from __future__ import annotations

import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import comm
import ipywidgets
import pytest
from ipykernel.jsonutil import json_clean

from distnb.engine.control import _joined
from distnb.engine.output import widget_comms
from distnb.widgets.replica_widgets import Captured, ReplicaWidgets
from distnb.wire.messages import Display, Output, WidgetChange

VIEW = "application/vnd.jupyter.widget-view+json"


@pytest.fixture
def emitted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the messages of the test's widgets that an engine's control thread gets."""
    events: list[Any] = []
    control: Any = SimpleNamespace(running=(3, 1), emit=events.append)
    monkeypatch.setattr(comm, "create_comm", comm.create_comm)
    shell = SimpleNamespace(
        set_parent=lambda parent: None, kernel=SimpleNamespace(session=SimpleNamespace(msg=lambda kind: {}))
    )
    widget_comms.install(1, control, shell)
    return events


def copy_of(model: str) -> str:
    return f"copy of {model}"


def wrote(text: str, replica: int = 1) -> Output:
    return Output(engine=replica, program=3, replica=replica, stream="stdout", text=text)


class Sent(ReplicaWidgets):
    """Copies that record their messages to pages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, shown: bool = True) -> None:
        super().__init__(shown=shown)
        self.messages: list[tuple[str, dict[str, Any], Any]] = []

        class PageComm(comm.base_comm.BaseComm):
            def publish_msg(
                page, kind: str, data: Any = None, metadata: Any = None, buffers: Any = None, **_: Any
            ) -> None:
                self.messages.append((kind, json_clean(data or {}), buffers))

        monkeypatch.setattr(comm, "create_comm", lambda *args, **keywords: PageComm(*args, **keywords))

    def follow(self, events: list[Any]) -> None:
        for event in _joined(events):
            if isinstance(event, WidgetChange):
                self.feed(replace(event, widget=copy_of(event.widget)))  # both ends are one process here
            else:
                self.capture(event)
        events.clear()


def test_a_widget_sends_its_state_and_then_its_changes(emitted: list[Any]) -> None:
    image = ipywidgets.Image(value=b"one")
    model = image.model_id
    image.value = b"two"
    image.send({"zoom": 2}, [memoryview(b"raw")])
    image.close()
    of_image = [event for event in emitted if event.widget == model]
    assert [event.method for event in of_image] == ["open", "update", "custom", "close"]
    opened, update, custom, _ = of_image
    assert (opened.engine, opened.program, opened.replica) == (1, 3, 1)
    assert opened.content["value"] == b"one"
    assert update.content == {"value": b"two"}
    assert (custom.content, custom.buffers) == ({"zoom": 2}, (b"raw",))
    pickle.loads(pickle.dumps(emitted))
    with pytest.raises(TypeError, match="stays on its replica"):
        pickle.dumps(ipywidgets.Label().comm)


def test_many_changes_are_merged_in_the_order_of_other_messages(emitted: list[Any]) -> None:
    bar, text = ipywidgets.IntProgress(max=100), ipywidgets.Label()
    emitted.clear()
    for at in range(1, 100):
        bar.value, text.value = at, str(at)
    emitted.append(wrote("between\n"))
    bar.value = 7
    joined = _joined(emitted)
    assert [getattr(event, "content", event) for event in joined] == [
        {"value": 99},
        {"value": "99"},
        wrote("between\n"),
        {"value": 7},
    ]


def test_pages_get_copies_that_cannot_be_pressed(emitted: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    button, image = ipywidgets.Button(description="go"), ipywidgets.Image(value=b"pixels")
    widgets = Sent(monkeypatch)
    widgets.follow(emitted)
    opened = {data["state"]["_model_name"]: (data["state"], buffers) for _, data, buffers in widgets.messages}
    assert opened["ButtonModel"][0]["disabled"] is True
    assert opened["ButtonModel"][0]["description"] == "go"
    assert [bytes(each) for each in opened["ImageModel"][1]] == [b"pixels"]
    widgets.messages.clear()
    button.disabled, button.description = True, "stop"
    button.disabled = False
    widgets.follow(emitted)
    assert not widgets.messages
    widgets.send(1.0)
    ((_, data, _),) = widgets.messages
    assert data["state"] == {"description": "stop", "disabled": True}
    button.description = "late"
    widgets.follow(emitted)
    widgets.send(1.01)
    assert len(widgets.messages) == 1, "some times a second"
    assert not widgets.idle
    widgets.send(1.02, final=True)
    assert widgets.idle
    copy = widgets._copies[copy_of(button.model_id)]
    copy._handle_msg(
        {"content": {"data": {"method": "update", "state": {"description": "by hand"}, "buffer_paths": []}}}
    )
    assert copy.get_state("description") == {"description": "late"}
    assert copy.get_state()["_view_name"] == "ButtonView", "a page that is reloaded asks for all"
    button.close()
    widgets.follow(emitted)
    assert widgets.messages[-1][0] == "comm_close"
    del image


def test_large_changes_are_sent_less_often(emitted: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    image = ipywidgets.Image()
    widgets = Sent(monkeypatch)
    widgets.follow(emitted)
    image.value = b"x" * 1_000_000
    widgets.follow(emitted)
    widgets.send(1.0)
    image.value = b"y"
    widgets.follow(emitted)
    widgets.send(5.9)
    assert not widgets.idle
    widgets.send(6.1)
    assert widgets.idle


def test_output_within_an_output_widget_belongs_to_it(emitted: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    out, label = ipywidgets.Output(), ipywidgets.Label("inner")
    widgets = Sent(monkeypatch)
    widgets.follow(emitted)
    before, within = wrote("before\n"), wrote("within\n")
    assert widgets.capture(before) is before
    out.msg_id = "captures"
    out.append_stderr("appended\n")
    widgets.follow(emitted)
    of_another = wrote("of another replica\n", replica=0)
    assert widgets.capture(of_another) is of_another
    assert widgets.capture(within) is None
    assert widgets.capture(within) is None
    shown = {VIEW: {"model_id": copy_of(label.model_id)}, "text/plain": "Label"}
    assert widgets.capture(Display(engine=1, program=3, replica=1, data=shown)) is None
    out.msg_id = ""
    widgets.follow(emitted)
    assert widgets.capture(before) is before
    widgets.send(1.0)
    ((_, data, _),) = [each for each in widgets.messages if each[0] == "comm_msg"]
    appended, text, shown = data["state"]["outputs"]
    assert (appended["name"], appended["text"]) == ("stderr", "appended\n")
    assert (text["name"], text["text"]) == ("stdout", "within\nwithin\n")
    assert shown["data"][VIEW] == {"model_id": copy_of(label.model_id)}
    assert "msg_id" not in str(widgets.messages), "pages would look for a cell's message"

    out.msg_id = "captures"
    widgets.follow(emitted)
    widgets.ended(1)
    assert widgets.capture(within) is within, "another engine has taken its place"


def test_an_output_can_be_cleared_and_its_displays_updated() -> None:
    captured = Captured(own=[{"output_type": "stream"}])
    captured.apply(Display(engine=0, program=1, replica=0, data={"text/plain": "one"}, transient={"display_id": "a"}))
    captured.apply(
        Display(engine=0, program=1, replica=0, data={"text/plain": "two"}, transient={"display_id": "a"}, update=True)
    )
    assert [each.get("data") for each in captured.all()] == [None, {"text/plain": "two"}]
    captured.apply(Display(engine=0, program=1, replica=0, data={}, clear="wait"))
    assert len(captured.all()) == 2, "until something comes"
    captured.apply(Output(engine=0, program=1, replica=0, stream="stdout", text="x" * 300_000))
    (text,) = captured.all()
    assert text["text"] == "…" + "x" * 100_000
    captured.apply(Display(engine=0, program=1, replica=0, data={}, clear="now"))
    assert captured.all() == []


def test_a_widget_without_a_copy_is_shown_as_text(emitted: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    label = ipywidgets.Label("text")
    display = Display(
        engine=1, program=3, replica=1, data={VIEW: {"model_id": label.model_id}, "text/plain": "Label(value='text')"}
    )
    for widgets in (Sent(monkeypatch, shown=False), Sent(monkeypatch)):  # in a terminal, and without the first message
        if not widgets._shown:
            widgets.follow(emitted)
        passed = widgets.capture(display)
        assert passed is not None
        assert passed.data == {"text/plain": "Label(value='text')"}  # type: ignore[union-attr]
        assert not widgets.messages


def test_a_comm_outside_a_program_belongs_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(comm, "create_comm", lambda *args, **keywords: made.append(keywords))
    control: Any = SimpleNamespace(running=None, emit=None)
    kernel = SimpleNamespace(session=SimpleNamespace(msg=lambda kind: {}))
    widget_comms.install(0, control, SimpleNamespace(set_parent=lambda parent: None, kernel=kernel))
    comm.create_comm(target_name="jupyter.widget")
    control.running = (1, 0)
    comm.create_comm(target_name="another")
    assert [each["target_name"] for each in made] == ["jupyter.widget", "another"]
