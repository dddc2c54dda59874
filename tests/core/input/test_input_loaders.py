"""Distributed DataLoaders: the slices of all replicas are the plain loader's batches, in every epoch."""

from __future__ import annotations

import gc
import itertools
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing import active_children
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

from distnb.errors import OptionError, ProgramError, StructureError
from distnb.input.cutting import slice_bounds
from distnb.input.dataset import DistributedDataset
from distnb.input.distribute import distribute
from distnb.options import InputOptions
from distnb.topology import Device
from distnb.values.distributed import PerReplica
from tests.support.batches import split_batch

CPU = Device("cpu")
X, Y = torch.randn(23, 3, generator=torch.Generator().manual_seed(0)), torch.arange(23)
EPOCHS = 3


class Squares(Dataset[Any]):
    """A map-style dataset that records its accesses."""

    def __init__(self, n: int = 23) -> None:
        self.n = n
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        return {"x": torch.full((2,), float(index)), "y": index * index, "name": f"n{index}", "pair": (index, [0.5])}


class Batched(Squares):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Augmented(Dataset[Any]):
    """A dataset that draws from all three global generators."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Any:
        # An uneven number of draws, so that replicas would part soon.
        for _ in range(index % 3 + 1):
            noise = torch.rand(()), random.random(), np.random.rand()
        return index, *noise


class Buckets(Sampler[list[int]]):
    """Batches of different sizes, drawn one by one, without a length."""

    def __iter__(self) -> Iterator[list[int]]:
        left = list(range(23))
        random.shuffle(left)
        while left:
            size = int(torch.randint(1, 6, ()))
            yield left[:size]
            left = left[size:]


def place(replicas: int, replica_id: int, **more: Any) -> dict[str, Any]:
    return {"num_replicas": replicas, "replica_id": replica_id, "device": CPU, "shared_randomness": nullcontext, **more}


def seed() -> None:
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)


def states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


def leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for key in tree for leaf in leaves(tree[key])]
    if isinstance(tree, (list, tuple)) and not all(isinstance(item, (str, int)) for item in tree):
        return [leaf for item in tree for leaf in leaves(item)]
    return [tree]


def own(tree: Any, replica_id: int) -> Any:
    """Return the replica's components, as `run` passes them."""
    if isinstance(tree, PerReplica):
        assert tree.replica_ids == (replica_id,)
        return tree.component(replica_id)
    if isinstance(tree, dict):
        return {key: own(value, replica_id) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(own(value, replica_id) for value in tree)
    raise AssertionError(f"{tree!r} is no PerReplica")


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def epochs_of(loader: Any, between: Callable[[], None] = lambda: None, *, epochs: int = EPOCHS) -> list[list[Any]]:
    seed()
    found: list[list[Any]] = []
    for _ in range(epochs):
        found.append([])
        for batch in loader:
            found[-1].append(batch)
            between()
    return found


def check_equal(
    make: Callable[[], Any], replicas: int, *, epochs: int = EPOCHS, rng: bool = True, **options: Any
) -> None:
    """Check that all slices together are the plain batches, and that the random states end as the plain loader's."""
    expected = epochs_of(make(), epochs=epochs)
    after = states()
    for replica_id in range(replicas):
        dataset = distribute(make(), **place(replicas, replica_id), **options)
        found = epochs_of(dataset, epochs=epochs)
        assert not rng or states() == after
        for plain, distributed in zip(expected, found, strict=True):
            for batch, mine in zip(plain, distributed, strict=True):
                assert equal(own(mine, replica_id), split_batch(batch, replicas)[replica_id])
                assert {leaf.global_batch_size for leaf in leaves(mine)} == {len(leaves(batch)[0])}


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_size": 5},
        {"batch_size": 5, "shuffle": True},
        {"batch_size": 5, "shuffle": True, "drop_last": True},
        {"batch_size": 7, "sampler": SubsetRandomSampler(range(20))},
        {"batch_size": 4, "sampler": WeightedRandomSampler([1.0] * 23, 21)},
        {"batch_size": 4, "sampler": RandomSampler(range(23), replacement=True, num_samples=50)},
        {"batch_sampler": BatchSampler(range(22, -1, -1), 6, False)},
        {"batch_sampler": [[3], [1, 2], [0, 4, 5, 6, 7, 8], (9, 10)]},
        {"batch_sampler": [torch.tensor([3, 1]), np.array([0, 4, 2])]},
        {"batch_sampler": Buckets()},
        {"batch_size": 1, "shuffle": True},
    ],
    ids=lambda arguments: re.sub(r" object at 0x\w+", "", str(arguments)),  # the same in each of several workers
)
@pytest.mark.parametrize("dataset", [Squares(), Batched(), TensorDataset(X, Y)], ids=lambda d: type(d).__name__)
def test_batches_equal_those_of_the_plain_loader(dataset: Any, arguments: dict[str, Any], replicas: int) -> None:
    check_equal(lambda: DataLoader(dataset, **arguments), replicas)


