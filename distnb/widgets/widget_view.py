"""The live view as a widget: it changes without a flicker, and lives on in a page that is reloaded.

What is written is sent as HTML. Of the curves only what is new is sent, in binary: the page has the rest, and draws.
"""

from __future__ import annotations

import threading
from array import array
from importlib import resources
from typing import Any, ClassVar, NamedTuple

import anywidget
import traitlets

from distnb.notebook.views.chart_model import Chart, charts
from distnb.notebook.views.curves import Line, Point
from distnb.widgets.content import head_text, live_html, picture_bundle
from distnb.widgets.live_views import LiveView

__all__ = ["LiveWidget", "WidgetView"]

_FASTEST_S = 0.16  # replicas tell their points, and what they measured, each five times a second
_REPEATED_POINTS = 300
_BYTES_PER_S = 200_000
"""The Jupyter server drops messages, the cell's own among them, where more than a megabyte a second comes."""


class _Sent(NamedTuple):
    """Of a line: how many points are final, for how many values each stands, and how many values there were."""

    final: int
    width: int
    told: int


class LiveWidget(anywidget.AnyWidget):
    """The browser's side is live_view.js.

    Attributes:
        above, below: What stands above and below the charts, as HTML; empty when it is made.
        curves: All that is to be drawn, as one message (see `WidgetView`), for a page that asks for all of the state.
        written: The end of what the cell wrote, once it has ended.
        adopted: A page that was reloaded while the cell ran shows it, and no picture will take its place there.
    """

    adopted = False

    _esm: ClassVar[str] = resources.files("distnb.widgets").joinpath("live_view.js").read_text(encoding="utf-8")
    above = traitlets.Unicode().tag(sync=True)
    below = traitlets.Unicode().tag(sync=True)
    written = traitlets.Unicode().tag(sync=True)
    curves = traitlets.Any().tag(sync=True, to_json=lambda _, widget: widget.all_curves())

    def __init__(self, view: WidgetView, **keywords: Any) -> None:
        self._view = view
        super().__init__(**keywords)
        self.on_msg(self._adopt)

    def all_curves(self) -> dict[str, Any]:
        """What `curves` is when it is asked for."""
        content, points = self._view.message(charts(self._view.model), {})
        return {**content, "points": memoryview(points).cast("B")}

    def _adopt(self, widget: Any, content: Any, buffers: Any) -> None:
        self.adopted = True


class WidgetView(LiveView):
    """Shows a `LiveWidget` while the cell runs, and a picture afterwards."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._numbers: dict[int, int] = {}  # of each line that was drawn, by its identity; they are kept
        self._lines: list[Line] = []  # by number
        self._lock = threading.Lock()  # a page's question is answered on another thread
        self._sent: dict[int, _Sent] = {}  # by a line's number
        self._widget = LiveWidget(self)

    def show(self, now: float) -> None:
        view = {"version_major": 2, "version_minor": 0, "model_id": self._widget.model_id}
        data = {"application/vnd.jupyter.widget-view+json": view, "text/plain": head_text(self.model, now)}
        self.publisher.display(self.name, data, {})
        self.update(now)

    def update(self, now: float) -> None:
        html = live_html(self.model, now)
        with self._widget.hold_sync():
            self._widget.above, self._widget.below = html
        self._repeat_some()
        content, points = self.message(charts(self.model), self._sent)
        if content["charts"]:
            self._widget.send(content, buffers=[memoryview(points).cast("B")])
        self.period_s = max(_FASTEST_S, (sum(map(len, html)) + len(points) * points.itemsize) / _BYTES_PER_S)

    def message(self, drawn: list[Chart], sent: dict[int, _Sent]) -> tuple[dict[str, Any], array[float]]:
        """What a page needs to draw charts, once it has been sent something; that is brought up to date.

        Returns:
            charts: Each with its series, which name lines by number; lines: [number, width, at, count], which means
            that points were joined until one stands for `width` values, and that so many new ones stand from place
            `at` on. And the points, four numbers each, of all lines one after the other.
        """
        lines: list[list[int]] = []
        points, told = array("f"), []
        for chart in drawn:
            series = []
            for each in chart.series:
                numbers = [[self._number(line), replica] for replica, line in each.lines.items()]
                series.append([each.label, each.css_color, each.thick, numbers])
                for number, line in zip(numbers, each.lines.values(), strict=True):
                    new = _new_points(line, sent, number[0])
                    if new:
                        lines.append([number[0], line.width, len(line.points) - len(new), len(new)])
                        for point in new:
                            points.extend(point)
            told.append({"name": chart.name, "series": series, "facts": chart.facts, "exploded": chart.exploded})
            told[-1]["epochs"] = list(chart.epochs.items())
        return {"charts": told, "lines": lines}, points

    def _repeat_some(self) -> None:
        """Let some lines be sent whole: a page that has missed a message, or came late, has all of them soon."""
        room = _REPEATED_POINTS
        for number in list(self._sent):  # the first was sent whole longest ago
            room -= len(self._lines[number].points)
            del self._sent[number]
            if room < 0:
                return

    def _number(self, line: Line) -> int:
        with self._lock:
            number = self._numbers.setdefault(id(line), len(self._lines))
            if number == len(self._lines):
                self._lines.append(line)
            return number

    def finish(self, now: float) -> None:
        self._widget.written = self.publisher.latest
        self.update(now)
        self.publisher.display(self.name, picture_bundle(self.model, now), {}, update=True)

    def close(self) -> None:
        if not self._widget.adopted:
            self._widget.close()


def _new_points(line: Line, sent: dict[int, _Sent], number: int) -> list[Point]:
    """The points of a line that were not sent, or have changed since; `sent` is brought up to date."""
    before = sent.get(number, _Sent(0, line.width, -1))
    if before.told == line.record.told:
        return []
    new = line.points[before.final * before.width // line.width :]
    sent[number] = _Sent(len(line.points) - 1, line.width, line.record.told)
    return new
