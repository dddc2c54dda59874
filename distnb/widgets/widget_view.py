"""The live view as a widget: it changes without a flicker, and lives on in a page that is reloaded."""

from __future__ import annotations

from importlib import resources
from typing import Any, ClassVar

import anywidget
import traitlets

from distnb.widgets.content import head_text, live_html, picture_bundle
from distnb.widgets.views import LiveView

__all__ = ["LiveWidget", "WidgetView"]

_FASTEST_S = 0.2
_BYTES_PER_S = 200_000
"""The Jupyter server drops messages, the cell's own among them, where more than a megabyte a second comes."""


class LiveWidget(anywidget.AnyWidget):
    """The browser's side is live_view.js.

    Attributes:
        html: All that is drawn; empty when it is made.
        written: The end of what the cell wrote, once it has ended.
        adopted: A page that was reloaded while the cell ran shows it, and no picture will take its place there.
    """

    adopted = False

    _esm: ClassVar[str] = resources.files("distnb.widgets").joinpath("live_view.js").read_text(encoding="utf-8")
    html = traitlets.Unicode().tag(sync=True)
    written = traitlets.Unicode().tag(sync=True)

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.on_msg(self._adopt)

    def _adopt(self, widget: Any, content: Any, buffers: Any) -> None:
        self.adopted = True


class WidgetView(LiveView):
    """Shows a `LiveWidget` while the cell runs, and a picture afterwards."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._widget = LiveWidget()

    def show(self, now: float) -> None:
        view = {"version_major": 2, "version_minor": 0, "model_id": self._widget.model_id}
        data = {"application/vnd.jupyter.widget-view+json": view, "text/plain": head_text(self.model, now)}
        self.publisher.display(self.name, data, {})
        self.update(now)

    def update(self, now: float) -> None:
        html = self._widget.html = live_html(self.model, now)
        self.period_s = max(_FASTEST_S, len(html) / _BYTES_PER_S)

    def finish(self, now: float) -> None:
        self._widget.written = self.publisher.latest
        self.update(now)
        self.publisher.display(self.name, picture_bundle(self.model, now), {}, update=True)

    def close(self) -> None:
        if not self._widget.adopted:
            self._widget.close()
