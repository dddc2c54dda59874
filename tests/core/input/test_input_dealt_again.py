"""Distributed datasets whose number of replicas changes: each element is read once, at its place."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from distnb.errors import ProgramError
from distnb.input.dataset import DistributedDataset, sent_to_new_replicas
from distnb.input.distribute import distribute, distribute_from_function
from distnb.options import InputOptions
from distnb.topology import Device
from tests.core.input.test_input_resuming import SOURCES, X

now = (1, 0)
"""The number of replicas, and the replica that reads."""


def current() -> dict[str, Any]:
    replicas, replica_id = now
    here = {"num_replicas": replicas, "replica_id": replica_id, "device": Device("cpu")}
    return here | {"shared_randomness": nullcontext, "agree": None}


def become(replicas: int, replica_id: int) -> None:
    global now
    now = (replicas, replica_id)


def part(batch: Any) -> list[Any]:
    leaf = batch[0] if isinstance(batch, (list, tuple)) else batch
    found: list[Any] = (leaf.component(now[1]) if hasattr(leaf, "component") else leaf).tolist()
    return found


def moved(dataset: Any, iteration: Any) -> Any:
    """Return the dataset and its iteration as a new replica receives them."""
    with sent_to_new_replicas():
        return pickle.loads(pickle.dumps((dataset, iteration)))


def read(make: Callable[[], Any], sizes: list[int], way: Callable[[int], int]) -> list[list[Any]]:
    """Return the batches that are read while the number of replicas changes after each second batch.

    `way` returns the replica that reads, for a number of replicas.
    """
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    become(sizes[0], way(sizes[0]))
    dataset = make()
    iteration = iter(dataset)
    found = []
    for size in sizes:
        become(size, way(size))
        for _ in range(2):
            try:
                found.append(part(next(iteration)))
            except StopIteration:
                return found
    return found


@pytest.mark.filterwarnings("ignore:The collate function")
@pytest.mark.parametrize("name", [*SOURCES])
def test_slices_of_the_same_batches_are_read(name: str) -> None:
    def make() -> Any:
        options = InputOptions()
        batch_size = 4 if name == "arrays" else None
        return distribute(SOURCES[name](), batch_size=batch_size, options=options, current=current, **current())

    whole = read(make, [1, 1, 1], lambda size: 0)
    assert len(whole) > 3
    sizes = [2, 3, 1]
    first, last = read(make, sizes, lambda size: 0), read(make, sizes, lambda size: size - 1)
    for place, batch in enumerate(whole):
        size = sizes[place // 2]
        share = -(-len(batch) // size)
        assert first[place] == batch[:share]
        assert last[place] == batch[len(batch) - len(batch) // size :]


def test_a_new_replica_continues_where_the_others_are() -> None:
    become(1, 0)
    torch.manual_seed(5)
    dataset = distribute(SOURCES["loader"](), current=current, **current())
    iteration = iter(dataset)
    whole = [part(batch) for batch in iteration]
    torch.manual_seed(5)
    dataset = distribute(SOURCES["loader"](), current=current, **current())
    iteration = iter(dataset)
    assert [part(next(iteration)) for _ in range(2)] == whole[:2]
    become(2, 1)
    there, its_iteration = moved(dataset, iteration)
    assert its_iteration._dataset is there
    assert there.state_dict()["position"] == 2
    assert [part(batch) for batch in its_iteration] == [batch[len(batch) - len(batch) // 2 :] for batch in whole[2:]]
    assert there.epoch == 1
    become(2, 0)
    assert [part(batch) for batch in iteration] == [batch[: -(-len(batch) // 2)] for batch in whole[2:]]


def test_replicas_that_take_turns_go_on_with_the_next_elements() -> None:
    calls = []

    def make(context: Any) -> Any:
        calls.append(context)
        return [X[place : place + 2] for place in range(0, 20, 2)]

    become(2, 0)
    dataset = distribute_from_function(make, current=current, **current())
    iteration = iter(dataset)
    assert part(next(iteration)) == [0, 1]
    become(3, 1)
    assert [part(next(iteration)) for _ in range(2)] == [[6, 7], [12, 13]]  # elements 2, 3, 4 and 5, 6, 7
    assert dataset.state_dict()["position"] == 8
    become(1, 0)
    assert [part(batch) for batch in iteration] == [[16, 17], [18, 19]]
    assert len(calls) == 1


def test_the_same_number_of_replicas_can_be_dealt_to_again() -> None:
    become(2, 0)
    dataset = distribute(X, batch_size=4, current=current, **current())
    iteration = iter(dataset)
    next(iteration)
    before = iteration._now()
    assert iteration._now() is before
    dataset.deal_again()
    assert part(next(iteration)) == [4, 5]
    assert iteration._now() is not before


def numbers() -> Iterator[Any]:
    yield from X.split(4)


def test_data_that_is_read_once_or_apart_is_refused() -> None:
    become(2, 0)
    once = distribute(numbers(), current=current, **current())
    iteration = iter(once)
    next(iteration)
    unread = distribute(numbers(), current=current, **current())
    workers = {**current(), "workers": [0, 1]}
    apart = distribute(X, batch_size=4, options=InputOptions(auto_shard_policy="OFF"), current=current, **workers)
    become(3, 0)
    with pytest.raises(
        ProgramError, match=r"there were 2, now 3\. Its data is a generator, which can be read only once"
    ):
        next(iteration)
    with pytest.raises(ProgramError, match="Each read an input pipeline with data of its own"):
        iter(apart)
    assert part(next(iter(unread))) == [0, 1]
    with sent_to_new_replicas(), pytest.raises(ProgramError, match="A new replica cannot read this dataset"):
        pickle.dumps(unread)
    with pytest.raises(ProgramError, match="cannot be copied to another process"):
        pickle.loads(pickle.dumps(distribute(X, batch_size=4, current=current, **current())))


def test_a_state_that_waits_to_be_resumed_goes_along() -> None:
    become(1, 0)
    dataset = distribute(X, batch_size=4, current=current, **current())
    iteration = iter(dataset)
    next(iteration)
    state = dataset.state_dict()
    dataset = distribute(X, batch_size=4, current=current, **current())
    dataset.load_state_dict(state)
    become(2, 1)
    there: DistributedDataset
    there, _ = moved(dataset, None)
    assert part(next(iter(there))) == [6, 7]


def test_persistent_workers_serve_the_new_slices() -> None:
    become(2, 0)
    loader = DataLoader(X, batch_size=4, num_workers=1, persistent_workers=True)  # type: ignore[arg-type]
    dataset = distribute(loader, current=current, **current())
    assert part(next(iter(dataset))) == [0, 1]
    become(4, 3)
    assert part(next(iter(dataset))) == [3]
    assert [part(batch) for batch in dataset][1] == [7]