def test_the_users_own_generator_is_used() -> None:
    def make() -> Any:
        generator = torch.Generator().manual_seed(3)
        return DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True, generator=generator)

    check_equal(make, 3)


def test_only_the_slice_is_loaded() -> None:
    for replica_id, wanted in enumerate([[0, 1, 4, 5], [2, 6], [3, 7]]):
        data = Squares(8)
        list(distribute(DataLoader(data, batch_size=4), **place(3, replica_id)))
        assert data.asked == wanted


def test_an_empty_slice_gets_its_structure_from_one_example() -> None:
    data = Squares(5)
    batches = list(distribute(DataLoader(data, batch_size=3), **place(4, 3)))
    assert data.asked == [0, 3]
    for batch in batches:
        mine = own(batch, 3)
        assert mine["x"].shape == (0, 2)
        assert mine["y"].dtype == torch.int64
        assert mine["name"] == []
        assert mine["pair"][1][0].dtype == torch.float64
    assert leaves(batches[-1])[0].global_batch_size == 2


@pytest.mark.parametrize(
    ("arguments", "prefetch"),
    [
        *itertools.product([{}, {"persistent_workers": True}], [None, 1]),
        ({}, 0),
        ({"prefetch_factor": 3}, None),
    ],
    ids=str,
)
def test_loaders_with_workers_give_the_same_batches(arguments: dict[str, Any], prefetch: int | None) -> None:
    def make() -> Any:
        return DataLoader(Squares(), batch_size=5, shuffle=True, num_workers=2, **arguments)

    check_equal(make, 2, epochs=2, options=InputOptions(prefetch=prefetch))


@pytest.mark.parametrize("batches", [1, 9])
@pytest.mark.parametrize("replicas", [1, 2])
def test_an_unreferenced_iteration_ends_its_workers_at_once(replicas: int, batches: int) -> None:
    """End the workers at once: the collector would end them during another loader's work, with 5 s for each."""
    gc.disable()
    try:
        dataset = distribute(DataLoader(Squares(), batch_size=5, num_workers=2), **place(replicas, 0))
        before = set(active_children())
        reading = iter(dataset)
        assert sum(1 for _ in itertools.islice(reading, batches)) == min(batches, 5)
        del reading
        assert set(active_children()) == before
    finally:
        gc.enable()


def test_workers_support_a_sampler_that_draws_continuously() -> None:
    def make() -> Any:
        return DataLoader(Squares(), batch_sampler=Buckets(), num_workers=2)

    dataset = distribute(make(), **place(2, 0))
    assert not iter(dataset).ahead
    check_equal(make, 2, epochs=2)


@pytest.mark.parametrize(
    ("features", "prefetch", "expected"), [(4, None, 16), (4, 3, 3), (1 << 18, None, 4), (1 << 22, None, 1)]
)
def test_the_notebook_fetches_as_many_batches_ahead_as_take_little_memory(
    features: int, prefetch: int | None, expected: int
) -> None:
    rows = torch.zeros(1, features).expand(8, features)
    options = InputOptions(prefetch=prefetch)
    reading = iter(distribute(DataLoader(TensorDataset(rows), batch_size=4), **place(2, 1), options=options))
    assert reading.ahead_like(next(reading)) == expected


