"""The object that `strategy.scope()` returns."""

from __future__ import annotations

from contextlib import AbstractContextManager, ContextDecorator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from distnb.runtime import contexts

if TYPE_CHECKING:
    from distnb.strategies.base import Strategy

__all__ = ["StrategyScope"]


class StrategyScope(ContextDecorator):
    """A context manager for a strategy's scope, which can be entered any number of times.

    Attributes:
        strategy: The strategy.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self._entered: list[AbstractContextManager[Any]] = []

    @property
    def is_remote(self) -> bool:
        """True if the scope's block has to be sent to the replicas, as from a notebook's ordinary cell."""
        return getattr(self.strategy.runtime, "is_remote", False)

    def __enter__(self) -> Any:
        contexts.require_cross_replica(self.strategy, "scope")
        scope, depth = self.strategy.runtime.scope(), len(self._entered)
        try:
            self._entered.append(scope)
            return scope.__enter__()
        except BaseException:
            del self._entered[depth:]
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return self._entered.pop().__exit__(kind, error, traceback)

    def __reduce__(self) -> tuple[type[StrategyScope], tuple[Strategy]]:
        return StrategyScope, (self.strategy,)
