"""The widgets that replicas create, shown by copies in this kernel.

Replicas send changes (`WidgetChange`), which the kernel forwards to pages a few times a second. Text and displays that
a replica produces inside `with ipywidgets.Output():` become part of that widget's copy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from distnb.notebook.output.displays import WIDGET_VIEW
from distnb.widgets.value_views.showing import drawn
from distnb.wire.messages import Display, Output, WidgetChange

if TYPE_CHECKING:
    from distnb.widgets.widget_copy import WidgetCopy

__all__ = ["Captured", "ReplicaWidgets"]

_PERIOD_S = 0.2
_BYTES_PER_S = 200_000  # as for the live view: the Jupyter server drops messages if too many come at once
_LONGEST_TEXT = 100_000


@dataclass
class Captured:
    """The content of an `Output` widget.

    Attributes:
        own: The outputs that the replica appended itself (`append_stdout`).
        outputs: The captured outputs in nbformat's form, each with the display id that updates refer to.
        cleared: True if the next output replaces all others.
    """

    own: list[Any] = field(default_factory=list)
    outputs: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    cleared: bool = False

    def apply(self, event: Output | Display) -> None:
        """Add a replica's text or display, or update or clear the content."""
        if isinstance(event, Display) and event.clear != "no":
            self.cleared = event.clear == "wait"
            if not self.cleared:
                self._clear()
            return
        if self.cleared:
            self._clear()
        if isinstance(event, Output):
            self._write(event.stream, event.text)
            return
        name = str(event.transient.get("display_id", ""))
        shown = {"output_type": "display_data", "data": drawn(event.data), "metadata": event.metadata}
        if event.update:
            self.outputs = [(each, shown if each == name else output) for each, output in self.outputs]
        else:
            self.outputs.append((name, shown))

    def all(self) -> list[Any]:
        """Return all outputs that the widget shows."""
        return [*self.own, *(output for _, output in self.outputs)]

    def _write(self, stream: str, text: str) -> None:
        if self.outputs and self.outputs[-1][1].get("name") == stream:
            text = self.outputs.pop()[1]["text"] + text
        if len(text) > _LONGEST_TEXT:
            text = "…" + text[-_LONGEST_TEXT:]
        self.outputs.append(("", {"output_type": "stream", "name": stream, "text": text}))

    def _clear(self) -> None:
        self.own, self.outputs, self.cleared = [], [], False


class ReplicaWidgets:
    """The copies of the replicas' widgets. Used by one thread at a time.

    Args:
        shown: False in a terminal, which cannot show widgets. Then no copies are made, and displays become text.
    """

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown
        self._copies: dict[str, WidgetCopy] = {}
        self._captured: dict[str, Captured] = {}  # by widget, for `Output` widgets
        self._capturing: defaultdict[int, list[str]] = defaultdict(list)  # by engine, the innermost widget last
        self._changed: defaultdict[str, set[str]] = defaultdict(set)  # the traits to send to pages
        self._next = 0.0

    def feed(self, change: WidgetChange) -> None:
        """Apply a change of a replica's widget."""
        if not self._shown:
            return
        name = change.widget
        if change.method == "open":
            from distnb.widgets.widget_copy import WidgetCopy

            self._copies[name] = WidgetCopy(name, self._state(change))
        elif name not in self._copies:
            return
        elif change.method == "update":
            state = self._state(change)
            self._copies[name].state.update(state)
            self._changed[name].update(state)
        elif change.method == "custom":
            self._send(name)
            self._copies[name].send(change.content, change.buffers)
        else:
            self._changed.pop(name, None)
            self._captured.pop(name, None)
            self._copies.pop(name).close()

    def _state(self, change: WidgetChange) -> dict[str, Any]:
        """Return the state to send to pages. Controls are disabled, because using them would have no effect."""
        state = dict(change.content)
        if "disabled" in state:
            state["disabled"] = True
        if state.get("_model_name") == "OutputModel":
            self._captured[change.widget] = Captured()
        captured = self._captured.get(change.widget)
        if captured is not None and "msg_id" in state:
            within = self._capturing[change.engine]
            within[:] = [each for each in within if each != change.widget]
            within += [change.widget] if state.pop("msg_id") else []
        if captured is not None and "outputs" in state:
            captured.own = list(state["outputs"])
            state["outputs"] = captured.all()
        return state

    def capture(self, event: Output | Display) -> Output | Display | None:
        """Put an event into the widget that captures it and return None, or return the event for the cell to show.

        A display of a widget without a copy is reduced to its text.
        """
        if isinstance(event, Display) and event.data.get(WIDGET_VIEW, {}).get("model_id", "") not in self._copies:
            event = replace(event, data={kind: value for kind, value in event.data.items() if kind != WIDGET_VIEW})
        within = self._capturing.get(event.engine)
        if not within:
            return event
        name = within[-1]
        self._captured[name].apply(event)
        self._copies[name].state["outputs"] = self._captured[name].all()
        self._changed[name].add("outputs")
        return None

    @property
    def idle(self) -> bool:
        """True if pages have received all changes."""
        return not self._changed

    def send(self, now: float, *, final: bool = False) -> None:
        """Send the changes to the pages, if it is time or if `final` is set."""
        if self._changed and (final or now >= self._next):
            nbytes = sum([self._send(name) for name in list(self._changed)])
            self._next = now + max(_PERIOD_S, nbytes / _BYTES_PER_S)

    def _send(self, name: str) -> int:
        names = self._changed.pop(name, None)
        if not names:
            return 0
        self._copies[name].send_state(names)
        return _size(self._copies[name].get_state(names))

    def ended(self, engine: int | None = None) -> None:
        """Stop capturing for an engine that has ended, or for all engines. The next engine starts without a capture."""
        for each in [engine] if engine is not None else list(self._capturing):
            self._capturing.pop(each, None)


def _size(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_size, value.values()))
    return sum(map(_size, value)) if isinstance(value, list | tuple) else 8
