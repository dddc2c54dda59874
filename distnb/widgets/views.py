"""The live views that need no widget: an SVG picture that is replaced, a line in a terminal, and none."""

from __future__ import annotations

from distnb.notebook.output.wording import html_table
from distnb.widgets.base import LiveView
from distnb.widgets.content import head_text, images, plain_summary, replica_table, static_html
from distnb.widgets.picture import short_number

__all__ = ["NoView", "PictureView", "TextView"]


class PictureView(LiveView):
    """For front ends without widgets: the whole picture, a few times a second."""

    period_s = 0.3

    def show(self, now: float) -> None:
        self._publish(self._html(now), now, update=False)

    def update(self, now: float) -> None:
        self.model.take_fresh()
        self._publish(self._html(now), now, update=True)

    def finish(self, now: float) -> None:
        self._publish(static_html(self.model, now), now, update=True)

    def _html(self, now: float) -> str:
        table = replica_table(self.model)
        cells = html_table(table.header, table.rows, numeric=table.numeric)
        return f"<div>{head_text(self.model, now)}</div>{images(self.model)}{cells}"

    def _publish(self, html: str, now: float, *, update: bool) -> None:
        self.publisher.display(
            self.name, {"text/html": html, "text/plain": plain_summary(self.model, now)}, {}, update=update
        )


class TextView(LiveView):
    """For terminals: one progress line."""

    period_s = 0.2

    def show(self, now: float) -> None:
        self.update(now)

    def update(self, now: float) -> None:
        self.model.take_fresh()
        if self.model.state in ("ended", "failed", "interrupted"):
            return  # the shell may be writing its error
        values = []
        for curve in self.model.curves.values():
            lines = curve.shown(max(1, len(self.model.rows)))
            values.append(f"{curve.name} {'/'.join(short_number(line.last) for line in lines.values())}")
        self.publisher.area((" · ".join([head_text(self.model, now), *values]),))

    def finish(self, now: float) -> None:
        self.publisher.area(())
        if self.model.curves or self.model.steps:
            self.publisher.write("stderr", plain_summary(self.model, now).replace("\n", " · ") + "\n")


class NoView(LiveView):
    """`%distnb live off`: nothing is drawn."""

    period_s = 1.0

    def show(self, now: float) -> None:
        return

    def update(self, now: float) -> None:
        self.model.take_fresh()

    def finish(self, now: float) -> None:
        return
