"""Rulings on differences from TensorFlow that one replica in this process can show."""

from __future__ import annotations

import copy
import pickle
from typing import Any, NamedTuple

import pytest
import torch

import distnb

DEFAULT = distnb.get_strategy()
ONE = distnb.OneDeviceStrategy("cpu:0")


# -- sums and losses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.uint8, torch.float16])
def test_sums_keep_their_dtype(dtype: torch.dtype) -> None:
    value = torch.tensor([[1, 2], [3, 4]], dtype=dtype)
    for axis in (None, 0, -1, (0, 1)):
        assert ONE.reduce("sum", value, axis=axis).dtype is dtype
    assert ONE.reduce("mean", value, axis=0).dtype is (dtype if dtype.is_floating_point else torch.float64)


@pytest.mark.parametrize(
    ("losses", "weights", "total"),
    [
        ([1.0, 2.0], [[1.0], [2.0]], 5.0),
        ([[1.0], [2.0]], [1.0, 2.0], 5.0),
        ([[1.0], [2.0]], [[1.0], [2.0]], 5.0),
        ([[1.0, 2.0], [3.0, 4.0]], [[1.0], [0.0]], 3.0),
        ([[1.0, 2.0], [3.0, 4.0]], [1.0, 0.0], 3.0),
        ([[1.0, 2.0], [3.0, 4.0]], [[[1.0], [0.0]], [[0.0], [1.0]]], 5.0),
        ([1.0, 2.0], 3.0, 9.0),
        ([1.0, 2.0], [3.0], 9.0),
    ],
)
def test_weights_are_broadcast_to_the_shape_of_the_losses(losses: Any, weights: Any, total: float) -> None:
    found = distnb.nn.compute_average_loss(torch.tensor(losses), torch.tensor(weights), global_batch_size=2)
    assert float(found) == total / 2


def test_weights_without_losses_are_allowed() -> None:
    assert float(distnb.nn.compute_average_loss(torch.zeros(0), torch.zeros(0, 1), global_batch_size=2)) == 0.0


@pytest.mark.parametrize(
    ("losses", "weights"), [([2], [2, 3]), ([2], [3]), ([1], [3]), ([2, 1], [2, 3]), ([2], [2, 1, 1]), ([2, 3], [3])]
)
def test_weights_that_would_increase_the_losses_are_refused(losses: list[int], weights: list[int]) -> None:
    with pytest.raises(ValueError, match="sample_weight of shape"):
        distnb.nn.compute_average_loss(torch.ones(losses), torch.ones(weights), global_batch_size=2)


# -- metrics -----------------------------------------------------------------------------------------------------------


def test_update_state_has_the_argument_order_of_keras() -> None:
    metrics: Any = distnb.metrics
    accuracy = metrics.BinaryAccuracy(threshold=0.7, name="train_accuracy")
    accuracy.update_state([1.0, 1.0, 0.0, 0.0], [0.8, 0.6, 0.6, 0.9])
    assert (float(accuracy.result()), accuracy.name) == (0.5, "train_accuracy")
    accuracy.reset_states()
    accuracy.update_state(torch.tensor([[1], [0]]), torch.tensor([0.9, 0.1]))
    assert float(accuracy.result()) == 1.0
    accuracy.reset_state()
    accuracy.update(torch.tensor([0.9, 0.1]), torch.tensor([1, 1]))
    assert float(accuracy.compute()) == 0.5
    many = metrics.Accuracy(task="multiclass", num_classes=3, average="micro")
    probabilities = torch.tensor([[0.1, 0.8, 0.1], [0.6, 0.2, 0.2]])
    many.update_state(torch.tensor([[1], [2]]), probabilities)
    assert (float(many.result()), many.name) == (0.5, "multiclass_accuracy")
    error = metrics.MeanSquaredError()
    error.update_state([1.0, 2.0], [1.0, 4.0])
    assert float(error.result()) == 2.0
    both = metrics.MetricCollection([metrics.BinaryPrecision(), metrics.BinaryRecall()])
    both.update_state([1, 1, 0], [0.9, 0.1, 0.2])
    assert {name: float(value) for name, value in both.result().items()} == {
        "BinaryPrecision": 1.0,
        "BinaryRecall": 0.5,
    }
    with pytest.raises(ValueError, match=r"BinaryAccuracy gives all examples the same weight.*metrics\.Mean"):
        accuracy.update_state([1], [0.9], sample_weight=[2.0])
    mixed = metrics.MetricCollection([metrics.BinaryPrecision(), metrics.Sum()])
    with pytest.raises(ValueError, match="a collection of each kind"):
        mixed.update_state([1], [0.9])


