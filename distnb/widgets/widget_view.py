"""The live view as a widget, which updates without flicker and survives a reload of the page.

Texts and tables are sent as HTML. Curves are sent in binary, and only their new points. The page keeps the earlier
points and draws the curves.
"""

from __future__ import annotations

import json
import threading
from array import array
from importlib import resources
from typing import Any, ClassVar, NamedTuple

import anywidget
import traitlets

from distnb.views.chart_model import Chart, charts
from distnb.views.curves import Line, Point
from distnb.widgets.content import head_text, live_html, picture_bundle
from distnb.widgets.live_views import LiveView

__all__ = ["LiveWidget", "WidgetView"]

_FASTEST_S = 0.16  # replicas send points and measurements five times a second each
_REPEATED_POINTS = 300
_BYTES_PER_S = 200_000
"""The limit for one view. Above a megabyte a second, the Jupyter server drops messages, including the cell's own."""


class _Sent(NamedTuple):
    """The part of a line that pages have received.

    Attributes:
        final: The number of points that will not change.
        width: The number of values per point.
        values: The number of values so far.
    """

    final: int
    width: int
    values: int


def _module() -> str:
    """Return the code of the browser side: uPlot, as its npm package has it, and live_view.js.

    Each view brings all of it, because a page that was reloaded has nothing, and a busy kernel answers no request. A
    page runs uPlot's part once.
    """
    folder = resources.files("distnb.widgets")
    names = ("uplot/uPlot.min.css", "uplot/uPlot.iife.min.js", "live_view.js")
    style, uplot, view = (folder.joinpath(name).read_text(encoding="utf-8") for name in names)
    shared = f"const uPlot = (globalThis[Symbol.for('distnb.uPlot')] ??= (() => {{\n{uplot}\nreturn uPlot;\n}})());"
    return f"{shared}\nconst UPLOT_STYLE = {json.dumps(style)};\n{view}"


class LiveWidget(anywidget.AnyWidget):
    """A live view, whose browser side is live_view.js.

    Attributes:
        above, below: The HTML above and below the charts; empty at first.
        curves: All points, as one message (see `WidgetView.message`), for a page that requests the whole state.
        written: The end of the cell's text output, once the cell has ended.
        ended: True if the cell has ended.
        is_needed: False once a page has replaced the widget by the picture of the ended cell. A page that was closed or
            reloaded meanwhile receives no picture, and requests the widget.
    """

    is_needed = True

    _esm: ClassVar[str] = _module()
    above = traitlets.Unicode().tag(sync=True)
    below = traitlets.Unicode().tag(sync=True)
    written = traitlets.Unicode().tag(sync=True)
    ended = traitlets.Bool(False).tag(sync=True)
    curves = traitlets.Any().tag(sync=True, to_json=lambda _, widget: widget.all_curves())

    def __init__(self, view: WidgetView, **keywords: Any) -> None:
        self._view = view
        super().__init__(**keywords)
        self.on_msg(self._handle_page)

    def all_curves(self) -> dict[str, Any]:
        """Return the value of `curves` for a page that requests it."""
        content, points = self._view.message(charts(self._view.model), {})
        return {**content, "points": memoryview(points).cast("B")}

    def _handle_page(self, widget: Any, content: Any, buffers: Any) -> None:
        self.is_needed = content != {"replaced": True}


class WidgetView(LiveView):
    """A view that shows a `LiveWidget` while the cell runs, and a picture afterwards."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._numbers: dict[int, int] = {}  # the number of each line, by id(); `_lines` keeps the lines alive
        self._lines: list[Line] = []  # by number
        self._lock = threading.Lock()  # a page's request is answered on another thread
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
        """Return a page's next message, with the points that `sent` does not have yet, and update `sent`.

        For example, with `lines = [[4, 2, 10, 3]]` each point of line 4 represents 2 values, and 3 new points
        replace all points from index 10 on.

        Returns:
            A message with `charts`, whose series refer to lines by number, and `lines`: [number, width, at, count]. The
            page merges a line's points until each represents `width` values, and inserts `count` new points at index
            `at`. The second item is the new points of all lines in this order, four numbers each: step, value, least,
            greatest.
        """
        lines: list[list[int]] = []
        points, described = array("f"), []
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
            described.append({"name": chart.name, "series": series, "facts": chart.facts, "exploded": chart.exploded})
            described[-1]["epochs"] = list(chart.epochs.items())
        return {"charts": described, "lines": lines}, points

    def _repeat_some(self) -> None:
        """Mark some lines as unsent, so that a page that missed a message or was opened late soon has all points."""
        room = _REPEATED_POINTS
        for number in list(self._sent):  # the first line is the one whose points were all sent longest ago
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
        with self._widget.hold_sync():
            self._widget.written, self._widget.ended = self.publisher.latest, True
        self.update(now)
        self.publisher.display(self.name, picture_bundle(self.model, now), {}, update=True)

    @property
    def is_needed(self) -> bool:
        return self._widget.is_needed

    def close(self) -> None:
        self._widget.close()


def _new_points(line: Line, sent: dict[int, _Sent], number: int) -> list[Point]:
    """Return the points of a line that are new or have changed since they were sent, and update `sent`."""
    before = sent.get(number, _Sent(0, line.width, -1))
    if before.values == line.record.count:
        return []
    new = line.points[before.final * before.width // line.width :]
    sent[number] = _Sent(len(line.points) - 1, line.width, line.record.count)
    return new
