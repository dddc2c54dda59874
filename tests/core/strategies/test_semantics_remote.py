"""The same semantics from ordinary notebook code, through engines: errors that only the remote runtime could make."""

from __future__ import annotations

import random
import types
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import distnb
from distnb.errors import ContextError, DistributedValueError
from distnb.notebook import compose as sessions
from distnb.values import PerReplica
from tests.support.sessions import started

pytestmark = [pytest.mark.processes, pytest.mark.timeout(170)]


@pytest.fixture(scope="module")
def strategy() -> Iterator[Any]:
    with started() as session:
        yield session.user_ns["strategy"]


def test_run_reduce_and_gather_work_from_the_notebook(strategy: Any) -> None:
    def step(x: Any) -> Any:
        return {"own": x * (distnb.replica_id() + 1), "same": 3, "none": None, "id": distnb.replica_id()}

    found = strategy.run(step, args=(torch.ones(2),))
    assert found["same"] == 3
    assert found["none"] is None
    assert isinstance(found["own"], PerReplica)
    assert list(strategy.reduce("sum", found["own"], axis=None).numpy()) == [3.0, 3.0]
    assert float(strategy.reduce("mean", found["own"], axis=0)) == 1.5
    assert list(strategy.gather(found["own"], axis=0).numpy()) == [1.0, 1.0, 2.0, 2.0]
    assert [one.tolist() for one in strategy.local_results(found["own"])] == [[1.0, 1.0], [2.0, 2.0]]
    assert strategy.local_results(found["id"]) == (0, 1)
    assert strategy.num_replicas_in_sync == 2


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.int32, torch.complex64])
def test_known_numbers_are_reduced_in_the_notebook_as_on_the_replicas(strategy: Any, op: str, dtype: Any) -> None:
    def number() -> Any:
        x = torch.tensor((0.1 + distnb.replica_id() * 7.3) * (1 + 2j if dtype.is_complex else 1)).to(dtype)
        return x.requires_grad_() * 1 if dtype is torch.float32 else x

    def unknown(x: Any) -> Any:
        return x.detach().reshape(1)

    numbers = strategy.run(number)
    vectors = strategy.run(unknown, args=(numbers,))
    numbers = strategy.run(number)  # from the latest call, since earlier results may have changed
    before = sessions.require().latest_program
    found = strategy.reduce(op, numbers, axis=None)
    several = strategy.reduce(op, {"a": [numbers], "b": numbers}, axis=None)
    assert sessions.require().latest_program == before  # no message
    expected = strategy.reduce(op, vectors, axis=None).numpy()
    for one in (found, several["b"], *several["a"]):
        assert not one.requires_grad
        assert one.numpy().dtype == expected.dtype
        assert one.item() == pytest.approx(expected.item(), rel=1e-6)
    assert found.item() == expected.item()


def test_a_number_that_may_have_changed_is_reduced_on_the_replicas(strategy: Any) -> None:
    def number() -> Any:
        return torch.zeros(()) + distnb.replica_id()

    def grow(x: Any) -> None:
        x += 10

    numbers = strategy.run(number)
    strategy.run(grow, args=(numbers,))
    total = strategy.reduce("sum", numbers, axis=None)
    assert (type(total), total.item()) == (torch.Tensor, 21.0)
    ones = strategy.run(lambda: distnb.replica_id() > 0)
    with pytest.raises(DistributedValueError, match="booleans"):
        strategy.reduce("sum", strategy.run(lambda: torch.tensor(distnb.replica_id() > 0)), axis=None)
    assert strategy.local_results(ones) == (False, True)


def test_gradient_mode_follows_the_notebook(strategy: Any) -> None:
    def enabled() -> bool:
        return torch.is_grad_enabled()

    for _ in range(3):  # the later ones are sent as repeated calls
        assert strategy.run(enabled) is True
        with torch.no_grad():
            assert strategy.run(enabled) is False


def test_an_equal_seed_starts_the_sequence_again(strategy: Any) -> None:
    def draw() -> tuple[float, float]:
        return random.random(), float(numpy.random.rand())

    drawn = []
    for _ in range(3):
        random.seed(1)
        numpy.random.seed(1)
        drawn.append([strategy.run(draw) for _ in range(3)])
    assert drawn[0] == drawn[1] == drawn[2]
    assert drawn[0][0] != drawn[0][1] != drawn[0][2]
    assert draw() == drawn[0][0]


