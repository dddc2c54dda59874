"""The extension point of a cell's live view, for objects that it shows in addition to the replicas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distnb.notebook.views.live_model import LiveModel

__all__ = ["Watch"]


class Watch(ABC):
    """An object that a running cell uses, such as a coordinator, sampled for the cell's live view.

    Attributes:
        subject: The object itself.
        due: True while it may change, so that it is to be sampled.
    """

    def __init__(self, subject: Any) -> None:
        self.subject = subject
        self.due = True

    @abstractmethod
    def add_to(self, model: LiveModel, now: float) -> None:
        """Add the samples' data to a cell's model."""

    @abstractmethod
    def poll(self, now: float, *, drawn: bool) -> bool:
        """Take a sample if it is time, with more data if the view is `drawn`. Return whether a sample was taken."""

    @abstractmethod
    def finish(self, now: float) -> None:
        """Take the last sample, at the end of the cell."""
