"""What a strategy asks of the place where it runs. Importing this loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from distnb.options import InputContext, InputOptions, ReduceOp, RunOptions, StrategySpec, ValueContext

__all__ = ["DEFAULT", "PARAMETER_SERVER", "Owner", "Runtime", "is_in_process"]

DEFAULT = "default"
"""The kind of the strategy that is in force where no other is."""

PARAMETER_SERVER = "parameter_server"
"""The kind of the strategy whose variables live on servers."""


def is_in_process(spec: StrategySpec) -> bool:
    """Whether a strategy always computes in the calling process."""
    return spec.kind in (DEFAULT, "one_device")


class Owner(Protocol):
    """What a runtime sees of the strategy that it works for."""

    @property
    def spec(self) -> StrategySpec:
        """What the strategy is."""


class Runtime(Protocol):
    """Where one strategy runs. There are three: in process, SPMD, and remote (the session's).

    Every public method of `Strategy` goes through the method of the same name here, after checks that need no
    replica; an implementation is complete by itself. `call` is for what uses several of them.
    """

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function where the replicas are, on all of them, in cross-replica context."""

    def num_replicas(self) -> int:
        """Replicas in sync."""

    def worker_devices(self) -> tuple[str, ...]:
        """The device of each replica, in order."""

    def scope(self) -> AbstractContextManager[Any]:
        """Where variables are made."""

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        options: RunOptions | None,
    ) -> Any:
        """Call a function on every replica."""

    def reduce(self, op: ReduceOp, value: Any, axis: Any) -> Any:
        """Combine the replicas' components into one value."""

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenate the replicas' components."""

    def broadcast(self, value: Any, source: int) -> Any:
        """One replica's component, on all."""

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """The components that are here."""

    def distribute_values_from_function(self, fn: Callable[[ValueContext], Any]) -> Any:
        """A distributed value made by a function."""

    def distribute_dataset(self, dataset: Any, batch_size: int | None, options: InputOptions | None) -> Any:
        """A dataset whose global batches are cut into one slice per replica."""

    def distribute_datasets_from_function(self, fn: Callable[[InputContext], Any], options: InputOptions | None) -> Any:
        """A dataset of the batches that a function's pipelines give, one for each replica."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients locally."""

    def assert_in_sync(self, value: Any) -> None:
        """Raise when replicas hold different bits."""
