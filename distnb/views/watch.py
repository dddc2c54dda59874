"""The extension point of a cell's live view, for work that other processes do for the cell, such as a coordinator's.

A `Watch` samples the object that hands out the work, and `Work` is what the view shows of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distnb.runtime.step_count import Reading
    from distnb.views.live_model import LiveModel

__all__ = ["Watch", "Work"]


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


class Work(ABC):
    """The work of a cell that workers do, in place of the cell's own replicas. The view shows workers instead."""

    @property
    @abstractmethod
    def workers(self) -> int:
        """The number of workers."""

    @property
    @abstractmethod
    def replicas_per_worker(self) -> int:
        """The number of replicas of each worker. Worker *w* has the replicas from *w* times this on."""

    @property
    @abstractmethod
    def steps(self) -> int:
        """The steps of this cell, on all workers."""

    @property
    @abstractmethod
    def reading(self) -> Reading | None:
        """The progress of a loop over epochs that hands out the work; None if there is none."""

    @property
    @abstractmethod
    def failed(self) -> bool:
        """True if a part of the work failed."""

    @abstractmethod
    def facts(self, *, ended: bool) -> list[str]:
        """Return texts for the cell's status line."""

    @abstractmethod
    def lines(self) -> list[str]:
        """Return the work as plain text. The first line is the summary."""

    @abstractmethod
    def tables(self, model: LiveModel) -> list[str]:
        """Return the tables of the workers and of other processes as HTML, for a cell's model."""

    @abstractmethod
    def picture(self) -> str:
        """Return a picture of the work, as SVG."""

    @abstractmethod
    def picture_text(self) -> str:
        """Return the picture in words."""
