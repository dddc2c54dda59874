"""The strategy in force on each thread, inside or outside a replica. Loads no torch."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from distnb.errors import ContextError

if TYPE_CHECKING:
    from distnb.runtime.replica_context import ReplicaContext

__all__ = [
    "Execution",
    "enter_cross_replica",
    "enter_replica",
    "entries",
    "execute",
    "executing",
    "execution",
    "in_lasting_scope",
    "in_replica",
    "innermost",
    "mixing",
    "require_all_replicas",
    "require_cross_replica",
    "enter_lasting_scope",
    "this_thread",
]


class Execution(NamedTuple):
    """The mode in which a strategy's replicas run a library's loop, such as Keras's.

    Attributes:
        strategy: The strategy.
        kind: "replicated": all replicas do the same work, so each has the whole of every result. "split": each replica
            has its own part, as in `strategy.run`. "single": this replica runs code that the others do not run.
        counts: Whether this replica's results count. False: it has no part of the data, and its results are dropped.
        counting: The number of replicas whose results count; 0 if all count.
    """

    strategy: Any
    kind: Literal["replicated", "split", "single"]
    counts: bool = True
    counting: int = 0


class _ThreadContext(threading.local):
    """The state of one thread.

    Attributes:
        execution: See `execution`.
        stack: See `entries`.
        lasting_scope: The strategy of the lasting scope, and the scope.
        in_default_run: Whether the thread is in a function that the default strategy's `run` called.
    """

    def __init__(self) -> None:
        self.execution: Execution | None = None
        self.stack: list[tuple[Any, ReplicaContext | None]] = []
        self.lasting_scope: tuple[Any, AbstractContextManager[Any]] | None = None
        self.in_default_run = False


this_thread = _ThreadContext()

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
    """Return this thread's stack of (strategy, replica context or None for cross-replica). The last one is in force."""
    return this_thread.stack


def innermost() -> tuple[Any, ReplicaContext | None] | None:
    """Return the entry in force on this thread, or None outside all scopes."""
    stack = this_thread.stack
    return stack[-1] if stack else None


def enter_lasting_scope(strategy: Any, error: BaseException | None = None) -> None:
    """Enter a strategy's scope as the lasting scope, and leave the previous one.

    A lasting scope remains in force until the program ends or this function is called again.

    Args:
        strategy: The strategy. None: only leave the previous scope.
        error: The error with which the previous scope ends, if any.
    """
    lasting_scope, this_thread.lasting_scope = this_thread.lasting_scope, None
    if lasting_scope is not None:
        lasting_scope[1].__exit__(type(error) if error is not None else None, error, None)
    if strategy is not None:
        scope = strategy.scope()
        scope.__enter__()
        this_thread.lasting_scope = strategy, scope


def in_lasting_scope() -> bool:
    """Return whether only a lasting scope is in force."""
    return this_thread.lasting_scope is not None and len(this_thread.stack) == 1


def in_replica() -> bool:
    """Return whether this thread is in a function that `run` called."""
    stack = this_thread.stack
    return bool(stack) and stack[-1][1] is not None


def execution() -> Execution | None:
    """Return the mode in which this thread runs a library's loop, or None outside such a loop."""
    return this_thread.execution


def execute(how: Execution | None) -> None:
    """Set the mode in which this thread runs a library's loop from now on."""
    this_thread.execution = how


@contextmanager
def executing(how: Execution) -> Iterator[None]:
    """Return a context in which this thread runs a library's loop, or a part of it, in a mode."""
    before = this_thread.execution
    try:
        this_thread.execution = how
        yield
    finally:
        this_thread.execution = before


def require_cross_replica(strategy: Any, method: str) -> None:
    """Raise a ContextError for a call that is not possible in a replica context, or that mixes strategies."""
    stack = this_thread.stack
    owner, replica = stack[-1] if stack else (strategy, None)
    in_default_run = not stack and this_thread.in_default_run and strategy.is_default
    if replica is not None or (in_default_run and method in ("run", "reduce", "gather", "scope")):
        raise ContextError(
            f"strategy.{method} was called in a replica context, inside a function that strategy.run called. "
            f"There, {_CURES.get(method, 'leave the function first')}."
        )
    if owner is not strategy:
        raise mixing(owner, strategy)


def mixing(outer: Any, inner: Any) -> ContextError:
    """Return the error for an object of one strategy that is used while another is in force."""
    return ContextError(
        f"Mixing different Strategy objects: {inner!r} was used while {outer!r} is in force. Leave the scope "
        "of one before you use the other. Equal arguments give the same strategy object."
    )


def require_all_replicas() -> None:
    """Raise ContextError if this replica runs code that the others do not run, such as a callback of Keras's."""
    if this_thread.execution is not None and this_thread.execution.kind == "single":
        raise ContextError(
            "A callback on replica 0 uses the weights of a sharded model after a batch, when the other replicas do not "
            "take part. Use them in on_epoch_end, or in another method that is called for epochs or for the whole "
            "training (ModelCheckpoint and BackupAndRestore: save_freq='epoch')."
        )


@contextmanager
def enter_cross_replica(strategy: Any) -> Iterator[Any]:
    """Return a context that is a cross-replica context of this strategy."""
    with _entered(strategy, None):
        yield strategy


@contextmanager
def enter_replica(strategy: Any, replica: ReplicaContext) -> Iterator[None]:
    """Return a context in which a replica's context is in force."""
    with _entered(strategy, replica):
        yield


@contextmanager
def _entered(strategy: Any, replica: ReplicaContext | None) -> Iterator[None]:
    stack = this_thread.stack
    depth = len(stack)
    try:
        stack.append((strategy, replica))
        yield
    finally:
        del stack[depth:]
