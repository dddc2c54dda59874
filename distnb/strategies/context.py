"""The strategy and the replica of the calling thread. This module does not load torch."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from distnb.errors import ContextError, OptionError
from distnb.runtime import choice, contexts
from distnb.runtime.chief_work.chief_first import chief_first
from distnb.runtime.replica_context import ReplicaContext
from distnb.runtime.this_process import this_process
from distnb.strategies.base import Strategy
from distnb.strategies.default import DefaultStrategy

__all__ = [
    "ReplicaContext",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "is_chief",
    "on_chief",
    "replica_id",
    "set_strategy",
]

P = ParamSpec("P")
T = TypeVar("T")


def get_strategy() -> Strategy:
    """Return the strategy in whose scope or `run` the caller is; outside, the default strategy."""
    innermost = contexts.innermost()
    return DefaultStrategy() if innermost is None else innermost[0]


def has_strategy() -> bool:
    """Return whether a strategy other than the default one is in force."""
    return contexts.innermost() is not None


def set_strategy(strategy: Strategy | None) -> None:
    """Enter a strategy's scope without a `with` statement, until another strategy or None is set.

    In a distributed cell the scope lasts until the cell's end. Objects made in it are kept in sync from the next
    `strategy.run` on.

    Raises:
        ContextError: The caller is in `with strategy.scope():` or `strategy.run`, or in a notebook's ordinary cell,
            whose variables would not be created on the replicas.
        OptionError: The argument is no strategy.
    """
    if strategy is not None and not isinstance(strategy, Strategy):
        raise OptionError(f"set_strategy takes a strategy, or None, and got {strategy!r}.")
    if has_strategy() and not contexts.in_lasting_scope():
        raise ContextError(
            f"set_strategy was called while {get_strategy()!r} is in force by `with strategy.scope():` or "
            "strategy.run. Call it outside of these."
        )
    contexts.enter_lasting_scope(None if isinstance(strategy, DefaultStrategy) else strategy)


def in_cross_replica_context() -> bool:
    """Return whether the caller is in a scope or a merge_call, and not in a replica context."""
    innermost = contexts.innermost()
    return innermost is not None and innermost[1] is None


def get_replica_context() -> ReplicaContext | None:
    """Return the context of the calling replica; None in a cross-replica context.

    Outside every strategy, return the default context of one replica, in which collectives return their arguments.
    """
    innermost = contexts.innermost()
    return innermost[1] if innermost is not None else _default_context()


@functools.cache
def _default_context() -> ReplicaContext:
    return ReplicaContext(DefaultStrategy())


def replica_id() -> int:
    """Return this process's replica number; 0 in the notebook, and in scripts of one process.

    Example:
        >>> replica_id()
        0
    """
    innermost, process = contexts.innermost(), this_process.replica
    replica = innermost[1] if innermost is not None else None
    if replica is not None and (replica.num_replicas_in_sync > 1 or process is None):
        return replica.replica_id_in_sync_group
    if process is not None:  # also in a step of a Keras model, in which every replica sees a single one
        return process.rank
    return int(os.environ["RANK"]) if choice.started_by_launcher() else 0


def is_chief() -> bool:
    """Return whether this is replica 0, which writes files and logs."""
    return replica_id() == 0


def on_chief(function: Callable[P, T]) -> Callable[P, T | None]:
    """Return a function that only replica 0 runs. The other replicas wait and get None. An error is raised on all.

    For example, `on_chief(write)(path)` writes a file that all replicas can read afterwards. Replica 0 may call the
    function alone, as in a callback. The function must not call collectives, since the other replicas do not.

    Example:
        >>> on_chief(print)("saved")
        saved
    """
    if not callable(function):
        raise ContextError(
            f"on_chief takes a function and got {function!r}. Write on_chief(function)(arguments), or use it as a "
            "decorator."
        )

    name = getattr(function, "__qualname__", type(function).__qualname__)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T | None:
        return chief_first(name, lambda: function(*args, **kwargs))

    return call
