"""Data for Keras's loops: global batches, read by all replicas or in parts."""

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

__all__ = ["DatasetCreator", "SameBatches", "as_tensor", "resolve_data"]


class _Batches(keras_internals.DataAdapter):  # type: ignore[misc]
    """Batches for Keras's loops: an iterable that starts again in each epoch."""

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
    """A dataset for `fit`, `evaluate` and `predict` that a function makes in the process that reads it.

    With a ParameterServerStrategy each worker makes its own. With other strategies a function that takes an
    InputContext is called once for each worker (machine), and returns batches of the size for one replica. The worker's
    replicas take them in turn, and the batches of all replicas together form the global batch. A function without
    arguments returns global batches, the same on every replica.

    Args:
        dataset_fn: A function that returns an iterable of batches, such as a DataLoader or a generator. It is called
            with an InputContext (`input_pipeline_id` is the worker, of `num_input_pipelines`), or without arguments if
            it takes none. With `steps_per_epoch` each epoch continues where the last one ended; without, the function
            is called again. A ParameterServerStrategy needs an endless dataset.
        input_options: The options of batches that are read with an InputContext; see `InputOptions`.

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
    def accepts_context(self) -> bool:
        """True if the function is called with an InputContext."""
        return bool(inspect.signature(self.dataset_fn).parameters)

    def __iter__(self) -> Iterator[Any]:
        """Read batches in this process alone."""
        made = self.dataset_fn(InputContext(1, 0, 1)) if self.accepts_context else self.dataset_fn()
        for batch in made:
            yield _tensors(batch)


class GatheredBatches(_Batches):
    """Global batches of which each replica reads a part. All replicas receive the whole batches.

    Args:
        dataset: A distributed dataset, or a function that makes one for each iteration.
        group: A function that returns the group of the current generation; None for a single replica.
    """

    def __init__(self, dataset: Any, group: Callable[[], Group] | None = None) -> None:
        self._dataset = dataset
        self._group = group
        self._begun: tuple[tuple[Any, ...], Iterator[Any]] | None = None

    def __iter__(self) -> Iterator[Any]:
        # To build a model Keras reads one batch and starts again, but a generator has that batch only once.
        begun, self._begun = self._begun, None
        if begun is not None:
            return self._read(*begun)
        dataset = self._dataset() if callable(self._dataset) else self._dataset
        # the dataset draws from the random streams immediately
        return self._read((), iter(dataset), once=dataset.reads_once)

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
        except TypeError:  # it is unknown beforehand
            return None


def resolve_data(
    method: str, given: dict[str, Any], strategy: Any = None, group: Callable[[], Group] | None = None
) -> None:
    """Replace distributed data among the arguments of one of Keras's loops by whole batches.

    Args:
        method: The name of the loop.
        given: Its arguments.
        strategy, group: The strategy and the group of several replicas.

    Raises:
        OptionError: An argument is incompatible with such data.
        CannotTravelError: The data could not be sent from the notebook.
    """
    for name in ("x", "validation_data"):
        data = given.get(name)
        dataset: Any = data
        if isinstance(data, DatasetCreator) and data.accepts_context and strategy is not None:
            make = strategy.distribute_datasets_from_function
            dataset = functools.partial(make, data.dataset_fn, data.input_options)
        elif isinstance(data, DistributedDataset):
            pass
        elif isinstance(data, types.FunctionType):
            raise OptionError(
                f"model.{method} was given a function as {name}. To use the dataset that it returns, give "
                f"distnb.keras.DatasetCreator({data.__name__})."
            )
        elif type(data) is Placeholder:
            raise _with_cure(data, method)
        elif has_distributed(data):
            raise OptionError(
                f"model.{method} was given {name} that is distributed already. It divides batches itself: give it the "
                "arrays, or the DataLoader of global batches, or the distributed dataset."
            )
        else:
            continue
        given[name] = GatheredBatches(dataset, group)
        if name == "x":
            _refuse_others(method, given)


def _with_cure(data: Placeholder, method: str) -> CannotTravelError:
    try:
        data.refuse()
    except CannotTravelError as error:
        return CannotTravelError(
            f"{error} Instead of a generator, give model.{method} the function that makes one, which every replica "
            f"calls: model.{method}(distnb.keras.DatasetCreator(make_batches), ...)."
        )


def _refuse_others(method: str, given: dict[str, Any]) -> None:
    if not given.get("validation_split", True):
        del given["validation_split"]  # 0.0 means none
    for name in ("y", "sample_weight", "class_weight", "batch_size", "validation_split"):
        if given.get(name) is not None:
            raise OptionError(
                f"model.{method} got {name} with a distributed dataset or a DatasetCreator. Leave it out, and let "
                "the dataset return batches of (inputs, targets) or (inputs, targets, sample_weights)."
            )


class SameBatches:
    """The comparison of the replicas' batches in one pass over data: each batch, and the end, must be the same."""

    def __init__(self, strategy: Any, group: Callable[[], Group]) -> None:
        self._strategy = strategy
        self._group = group
        self._batches = 0
        self._pending: _Comparison | None = None

    def begin(self, data: Any) -> None:
        """Begin to compare a batch. The replicas do not wait for each other until `finish`."""
        tensors = [as_tensor(leaf) for leaf in keras.tree.flatten(data) if leaf is not None]
        self._batches += 1
        # Later one row of each tensor represents the batch: reading all of it would cost as much as copying it.
        seen = tensors if self._batches == 1 else [each[:1] for each in tensors]
        shapes = [list(each.shape) for each in tensors]
        self._pending = _Comparison(self._group(), self._batches, digest_of_all(seen), shapes)

    def finish(self) -> None:
        """Finish the comparison of the batch, if any. Raise StructureError on all replicas if theirs differ."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.finish()

    def check_end(self) -> None:
        """Check the end. Raise StructureError on all replicas if some have further batches."""
        if self._batches:
            end = _Comparison(self._group(), self._batches + 1, _END, [])
            self._strategy.run(end.finish)  # as a batch's, so that the same error leaves `run` on all replicas
        self._batches = 0


class _Comparison:
    """A comparison of one batch under way."""

    def __init__(self, group: Group, batch: int, seen: int, shapes: list[list[int]]) -> None:
        self._group, self._batch, self._seen, self._shapes = group, batch, seen, shapes
        facts = [seen, sum(shape[0] for shape in shapes if shape)]
        # All numbers are equal if the largest is also the smallest.
        self._facts = torch.tensor([*facts, *(-each for each in facts)], device=torch_device(group.device))
        self._work = group.all_reduce_start(self._facts, "max")

    def finish(self) -> None:
        self._work.wait()
        seen, rows, *negative = self._facts.tolist()
        if negative == [-seen, -rows]:
            return
        every = self._group.all_gather_object((self._seen, self._shapes))
        lines = "; ".join(f"replica {rank} {_described(*each)}" for rank, each in enumerate(every))
        raise StructureError(
            f"The replicas read different data at batch {self._batch}: {lines}. Keras's fit, evaluate and predict take "
            "global batches, the same on every replica, and divide the rows: give all replicas the same data in the "
            "same order, and use the same seed for shuffling. If each worker should read its own rows, use "
            "fit(strategy.distribute_datasets_from_function(dataset_fn)), fit(distnb.keras.DatasetCreator(dataset_fn)) "
            "or fit(strategy.distribute_dataset(loader, options=distnb.InputOptions(auto_shard_policy='off')))."
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
