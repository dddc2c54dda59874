"""The questions that a strategy asks its runtime. Importing this loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from distnb.options import InputContext, InputOptions, ReduceOp, RunOptions, StrategySpec, ValueContext

if TYPE_CHECKING:
    from distnb.runtime.replica import Spmd
    from distnb.runtime.spmd import SpmdProcess

__all__ = ["Owner", "Runtime"]


class Owner(Protocol):
    """The part of a strategy that the runtime layer uses.

    Attributes:
        is_default: Whether this is the strategy in force outside every scope. Every other strategy may use its
            variables.
        device_type: The type that all its devices must have; "" for any.
    """

    is_default: ClassVar[bool]
    device_type: ClassVar[str]

    @property
    def spec(self) -> StrategySpec:
        """The description from which every process makes the same strategy."""

    def join(self) -> Runtime | None:
        """Make a script's process one of several replicas. Return a runtime if it trains alone instead."""

    def make_runtime(self, process: SpmdProcess) -> Spmd:
        """Make the runtime for one replica of several."""

    def check_honoured(self, devices: tuple[str, ...], nccl: bool, workers: tuple[int, ...] = ()) -> None:
        """Raise OptionError if replicas on these devices cannot do what the strategy asks for."""


class Runtime(Protocol):
    """The place where one strategy runs: in process, on one of several replicas (SPMD), or remote (the session's).

    Every public method of `Strategy` calls the method of the same name here, after checks that need no replica. Each
    implementation is complete by itself. `call` runs code that uses several of them.
    """

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function where the replicas are, on all of them, in cross-replica context."""

    def num_replicas(self) -> int:
        """Replicas in sync."""

    def worker_devices(self) -> tuple[str, ...]:
        """Return the device of each replica, in order."""

    def scope(self) -> AbstractContextManager[Any]:
        """Return the context in which variables are made."""

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
        """Return one replica's component, on all."""

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the components that are here."""

    def distribute_values_from_function(self, fn: Callable[[ValueContext], Any]) -> Any:
        """Return a distributed value made by a function."""

    def distribute_dataset(self, dataset: Any, batch_size: int | None, options: InputOptions | None) -> Any:
        """Return a dataset whose global batches are cut into one slice per replica."""

    def distribute_datasets_from_function(self, fn: Callable[[InputContext], Any], options: InputOptions | None) -> Any:
        """Return a dataset of the batches of a function's pipelines, one pipeline for each worker or replica."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients locally."""

    def assert_in_sync(self, value: Any) -> None:
        """Raise when replicas hold different bits."""
