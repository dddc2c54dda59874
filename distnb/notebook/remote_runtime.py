"""The runtime of a strategy in the notebook: every method is called on the engines' own strategy object."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from distnb.errors import ContextError
from distnb.notebook.remote_dataset import RemoteDataset
from distnb.options import InputContext, InputOptions, ReduceOp, RunOptions, ValueContext
from distnb.runtime.base import Owner
from distnb.runtime.in_process import local_components

if TYPE_CHECKING:
    from distnb.notebook.session import Session

__all__ = ["Remote", "RemoteScope"]


class Remote:
    """Forwards a strategy's methods to the engines: the meaning stays in one place, the SPMD runtime there.

    Args:
        session: Gives the running session, or raises that there is none.
    """

    def __init__(self, session: Callable[[], Session]) -> None:
        self._session = session

    def num_replicas(self, strategy: Owner) -> int:
        """As many as the team has."""
        return self._session().team(strategy.spec).size

    def worker_devices(self, strategy: Owner) -> tuple[str, ...]:
        """The device of each replica, in order."""
        return tuple(map(str, self._session().team(strategy.spec).devices))

    def scope(self, strategy: Owner) -> AbstractContextManager[Any]:
        """Stands for a scope whose body the notebook hands to the engines."""
        return RemoteScope(strategy)

    def run(
        self,
        strategy: Owner,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        options: RunOptions | None,
    ) -> Any:
        """Call a function on every replica."""
        wait = options is None or options.wait
        return self._session().call(strategy.spec, "run", (fn, tuple(args), dict(kwargs)), {}, wait=wait)

    def reduce(self, strategy: Owner, op: ReduceOp, value: Any, axis: Any) -> Any:
        """Combine the replicas' components into one value, which stays on the engines."""
        return self._session().call(strategy.spec, "reduce", (op, value), {"axis": axis})

    def gather(self, strategy: Owner, value: Any, axis: int) -> Any:
        """Concatenate the replicas' components."""
        return self._session().call(strategy.spec, "gather", (value, axis), {})

    def broadcast(self, strategy: Owner, value: Any, source: int) -> Any:
        """One replica's component, on all."""
        return self._session().call(strategy.spec, "broadcast", (value, source), {})

    def local_results(self, strategy: Owner, value: Any) -> tuple[Any, ...]:
        """Every replica's component, fetched: in the notebook they are all equally far."""
        return local_components(value)

    def distribute_values_from_function(self, strategy: Owner, fn: Callable[[ValueContext], Any]) -> Any:
        """A distributed value made by a function, which each replica calls for itself."""
        return self._session().call(strategy.spec, "distribute_values_from_function", (fn,), {})

    def distribute_dataset(
        self, strategy: Owner, dataset: Any, batch_size: int | None, options: InputOptions | None
    ) -> Any:
        """A dataset that every replica reads its slices of."""
        keywords = {"batch_size": batch_size, "options": options}
        handle = self._session().call(strategy.spec, "distribute_dataset", (dataset,), keywords)
        return RemoteDataset(handle, partial(self._call, strategy), self._note_batch)

    def distribute_datasets_from_function(
        self, strategy: Owner, fn: Callable[[InputContext], Any], options: InputOptions | None
    ) -> Any:
        """A dataset whose pipelines a function makes on the engines."""
        handle = self._session().call(strategy.spec, "distribute_datasets_from_function", (fn,), {"options": options})
        return RemoteDataset(handle, partial(self._call, strategy), self._note_batch)

    def _call(self, strategy: Owner, function: Callable[..., Any], *args: Any, wait: bool = True) -> Any:
        return self._session().call(strategy.spec, "", (function, *args), {}, wait=wait)

    def _note_batch(self, batch: Any) -> None:
        self._session().namespace.batch = batch

    def no_sync(self, strategy: Owner) -> AbstractContextManager[None]:
        """Gradients belong to a function that `run` calls, or to a distributed cell, and so does this."""
        raise ContextError(
            "strategy.no_sync() was called in the notebook, where no gradients are. Use it in the function that "
            "strategy.run calls, or in a %%distribute cell."
        )

    def assert_in_sync(self, strategy: Owner, value: Any) -> None:
        """Raise when replicas hold different bits."""
        self._session().call(strategy.spec, "assert_in_sync", (value,), {})


class RemoteScope:
    """What `strategy.scope()` is in the notebook: a `with` in a cell hands its block to the engines.

    Entered in any other way it raises, since the body would make its variables in the notebook.
    """

    is_remote = True
    """What the code that the notebook's transformer made asks for."""

    def __init__(self, strategy: Owner) -> None:
        self.strategy = strategy

    def __enter__(self) -> Any:
        raise ContextError(
            "strategy.scope() of a strategy whose replicas are engines was entered where its body cannot be sent to "
            "them: in the code of a module, or in a plain script. Put the code in a %%distribute cell, where all of it "
            "runs on the replicas, or write the `with` in a cell of the notebook, after %load_ext distnb."
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Never reached: entering raises."""
