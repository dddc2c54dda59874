"""Other objects with `state_dict()` and `load_state_dict()`: learning rate schedules, scalers, loaders, your own."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from distnb.checkpoint.states.base import Kind, copied, described, listed
from distnb.values.structure import map_structure

__all__ = ["OtherObjects", "has_state"]


def has_state(value: Any) -> bool:
    """Return whether an object has `state_dict()` and `load_state_dict()`."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


class OtherObjects(Kind):
    """Objects that alone know which states match them. If one raises, its earlier state is restored."""

    def covers(self, value: Any) -> bool:
        return has_state(value)

    def state(self, value: Any, name: str) -> Any:
        return value.state_dict()

    def misfits(self, value: Any, saved: Any, name: str) -> list[str]:
        if not isinstance(saved, Mapping):
            return [f"{name}: the checkpoint has {described(saved)}, but the object needs the dict of a state_dict()."]
        if isinstance(value, LRScheduler):
            own = value.state_dict()
            lacking, unknown = [key for key in own if key not in saved], [key for key in saved if key not in own]
            if lacking and unknown:
                return [
                    f"{name}: the checkpoint has the state of another schedule, with {listed(unknown)}; "
                    f"{type(value).__name__} has {listed(lacking)}."
                ]
        return []

    def may_fail(self, value: Any) -> bool:
        return not isinstance(value, DataLoader)  # torchdata's loader starts to read when its state is requested

    def before(self, value: Any, name: str) -> Any:
        return copy.deepcopy(value.state_dict())

    def restore(self, value: Any, state: Any, name: str) -> None:
        value.load_state_dict(map_structure(copied, state))
