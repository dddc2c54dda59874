"""How far the reading of a distributed dataset has come, and going on from there."""

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
    """One iteration.

    Attributes:
        epoch: Iterations that were begun before it.
        before: What it began with: states of the shared stream and of the user's own generators, and whether its
            source had workers.
        steps: Batches that it gave.
        ended: It has given all.
        batches: How many it will have given; None: it is not known beforehand.
        epochs: How many iterations there will be, the first being 0; None: it is not known, as in a loop of the user's.
    """

    latest: ClassVar[Progress | None] = None
    """The iteration of which this process was given a batch last."""

    epoch: int
    before: dict[str, Any] = field(default_factory=dict)
    steps: int = 0
    ended: bool = False
    batches: int | None = None
    epochs: int | None = None

    def gave(self) -> None:
        """It gave a batch."""
        self.steps += 1
        Progress.latest = self


def pipelines_of(place: ReplicaInput) -> list[int]:
    """What must be the same where the state is loaded: nothing, where all replicas read the same data."""
    turns = place.turns
    if turns is None or not place.several_pipelines:
        return []
    return [turns.pipelines, turns.pipeline, turns.takers, turns.pieces]


def checked_state(state: Any, place: ReplicaInput) -> dict[str, Any]:
    """A state that was given to a dataset. Raises OptionError for none, and for that of another pipeline of several."""
    if not isinstance(state, Mapping) or not set(state) >= _KEYS or state["version"] != VERSION:
        raise OptionError(
            f"load_state_dict takes what state_dict() of a distributed dataset gave, and got a {type(state).__name__}"
            f"{' with ' + ', '.join(map(str, state)) if isinstance(state, Mapping) else ''}."
        )
    saved, here = list(state["pipelines"]), pipelines_of(place)
    if saved != here:
        raise OptionError(
            f"This state is of {_named(saved)}, and here is {_named(here)}. Where workers read data of their own, each "
            "saves its own state, and the same workers with the same replicas load it."
        )
    return dict(state)


def _named(pipelines: list[int]) -> str:
    if not pipelines:
        return "a dataset that all replicas read alike"
    count, which, takers, pieces = pipelines
    cut = f" of batches cut into {pieces}" if pieces > 1 else ""
    return f"input pipeline {which} of {count}{cut}, read by {takers} replica(s)"