def test_errors_keep_their_types(strategy: Any) -> None:
    def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError):
        strategy.run(fail)
    with pytest.raises(RuntimeError, match="all_gather"):
        strategy.run(lambda: distnb.get_strategy().gather(torch.ones(2), 0))
    with pytest.raises(TypeError, match=r"args=\(x,\)"):
        strategy.run(fail, torch.ones(1))
    with pytest.raises(TypeError, match="plain value"):
        strategy.reduce("sum", torch.ones(2), axis=None)
    assert strategy.reduce("mean", 3, axis=None) == 3
    assert strategy.run(lambda: 4) == 4


def test_values_datasets_and_contexts_work_from_the_notebook(strategy: Any) -> None:
    ids = strategy.distribute_values_from_function(lambda context: torch.tensor(context.replica_id_in_sync_group))
    assert strategy.run(lambda i: int(i) + 1, args=(ids,)).num_replicas == 2
    assert float(strategy.reduce("sum", ids, axis=None)) == 1.0
    totals = []
    for batch in strategy.distribute_dataset(torch.arange(5.0), batch_size=3):
        losses = strategy.run(distnb.nn.compute_average_loss, args=(batch,))
        totals.append(float(strategy.reduce("sum", losses, axis=None)))
    assert totals == [1.0, 3.5]
    assert (distnb.has_strategy(), distnb.in_cross_replica_context(), distnb.replica_id()) == (False, False, 0)


def test_a_batch_requested_ahead_does_not_advance_the_position(strategy: Any) -> None:
    data = torch.arange(12.0)
    dataset = strategy.distribute_dataset(DataLoader(TensorDataset(data), batch_size=4))

    def seen(batch: Any) -> list[float]:
        found: list[float] = strategy.gather(batch[0], axis=0).numpy().tolist()
        return found

    for batch in dataset:
        assert type(batch) is list
        assert seen(batch) == [0.0, 1.0, 2.0, 3.0]
        break
    state = dataset.state_dict()
    assert (state["epoch"], state["position"]) == (0, 1)
    batches = iter(dataset)
    assert [seen(next(batches)) for _ in range(2)] == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]
    assert dataset.state_dict()["position"] == 2
    assert [seen(each) for each in batches] == [[8.0, 9.0, 10.0, 11.0]]
    assert (dataset.epoch, dataset.state_dict()["position"]) == (2, 0)
    with pytest.raises(StopIteration):
        next(batches)


def test_batches_requested_ahead_are_counted_one_by_one(strategy: Any) -> None:
    data = torch.arange(44.0)
    dataset = strategy.distribute_dataset(DataLoader(TensorDataset(data), batch_size=4))

    def total(batch: Any) -> Any:
        return batch[0].sum()

    found, states = [], []
    for place, batch in enumerate(dataset):
        found.append(strategy.reduce("sum", strategy.run(total, args=(batch,)), axis=None).item())
        if place in (0, 2, 3, 7, 8, 10):
            states.append((place, dataset.state_dict()))
            assert states[-1][1]["position"] == place + 1
    assert found == [float(four.sum()) for four in data.reshape(11, 4)]
    for place, state in states[:-1]:
        dataset.load_state_dict(state)
        for batch in dataset:
            first = strategy.reduce("sum", strategy.run(total, args=(batch,)), axis=None).item()
            break
        assert first == found[place + 1]


def test_a_function_that_reads_the_datasets_position_finds_the_delivered_batches(strategy: Any) -> None:
    dataset = strategy.distribute_dataset(DataLoader(TensorDataset(torch.arange(16.0)), batch_size=4))

    def position() -> int:
        found: int = dataset.state_dict()["position"]
        return found

    def double(batch: Any) -> Any:
        return batch[0] * 2

    for place, batch in enumerate(dataset):
        strategy.run(double, args=(batch,))
        assert strategy.run(position) == place + 1


def test_a_loop_continues_after_a_caught_error(strategy: Any) -> None:
    data = torch.arange(24.0)
    dataset = strategy.distribute_dataset(DataLoader(TensorDataset(data), batch_size=4))

    def step(batch: Any, fails: bool) -> Any:
        if fails and distnb.replica_id() == 1:
            raise KeyError("caught")
        return distnb.get_replica_context().all_reduce("sum", batch[0].sum())

    sums: list[float] = []
    for place, batch in enumerate(dataset):
        try:
            sums.append(strategy.reduce("mean", strategy.run(step, args=(batch, place % 3 == 1)), axis=None).item())
        except KeyError:
            sums.append(-1.0)
    whole = data.reshape(-1, 4).sum(dim=1).tolist()
    assert sums == [-1.0 if place % 3 == 1 else value for place, value in enumerate(whole)]


