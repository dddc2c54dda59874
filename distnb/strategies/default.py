"""The strategy that is in force where no other is: everything happens in the calling process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Self

from distnb.options import StrategySpec
from distnb.runtime import contexts, step_count
from distnb.runtime.call_arguments import check_call, check_fits
from distnb.strategies.base import Strategy

__all__ = ["DefaultStrategy"]


class DefaultStrategy(Strategy):
    """There is one, given by `distnb.get_strategy()` outside every scope. `run` calls the function and does no more."""

    kind: ClassVar[str] = "default"

    def __new__(cls) -> Self:
        return cls._of(StrategySpec(cls.kind))

    def scope(self) -> AbstractContextManager[Any]:
        """Changes nothing. A ContextError in a function that `run` called, or in another strategy's scope."""
        contexts.require_cross_replica(self, "scope")
        return nullcontext(self)

    def run(self, fn: Any, args: Sequence[Any] = (), kwargs: Any = None, options: Any = None) -> Any:
        """Call the function: `fn(*args, **kwargs)`.

        Raises:
            ContextError: In a function that `run` called, or in another strategy's scope.
        """
        __tracebackhide__ = True  # see Strategy.run
        check_call(fn, args, kwargs, options)
        contexts.require_cross_replica(self, "run")
        contexts.in_default_run(True)
        try:
            with step_count.calling:
                return fn(*args, **kwargs) if kwargs else fn(*args)
        except TypeError as error:
            check_fits(error, fn, args, kwargs or {})
            raise
        finally:
            contexts.in_default_run(False)
