"""The interface between strategies and their runtimes. Importing this module does not load torch."""

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
        is_default: Whether this is the strategy in force outside all scopes. Every other strategy may use its
            variables.
        device_type: The type that all its devices must have. "": any type.
    """

    is_default: ClassVar[bool]
    device_type: ClassVar[str]

    @property
    def spec(self) -> StrategySpec:
        """The description from which every process makes the same strategy."""

    def join(self) -> Runtime | None:
        """Make a script's process one of several replicas, or return a runtime if the process trains alone."""

    def make_runtime(self, process: SpmdProcess) -> Spmd:
        """Make the runtime for one replica of several."""

    def check_honoured(self, devices: tuple[str, ...], nccl: bool, workers: tuple[int, ...] = ()) -> None:
        """Raise OptionError if replicas on these devices cannot honour the strategy's options."""


class Runtime(Protocol):
    """The runtime of one strategy: in process, on one of several replicas (SPMD), or remote (the session's engines).

    Every public method of `Strategy` calls the method of the same name here, after checks that need no replica. Each
    method is complete by itself. `call` runs code that uses several of them.
    """

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function on all replicas, in cross-replica context."""

    def num_replicas(self) -> int:
        """Return the number of replicas in sync."""

    def worker_devices(self) -> tuple[str, ...]:
        """Return the device of each replica, in order."""

    def scope(self) -> AbstractContextManager[Any]:
        """Return a context in which the strategy's variables are made."""

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
        """Return one replica's component on all replicas."""

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the components in this process."""

    def distribute_values_from_function(self, fn: Callable[[ValueContext], Any]) -> Any:
        """Return a distributed value made by a function."""

    def distribute_dataset(self, dataset: Any, batch_size: int | None, options: InputOptions | None) -> Any:
        """Return a dataset whose global batches are cut into one slice per replica."""

    def distribute_datasets_from_function(self, fn: Callable[[InputContext], Any], options: InputOptions | None) -> Any:
        """Return a dataset of the batches of a function's pipelines, one pipeline for each worker or replica."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which gradients accumulate locally."""

    def assert_in_sync(self, value: Any) -> None:
        """Raise OutOfSyncError if replicas hold different bits."""
