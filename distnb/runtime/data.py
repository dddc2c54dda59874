"""Datasets on a replica of several: what the strategy's methods hand to the input room."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from distnb.input.distribute import distribute, distribute_from_function
from distnb.options import InputContext, InputOptions
from distnb.runtime.randomness import streams

if TYPE_CHECKING:
    from distnb.runtime.spmd import SpmdProcess

__all__ = ["dataset_of", "dataset_of_pipelines"]


def dataset_of(process: SpmdProcess, dataset: Any, batch_size: int | None, options: InputOptions | None) -> Any:
    """This replica's slices of a dataset's global batches."""
    return distribute(dataset, batch_size=batch_size, options=options, **_here(process))


def dataset_of_pipelines(
    process: SpmdProcess, make: Callable[[InputContext], Any], options: InputOptions | None
) -> Any:
    """This replica's batches of the pipelines that a function makes."""
    return distribute_from_function(make, options=options, **_here(process))


def _here(process: SpmdProcess) -> dict[str, Any]:
    return {
        "num_replicas": process.size,
        "replica_id": process.rank,
        "device": process.device,
        "workers": process.workers,
        "shared_randomness": streams.shared,
        # The group of the day: the dataset may outlive this one.
        "agree": lambda value: process.group.all_gather_object(value),
    }
