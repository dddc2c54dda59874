"""What every kind of live view can do."""

from __future__ import annotations

from abc import ABC, abstractmethod

from distnb.notebook.output.live_model import LiveModel
from distnb.widgets.publisher import Publisher

__all__ = ["LiveView"]


class LiveView(ABC):
    """Draws one cell's model in one way. Called by one thread at a time.

    Args:
        model: What is drawn.
        publisher: Where it is shown.
        name: Display id, unique in the notebook.
    """

    period_s: float = 0.15
    """Seconds between two drawings."""

    def __init__(self, model: LiveModel, publisher: Publisher, name: str) -> None:
        self.model = model
        self.publisher = publisher
        self.name = name

    @abstractmethod
    def show(self, now: float) -> None:
        """Appear; again after the cell's output was cleared."""

    @abstractmethod
    def update(self, now: float) -> None:
        """Draw what is new."""

    @abstractmethod
    def finish(self, now: float) -> None:
        """Leave what stays in the notebook."""

    def close(self) -> None:
        """Free what the view held, once nobody looks at it any more."""
        return
