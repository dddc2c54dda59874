"""The live view as a widget: only what is new is sent, as a custom message of a few hundred bytes."""

from __future__ import annotations

import math
from importlib import resources
from typing import Any, ClassVar

import anywidget
import traitlets

from distnb.notebook.output.live_model import LiveModel, Point
from distnb.widgets.base import LiveView
from distnb.widgets.content import head_text, plain_summary, replica_table, static_html

__all__ = ["LiveWidget", "WidgetView"]

_SNAPSHOT_S = 5.0
_FIRST_SNAPSHOT_S = 1.0


class LiveWidget(anywidget.AnyWidget):
    """The browser's side is live_view.js.

    Attributes:
        snapshot: All that is drawn. Sent seldom: for a browser that missed messages, or was reloaded.
        adopted: A page that was reloaded while the cell ran shows it, and no picture will take its place there.
    """

    adopted = False

    _esm: ClassVar[str] = resources.files("distnb.widgets").joinpath("live_view.js").read_text(encoding="utf-8")
    snapshot = traitlets.Dict().tag(sync=True)

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.on_msg(self._adopt)

    def _adopt(self, widget: Any, content: Any, buffers: Any) -> None:
        self.adopted = True


class WidgetView(LiveView):
    """Shows a `LiveWidget` while the cell runs, and a picture afterwards."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._widget: LiveWidget | None = None
        self._sequence = 0
        self._next_snapshot = 0.0

    def show(self, now: float) -> None:
        if self._widget is None:
            self.model.take_fresh()
            self._widget = LiveWidget(snapshot=self._snapshot(now))
            self._next_snapshot = now + _FIRST_SNAPSHOT_S
        view = {"version_major": 2, "version_minor": 0, "model_id": self._widget.model_id}
        data = {"application/vnd.jupyter.widget-view+json": view, "text/plain": head_text(self.model, now)}
        self.publisher.display(self.name, data, {})

    def update(self, now: float) -> None:
        assert self._widget is not None
        self._sequence += 1
        points = self.model.take_fresh()
        self._widget.send(
            {
                "sequence": self._sequence,
                "points": {name: {str(r): _plain(line) for r, line in lines.items()} for name, lines in points.items()},
                "differs": [name for name, curve in self.model.curves.items() if curve.differs],
                **self._surroundings(now),
            }
        )
        if now >= self._next_snapshot:
            self._next_snapshot = now + _SNAPSHOT_S
            self._widget.snapshot = self._snapshot(now)

    def finish(self, now: float) -> None:
        if self._widget is not None:
            self._sequence += 1
            self._widget.snapshot = {**self._snapshot(now), "written": self.publisher.latest}
        data = {"text/html": static_html(self.model, now), "text/plain": plain_summary(self.model, now)}
        self.publisher.display(self.name, data, {}, update=True)

    def close(self) -> None:
        if self._widget is not None and not self._widget.adopted:
            self._widget.close()

    def _surroundings(self, now: float) -> dict[str, Any]:
        table = replica_table(self.model)
        return {
            "head": {"state": self.model.state, "text": head_text(self.model, now), "total": _total(self.model)},
            "table": {"header": table.header, "rows": table.rows, "numeric": table.numeric},
        }

    def _snapshot(self, now: float) -> dict[str, Any]:
        curves = {
            name: {
                "differs": curve.differs,
                "lines": {
                    str(r): {"points": _plain(line.points), "width": line.width} for r, line in curve.lines.items()
                },
            }
            for name, curve in self.model.curves.items()
        }
        return {"sequence": self._sequence, "curves": curves, **self._surroundings(now)}


def _total(model: LiveModel) -> int:
    return max(1, len(model.rows))


def _plain(points: list[Point]) -> list[list[float | str | None]]:
    """For JSON: few digits, and a word for a value that is not finite."""
    return [
        [_short(step), _short(value) if math.isfinite(value) else str(value), _short(low), _short(high)]
        for step, value, low, high in points
    ]


def _short(number: float) -> float | None:
    return float(f"{number:.6g}") if math.isfinite(number) else None