def test_metrics_accept_weighted_values() -> None:
    mean, total = distnb.metrics.Mean(), distnb.metrics.Sum()
    mean.update_state([1, 3], sample_weight=[[3.0], [1.0]])
    total.update_state([1, 3], [2, 0])
    assert (float(mean.result()), float(total.result())) == (1.5, 2.0)
    mean.update_state(value=5.0, weight=4.0)
    assert float(mean.result()) == 26 / 8
    with pytest.raises(ValueError, match="Weights cannot enlarge the values"):
        mean.update_state([1.0, 2.0], sample_weight=[1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="Max gives all examples the same weight"):
        distnb.metrics.Max().update_state([1.0], sample_weight=2.0)


# -- names of TensorFlow -----------------------------------------------------------------------------------------------


class Slices(NamedTuple):
    values: Any
    indices: Any


def test_single_rows_of_a_variable_can_be_changed() -> None:
    with ONE.scope():
        variable: Any = distnb.Variable([1.0, 2.0, 3.0])
        table: Any = distnb.Variable(torch.zeros(3, 2), synchronization="on_read")
        counts: Any = distnb.Variable([7, 8, 9])
    assert variable.scatter_add([0, 2, 0], [1.0, 1.0, 2.0]) is variable
    assert variable.tolist() == [4.0, 2.0, 4.0]
    assert variable.scatter_sub(Slices(values=[1.0], indices=[1])).tolist() == [4.0, 1.0, 4.0]
    assert variable.scatter_update(([2, 2], [5.0, 6.0])).tolist() == [4.0, 1.0, 6.0]
    assert variable.scatter_min([0, 1], 2.0).tolist() == [2.0, 1.0, 6.0]
    assert variable.scatter_max([0, 1], [1.0, 3.0]).tolist() == [2.0, 3.0, 6.0]
    assert variable.scatter_mul([0, 0], [2.0, 3.0]).tolist() == [12.0, 3.0, 6.0]
    assert variable.scatter_div([0], 4.0).tolist() == [3.0, 3.0, 6.0]
    assert counts.scatter_div([0, 1], [2, -3]).tolist() == [3, -2, 9]
    entries = torch.sparse_coo_tensor([[0, 2]], [[1.0, 2.0], [3.0, 4.0]], (3, 2), check_invariants=True)
    assert ONE.run(lambda: table.scatter_add(entries).tolist()) == [[1.0, 2.0], [0.0, 0.0], [3.0, 4.0]]
    for arguments, text in [
        (([3], [1.0]), "not all in the variable's 3 rows"),
        (([-1], [1.0]), "not all in"),
        (([0.5], [1.0]), "whole numbers"),
        (([0], [1.0, 2.0]), "shape"),
        ((torch.ones(2),), r"Write scatter_add\(indices, updates\)"),
    ]:
        with pytest.raises(ValueError, match=text):
            variable.scatter_add(*arguments)
    assert variable.tolist() == [3.0, 3.0, 6.0]
    assert variable.scatter_add(0, torch.tensor([0]), torch.ones(1)).tolist() == [4.0, 3.0, 6.0]  # torch's own
    assert variable.assign(torch.ones(3), read_value=False) is None
    assert variable.assign_add(1.0, read_value=False) is variable.assign_sub(0.5, read_value=False) is None
    assert variable.tolist() == [1.5] * 3


def test_options_can_be_read_under_both_names() -> None:
    options: Any = distnb.InputOptions(experimental_fetch_to_device=False, experimental_per_replica_buffer_size=3)
    assert (options.fetch_to_device, options.experimental_fetch_to_device) == (False, False)
    assert options.prefetch == options.per_replica_buffer_size == options.experimental_per_replica_buffer_size == 3
    assert options.experimental_replication_mode is options.replication_mode
    assert options.experimental_place_dataset_on_device is False
    assert copy.deepcopy(pickle.loads(pickle.dumps(options))) == options
    with pytest.raises(AttributeError, match="experimental_nonsense"):
        _ = options.experimental_nonsense


def test_communication_options_are_merged() -> None:
    base = distnb.CommunicationOptions(bytes_per_pack=5, implementation="ring")  # type: ignore[arg-type]
    merged = base.merge(distnb.CommunicationOptions(timeout_seconds=2.0))
    assert (merged.bytes_per_pack, merged.timeout_seconds, merged.implementation.name) == (5, 2.0, "RING")
    assert base.merge(distnb.CommunicationOptions(bytes_per_pack=7)).bytes_per_pack == 7
    assert base.merge(None) is base
    with pytest.raises(ValueError, match="merge takes"):
        base.merge("ring")  # type: ignore[arg-type]


def test_a_strategy_can_be_set_without_a_with_statement() -> None:
    try:
        distnb.set_strategy(ONE)
        assert (distnb.get_strategy(), distnb.in_cross_replica_context()) == (ONE, True)
        assert ONE.run(lambda: distnb.get_replica_context().devices) == ("cpu:0",)
        with ONE.scope(), pytest.raises(RuntimeError, match="Call it outside"):
            distnb.set_strategy(None)
        with pytest.raises(RuntimeError, match="Mixing"):
            distnb.OneDeviceStrategy("cpu:1").run(lambda: 1)
        distnb.experimental_set_strategy(distnb.OneDeviceStrategy("cpu:1"))
        assert distnb.experimental.set_strategy is distnb.set_strategy
        assert distnb.get_strategy() is distnb.OneDeviceStrategy("cpu:1")
    finally:
        distnb.set_strategy(None)
    assert not distnb.has_strategy()
    with pytest.raises(ValueError, match="takes a strategy"):
        distnb.set_strategy("mirrored")  # type: ignore[arg-type]


def test_old_names_of_a_strategy_still_work() -> None:
    strategy: Any = ONE
    assert strategy.unwrap(3) == (3,)
    assert strategy.group(strategy.run(lambda: {"a": torch.ones(2)})) is None
    with pytest.raises(AttributeError, match="methods are the strategy's own"):
        _ = strategy.extended


def test_only_public_names_are_offered() -> None:
    assert set(dir(distnb)) == set(distnb.__all__)


# -- reports ------------------------------------------------------------------------------------------------------------


def test_a_strategy_offers_names_of_distnb() -> None:
    strategy: Any = ONE
    with pytest.raises(AttributeError, match=r"Write distnb\.replica_id\(\)\."):
        _ = strategy.replica_id


def test_live_values_have_names() -> None:
    with pytest.raises(ValueError, match=r"got a Tensor without a name. Write distnb\.live\(loss=value\)"):
        distnb.live(torch.ones(()))


def test_a_missing_gpu_is_an_error() -> None:
    from distnb.engine.debugging.error_reports import report

    for error in (
        AssertionError("Torch not compiled with CUDA enabled"),
        RuntimeError("No CUDA GPUs are available"),
    ):
        for _ in range(2):
            text = "\n".join(report(error).traceback)
        assert text.count("Leave out .cuda()") == 1
    assert "cuda" not in "\n".join(report(RuntimeError("other")).traceback)
