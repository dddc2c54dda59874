"""The part of a dataset that one of several workers reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler

from distnb.compat import loader_internals
from distnb.errors import OptionError
from distnb.input.sources.loaders import copy_loader, is_plain
from distnb.options import AutoShardPolicy

__all__ = ["part_for_worker", "resolve_policy"]

_ELSE = (
    "Otherwise AutoShardPolicy.DATA cuts every global batch among all replicas, and distribute_datasets_from_function "
    "lets your function select what each worker reads."
)


def resolve_policy(dataset: Any, policy: AutoShardPolicy, workers: int) -> AutoShardPolicy:
    """Replace AUTO by the policy for a dataset: FILE if each worker can have its own files, else DATA."""
    if policy is not AutoShardPolicy.AUTO or workers == 1:
        return policy
    files = _files_of(dataset.dataset if isinstance(dataset, DataLoader) else dataset)
    return AutoShardPolicy.FILE if files is not None and len(files) >= workers else AutoShardPolicy.DATA


def part_for_worker(dataset: Any, policy: AutoShardPolicy, worker: int, workers: int) -> Any:
    """Return the part of a dataset that one of several workers reads under a policy, as a dataset of the same kind.

    Raises:
        OptionError: The dataset does not define its parts, has fewer files than there are workers, or has a sampler
            for the whole dataset.
    """
    part: Callable[[Any, int, int], Any] | None
    part = {AutoShardPolicy.FILE: _by_files, AutoShardPolicy.HINT: _by_hint}.get(policy)
    if part is None:
        return dataset
    whole = dataset.dataset if isinstance(dataset, DataLoader) else dataset
    own = part(whole, worker, workers)
    if workers == 1:
        return dataset
    return _with_dataset(dataset, own) if isinstance(dataset, DataLoader) else own


def _by_files(dataset: Any, worker: int, workers: int) -> Any:
    files = _files_of(dataset)
    if files is None:
        raise OptionError(
            f"AutoShardPolicy.FILE was requested, but a {type(dataset).__name__} does not list its files. Give it an "
            "attribute `files`, a sequence, and a method `with_files(files)` that returns a dataset of the same kind "
            f"that reads only these files. {_ELSE}"
        )
    if len(files) < workers:
        raise OptionError(
            f"AutoShardPolicy.FILE needs at least one file for each of {workers} workers, but this dataset has "
            f"{len(files)}: {', '.join(map(str, files)) or 'none'}. Write the data as at least {workers} files. {_ELSE}"
        )
    return dataset if workers == 1 else dataset.with_files(list(files)[worker::workers])


def _files_of(dataset: Any) -> Sequence[Any] | None:
    """Return the files of a dataset that lists them and can be restricted to some of them."""
    files = getattr(dataset, "files", None)
    is_list = isinstance(files, Sequence) and not isinstance(files, (str, bytes))
    return files if is_list and callable(getattr(dataset, "with_files", None)) else None


def _by_hint(dataset: Any, worker: int, workers: int) -> Any:
    shard = getattr(dataset, "shard", None)
    if not callable(shard):
        raise OptionError(
            f"AutoShardPolicy.HINT was requested, but a {type(dataset).__name__} has no method `shard(num_shards, "
            f"index)` that returns the part of one worker. {_ELSE}"
        )
    return dataset if workers == 1 else shard(workers, worker)


def _with_dataset(loader: DataLoader[Any], dataset: Any) -> Any:
    """Return a loader like the user's that reads another dataset."""
    if loader_internals.reads_iterable(loader) and is_plain(loader):
        return copy_loader(loader, dataset=dataset)
    batch_sampler, sampler = loader.batch_sampler, _sampler_like(loader.sampler, dataset)
    if sampler is None or type(batch_sampler) not in (type(None), BatchSampler) or not is_plain(loader):
        raise OptionError(
            f"The DataLoader's {type(loader.sampler).__name__} was made for the whole dataset, and each worker reads "
            "a part of it. Use shuffle=True or False, or make the DataLoader of each part in "
            "distribute_datasets_from_function."
        )
    if batch_sampler is not None:
        batch_sampler = BatchSampler(sampler, batch_sampler.batch_size, batch_sampler.drop_last)  # type: ignore[attr-defined]
    return copy_loader(loader, dataset=dataset, sampler=sampler, batch_sampler=batch_sampler)


def _sampler_like(sampler: Any, dataset: Any) -> Sampler[Any] | None:
    if type(sampler) is SequentialSampler:
        return SequentialSampler(dataset)
    if type(sampler) is RandomSampler and loader_internals.draws_whole_dataset(sampler):
        return RandomSampler(dataset, sampler.replacement, generator=sampler.generator)
    return None
