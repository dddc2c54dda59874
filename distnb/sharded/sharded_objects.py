"""Sharded models as the core knows them: the runtime of their strategy, and a kind of divided objects."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distnb.runtime.scopes.divided_objects import DividedKind, register_divided
from distnb.sharded import resharding
from distnb.sharded.making.lost_values import require_values
from distnb.sharded.sharded_replica import ShardedSpmd
from distnb.sharded.whole_copies import holds_shards, whole_copies

if TYPE_CHECKING:
    from distnb.runtime.base import Owner
    from distnb.runtime.spmd import SpmdProcess

__all__ = ["SHARDED", "make_runtime"]

SHARDED = DividedKind(
    covers=holds_shards,
    whole=whole_copies,
    require_values=require_values,
    is_movable=resharding.is_movable,
    sent=resharding.sent,
    gather=resharding.gather,
    divide=resharding.divide,
)


def make_runtime(process: SpmdProcess, strategy: Owner) -> ShardedSpmd:
    """Make the runtime of a ShardedStrategy on this replica."""
    register_divided(SHARDED)
    return ShardedSpmd(process, strategy)
