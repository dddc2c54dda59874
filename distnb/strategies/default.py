"""The strategy that is in force where no other is: everything happens in the calling process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Self

from distnb.options import StrategySpec
from distnb.runtime import contexts
from distnb.strategies.base import Strategy

__all__ = ["DefaultStrategy"]


class DefaultStrategy(Strategy):
    """There is one, given by `distnb.get_strategy()` outside every scope. `run` calls the function and does no more."""

    kind: ClassVar[str] = "default"

    def __new__(cls) -> Self:
        return cls._of(StrategySpec(cls.kind))

    def scope(self) -> AbstractContextManager[Any]:
        """Changes nothing.

        Raises:
            ContextError: In another strategy's scope.
        """
        contexts.require_not_mixed(self)
        return self.runtime.scope(self)

    def run(self, fn: Any, args: Sequence[Any] = (), kwargs: Any = None, options: Any = None) -> Any:
        """Call the function: `fn(*args, **kwargs)`."""
        __tracebackhide__ = True  # see Strategy.run
        return super().run(fn, args, kwargs, options)
