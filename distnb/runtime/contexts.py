"""Which strategy is in force, and whether this is inside or outside a replica: per thread. Loads no torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from distnb.errors import ContextError

if TYPE_CHECKING:
    from distnb.runtime.replica_context import ReplicaContext

__all__ = [
    "enter_cross_replica",
    "entries",
    "innermost",
    "mixing",
    "note_names",
    "require_cross_replica",
    "require_not_mixed",
]


def _nothing() -> None:
    pass


note_names: Callable[[], Callable[[], None]] = lambda: _nothing  # noqa: E731
"""Called when a scope opens; what it returns, when one ends by an error: names assigned in it are not to stay bound.

An engine sets it. In a script it is the program's affair what it does after an error.
"""


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.stack: list[tuple[Any, ReplicaContext | None]] = []


_here = _PerThread()

_CURES = {
    "run": "call the function directly: it runs on every replica already",
    "reduce": "use distnb.get_replica_context().all_reduce(op, value)",
    "gather": "use distnb.get_replica_context().all_gather(value, axis)",
    "broadcast": "use distnb.get_replica_context().merge_call(lambda strategy, value: strategy.broadcast(value), "
    "(value,))",
    "scope": "make variables before strategy.run, within `with strategy.scope():`",
    "distribute_dataset": "distribute the dataset before strategy.run, and give its batches to run in args",
    "distribute_values_from_function": "make the value before strategy.run, and give it to run in args",
    "assert_in_sync": "call it after strategy.run, in cross-replica context",
}


def entries() -> list[tuple[Any, ReplicaContext | None]]:
    """This thread's stack of (strategy, replica context or None for a cross-replica context); the last is in force."""
    return _here.stack


def innermost() -> tuple[Any, ReplicaContext | None] | None:
    """What is in force on this thread; None outside every scope."""
    stack = _here.stack
    return stack[-1] if stack else None


def require_cross_replica(strategy: Any, method: str) -> None:
    """Refuse a call that replicas cannot make, or that mixes strategies.

    Raises:
        ContextError: It names the call to use instead.
    """
    stack = _here.stack
    if not stack:
        return
    owner, replica = stack[-1]
    if replica is not None:
        raise ContextError(
            f"strategy.{method} was called in a replica context, inside a function that strategy.run called. "
            f"There, {_CURES.get(method, 'leave the function first')}."
        )
    if owner is not strategy:
        raise mixing(owner, strategy)


def require_not_mixed(strategy: Any) -> None:
    """Refuse to enter a strategy's scope within another one's.

    Raises:
        ContextError: Another strategy is in force.
    """
    stack = _here.stack
    if stack and stack[-1][0] is not strategy:
        raise mixing(stack[-1][0], strategy)


def mixing(outer: Any, inner: Any) -> ContextError:
    """The error for what belongs to one strategy and is used while another is in force."""
    return ContextError(
        f"Mixing different Strategy objects: {inner!r} was used while {outer!r} is in force. Leave the one's scope "
        "before the other is used; equal arguments give the same strategy object."
    )


@contextmanager
def enter_cross_replica(strategy: Any) -> Iterator[Any]:
    """A cross-replica context of this strategy."""
    stack = _here.stack
    stack.append((strategy, None))
    try:
        yield strategy
    finally:
        stack.pop()
