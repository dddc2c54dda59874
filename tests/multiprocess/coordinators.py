"""A coordinator without parameter servers."""

from __future__ import annotations

from typing import Self

from distnb.options import StrategySpec
from distnb.strategies.base import Strategy


class OnTwoWorkers(Strategy):
    """A strategy of the kind that coordinators serve, without variables."""

    kind = "parameter_server"
    num_replicas_in_sync = 1

    def __new__(cls) -> Self:
        return cls._of(StrategySpec(cls.kind))
