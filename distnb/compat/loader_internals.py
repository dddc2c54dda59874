"""Private names of torch.utils.data (loaders, their iterations and workers) and of multiprocessing's processes."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from typing import Any

from distnb.compat.versions import private_names

with private_names("torch"):
    from torch.utils.data import DataLoader, RandomSampler
    from torch.utils.data._utils.signal_handling import _set_SIGCHLD_handler as handle_ends_of_workers
    from torch.utils.data.dataloader import _DatasetKind, _MultiProcessingDataLoaderIter

    _get_iterator = DataLoader._get_iterator
    _shutdown_workers = _MultiProcessingDataLoaderIter._shutdown_workers

__all__ = [
    "base_seed",
    "batches_returned",
    "call_of",
    "draws_whole_dataset",
    "forget_iterator",
    "handle_ends_of_workers",
    "is_shut_down",
    "kept_iterator",
    "makes_plain_iterators",
    "reads_iterable",
    "shut_down",
    "workers",
]


def makes_plain_iterators(loader: DataLoader[Any]) -> bool:
    """Return whether a loader's iterators are torch's own, whatever its class."""
    return type(loader)._get_iterator is _get_iterator


def reads_iterable(loader: DataLoader[Any]) -> bool:
    """Return whether a loader's dataset can only be read from end to end."""
    return loader._dataset_kind == _DatasetKind.Iterable


def kept_iterator(loader: DataLoader[Any]) -> Any:
    """Return the iterator of a loader whose workers persist, or None."""
    return loader.__dict__.get("_iterator")


def forget_iterator(loader: DataLoader[Any]) -> None:
    """Make a loader start new workers for its next iteration."""
    loader.__dict__["_iterator"] = None


def batches_returned(iterator: Any) -> int:
    """Return the number of batches that an iteration has returned."""
    given: int = iterator._num_yielded
    return given


def base_seed(iterator: Any) -> int:
    """Return the seed of an iteration, to which workers add their number."""
    seed: int = iterator._base_seed
    return seed


def workers(iterator: Any) -> Sequence[BaseProcess]:
    """Return the worker processes of an iteration."""
    found: Sequence[BaseProcess] = getattr(iterator, "_workers", ())
    return found


def is_shut_down(iterator: Any) -> bool:
    """Return whether an iteration has no workers, or has already shut them down."""
    return not hasattr(iterator, "_shutdown_workers") or bool(getattr(iterator, "_shutdown", False))


def shut_down(iterator: Any) -> None:
    """Shut down the workers of an iteration."""
    iterator._shutdown_workers()


def draws_whole_dataset(sampler: RandomSampler) -> bool:
    """Return whether a sampler draws as many examples as the dataset has."""
    return sampler._num_samples is None


def call_of(process: BaseProcess) -> tuple[Any, tuple[Any, ...]]:
    """Return the function that a process runs, and its positional arguments."""
    return process._target, process._args  # type: ignore[attr-defined]
