"""The meshes over which strategies shard models. A program's own DTensors are on meshes of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from distnb.options import StrategySpec

__all__ = ["note_mesh", "strategy_of"]

_meshes: dict[DeviceMesh, StrategySpec] = {}


def note_mesh(mesh: DeviceMesh, spec: StrategySpec) -> None:
    """Note a mesh over which a strategy shards models."""
    _meshes[mesh] = spec


def strategy_of(tensor: Any) -> StrategySpec | None:
    """Return the strategy that has divided a tensor, or None."""
    return _meshes.get(tensor.device_mesh) if isinstance(tensor, DTensor) else None