class SeedsOf(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        return info.seed, torch.initial_seed(), random.random(), np.random.rand()


def note_seed(worker_id: int) -> None:
    random.seed(torch.initial_seed())  # as users do


def test_workers_of_another_replica_have_other_seeds() -> None:
    loader = DataLoader(SeedsOf(), batch_size=4, num_workers=1, worker_init_fn=note_seed)
    torch.manual_seed(1)
    [plain] = loader
    seen = []
    for replica_id in range(2):
        torch.manual_seed(1)
        [batch] = distribute(loader, **place(2, replica_id))
        seen.append(own(batch, replica_id))
        assert seen[-1][0].tolist() == seen[-1][1].tolist()
    assert equal([leaf[:2] for leaf in plain], seen[0])
    for mine, other in zip(*seen, strict=True):
        assert mine[0] != other[0]


def test_augmentation_does_not_affect_shuffles() -> None:
    """Draw different amounts on each replica: the order of examples and the shared stream stay equal."""
    seen, after = [], []
    for replica_id in range(3):
        dataset = distribute(DataLoader(Augmented(), batch_size=4, shuffle=True), **place(3, replica_id))
        found = epochs_of(dataset)
        seen.append([[own(batch, replica_id) for batch in epoch] for epoch in found])
        after.append(states())
    assert after[0] == after[1] == after[2]
    plain = epochs_of(DataLoader(TensorDataset(Y), batch_size=4, shuffle=True))
    for epoch, batches in enumerate(plain):
        for step, [y] in enumerate(batches):
            assert torch.cat([seen[replica_id][epoch][step][0] for replica_id in range(3)]).tolist() == y.tolist()
    noise = [torch.cat([batch[1] for epoch in replica for batch in epoch]) for replica in seen]
    assert torch.cat(noise).unique().numel() > 40  # each replica draws its own numbers, and new ones in each epoch


def test_uneven_draws_inside_run_do_not_affect_shuffles() -> None:
    """Draw as dropout does: the shared stream is active where iteration starts and samplers draw."""
    plain = epochs_of(DataLoader(TensorDataset(Y), batch_size=4, shuffle=True))
    for replica_id in range(2):
        seed()
        shared = [torch.get_rng_state()]

        @contextmanager
        def shared_randomness(shared: list[torch.Tensor] = shared) -> Iterator[None]:
            mine = torch.get_rng_state()
            torch.set_rng_state(shared[0])
            yield
            shared[0] = torch.get_rng_state()
            torch.set_rng_state(mine)

        loader = DataLoader(TensorDataset(Y), batch_size=4, shuffle=True)
        dataset = distribute(
            loader, num_replicas=2, replica_id=replica_id, device=CPU, shared_randomness=shared_randomness
        )
        for epoch in range(EPOCHS):
            for [y], [expected] in zip(dataset, plain[epoch], strict=True):
                torch.rand(replica_id + 3)
                assert torch.equal(y.component(replica_id), split_batch(expected, 2)[replica_id])


# -- collate functions -------------------------------------------------------------------------------------------------


class Ragged(Dataset[Any]):
    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(index % 5 + 1)


def pad(examples: list[torch.Tensor]) -> Any:
    lengths = torch.tensor([len(example) for example in examples])
    return torch.nn.utils.rnn.pad_sequence(examples, batch_first=True), lengths


def stack(examples: list[Any]) -> Any:
    return {"x": torch.stack([example["x"] for example in examples]), "names": [e["name"] for e in examples]}


def mix(examples: list[Any]) -> Any:
    x = torch.stack([example["x"] for example in examples])
    return x + torch.rand(()) * x[torch.randperm(len(x))]


def pack(examples: list[torch.Tensor]) -> Any:
    return torch.nn.utils.rnn.pack_sequence(examples, enforce_sorted=False)


def longest(examples: list[torch.Tensor]) -> Any:
    return pad(examples)[0], max(map(len, examples))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("data", "collate"), [(Ragged(), pad), (Squares(11), mix)])
