"""The part of a dataset that one worker of several reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler

from distnb.compat import loader_internals
from distnb.errors import OptionError
from distnb.input.sources.loaders import changed, is_plain
from distnb.options import AutoShardPolicy

__all__ = ["part_of", "policy_for"]

_ELSE = (
    "Otherwise AutoShardPolicy.DATA cuts every global batch among all replicas, and distribute_datasets_from_function "
    "leaves it to you what each worker reads."
)


def policy_for(dataset: Any, policy: AutoShardPolicy, workers: int) -> AutoShardPolicy:
    """What AUTO means for a dataset: FILE where several workers can have files of their own, else DATA."""
    if policy is not AutoShardPolicy.AUTO or workers == 1:
        return policy
    files = _files_of(dataset.dataset if isinstance(dataset, DataLoader) else dataset)
    return AutoShardPolicy.FILE if files is not None and len(files) >= workers else AutoShardPolicy.DATA


def part_of(dataset: Any, policy: AutoShardPolicy, worker: int, workers: int) -> Any:
    """What one worker of several reads under a policy: a dataset of the same kind.

    Raises:
        OptionError: The dataset does not say how it is parted, has fewer files than there are workers, or has a sampler
            that is made for the whole of it.
    """
    part: Callable[[Any, int, int], Any] | None
    part = {AutoShardPolicy.FILE: _by_files, AutoShardPolicy.HINT: _by_hint}.get(policy)
    if part is None:
        return dataset
    whole = dataset.dataset if isinstance(dataset, DataLoader) else dataset
    own = part(whole, worker, workers)
    if workers == 1:
        return dataset
    return _reading(dataset, own) if isinstance(dataset, DataLoader) else own


def _by_files(dataset: Any, worker: int, workers: int) -> Any:
    files = _files_of(dataset)
    if files is None:
        raise OptionError(
            f"AutoShardPolicy.FILE was asked for, and a {type(dataset).__name__} does not say which files it is made "
            "of. Give it an attribute `files`, a sequence, and a method `with_files(files)` that gives a dataset like "
            f"itself which reads these files only. {_ELSE}"
        )
    if len(files) < workers:
        raise OptionError(
            f"AutoShardPolicy.FILE gives each of {workers} workers files of its own, and this dataset is made of "
            f"{len(files)}: {', '.join(map(str, files)) or 'none'}. Write the data as at least {workers} files. {_ELSE}"
        )
    return dataset if workers == 1 else dataset.with_files(list(files)[worker::workers])


def _files_of(dataset: Any) -> Sequence[Any] | None:
    """The files of a dataset that says which they are, and can be made of a part of them."""
    files = getattr(dataset, "files", None)
    told = isinstance(files, Sequence) and not isinstance(files, (str, bytes))
    return files if told and callable(getattr(dataset, "with_files", None)) else None


def _by_hint(dataset: Any, worker: int, workers: int) -> Any:
    shard = getattr(dataset, "shard", None)
    if not callable(shard):
        raise OptionError(
            f"AutoShardPolicy.HINT was asked for, and a {type(dataset).__name__} has no method `shard(num_shards, "
            f"index)` that gives the part of one worker. {_ELSE}"
        )
    return dataset if workers == 1 else shard(workers, worker)


def _reading(loader: DataLoader[Any], dataset: Any) -> Any:
    """A loader like the user's that reads another dataset."""
    if loader_internals.reads_iterable(loader) and is_plain(loader):
        return changed(loader, dataset=dataset)
    batch_sampler, sampler = loader.batch_sampler, _sampler_like(loader.sampler, dataset)
    if sampler is None or type(batch_sampler) not in (type(None), BatchSampler) or not is_plain(loader):
        raise OptionError(
            f"The DataLoader's {type(loader.sampler).__name__} was made for the whole dataset, and each worker reads "
            "a part of it. Use shuffle=True or False, or make the DataLoader of each part in "
            "distribute_datasets_from_function."
        )
    if batch_sampler is not None:
        batch_sampler = BatchSampler(sampler, batch_sampler.batch_size, batch_sampler.drop_last)  # type: ignore[attr-defined]
    return changed(loader, dataset=dataset, sampler=sampler, batch_sampler=batch_sampler)


def _sampler_like(sampler: Any, dataset: Any) -> Sampler[Any] | None:
    if type(sampler) is SequentialSampler:
        return SequentialSampler(dataset)
    if type(sampler) is RandomSampler and loader_internals.draws_as_many_as_there_are(sampler):
        return RandomSampler(dataset, sampler.replacement, generator=sampler.generator)
    return None
