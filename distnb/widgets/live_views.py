"""The live views without a widget: an empty view, a picture that is replaced, and a line in a terminal."""

from __future__ import annotations

from distnb.views.curves import MOST_LINES
from distnb.views.live_model import LiveModel
from distnb.views.wording import short_number
from distnb.widgets.content import head_text, picture_bundle, plain_summary
from distnb.widgets.publisher import Publisher

__all__ = ["LiveView", "PictureView", "TextView"]


class LiveView:
    """A view of one cell's model under a display id. This base draws nothing. Called by one thread at a time."""

    period_s: float = 1.0
    """Seconds between two drawings."""

    def __init__(self, model: LiveModel, publisher: Publisher, name: str) -> None:
        self.model = model
        self.publisher = publisher
        self.name = name

    def show(self, now: float) -> None:
        """Show the view. This is called again after the cell's output was cleared."""

    def update(self, now: float) -> None:
        """Draw the changes."""

    def finish(self, now: float) -> None:
        """Draw the final state, which stays in the notebook."""

    @property
    def is_needed(self) -> bool:
        """True if a page may still request the view, although the cell has ended."""
        return False

    def close(self) -> None:
        """Free the view's resources."""


class PictureView(LiveView):
    """The view for front ends without widgets: the whole picture, a few times a second."""

    period_s = 0.3

    def show(self, now: float) -> None:
        self.publisher.display(self.name, picture_bundle(self.model, now), {})

    def update(self, now: float) -> None:
        self.publisher.display(self.name, picture_bundle(self.model, now), {}, update=True)

    finish = update


class TextView(LiveView):
    """The view for terminals: one progress line."""

    period_s = 0.2

    def show(self, now: float) -> None:
        self.update(now)

    def update(self, now: float) -> None:
        if self.model.state in ("ended", "failed", "interrupted"):
            return  # the shell may be writing an error
        values = [f"⚠ {text}" for text in self.model.troubles()]
        for curve in self.model.curves.values():
            last = [line.last for line in curve.shown().values() if line.last is not None]
            if len(last) > MOST_LINES:
                values.append(f"{curve.name} {short_number(min(last))} to {short_number(max(last))}")
            else:
                values.append(f"{curve.name} {'/'.join(map(short_number, last))}")
        if self.model.work is not None:
            values.append(self.model.work.lines()[0])
        values = self.model.waits.lines(now) or values
        self.publisher.area((" · ".join([head_text(self.model, now), *values]),))

    def finish(self, now: float) -> None:
        self.publisher.area(())
        if self.model.curves or self.model.steps or self.model.work is not None:
            self.publisher.write("stderr", plain_summary(self.model, now).replace("\n", " · ") + "\n")