def test_a_number_is_read_with_its_current_value(strategy: Any) -> None:
    def count() -> Any:
        import builtins

        vars(builtins).setdefault("counter", torch.zeros(())).add_(1)
        return vars(builtins)["counter"]

    def numbers(value: Any) -> list[float]:
        return [one.item() for one in strategy.local_results(value)]

    first = strategy.run(count)
    assert numbers(first) == [1.0, 1.0]
    second = strategy.run(count)
    assert numbers(first) == numbers(second) == [2.0, 2.0]
    total = strategy.reduce("sum", first, axis=None)
    assert total.item() == 4.0
    total.add_(5)
    assert (total.item(), float(total)) == (9.0, 9.0)
    late = strategy.run(count, options=distnb.RunOptions(wait=False))
    strategy.run(count, options=distnb.RunOptions(wait=False))
    assert numbers(late.result()) == [4.0, 4.0]
    half = strategy.run(lambda: torch.tensor(0.5, dtype=torch.bfloat16))
    assert [(one.dtype, one.item()) for one in strategy.local_results(half)] == [(torch.bfloat16, 0.5)] * 2


def test_a_change_by_one_replica_alone_is_not_a_failure(strategy: Any) -> None:
    class Own:
        def __init__(self) -> None:
            self.best: Any = None

    def change(several: list[Any]) -> int:
        if distnb.replica_id() == 0:
            several[0].best = 3.0
        return 7

    assert strategy.run(change, args=([Own()],)) == 7, "it has no name"
    holder = strategy.run(lambda: types.SimpleNamespace(change=change))
    assert holder.change([Own()]) == 7
    assert strategy.run(change, args=([Own()],)) == 7


def test_an_error_while_reading_is_raised_at_its_batch(strategy: Any) -> None:
    class Broken(Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            if index == 5:
                raise KeyError("broken")
            return index

    dataset = strategy.distribute_dataset(DataLoader(Broken(), batch_size=4, num_workers=1))
    batches = iter(dataset)
    first = next(batches)
    assert strategy.gather(first, axis=0).numpy().tolist() == [0, 1, 2, 3]
    with pytest.raises(KeyError, match="broken"):
        next(batches)


def test_changes_of_the_notebooks_data_while_reading_are_kept(strategy: Any) -> None:
    class Counting(Dataset[Any]):
        def __init__(self) -> None:
            self.asked = 0

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            self.asked += 1
            return index

    data = Counting()
    for _ in strategy.distribute_dataset(DataLoader(data, batch_size=4)):
        pass
    assert data.asked == 4


def test_a_loss_of_handles_is_refused_with_the_cure(strategy: Any) -> None:
    losses = strategy.run(lambda: torch.ones(3))
    with pytest.raises(ContextError, match=r"compute_average_loss got a PerReplica.*strategy\.run\(step"):
        distnb.nn.compute_average_loss(losses)


def test_a_dataset_of_pipelines_can_be_resumed(strategy: Any) -> None:
    def make(context: Any) -> Any:
        assert context == distnb.InputContext(1, 0, 2)
        data = torch.utils.data.TensorDataset(torch.arange(10))
        return torch.utils.data.DataLoader(data, batch_size=context.get_per_replica_batch_size(4), shuffle=True)

    def read(dataset: Any) -> list[list[int]]:
        return [strategy.gather(batch[0], axis=0).numpy().tolist() for batch in dataset]

    torch.manual_seed(4)
    dataset = strategy.distribute_datasets_from_function(make)
    assert len(dataset) == 3
    [spec] = dataset.element_spec
    assert strategy.local_results(spec) == (distnb.TensorSpec((None,), torch.int64),) * 2
    batches = iter(dataset)
    next(batches)
    state = dataset.state_dict()
    assert (state["epoch"], state["position"]) == (0, 2)
    rest = [strategy.gather(batch[0], axis=0).numpy().tolist() for batch in batches]
    following = read(dataset)
    assert [len(batch) for batch in rest] == [4, 2]
    again = strategy.distribute_datasets_from_function(make)
    again.load_state_dict(state)
    assert read(again) == rest
    assert again.epoch == 1
    assert read(again) == following
    assert sorted(each for batch in following for each in batch) == list(range(10))


def test_strategies_of_different_sizes_coexist(strategy: Any) -> None:
    alone = distnb.MirroredStrategy([strategy.worker_devices[1]])
    with pytest.raises(ValueError, match="cpu:7"):
        distnb.MirroredStrategy(["cpu:7"])
    for _ in range(2):
        both = strategy.run(lambda: torch.tensor(distnb.replica_id() + 1.0))
        assert float(strategy.reduce("sum", both, axis=None)) == 3.0
        assert alone.run(lambda: distnb.get_replica_context().num_replicas_in_sync) == 1
    assert alone.num_replicas_in_sync == 1