def test_a_collate_function_that_needs_the_whole_batch_gets_it(data: Any, collate: Any, workers: int) -> None:
    def make() -> Any:
        return DataLoader(data, batch_size=4, shuffle=True, collate_fn=collate, num_workers=workers)

    with pytest.warns(UserWarning, match=rf"collate function {collate.__name__} may give other values.*collate=.slice"):
        check_equal(make, 2 if workers else 3, epochs=2)


@pytest.mark.filterwarnings("error:The collate function")  # garbage of other tests is ignored
@pytest.mark.parametrize("workers", [0, 1])
def test_a_collate_function_by_example_may_get_slices(workers: int) -> None:
    data = Squares(8)
    make = lambda: DataLoader(data, batch_size=4, collate_fn=stack, num_workers=workers)  # noqa: E731
    options = InputOptions(collate="slice")
    check_equal(make, 2, epochs=2, options=options)
    data.asked.clear()
    dataset = distribute(make(), options=options, **place(2, 1))
    list(dataset)
    assert data.asked == ([] if workers else [2, 3, 6, 7])


def test_batches_that_cannot_be_cut_may_be_collated_by_slice() -> None:
    loader, options = DataLoader(Ragged(), batch_size=4, collate_fn=pack), InputOptions(collate="slice")
    for replica_id in range(2):
        for batch, expected in zip(distribute(loader, options=options, **place(2, replica_id)), loader, strict=True):
            examples = torch.nn.utils.rnn.unpack_sequence(expected)
            mine = torch.nn.utils.rnn.unpack_sequence(batch.component(replica_id))
            assert equal(mine, examples[slice(*slice_bounds(len(examples), 2, replica_id))])
            assert batch.global_batch_size == len(examples)
    with pytest.raises(StructureError, match=r"leaves replica 1 of 2 without any.*PackedSequence cannot be empty"):
        list(distribute(DataLoader(Ragged(), batch_size=1, collate_fn=pack), options=options, **place(2, 1)))
    with (
        pytest.warns(UserWarning, match="may give"),
        pytest.raises(StructureError, match=r"PackedSequence.*collate=.sl"),
    ):
        list(distribute(loader, **place(2, 0)))


def test_an_option_sets_how_batches_are_collated() -> None:
    loader = DataLoader(Ragged(), batch_size=4, collate_fn=pad)
    x, _ = next(iter(distribute(loader, **place(2, 0), options=InputOptions(collate="slice"))))
    assert x.component(0).shape == (2, 2)
    x, _ = next(iter(distribute(loader, **place(2, 0), options=InputOptions(collate="global"))))
    assert x.component(0).shape == (2, 4)
    with pytest.raises(OptionError, match="'auto', 'slice' or 'global'"):
        InputOptions(collate="both")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:The collate function")
@pytest.mark.parametrize("choice", ["auto", "slice", "global"])
def test_a_number_for_the_whole_batch_is_an_error(choice: Any) -> None:
    loader = DataLoader(Ragged(), batch_size=4, collate_fn=longest)
    with pytest.raises(StructureError, match=r"batch\[1\] is the int .*never batched"):
        list(distribute(loader, **place(2, 0), options=InputOptions(collate=choice)))


class Keyed(Dataset[Any]):
    """A dataset without sizes and without numbers."""

    def __getitem__(self, key: str) -> Any:
        return torch.tensor(len(key)), key


def test_datasets_may_have_other_keys_and_no_length() -> None:
    batches = [["a", "bb", "ccc"], ["dddd"]]
    check_equal(lambda: DataLoader(Keyed(), batch_sampler=batches), 2)
    with pytest.warns(UserWarning, match="may give other values"):
        check_equal(lambda: DataLoader(Keyed(), batch_sampler=batches, collate_fn=lambda e: default_collate(e)), 2)


# -- iterable data -----------------------------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        for index in range(info.id if info else 0, 11, info.num_workers if info else 1):
            yield torch.tensor([index, 1]), torch.rand(()) if info is None else torch.tensor(0.0), str(index)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_iterable_datasets_are_cut(workers: int, drop_last: bool) -> None:
    check_equal(lambda: DataLoader(Stream(), batch_size=3, num_workers=workers, drop_last=drop_last), 2, epochs=2)


