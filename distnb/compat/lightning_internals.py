"""Names of Lightning: its objects that store the processes, and its own rank. Importing this loads no Lightning."""

from __future__ import annotations

import sys
from typing import Any, Final

__all__ = ["BOUND", "RANKS", "renew"]

BOUND: Final = {
    ("lightning.fabric.fabric", "Fabric"),
    ("lightning.fabric.wrappers", "_FabricDataLoader"),
    ("lightning.fabric.wrappers", "_FabricModule"),
    ("lightning.fabric.wrappers", "_FabricOptimizer"),
    ("lightning.pytorch.trainer.trainer", "Trainer"),
    ("lightning_fabric.fabric", "Fabric"),
    ("lightning_fabric.wrappers", "_FabricDataLoader"),
    ("lightning_fabric.wrappers", "_FabricModule"),
    ("lightning_fabric.wrappers", "_FabricOptimizer"),
    ("pytorch_lightning.trainer.trainer", "Trainer"),
}
"""Classes whose instances store the number of processes at their creation: (module, name)."""


RANKS: Final = "lightning_utilities.core.rank_zero"
"""The module that stores the rank."""


def renew(rank: int) -> None:
    """Set Lightning's rank for the current program. Lightning logs and saves on rank 0 only."""
    loaded: Any = sys.modules.get(RANKS)
    if loaded is not None and getattr(loaded.rank_zero_only, "rank", None) is not None:
        loaded.rank_zero_only.rank = rank
