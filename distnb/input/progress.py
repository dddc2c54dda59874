"""The progress of reading a distributed dataset, and the state from which reading resumes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from distnb.errors import OptionError

if TYPE_CHECKING:
    from distnb.input.dealing import ReplicaInput

__all__ = ["VERSION", "Progress", "checked_state", "pipelines_of"]

VERSION = 1
_KEYS = {"version", "epoch", "position", "began", "generators", "random", "kept", "pipelines"}


@dataclass
class Progress:
    """The progress of one iteration.

    Attributes:
        epoch: The number of iterations that were started before it.
        before: The state at its start: the states of the shared stream and of the user's own generators, and whether
            its source had workers.
        steps: The number of batches returned so far.
        elements: The number of the source's batches, or of elements if replicas take turns, that all readers of the
            pipeline have received together.
        ended: Whether it has returned all batches.
        batches: The total number of batches; None if it is unknown beforehand.
        epochs: The total number of iterations, the first being 0; None if it is unknown, as in a user's own loop.
    """

    latest: ClassVar[Progress | None] = None
    """The iteration that most recently returned a batch in this process."""

    epoch: int
    before: dict[str, Any] = field(default_factory=dict)
    steps: int = 0
    elements: int = 0
    ended: bool = False
    batches: int | None = None
    epochs: int | None = None

    def count_batch(self, elements: int = 1) -> None:
        """Count a batch that was returned, and its elements."""
        self.skip_batch(elements)
        Progress.latest = self

    def skip_batch(self, elements: int) -> None:
        """Count a batch that could not be read."""
        self.steps += 1
        self.elements += elements


def pipelines_of(place: ReplicaInput) -> list[int]:
    """Return the properties that must be the same when the state is loaded; none if all replicas read the same data."""
    turns = place.turns
    if turns is None or not place.several_pipelines:
        return []
    return [turns.pipelines, turns.pipeline, turns.takers, turns.pieces]


def checked_state(state: Any, place: ReplicaInput) -> dict[str, Any]:
    """Return a state that was passed to a dataset, as a dict.

    Raises:
        OptionError: The argument is not a state, or belongs to another one of several pipelines.
    """
    if not isinstance(state, Mapping) or not set(state) >= _KEYS or state["version"] != VERSION:
        raise OptionError(
            f"load_state_dict takes the result of a distributed dataset's state_dict(), and got a "
            f"{type(state).__name__}{' with ' + ', '.join(map(str, state)) if isinstance(state, Mapping) else ''}."
        )
    saved, here = list(state["pipelines"]), pipelines_of(place)
    if saved != here:
        raise OptionError(
            f"This state is of {_named(saved)}, and here is {_named(here)}. If workers read their own data, each "
            "saves its own state, and the same workers with the same replicas must load it."
        )
    return dict(state)


def _named(pipelines: list[int]) -> str:
    if not pipelines:
        return "a dataset that all replicas read alike"
    count, which, takers, pieces = pipelines
    cut = f" of batches cut into {pieces}" if pieces > 1 else ""
    return f"input pipeline {which} of {count}{cut}, read by {takers} replica(s)"