def test_batches_made_by_the_dataset_are_cut() -> None:
    ready = [(X[:4], Y[:4]), (X[4:9], Y[4:9])]
    check_equal(lambda: DataLoader(ready, batch_size=None, shuffle=True), 3)  # type: ignore[arg-type]
    sampler = BatchSampler(RandomSampler(range(23)), 5, False)
    check_equal(lambda: DataLoader(TensorDataset(X, Y), sampler=sampler, batch_size=None), 2)


class Doubling(DataLoader[Any]):
    def __iter__(self) -> Any:
        for x, y in super().__iter__():
            yield torch.cat([x, x]), torch.cat([y, y])


def test_a_loader_with_its_own_iteration_is_supported() -> None:
    check_equal(lambda: Doubling(TensorDataset(X, Y), batch_size=3, shuffle=True), 2)


def test_order_is_kept_even_for_unordered_loaders() -> None:
    def make(**arguments: Any) -> Any:
        return DataLoader(Squares(), batch_size=5, num_workers=2, **arguments)

    expected = list(make())
    for replica_id in range(2):
        for batch, plain in zip(distribute(make(in_order=False), **place(2, replica_id)), expected, strict=True):
            assert equal(own(batch, replica_id), split_batch(plain, 2)[replica_id])


# -- one replica, and refused loaders ----------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_one_replica_gets_the_batches_themselves(workers: int) -> None:
    def make() -> Any:
        return DataLoader(Augmented(), batch_size=5, shuffle=True, num_workers=workers)

    expected, after = epochs_of(make()), states()
    assert equal(epochs_of(distribute(make(), **place(1, 0))), expected)
    assert states() == after
    [(x, longest_)] = distribute(DataLoader(Ragged(), batch_size=11, collate_fn=longest), **place(1, 0))
    assert (x.shape, longest_) == ((11, 5), 5)


def test_a_loader_with_a_distributed_sampler_is_refused() -> None:
    data = TensorDataset(X)
    loader = DataLoader(data, sampler=DistributedSampler(data, num_replicas=2, rank=0), batch_size=4)
    with pytest.raises(ProgramError, match="cut them twice"):
        distribute(loader, **place(2, 0))
    with pytest.raises(OptionError, match="makes batches itself"):
        distribute(DataLoader(data), batch_size=3, **place(2, 0))
    with pytest.raises(ProgramError, match="distributed already"):
        distribute(distribute([X], **place(2, 0)), **place(2, 0))


def test_datasets_report_their_length() -> None:
    def length(data: Any, **arguments: Any) -> int:
        return len(distribute(data, **place(2, 0), **arguments))

    assert length(DataLoader(Squares(), batch_size=5)) == 5
    assert length(DataLoader(Squares(), batch_size=5, drop_last=True)) == 4
    assert length(X, batch_size=5) == 5
    assert length([X, X]) == 2
    for unknown in (DataLoader(Stream(), batch_size=3), DataLoader(Squares(), batch_sampler=Buckets()), iter([X])):
        with pytest.raises(TypeError, match="not known beforehand"):
            length(unknown)
    assert "5 global batches over 2 replica(s)" in repr(distribute(X, batch_size=5, **place(2, 0)))
    assert isinstance(distribute(iter([X]), **place(2, 0)), DistributedDataset)


def test_replicas_that_read_different_data_are_detected() -> None:
    def agree_as(other: tuple[Any, ...]) -> Callable[[Any], list[Any]]:
        return lambda mine: [mine, other if mine[0] == other[0] else mine]

    loader = DataLoader(TensorDataset(Y), batch_size=4, shuffle=True)
    batches = iter(
        distribute(loader, **place(2, 0, agree=agree_as(("first", 4, 12345))), options=InputOptions(prefetch=2))
    )
    with pytest.raises(StructureError, match=r"replica 0 has a first batch of 4 examples .*; replica 1 has"):
        next(batches)
    assert list(batches) == []
    with pytest.raises(StructureError, match=r"replica 0 ended after 6 batches .*; replica 1 ended after 5 batches"):
        list(distribute(loader, **place(2, 0, agree=agree_as(("end", 5, 12345)))))
    assert len(list(distribute(loader, **place(2, 0, agree=agree_as(("other",)))))) == 6
