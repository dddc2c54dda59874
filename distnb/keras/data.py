"""Data for Keras's loops: global batches that all replicas read alike, or that each reads a part of."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import torch

from distnb.accelerators import torch_device
from distnb.collectives.digests import digest
from distnb.collectives.group.interface import Group
from distnb.errors import CannotTravelError, OptionError, StructureError
from distnb.input.dataset import DistributedDataset
from distnb.keras import keras_internals
from distnb.objects.placeholder import Placeholder
from distnb.options import InputContext, InputOptions
from distnb.values.distributed import PerReplica
from distnb.values.structure import has_distributed, map_structure

__all__ = ["DatasetCreator", "SameBatches", "as_tensor", "take_data"]


class _Batches(keras_internals.DataAdapter):  # type: ignore[misc]
    """Batches as Keras's loops take them: an iterable, which begins anew in each epoch."""

    def get_torch_dataloader(self) -> Any:
        return self

    get_native_iterator = get_numpy_iterator = get_torch_dataloader

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError

    @property
    def num_batches(self) -> int | None:
        return None

    @property
    def batch_size(self) -> int | None:
        return None

    has_partial_batch = False
    partial_batch_size = None


class DatasetCreator(_Batches):
    """A dataset for `fit`, `evaluate` and `predict` that a function makes where it is read.

    With a ParameterServerStrategy each worker makes its own. With other strategies a function that takes an
    InputContext is called once for each worker (machine), and gives batches as large as one replica's shall be: a
    worker's replicas take them in turn, and what all of them take together is the global batch. A function without
    arguments gives global batches, the same on every replica.

    Args:
        dataset_fn: Returns an iterable of batches, such as a DataLoader or a generator. It is called with an
            InputContext (`input_pipeline_id` is the worker, of `num_input_pipelines`), or without arguments if it takes
            none. With `steps_per_epoch` each epoch reads on where the last one ended; without, it is called again. A
            ParameterServerStrategy needs a dataset without end.
        input_options: How batches that are read with an InputContext are fed; see `InputOptions`.

    Raises:
        OptionError: `dataset_fn` cannot be called.

    Example:
        model.fit(distnb.keras.DatasetCreator(dataset_fn), epochs=5, steps_per_epoch=100)
    """

    def __init__(self, dataset_fn: Callable[..., Any], input_options: InputOptions | None = None) -> None:
        if not callable(dataset_fn):
            raise OptionError(f"DatasetCreator({dataset_fn!r}): give a function that returns a dataset.")
        self.dataset_fn = dataset_fn
        self.input_options = input_options

    @property
    def takes_context(self) -> bool:
        """Whether the function is called with an InputContext."""
        return bool(inspect.signature(self.dataset_fn).parameters)

    def __iter__(self) -> Iterator[Any]:
        """Read batches in this process alone."""
        made = self.dataset_fn(InputContext(1, 0, 1)) if self.takes_context else self.dataset_fn()
        for batch in made:
            yield _tensors(batch)


class GatheredBatches(_Batches):
    """Global batches of which each replica reads a part. All replicas get the whole of each.

    Args:
        dataset: A distributed dataset, or a function that makes one at each beginning.
        group: Gives the replicas of the present generation; None where there is one.
    """

    def __init__(self, dataset: Any, group: Callable[[], Group] | None = None) -> None:
        self._dataset = dataset
        self._group = group
        self._begun: tuple[tuple[Any, ...], Iterator[Any]] | None = None

    def __iter__(self) -> Iterator[Any]:
        # To build a model Keras reads one batch, and begins again: a generator has that batch only once.
        begun, self._begun = self._begun, None
        if begun is not None:
            return self._read(*begun)
        dataset = self._dataset() if callable(self._dataset) else self._dataset
        return self._read((), iter(dataset), once=dataset.reads_once)  # it draws from the random streams at once

    def _read(self, before: tuple[Any, ...], reading: Iterator[Any], once: bool = False) -> Iterator[Any]:
        yield from before
        for batch in reading:
            whole = self._gathered(batch)
            self._begun = ((whole,), reading) if once else None
            yield whole
            self._begun, once = None, False

    def _gathered(self, batch: Any) -> Any:
        group = self._group() if self._group is not None else None

        def whole(leaf: Any) -> Any:
            own = as_tensor(leaf.values[0] if isinstance(leaf, PerReplica) else leaf)
            return own if group is None else torch.cat(group.all_gather_uneven(own))

        return map_structure(whole, batch)

    @property
    def num_batches(self) -> int | None:
        try:
            return len(self._dataset)
        except TypeError:  # it is not known beforehand
            return None


