"""How far the reading of a distributed dataset has come, and going on from there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distnb.errors import OptionError
from distnb.input.dealing import Place
from distnb.input.draws import state_of
from distnb.input.sources.base import Source

__all__ = ["Progress", "checked_state", "as_state"]

_VERSION = 1


@dataclass
class Progress:
    """One iteration.

    Attributes:
        epoch: Iterations that were begun before it.
        began: States of the shared stream when it began.
        generators: States of the user's own generators then.
        steps: Batches that it gave.
        ended: It has given all.
        kept: What its source said of its workers before it began.
    """

    epoch: int
    began: dict[str, Any] | None = None
    generators: tuple[Any, ...] = ()
    steps: int = 0
    ended: bool = False
    kept: bool = False


def as_state(progress: Progress, place: Place, random: dict[str, Any], source: Source) -> dict[str, Any]:
    """What resuming needs, of plain values.

    Args:
        progress: Of the latest iteration.
        place: The replica that reads.
        random: States of the shared stream now.
        source: What is read.
    """
    under_way = progress.steps > 0 and not progress.ended
    return {
        "version": _VERSION,
        "epoch": progress.epoch + progress.ended,
        "position": progress.steps * place.elements_per_step if under_way else 0,
        "began": progress.began if under_way else None,
        "generators": list(progress.generators) if under_way else [state_of(each) for each in source.generators()],
        "random": random,
        "kept": progress.kept if under_way else source.kept(),
        "pipelines": _pipelines(place),
    }


def _pipelines(place: Place) -> list[int]:
    """What must be the same where the state is loaded: nothing, where all replicas read the same data."""
    turns = place.turns
    if turns is None or not place.several_pipelines:
        return []
    return [turns.pipelines, turns.pipeline, turns.takers, turns.pieces]


def checked_state(state: Any, place: Place) -> dict[str, Any]:
    """A state that was given to a dataset.

    Raises:
        OptionError: It is none, or that of another pipeline of several.
    """
    wanted = {"version", "epoch", "position", "began", "generators", "random", "kept", "pipelines"}
    if not isinstance(state, Mapping) or not wanted <= set(state) or state["version"] != _VERSION:
        raise OptionError(
            f"load_state_dict takes what state_dict() of a distributed dataset gave, and got a {type(state).__name__}"
            f"{' with ' + ', '.join(map(str, state)) if isinstance(state, Mapping) else ''}."
        )
    saved, here = list(state["pipelines"]), _pipelines(place)
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
