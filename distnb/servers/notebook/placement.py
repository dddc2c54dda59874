"""The placement of a strategy's variables on the servers, for drawing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distnb.views.placement_model import PlacementModel
from distnb.wire.value_facts import Holding

if TYPE_CHECKING:
    from distnb.strategies.parameter_server import ParameterServerStrategy

__all__ = ["placement"]


def placement(strategy: ParameterServerStrategy) -> PlacementModel:
    """Return the shards of a strategy's variables."""
    held = [
        Holding(
            name=row.name,
            whole=row.shape,
            bounds=None,
            kind="stored",
            dtype=str(row.dtype).removeprefix("torch."),
            device="",
            nbytes=row.nbytes,
            holder=f"ps {row.server}",
        )
        for row in strategy.placement()
    ]
    return PlacementModel.of("variables on parameter servers", 1, {0: held})