def take_data(
    method: str, given: dict[str, Any], strategy: Any = None, group: Callable[[], Group] | None = None
) -> None:
    """Replace, among the arguments of one of Keras's loops, data that each replica reads a part of by whole batches.

    Args:
        method: The loop's name.
        given: Its arguments.
        strategy, group: Of several replicas.

    Raises:
        OptionError: An argument that does not go with such data.
        CannotTravelError: Data that stayed in the notebook.
    """
    for name in ("x", "validation_data"):
        data = given.get(name)
        dataset: Any = data
        if isinstance(data, DatasetCreator) and data.takes_context and strategy is not None:
            make = strategy.distribute_datasets_from_function
            dataset = functools.partial(make, data.dataset_fn, data.input_options)
        elif isinstance(data, DistributedDataset):
            pass
        elif isinstance(data, types.FunctionType):
            raise OptionError(
                f"model.{method} was given a function as {name}. For the dataset that it returns, give "
                f"distnb.keras.DatasetCreator({data.__name__})."
            )
        elif type(data) is Placeholder:
            raise _told_cure(data, method)
        elif has_distributed(data):
            raise OptionError(
                f"model.{method} was given {name} that is distributed already. It shares batches out itself: give it "
                "the arrays, or the DataLoader that gives global batches, or the distributed dataset."
            )
        else:
            continue
        given[name] = GatheredBatches(dataset, group)
        if name == "x":
            _refuse_others(method, given)


def _told_cure(data: Placeholder, method: str) -> CannotTravelError:
    try:
        data.refuse()
    except CannotTravelError as error:
        return CannotTravelError(
            f"{error} Instead of a generator, model.{method} takes the function that makes one, which every replica "
            f"calls: model.{method}(distnb.keras.DatasetCreator(make_batches), ...)."
        )


def _refuse_others(method: str, given: dict[str, Any]) -> None:
    if not given.get("validation_split", True):
        del given["validation_split"]  # 0.0 is none
    for name in ("y", "sample_weight", "class_weight", "batch_size", "validation_split"):
        if given.get(name) is not None:
            raise OptionError(
                f"model.{method} got {name} with a distributed dataset or a DatasetCreator. Have the dataset give "
                "batches of (inputs, targets) or (inputs, targets, sample_weights), and leave it out."
            )


class SameBatches:
    """The batches of one pass over data, which all replicas read alike: each batch, and the end, are compared."""

    def __init__(self, group: Callable[[], Group]) -> None:
        self._group = group
        self._batches = 0

    def took(self, data: Any) -> None:
        """Note a batch. Raise StructureError on all replicas if they have different ones."""
        tensors = [as_tensor(leaf) for leaf in keras.tree.flatten(data) if leaf is not None]
        self._batches += 1
        # Later on a row of each tensor stands for the batch: to read all of it would cost as much as to copy it.
        seen = tensors if self._batches == 1 else [each[:1] for each in tensors]
        self._compare(digest_of_all(seen), [list(each.shape) for each in tensors])

    def ended(self) -> None:
        """Note the end. Raise StructureError on all replicas if others have further batches."""
        if self._batches:
            self._compare(_END, [])
        self._batches = 0

    def _compare(self, seen: int, shapes: list[list[int]]) -> None:
        group = self._group()
        told = torch.tensor([seen, sum(shape[0] for shape in shapes if shape)], device=torch_device(group.device))
        if len(torch.stack(group.all_gather(told)).unique(dim=0)) == 1:
            return
        every = group.all_gather_object((seen, shapes))
        lines = "; ".join(f"replica {rank} {_described(*each)}" for rank, each in enumerate(every))
        raise StructureError(
            f"The replicas read different data at batch {self._batches + (seen == _END)}: {lines}. Keras's fit, "
            "evaluate and predict take global batches, the same on every replica, and share the rows out: give all "
            "replicas the same data in the same order, and seed whatever shuffles it alike. If each worker is to read "
            "rows of its own, say so: fit(strategy.distribute_datasets_from_function(dataset_fn)), "
            "fit(distnb.keras.DatasetCreator(dataset_fn)) or "
            "fit(strategy.distribute_dataset(loader, options=distnb.InputOptions(auto_shard_policy='off')))."
        )


_END = -1


def _described(seen: int, shapes: list[list[int]]) -> str:
    if seen == _END:
        return "has no more batches"
    return f"has shapes {', '.join(map(str, shapes))} (content {seen:016x})"


def digest_of_all(tensors: list[torch.Tensor]) -> int:
    """Return a number that is equal for equal contents of several tensors."""
    number = 0
    for each in tensors:
        number = (number * 31 + digest(each)) % (1 << 63)
    return number


def _tensors(batch: Any) -> Any:
    return keras.tree.map_structure(as_tensor, batch, none_is_leaf=False)


def as_tensor(value: Any) -> torch.Tensor:
    """Convert an array as Keras's own datasets do with torch."""
    if isinstance(value, torch.Tensor):
        return value
    value = np.asarray(value)
    dtype = keras.backend.floatx() if value.dtype == np.float64 else None
    converted: torch.Tensor = keras.ops.convert_to_tensor(value, dtype=dtype)
    return converted
