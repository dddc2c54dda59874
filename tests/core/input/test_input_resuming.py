"""Resuming in the middle of an epoch: exactly the remaining batches and the later epochs, for every source."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from distnb.errors import OptionError
from distnb.input.distribute import distribute, distribute_from_function
from distnb.options import InputOptions
from distnb.topology import Device

X = torch.arange(23)


def place(replicas: int, replica_id: int) -> dict[str, Any]:
    here = {"num_replicas": replicas, "replica_id": replica_id, "device": Device("cpu")}
    return here | {"shared_randomness": nullcontext}


def shuffled(**arguments: Any) -> Any:
    return DataLoader(TensorDataset(X), batch_size=4, shuffle=True, **arguments)


class Stream(IterableDataset[Any]):
    """A stream that draws from all three global generators."""

    def __iter__(self) -> Iterator[Any]:
        order = list(range(23))
        random.shuffle(order)
        np.random.shuffle(order)
        for index in order:
            yield torch.tensor(index), torch.rand(())


class Augmented(Dataset[Any]):
    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index), torch.rand(())


SOURCES: dict[str, Callable[[], Any]] = {
    "loader": shuffled,
    "workers": lambda: shuffled(num_workers=1),
    "persistent": lambda: shuffled(num_workers=1, persistent_workers=True),
    "own generator": lambda: shuffled(generator=torch.Generator().manual_seed(3)),
    "collated whole": lambda: shuffled(collate_fn=lambda examples: torch.stack([x for [x] in examples]).flip(0)),
    "stream": lambda: DataLoader(Stream(), batch_size=4),
    "list": lambda: DataLoader([X[:4], X[4:8], X[8:9], X[9:]], batch_size=None, shuffle=True),  # type: ignore[arg-type]
    "arrays": lambda: X,
}


def first_leaf(batch: Any, replica_id: int) -> Any:
    leaf = batch[0] if isinstance(batch, (list, tuple)) else batch
    return (leaf.component(replica_id) if hasattr(leaf, "component") else leaf).tolist()


@pytest.mark.filterwarnings("ignore:The collate function")
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("name", SOURCES)
def test_resuming_gives_exactly_the_remaining_batches(name: str, replicas: int) -> None:
    def read(batches: Any) -> list[Any]:
        return [first_leaf(batch, replicas - 1) for batch in batches]

    size = {"batch_size": 4} if name == "arrays" else {}
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    dataset = distribute(SOURCES[name](), **size, **place(replicas, replicas - 1))
    list(dataset)
    batches = iter(dataset)
    next(batches)
    assert dataset.epoch == 1
    state = dataset.state_dict()
    expected = [read(batches), read(dataset)]
    assert all(expected)
    assert dataset.epoch == 3
    for _ in range(2):
        torch.rand(3), random.random(), np.random.rand()
        again = distribute(SOURCES[name](), **size, **place(replicas, replicas - 1))
        again.load_state_dict(state)
        assert again.state_dict() is not None
        assert [read(again), read(again)] == expected
        assert again.epoch == 3


def test_augmentation_of_one_replica_resumes_its_random_stream() -> None:
    torch.manual_seed(1)
    make = lambda: distribute(DataLoader(Augmented(), batch_size=4, shuffle=True), **place(1, 0))  # noqa: E731
    dataset = make()
    batches = iter(dataset)
    next(batches)
    state = dataset.state_dict()
    expected = [[part.tolist() for part in batch] for batch in batches]
    again = make()
    again.load_state_dict(state)
    assert [[part.tolist() for part in batch] for batch in again] == expected


def test_skipped_batches_are_not_loaded() -> None:
    asked: list[int] = []

    class Asked(Augmented):
        def __getitem__(self, index: int) -> Any:
            asked.append(index)
            return super().__getitem__(index)

    for replicas in (1, 2):
        dataset = distribute(DataLoader(Asked(), batch_size=4), **place(replicas, 0))
        batches = iter(dataset)
        for _ in range(4):
            next(batches)
        state = dataset.state_dict()
        dataset.load_state_dict(state)
        asked.clear()
        list(dataset)
        assert asked == ([16, 17, 18, 19, 20, 21, 22] if replicas == 1 else [16, 17, 20, 21])


def test_batches_read_ahead_are_not_lost() -> None:
    for options in (InputOptions(prefetch=3), None):
        dataset = distribute(shuffled(num_workers=int(options is None)), options=options, **place(2, 0))
        batches = iter(dataset)
        next(batches)
        state = dataset.state_dict()
        rest = [first_leaf(batch, 0) for batch in batches]
        dataset.load_state_dict(state)
        assert [first_leaf(batch, 0) for batch in dataset] == rest


@pytest.mark.parametrize("generator", [None, torch.Generator().manual_seed(2)], ids=["shared", "own"])
def test_a_state_between_epochs_can_be_restored(generator: torch.Generator | None) -> None:
    torch.manual_seed(2)
    dataset = distribute(shuffled(generator=generator), **place(2, 0))
    fresh = dataset.state_dict()
    first = [first_leaf(batch, 0) for batch in dataset]
    between = dataset.state_dict()
    assert (between["epoch"], between["position"]) == (1, 0)
    second = [first_leaf(batch, 0) for batch in dataset]
    for state, expected in ((between, [second]), (fresh, [first, second])):
        dataset.load_state_dict(state)
        assert dataset.epoch == state["epoch"]
        assert [[first_leaf(batch, 0) for batch in dataset] for _ in expected] == expected
    next(iter(dataset))  # stopped half-way
    assert dataset.epoch == 2
    next(iter(dataset))
    assert dataset.epoch == 3


def test_batches_resume_under_another_number_of_replicas() -> None:
    def make(_context: Any) -> Any:
        return DataLoader(TensorDataset(X), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(1))

    elements = [x.tolist() for [x] in make(None)]
    dataset = distribute_from_function(make, **place(2, 0))
    batches = iter(dataset)
    next(batches), next(batches)
    state = dataset.state_dict()
    rest = distribute_from_function(make, **place(3, 1))
    rest.load_state_dict(state)
    assert [first_leaf(batch, 1) for batch in rest] == [elements[5], elements[8], elements[11]]


def test_a_failed_resumption_can_be_repeated() -> None:
    calls: list[int] = []

    def make() -> Any:
        calls.append(len(calls))
        if len(calls) == 2:
            raise OSError("not mounted")
        return list(X.split(4))

    dataset = distribute(make, **place(2, 0))
    batches = iter(dataset)
    next(batches)
    dataset.load_state_dict(dataset.state_dict())
    rest = [first_leaf(batch, 0) for batch in batches]
    with pytest.raises(OSError, match="not mounted"):
        iter(dataset)
    assert [first_leaf(batch, 0) for batch in dataset] == rest


def test_mismatched_states_are_refused() -> None:
    dataset = distribute(X, batch_size=4, **place(2, 0))
    for wrong in ({}, None, {"position": 3}):
        with pytest.raises(OptionError, match=r"takes the result of a distributed dataset's state_dict\(\)"):
            dataset.load_state_dict(wrong)
    workers = place(2, 0) | {"workers": [0, 1]}
    apart = distribute(X, batch_size=4, options=InputOptions(auto_shard_policy="OFF"), **workers)
    with pytest.raises(OptionError, match=r"input pipeline 0 of 2 .*that all replicas read alike.*each saves its own"):
        dataset.load_state_dict(apart.state_dict())
    with pytest.raises(OptionError, match="each saves its own"):
        apart.load_state_dict(dataset.state_dict())


def test_draws_of_a_generator_during_read_ahead_are_restored() -> None:
    def batches() -> Iterator[torch.Tensor]:
        for _ in range(6):
            yield torch.rand(2)

    def dataset() -> Any:
        return distribute(batches, **place(2, 0))

    def numbers(data: Any) -> list[Any]:
        return [batch.values[0].tolist() for batch in data]

    torch.manual_seed(1)
    first = dataset()
    iterator = iter(first)
    next(iterator)
    state = first.state_dict()
    rest, after = numbers(iterator), torch.rand(1)
    torch.manual_seed(2)
    again = dataset()
    again.load_state_dict(state)
    assert numbers(again) == rest
    assert torch.rand(1) == after
