"""Distributed datasets: the progress of reading."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distnb.checkpoint.states.base import Kind
from distnb.checkpoint.stored_tensors import whole
from distnb.errors import OptionError
from distnb.input.dataset import DistributedDataset
from distnb.input.progress import checked_state
from distnb.runtime.this_process import this_process
from distnb.values.structure import map_structure

__all__ = ["Datasets"]


class Datasets(Kind):
    """Distributed datasets, on their replica. If workers read their own data, each has a state."""

    def covers(self, value: Any) -> bool:
        return isinstance(value, DistributedDataset) and not hasattr(value, "handle")

    def state(self, value: Any, name: str) -> Any:
        state, process = value.state_dict(), this_process.replica
        if process is None or process.size == 1 or not state["pipelines"]:
            return state
        return {"of_replicas": process.group.all_gather_object(state)}

    def misfits(self, value: Any, saved: Any, name: str) -> list[str]:
        try:
            checked_state(_own(saved), value.place)
        except OptionError as error:
            return [f"{name}: {error}"]
        return []

    def restore(self, value: Any, state: Any, name: str) -> None:
        value.load_state_dict(map_structure(whole, _own(state)))


def _own(state: Any) -> Any:
    """Return this replica's state."""
    if not isinstance(state, Mapping) or "of_replicas" not in state:
        return state
    process = this_process.replica
    states, rank = state["of_replicas"], process.rank if process is not None else 0
    return states[min(rank, len(states) - 1)]  # the state itself shows whether it matches
