"""Pipelines made by a function, sharding policies, options, and the shape of batches: the rules, without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
)

import distnb
from distnb import AutoShardPolicy, InputContext, InputOptions, InputReplicationMode, PerReplica, TensorSpec
from distnb.errors import OptionError, ProgramError, StructureError
from distnb.input.distribute import distribute, distribute_from_function, part_for_worker
from distnb.topology import Device


def place(replicas: int, replica_id: int, **more: Any) -> dict[str, Any]:
    here = {"num_replicas": replicas, "replica_id": replica_id, "device": Device("cpu")}
    return here | {"shared_randomness": nullcontext} | more


class Exchange:
    """The group of replicas that are threads of this process."""

    def __init__(self, replicas: int) -> None:
        self._values: list[Any] = [None] * replicas
        self._meeting = threading.Barrier(replicas, timeout=30)

    def of(self, replica_id: int) -> Callable[[Any], list[Any]]:
        def agree(value: Any) -> list[Any]:
            self._values[replica_id] = value
            self._meeting.wait()
            seen = list(self._values)
            self._meeting.wait()
            return seen

        return agree


def on_replicas(workers: list[int], read: Callable[[dict[str, Any]], Any]) -> list[Any]:
    """Return what each replica, a thread, reads, or its error."""
    exchange, results = Exchange(len(workers)), [None] * len(workers)

    def replica(replica_id: int) -> None:
        here = place(len(workers), replica_id, agree=exchange.of(replica_id), workers=workers)
        try:
            results[replica_id] = read(here)
        except Exception as error:
            results[replica_id] = error

    threads = [threading.Thread(target=replica, args=(replica_id,)) for replica_id in range(len(workers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


# -- options and contexts ----------------------------------------------------------------------------------------------


def test_the_batch_size_per_replica_is_divided() -> None:
    assert InputContext(num_replicas_in_sync=2).get_per_replica_batch_size(4) == 2
    with pytest.raises(ValueError, match="The `global_batch_size` 4 is not divisible by `num_replicas_in_sync` 3"):
        InputContext(num_replicas_in_sync=3).get_per_replica_batch_size(4)


def test_options_also_accept_tensorflows_names() -> None:
    mode = InputReplicationMode.PER_REPLICA
    options = InputOptions(experimental_fetch_to_device=False, experimental_per_replica_buffer_size=3)
    assert options == InputOptions(fetch_to_device=False, prefetch=3)
    assert InputOptions(experimental_replication_mode=mode) == InputOptions(replication_mode="per_replica")
    assert InputOptions(auto_shard_policy="off").auto_shard_policy is AutoShardPolicy.OFF


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fetch_to_device": 1}, "True or False"),
        ({"replication_mode": "PER_HOST"}, "'PER_WORKER', 'PER_REPLICA'"),
        ({"experimental_place_dataset_on_device": True}, "cannot be honoured: datasets run on the host"),
        ({"per_replica_buffer_size": -1}, "0 or more"),
        ({"per_replica_buffer_size": 1, "prefetch": 1}, "two names of one option"),
        ({"auto_shard_policy": "FILES"}, "not an AutoShardPolicy"),
        ({"experimental_nonsense": 1}, "no option 'nonsense'"),
    ],
)
def test_unsupported_options_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        InputOptions(**given)


def test_options_of_the_other_method_are_refused() -> None:
    for strategy in (distnb.get_strategy(), distnb.OneDeviceStrategy("cpu:0")):
        with pytest.raises(OptionError, match="Use distribute_datasets_from_function"):
            strategy.distribute_dataset([torch.arange(2)], InputOptions(replication_mode="PER_REPLICA"))
        for options in (InputOptions(collate="global"), InputOptions(auto_shard_policy="DATA")):
            with pytest.raises(OptionError, match="distribute_datasets_from_function"):
                strategy.distribute_datasets_from_function(lambda context: [], options)


def test_batches_may_stay_on_the_host() -> None:
    here = place(2, 0) | {"device": Device("meta")}
    options = InputOptions(fetch_to_device=False)
    for chosen, kind in ((None, "meta"), (options, "cpu")):
        [batch] = distribute(torch.arange(4), batch_size=4, options=chosen, **here)
        assert batch.component(0).device.type == kind
        [batch] = distribute_from_function(lambda context: [torch.arange(4)], options=chosen, **here)
        assert batch.component(0).device.type == kind


# -- pipelines made by a function --------------------------------------------------------------------------------------


class Numbers(IterableDataset[Any]):
    files = (0, 10, 20)

    def with_files(self, files: list[int]) -> Numbers:
        chosen = Numbers()
        chosen.files = tuple(files)
        return chosen

    def __iter__(self) -> Iterator[int]:
        for first in self.files:
            yield from range(first, first + 3)


class Ten(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        yield from range(10)


def generated() -> Iterator[Any]:
    for first in range(0, 10, 2):
        yield torch.arange(first, first + 2)


@pytest.mark.parametrize(
    "pipeline",
    [
        DataLoader(range(10), batch_size=2),
        DataLoader(range(10), batch_size=2, num_workers=1),
        DataLoader(Ten(), batch_size=2, num_workers=1),
        list(generated()),
        generated,
    ],
    ids=["loader", "workers", "stream", "list", "function"],
)
def test_replicas_take_the_batches_of_a_pipeline_in_turn(pipeline: Any) -> None:
    contexts = []

    def make(context: InputContext) -> Any:
        contexts.append(context)
        return pipeline

    for replica_id, expected in enumerate([[[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], []]]):
        dataset = distribute_from_function(make, **place(3, replica_id))
        for _ in range(2):
            batches = list(dataset)
            assert [batch.component(replica_id).tolist() for batch in batches] == expected
            assert [batch.global_batch_size for batch in batches] == [6, 4]
            assert batches[-1].component(replica_id).dtype == torch.int64
    assert contexts == [InputContext(1, 0, 3)] * 3
    next(iter(dataset))  # and dropped
    if not isinstance(getattr(pipeline, "dataset", pipeline), Ten) and pipeline is not generated:
        assert len(dataset) == 2


def test_only_the_replica_that_takes_an_example_loads_it() -> None:
    asked: list[int] = []

    class Asked(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            asked.append(index)
            return super().__getitem__(index)

    data = Asked(torch.arange(8))
    list(distribute_from_function(lambda context: DataLoader(data, batch_size=2), **place(2, 1)))
    assert asked == [2, 3, 6, 7]


def test_one_replica_gets_the_batches_themselves() -> None:
    batches = [{"x": torch.arange(2), "number": 3}]
    assert list(distribute_from_function(lambda context: batches, **place(1, 0))) == batches
    strategy = distnb.get_strategy()
    assert strategy.distribute_datasets_from_function(lambda context: context) == InputContext()
    on_cpu = distnb.OneDeviceStrategy("cpu:0")
    first, *_ = on_cpu.experimental_distribute_datasets_from_function(lambda context: generated)
    assert first.tolist() == [0, 1]
    with pytest.raises(TypeError, match=r"needs a function.*use distribute_dataset"):
        strategy.distribute_datasets_from_function([torch.arange(2)])


def test_functions_without_a_result_are_refused() -> None:
    for given, message in ((None, "returned None"), (3, "cannot be distributed"), (torch.arange(3), "not batched yet")):
        with pytest.raises(ProgramError, match=message):
            distribute_from_function(lambda context, given=given: given, **place(2, 0))


def test_elements_are_distributed_unchanged_in_turn() -> None:
    def read(make: Callable[[Any], Any], replica_id: int, **more: Any) -> list[Any]:
        return [one.values[0] for one in distribute_from_function(make, **place(2, replica_id, **more))]

    assert [read(lambda context: range(3), replica_id) for replica_id in range(2)] == [[0, 2], [1, None]]
    tensors = [torch.tensor(float(number)) for number in range(3)]
    first, second = (read(lambda context: tensors, replica_id) for replica_id in range(2))
    assert [*map(float, first), float(second[0])] == [0.0, 2.0, 1.0]
    assert (second[1].shape, second[1].dtype) == ((0,), torch.float32)
    mixed = [(torch.ones(2), torch.ones(3), "a"), (torch.ones(1), 7, "b")]
    (one, two, three), *nothing = distribute_from_function(lambda context: mixed, **place(2, 1))
    assert [one.values[0].tolist(), two.values[0], three.values[0], nothing] == [[1.0], 7, "b", []]
    assert one.global_batch_size is None
    scalars = distribute_from_function(lambda context: DataLoader(range(3), batch_size=None), **place(2, 0))
    assert scalars.element_spec.values == (TensorSpec((), int),) * 2
    # Batches still know how large they are together, and after an odd end there is an empty one.
    batches = distribute_from_function(lambda context: [torch.ones(3), torch.ones(2), torch.ones(1)], **place(2, 1))
    assert [(len(one.values[0]), one.global_batch_size) for one in batches] == [(2, 5), (0, 1)]


def test_pipelines_of_unequal_length_end_together_with_notice() -> None:
    def read(here: dict[str, Any]) -> list[Any]:
        dataset = distribute_from_function(lambda context: range(2 - context.input_pipeline_id), **here)
        return [one.values[0] for one in dataset]

    assert on_replicas([0, 1], read) == [[0, 1], [0, None]]
    assert on_replicas([0, 0, 1], read) == [[0], [1], [0]]


def test_next_returns_batches_of_a_pipeline() -> None:
    dataset = distribute([torch.ones(2), torch.ones(1)], **place(2, 0))
    assert isinstance(dataset, distnb.DistributedDataset)
    assert dataset.cardinality == 2
    assert distribute(lambda: iter([torch.ones(2)]), **place(2, 0)).cardinality == -2
    batches = iter(dataset)
    assert isinstance(batches, distnb.DistributedIterator)
    assert batches.get_next().values[0].tolist() == [1.0]
    optional = batches.get_next_as_optional()
    assert optional.has_value()
    assert optional.get_value().global_batch_size == 1
    optional = batches.get_next_as_optional()
    assert not optional.has_value()
    with pytest.raises(ValueError, match="has_value"):
        optional.get_value()
    with pytest.raises(StopIteration):
        batches.get_next()


@pytest.mark.parametrize(("prefetch", "ahead"), [(None, 2), (0, 0), (3, 3)])
def test_iterables_are_read_ahead(prefetch: int | None, ahead: int) -> None:
    made: list[int] = []

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            for number in range(9):
                made.append(number)
                yield torch.full((2,), number)

    for data in (lambda: iter(Stream()), Stream().__iter__(), DataLoader(Stream(), batch_size=None)):
        made.clear()
        batches = iter(distribute(data, options=InputOptions(prefetch=prefetch), **place(2, 0)))
        assert made == []
        for count in (1, 2):
            next(batches)
            assert len(made) == count + ahead
    examples: list[int] = []

    class Examples(Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            examples.append(index)
            return index

    next(iter(distribute(DataLoader(Examples(), batch_size=2, collate_fn=None), **place(2, 0))))
    assert examples == [0]  # a loader that may draw random numbers per example is not


def test_a_pipeline_may_use_torchs_distributed_sampler() -> None:
    data = TensorDataset(torch.arange(6))

    def read(here: dict[str, Any]) -> Any:
        def make(context: InputContext) -> Any:
            count, which = context.num_input_pipelines, context.input_pipeline_id
            return DataLoader(data, sampler=DistributedSampler(data, count, which, shuffle=False), batch_size=2)

        return [x.component(here["replica_id"]).tolist() for [x] in distribute_from_function(make, **here)]

    assert on_replicas([0, 1], read) == [[[0, 2], [4]], [[1, 3], [5]]]


# -- workers that read separate data -----------------------------------------------------------------------------------


def test_unequal_pipelines_end_together() -> None:
    batch = {"x": torch.ones(2, 3), "names": ["a", "b"], "nothing": None, "array": np.zeros((2, 2), np.float32)}

    def read(here: dict[str, Any]) -> Any:
        def make(context: InputContext) -> Any:
            return [batch] * [0, 1, 3][context.input_pipeline_id]

        dataset = distribute_from_function(make, **here)
        batches = list(dataset)
        with pytest.raises(TypeError, match="longest of several input pipelines"):
            len(dataset)
        assert list(dataset) is not None  # and again
        return batches

    for replica_id, batches in enumerate(on_replicas([0, 1, 2], read)):
        assert len(batches) == 3
        for step, each in enumerate(batches):
            full = step < [0, 1, 3][replica_id]
            assert each["x"].component(replica_id).shape == (2 if full else 0, 3)
            assert each["names"].component(replica_id) == (["a", "b"] if full else [])
            assert each["nothing"] is None
            assert each["array"].component(replica_id).shape == (2 if full else 0, 2)
            assert each["x"].global_batch_size == each["names"].global_batch_size == [4, 2, 2][step]


def test_empty_pipelines_give_no_batch() -> None:
    def read(here: dict[str, Any]) -> Any:
        return list(distribute_from_function(lambda context: [], **here))

    assert on_replicas([0, 1], read) == [[], []]


def test_replicas_of_one_worker_that_read_different_data_are_detected() -> None:
    def read(here: dict[str, Any]) -> Any:
        size = 2 + (here["replica_id"] == 1)
        return list(distribute_from_function(lambda context: [torch.ones(size), torch.ones(2)], **here))

    for error in on_replicas([0, 0, 1], read):
        assert isinstance(error, StructureError)
        assert "replica 0 has 4 examples for this step; replica 1 has 5 examples" in str(error)


def test_a_batch_that_cannot_be_empty_is_an_error() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.arange(3), torch.arange(2)])
    batch = [torch.ones(2), packed]

    def read(here: dict[str, Any]) -> Any:
        dataset = distribute_from_function(lambda context: [batch] * (1 + context.input_pipeline_id), **here)
        return list(islice(dataset, 2))

    error, batches = on_replicas([0, 1], read)
    assert isinstance(error, StructureError)
    assert "PackedSequence cannot be empty" in str(error)
    assert len(batches) == 2


@pytest.mark.parametrize("collate", ["slice", "global"])
def test_policies_cut_equally_many_examples_per_step(collate: Any) -> None:
    def stacked(examples: list[int]) -> torch.Tensor:
        return torch.tensor(examples)

    def read(here: dict[str, Any]) -> Any:
        loader = DataLoader(range(9), batch_size=4, collate_fn=stacked)
        dataset = distribute(loader, options=InputOptions(auto_shard_policy="OFF", collate=collate), **here)
        return [(x.component(here["replica_id"]).tolist(), x.global_batch_size) for x in dataset]

    first, second = (
        [([0], 4), ([2], 4), ([4], 4), ([6], 4), ([8], 2)],
        [([1], 4), ([3], 4), ([5], 4), ([7], 4), ([], 2)],
    )
    assert on_replicas([0, 0, 1, 1], read) == [first, second, first, second]


def test_arrays_and_lists_of_batches_follow_the_policy() -> None:
    def read(here: dict[str, Any]) -> Any:
        options = InputOptions(auto_shard_policy="OFF")
        arrays = distribute(torch.arange(5), batch_size=4, options=options, **here)
        batches = distribute([torch.arange(4), torch.arange(4, 5)], options=options, **here)
        return [[x.component(here["replica_id"]).tolist() for x in each] for each in (arrays, batches)]

    assert on_replicas([0, 1], read) == [[[[0, 1], [2, 3], [4]]] * 2] * 2


def test_auto_distributes_files_if_there_are_enough() -> None:
    def read(here: dict[str, Any]) -> Any:
        return [[x.component(here["replica_id"]).tolist() for x in distribute(data, **here)] for data in datasets]

    datasets = [DataLoader(Files(list(names)), batch_size=None) for names in ("abc", "a", "ab")]
    assert on_replicas([0, 1], read) == [
        [[[97], [99]], [[97]], [[97]]],
        [[[98], []], [[]], [[98]]],
    ]
    assert on_replicas([0, 0], read)[1] == [[[]] * 3, [[]], [[]] * 2]  # one worker: each batch is cut


class Files(IterableDataset[Any]):
    """A dataset with one batch of one example per file."""

    def __init__(self, files: list[str]) -> None:
        self.files = files

    def with_files(self, files: list[str]) -> Any:
        return Files(files)

    def __iter__(self) -> Iterator[Any]:
        return (torch.tensor([ord(file)]) for file in self.files)


def test_files_are_distributed() -> None:
    def numbers(data: Any) -> list[int]:
        return [int(each) for batch in data for each in batch]

    loader = DataLoader(Numbers(), batch_size=2)
    assert numbers(part_for_worker(loader, AutoShardPolicy.FILE, 0, 2)) == [0, 1, 2, 20, 21, 22]
    assert list(part_for_worker(Numbers(), AutoShardPolicy.FILE, 1, 2)) == [10, 11, 12]
    assert part_for_worker(loader, AutoShardPolicy.FILE, 0, 1) is loader
    with pytest.raises(OptionError, match=r"each of 4 workers.*has 3: 0, 10, 20.*at least 4 files"):
        part_for_worker(loader, AutoShardPolicy.FILE, 0, 4)
    for workers in (1, 2):  # raised at once, not only with several machines
        with pytest.raises(OptionError, match=r"does not list its files.*with_files"):
            part_for_worker(DataLoader(range(4)), AutoShardPolicy.FILE, 0, workers)
        with pytest.raises(OptionError, match=r"no method `shard\(num_shards, index\)`"):
            part_for_worker(DataLoader(range(4)), AutoShardPolicy.HINT, 0, workers)


def test_loaders_of_shards_shuffle_their_shards() -> None:
    class Sharded(TensorDataset):
        def shard(self, num_shards: int, index: int) -> Sharded:
            return Sharded(*(tensor[index::num_shards] for tensor in self.tensors))

    data = Sharded(torch.arange(7))
    generator = torch.Generator().manual_seed(1)
    part = part_for_worker(
        DataLoader(data, batch_size=2, shuffle=True, generator=generator), AutoShardPolicy.HINT, 1, 2
    )
    assert sorted(int(each) for [batch] in part for each in batch) == [1, 3, 5]
    assert part.sampler.generator is generator
    with pytest.raises(OptionError, match="SubsetRandomSampler was made for the whole dataset"):
        part_for_worker(DataLoader(data, sampler=SubsetRandomSampler(range(3))), AutoShardPolicy.HINT, 0, 2)


# -- the shape of batches ----------------------------------------------------------------------------------------------


def test_datasets_report_their_element_spec() -> None:
    image, label, text = (
        TensorSpec((None, 3), torch.float32),
        TensorSpec((None,), torch.int64),
        TensorSpec((None,), str),
    )
    data = TensorDataset(torch.zeros(5, 3), torch.arange(5))
    state = torch.get_rng_state()
    for source, batch_size in ((DataLoader(data, batch_size=2, shuffle=True), None), (data, 2), ([*data.tensors], 2)):
        dataset = distribute(source, batch_size=batch_size, **place(2, 0))
        x, y = dataset.element_spec
        assert isinstance(x, PerReplica)
        assert (x.values, y.values) == ((image,) * 2, (label,) * 2)
        assert len(list(dataset)) == 3
    torch.set_rng_state(state)
    alone = distribute(DataLoader(data, batch_size=2, shuffle=True, num_workers=1), **place(1, 0))
    assert alone.element_spec == [image, label]
    assert torch.equal(torch.get_rng_state(), state)
    named = distribute([{"x": torch.zeros(2, 3), "names": ["a", "b"], "none": None}], **place(1, 0))
    assert named.element_spec == {"x": image, "names": text, "none": None}
    mixed = distribute([{"x": torch.zeros(2, 3), "number": 3}], **place(1, 0))
    assert mixed.element_spec == {"x": image, "number": TensorSpec((), int)}
    in_turn = distribute_from_function(lambda context: generated, **place(2, 1))
    assert in_turn.element_spec.component(1) == label
    with pytest.raises(ProgramError, match="can be read only once"):
        distribute(generated(), **place(2, 0)).element_spec
    with pytest.raises(ProgramError, match="is empty"):
        distribute([], **place(2, 0)).element_spec
