"""The strategy in force outside every other strategy: everything happens in the calling process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

from distnb.options import StrategySpec
from distnb.runtime import choice, contexts, step_count
from distnb.runtime.base import Runtime
from distnb.runtime.call_arguments import check_call, check_fits
from distnb.runtime.variable_homes import AloneHome
from distnb.strategies.base import Strategy
from distnb.variables.homes import Home

__all__ = ["DefaultStrategy"]


class DefaultStrategy(Strategy):
    """The strategy that `distnb.get_strategy()` returns outside every scope. `run` only calls the function."""

    kind = "default"
    about = "in the notebook's own process, as an ordinary cell"
    is_default = is_local = True
    needs_engines = False
    word_options = ()
    refusal = "it runs in the notebook's own process"

    @property
    def runtime(self) -> Runtime:
        """The calling process, without a device of its own."""
        return choice.in_process(self, None)

    @property
    def home(self) -> Home:
        """The calling process."""
        return AloneHome(self)

    def __new__(cls) -> Self:
        return cls._of(StrategySpec(kind=cls.kind))

    def scope(self) -> AbstractContextManager[Any]:
        """Return a context that changes nothing.

        Raises:
            ContextError: In a function that `run` called, or in another strategy's scope.
        """
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
        try:
            contexts.this_thread.in_default_run = True
            with step_count.calling:
                return fn(*args, **kwargs) if kwargs else fn(*args)
        except TypeError as error:
            check_fits(error, fn, args, kwargs or {})
            raise
        finally:
            contexts.this_thread.in_default_run = False
