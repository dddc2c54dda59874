"""The checks of the arguments of `run` and related methods, the same in every runtime. Loads no torch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from distnb.errors import DistributedValueError, OptionError
from distnb.options import AutoShardPolicy, InputOptions, InputReplicationMode, RunOptions
from distnb.values.distributed import DistributedValues

__all__ = [
    "BatchNote",
    "check_call",
    "check_fits",
    "check_input_function",
    "check_input_options",
]


def check_fits(error: TypeError, fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise a DistributedValueError with the cure if `run`'s function does not accept these arguments.

    Args:
        error: The TypeError that the call raised. It may have another cause; then nothing is raised.
        fn: The function.
        args: The positional arguments.
        kwargs: The named arguments.
    """
    if error.__traceback__ is None or error.__traceback__.tb_next is not None:
        return  # the function's own code raised it, not the call
    try:
        inspect.signature(fn).bind(*args, **kwargs)
    except ValueError:
        return  # a function without a signature, such as some of C's
    except TypeError:
        name = getattr(fn, "__name__", type(fn).__name__)
        raise DistributedValueError(
            f"strategy.run called {name}({_listed(args, kwargs)}): {error}. args is the tuple of "
            f"{name}'s arguments. A batch that is a tuple counts as one argument: strategy.run({name}, args=(batch,))."
        ) from None


def _listed(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    return ", ".join([*map(_kind, args), *(f"{name}={_kind(value)}" for name, value in kwargs.items())])


def _kind(value: Any) -> str:
    """Return a short description of a value: its type, or the value itself if it is plain and short."""
    if isinstance(value, (str, int, float, type(None))) and len(repr(value)) < 40:
        return repr(value)
    return value._word if isinstance(value, DistributedValues) else type(value).__name__


def check_call(fn: Any, args: Any, kwargs: Any, options: Any) -> None:
    """Check the arguments of `run`."""
    if not callable(fn):
        raise DistributedValueError(
            f"strategy.run needs a function and got {fn!r}. Write strategy.run(fn, args=(x,)), without calling fn."
        )
    if isinstance(args, (str, bytes)) or not isinstance(args, (tuple, list)):
        raise DistributedValueError(
            f"strategy.run needs args as a tuple or list and got a {_kind(args)}. Write args=(x,) for one argument."
        )
    if kwargs is not None and type(kwargs) is not dict and not isinstance(kwargs, Mapping):
        raise DistributedValueError(f"strategy.run needs kwargs as a dict and got a {type(kwargs).__name__}.")
    if options is not None and not isinstance(options, RunOptions):
        raise OptionError(f"options={options!r}: strategy.run takes a distnb.RunOptions.")


def check_input_function(fn: Any, options: Any) -> None:
    """Check the arguments of `distribute_datasets_from_function`."""
    if not callable(fn):
        raise DistributedValueError(
            f"distribute_datasets_from_function needs a function of an InputContext and got a {type(fn).__name__}. For "
            "an existing dataset, use distribute_dataset."
        )
    _check_options(options, "distribute_datasets_from_function")
    if options is None:
        return
    if options.collate == "global":
        raise OptionError(
            "collate='global' applies to global batches that distnb splits. distribute_datasets_from_function does not "
            "split the batches of its function. Leave it out."
        )
    if options.auto_shard_policy not in (AutoShardPolicy.AUTO, AutoShardPolicy.OFF):
        raise OptionError(
            f"auto_shard_policy={options.auto_shard_policy.name!r} cannot be honoured: the function passed to "
            "distribute_datasets_from_function chooses each worker's data by its context's input_pipeline_id."
        )


def _check_options(options: Any, method: str) -> None:
    if options is not None and not isinstance(options, InputOptions):
        raise OptionError(f"options={options!r}: {method} takes a distnb.InputOptions.")


def check_input_options(options: Any, batch_size: Any) -> None:
    """Check the arguments of `distribute_dataset`."""
    _check_options(options, "distribute_dataset")
    if options is not None and options.replication_mode is InputReplicationMode.PER_REPLICA:
        raise OptionError(
            "replication_mode='PER_REPLICA' needs an input pipeline for each replica, but distribute_dataset got a "
            "single dataset. Use distribute_datasets_from_function, which calls your function for each pipeline."
        )
    if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1):
        raise OptionError(f"batch_size={batch_size!r}: give the size of the global batch, a whole number from 1.")


class BatchNote:
    """A callback of `select` that notes the sizes of the distributed batch among the arguments of `run`.

    Attributes:
        batch_size: The size of the global batch. None: there is no batch, or there are several of different sizes.
        slice_size: The size of this replica's slice of the batch.
    """

    __slots__ = ("_mixed", "batch_size", "slice_size")

    def __init__(self) -> None:
        self.batch_size: int | None = None
        self.slice_size: int | None = None
        self._mixed = False

    def __call__(self, value: Any, component: Any, /) -> None:
        total = value.global_batch_size
        if total is None or self._mixed or total == self.batch_size:
            return
        if self.batch_size is not None:
            self.batch_size = self.slice_size = None
            self._mixed = True
            return
        self.batch_size = total
        shape = getattr(component, "shape", None)
        if shape is not None:
            self.slice_size = int(shape[0]) if len(shape) else None
        elif isinstance(component, Sequence) and not isinstance(component, (str, bytes)):
            self.slice_size = len(component)

    def explain(self, error: Exception, replica_id: int, replicas: int) -> None:
        """Add a note to the function's error if this replica's slice is empty, which some torch functions refuse."""
        if self.slice_size == 0 and replicas > 1:
            error.add_note(
                f"The slice of replica {replica_id} is empty: the global batch has {self.batch_size} example(s) for "
                f"{replicas} replicas. Leave out an incomplete last batch (drop_last=True), or handle the empty slice "
                "in the function (if len(x): ...)."
            )
