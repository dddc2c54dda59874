"""The runtime of a strategy in the notebook, which calls every method on the engines' own strategy object."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from distnb.errors import ContextError
from distnb.notebook.handles.handle import HANDLES, state_of_handle
from distnb.notebook.handles.pending import DeferredCall
from distnb.notebook.remote_dataset import RemoteDataset, RemoteIterator
from distnb.options import InputContext, InputOptions, ReduceOp, RunOptions, ValueContext
from distnb.runtime.base import Owner
from distnb.runtime.in_process import local_components
from distnb.values import Mirrored
from distnb.values.structure import flatten, map_structure, unflatten

if TYPE_CHECKING:
    from distnb.notebook.session import Session

__all__ = ["Remote", "RemoteScope"]


class Remote:
    """The runtime that forwards a strategy's methods to the SPMD runtime of the engines, which implements them."""

    is_remote = True
    """True: the notebook sends the blocks of scopes to the engines (`StrategyScope`)."""

    def __init__(self, strategy: Owner, session: Callable[[], Session]) -> None:
        self._strategy = strategy
        self._find_session = session
        self._latest: Callable[[], Session | None] = lambda: None  # a weak reference

    def _session(self) -> Session:
        """Return the session on which the strategy runs. While it lives, no other one can run."""
        session = self._latest()
        if session is None or not session.alive:
            session = self._find_session()
            self._latest = weakref.ref(session)
        return session

    def _ask(self, method: str, args: tuple[Any, ...], keywords: dict[str, Any], *, wait: bool = True) -> Any:
        return self._session().calls.call(self._strategy.spec, method, args, keywords, wait=wait)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function on every replica."""
        return self._ask("", (function, *args), {})

    def num_replicas(self) -> int:
        """Return the number of the team's replicas."""
        return self._session().team(self._strategy.spec).size

    def worker_devices(self) -> tuple[str, ...]:
        """Return the device of each replica, in order."""
        return tuple(map(str, self._session().team(self._strategy.spec).devices))

    def scope(self) -> AbstractContextManager[Any]:
        """Return a placeholder for a scope. The notebook sends the scope's block to the engines."""
        return RemoteScope()

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        options: RunOptions | None,
    ) -> Any:
        """Call a function on every replica."""
        wait = options is None or options.wait
        return self._ask("run", (fn, tuple(args), dict(kwargs)), {}, wait=wait)

    def reduce(self, op: ReduceOp, value: Any, axis: Any) -> Any:
        """Combine the replicas' components into one value.

        The value stays on the engines, except for numbers in host memory, which are returned as tensors. If the
        notebook knows the components, as it does for numbers that `run` returned, no message is needed.
        """
        leaves, shape = flatten(value)
        known = []
        if axis is None and self._strategy.spec.option("cross_device_ops") is None:
            engines = self._session().team(self._strategy.spec).engines
            known = [state_of_handle(leaf).all_known(engines) for leaf in leaves if type(leaf) in HANDLES]
        if not known or len(known) < len(leaves) or not all(known):
            return map_structure(_fetched_number, self._ask("reduce", (op, value), {"axis": axis}))
        from distnb.runtime.reduction.reducing import reduce_numbers

        reduced = reduce_numbers(op, known)
        return reduced[0] if leaves[0] is value else unflatten(shape, reduced)

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenate the replicas' components."""
        return self._ask("gather", (value, axis), {})

    def broadcast(self, value: Any, source: int) -> Any:
        """Send one replica's component to all replicas."""
        return self._ask("broadcast", (value, source), {})

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Fetch every replica's component. None of them is local to the notebook."""
        return local_components(value)

    def distribute_values_from_function(self, fn: Callable[[ValueContext], Any]) -> Any:
        """Create a distributed value with a function that each replica calls for itself."""
        return self._ask("distribute_values_from_function", (fn,), {})

    def distribute_dataset(self, dataset: Any, batch_size: int | None, options: InputOptions | None) -> Any:
        """Create a dataset from which every replica reads its slices."""
        keywords = {"batch_size": batch_size, "options": options}
        handle = self._ask("distribute_dataset", (dataset,), keywords)
        return RemoteDataset(handle, self.call, self._defer, self._note_batch, self._note_iteration)

    def distribute_datasets_from_function(self, fn: Callable[[InputContext], Any], options: InputOptions | None) -> Any:
        """Create a dataset with a function that creates the pipelines on the engines."""
        handle = self._ask("distribute_datasets_from_function", (fn,), {"options": options})
        return RemoteDataset(handle, self.call, self._defer, self._note_batch, self._note_iteration)

    def _defer(self, ask: Callable[[], Sequence[Any]], changed: Sequence[Any]) -> DeferredCall:
        return self._session().calls.defer(self._strategy.spec, ask, changed)

    def _note_batch(self, batch: Any) -> None:
        self._session().namespace.batch = batch

    def _note_iteration(self, iteration: RemoteIterator) -> None:
        self._session().iterations.add(iteration)

    def no_sync(self) -> AbstractContextManager[None]:
        """Raise ContextError: gradients exist only in functions that `run` calls, and in distributed cells."""
        raise ContextError(
            "strategy.no_sync() was called in the notebook, where there are no gradients. Use it in the function that "
            "strategy.run calls, or in a %%distribute cell."
        )

    def assert_in_sync(self, value: Any) -> None:
        """Raise if the replicas hold different bits."""
        self._ask("assert_in_sync", (value,), {})


def _fetched_number(value: Any) -> Any:
    """Return the number behind a mirrored handle if the notebook knows it, else the value unchanged."""
    known = state_of_handle(value).all_known() if isinstance(value, Mirrored) and type(value) in HANDLES else []
    return known[0] if known else value


class RemoteScope:
    """A placeholder for a scope in the notebook. Entering it raises ContextError.

    A `with` statement in a cell never enters it: the notebook's transformer sends the block to the replicas.
    """

    def __enter__(self) -> Any:
        raise ContextError(
            "strategy.scope() of a strategy whose replicas are engines was entered where the notebook cannot send its "
            "block to them: by ExitStack.enter_context, as a decorator, in the code of a module, or in a plain script. "
            "In a cell write `with strategy.scope():` (or `with scope:`, for scope = strategy.scope()), after "
            "%load_ext distnb; or put the code in a %%distribute cell, where all of it runs on the replicas."
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Do nothing. This is never called, because entering raises."""
