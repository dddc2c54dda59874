"""The extension point of a cell's live view: things that it shows besides its replicas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distnb.notebook.views.live_model import LiveModel

__all__ = ["Watch"]


class Watch(ABC):
    """A thing that a running cell uses, sampled for its live view.

    Attributes:
        subject: The thing itself.
        due: Whether it may change: it is to be sampled.
    """

    def __init__(self, subject: Any) -> None:
        self.subject = subject
        self.due = True

    @abstractmethod
    def add_to(self, model: LiveModel, now: float) -> None:
        """Add what is known of it to a cell's model."""

    @abstractmethod
    def poll(self, now: float, *, drawn: bool) -> bool:
        """Take a sample if it is time; more of it if the view is `drawn`. Return whether a sample was taken."""

    @abstractmethod
    def finish(self, now: float) -> None:
        """Take the last sample: the cell has ended."""
