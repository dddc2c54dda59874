"""Strategies in the calling process: default, one-device, and a mirrored one without replicas."""

from __future__ import annotations

import copy
import operator
import pickle
import threading
from typing import Any

import numpy as np
import pytest
import torch

import distnb
from distnb import errors
from distnb.options import StrategySpec
from distnb.runtime import step_count
from distnb.runtime.central.setup import check_places
from distnb.runtime.this_process import this_process
from distnb.strategies import resolve
from distnb.values import PerReplica

DEFAULT = distnb.get_strategy()
ONE = distnb.OneDeviceStrategy("cpu:0")


@pytest.fixture(params=[DEFAULT, ONE], ids=["default", "one_device"])
def strategy(request: pytest.FixtureRequest) -> Any:
    return request.param


# -- identity ----------------------------------------------------------------------------------------------------------


def test_equal_arguments_give_the_same_object() -> None:
    assert distnb.OneDeviceStrategy("/job:worker/task:1/device:CPU:0") is ONE
    assert distnb.MirroredStrategy() is distnb.MirroredStrategy(None, None, None, "sum", False)
    assert distnb.MirroredStrategy(gradient_reduction="mean") is not distnb.MirroredStrategy()
    assert distnb.MirroredStrategy(["GPU:0", "/gpu:1"]) is distnb.MirroredStrategy(num_gpus=2)
    assert distnb.MirroredStrategy("cpu:0,cpu:1") is distnb.MirroredStrategy(["cpu", "cpu:1"])
    ops = distnb.HierarchicalCopyAllReduce()
    assert distnb.MirroredStrategy(cross_tower_ops=ops) is distnb.MirroredStrategy(cross_device_ops=ops)
    central = distnb.CentralStorageStrategy(["/cpu:0", "cpu:1"], "cpu")
    assert distnb.experimental.CentralStorageStrategy("cpu:0,cpu:1", parameter_device="CPU:0") is central
    assert repr(central) == "CentralStorageStrategy(compute_devices=['cpu:0', 'cpu:1'], parameter_device='cpu:0')"
    for made in (central, DEFAULT, ONE, distnb.MirroredStrategy(gradient_reduction="mean", check_mean_loss=False)):
        assert resolve(made.spec) is made
        assert pickle.loads(pickle.dumps(made)) is made
        assert copy.deepcopy(made) is made


def test_unsupported_options_are_refused() -> None:
    ops = distnb.ReductionToOneDevice()
    for arguments, text in [
        ({"devices": ["cpu:0", "cpu:0"]}, "oversubscribe=True"),
        ({"devices": ["cpu:0"], "num_gpus": 1}, "one of them"),
        ({"devices": []}, "empty"),
        ({"devices": ["nonsense:x"]}, "not a device"),
        ({"devices": 3}, "devices=3: name the devices"),
        ({"num_gpus": 0}, "whole number"),
        ({"cross_device_ops": object()}, "cannot be honoured"),
        ({"cross_tower_ops": object()}, "cannot be honoured"),
        ({"cross_tower_ops": ops, "cross_device_ops": ops}, "the old name"),
        ({"gradient_reduction": "max"}, "'sum' or 'mean'"),
    ]:
        with pytest.raises(errors.OptionError, match=text):
            distnb.MirroredStrategy(**arguments)  # type: ignore[arg-type]
    for arguments, text in [
        ({"compute_devices": ["cpu:0", "cpu:0"]}, "once"),
        ({"compute_devices": []}, "compute_devices is empty"),
        ({"compute_devices": 3}, "compute_devices=3: name the devices"),
        ({"check_mean_loss": "no"}, "True or False"),
        ({"compute_devices": ["cuda:0", "cpu:0"]}, "devices of one kind"),
        ({"compute_devices": ["cuda:0", "cuda:1"], "parameter_device": "cuda:0"}, "variables are on cpu:0"),
        ({"compute_devices": ["cuda:0"], "parameter_device": "cpu:0"}, "variables are on cuda:0"),
        ({"compute_devices": ["cpu:0", "cpu:1"], "parameter_device": "cuda:0"}, "variables are on cpu:0"),
        ({"parameter_device": "nonsense:x"}, "not a device"),
        ({"gradient_reduction": "max"}, "'sum' or 'mean'"),
    ]:
        with pytest.raises(errors.OptionError, match=text):
            distnb.CentralStorageStrategy(**arguments)  # type: ignore[arg-type]
    with pytest.raises(errors.OptionError, match="one machine"):
        check_places(StrategySpec(kind="central_storage"), ["cpu:0", "cpu:0"], [0, 1])
    with pytest.raises(errors.OptionError, match="base class of strategies"):
        distnb.Strategy()
    with pytest.raises(errors.OptionError, match="no strategy"):
        resolve(StrategySpec(kind="nonsense"))
    with pytest.raises(errors.OptionError, match="devices are cpu:0"):
        distnb.OneDeviceStrategy("cuda:77").run(lambda: None)
    with pytest.raises(AttributeError, match="no 'extended'"):
        _ = ONE.extended


def test_a_script_started_without_a_launcher_gets_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = distnb.MirroredStrategy()
    for use in (
        lambda: strategy.run(print),
        lambda: strategy.num_replicas_in_sync,
        lambda: strategy.scope(),
        lambda: strategy.reduce("sum", 1, axis=None),
    ):
        with pytest.raises(errors.NoClusterError, match=r"distnb run .*-n 2") as raised:
            use()
        assert "distnb.start()" in str(raised.value)


def test_a_registered_remote_runtime_is_used() -> None:
    calls: list[tuple[Any, ...]] = []

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            found = ("cpu:0", "cpu:1") if name == "worker_devices" else 2
            return lambda *args: calls.append((name, *args)) or found

    this_process.remote = lambda strategy: Recorder()  # type: ignore[assignment, return-value]
    try:
        strategy = distnb.MirroredStrategy(gradient_reduction="mean")
        assert strategy.num_replicas_in_sync == 2
        strategy.run(print, args=[1])
        strategy.reduce("Sum", 3, axis=[0, 1])
        strategy.experimental_local_results(4)
        with pytest.raises(TypeError):
            strategy.run(print, 1)  # type: ignore[arg-type]
        assert ONE.run(lambda: 1) == 1  # runs here nevertheless
    finally:
        this_process.remote = None
    assert [call[0] for call in calls] == ["worker_devices", "num_replicas", "run", "reduce", "local_results"]
    assert calls[2][1:] == (print, [1], {}, None)
    assert calls[3][1:] == (distnb.ReduceOp.SUM, 3, (0, 1))


# -- run, and contexts -------------------------------------------------------------------------------------------------


def test_run_returns_the_value_itself(strategy: Any) -> None:
    tensor = torch.ones(2)
    assert strategy.run(lambda: tensor) is tensor
    assert strategy.run(lambda x, y=0: (x, y), args=[1], kwargs={"y": 2}) == (1, 2)
    assert strategy.run(lambda: None) is None
    with pytest.raises(TypeError, match=r"args=\(x,\)"):
        strategy.run(print, tensor)
    with pytest.raises(KeyError):
        strategy.run({}.__getitem__, args=("missing",))


def test_errors_of_invalid_calls_name_the_received_value_and_the_cure(strategy: Any) -> None:
    def step(batch: Any) -> Any:
        return batch

    batch = (torch.ones(2), 3)
    message = (
        r"called step\(Tensor, 3\): .*takes 1 positional argument but 2 were given.*strategy.run\(step, args=\(batch,"
    )
    with pytest.raises(errors.DistributedValueError, match=message):
        strategy.run(step, batch)
    with pytest.raises(TypeError, match=r"called step\(\): .*missing 1 required.*'batch'"):
        strategy.run(step)
    with pytest.raises(TypeError, match="got a PerReplica"):
        strategy.run(step, PerReplica([1]))
    with pytest.raises(TypeError, match=r"missing .* 'axis'"):
        strategy.reduce("sum", PerReplica([1]))
    with pytest.raises(TypeError, match="'value' and 'axis'"):
        strategy.reduce(PerReplica([1]))
    with pytest.raises(TypeError, match="'axis'"):
        strategy.gather(torch.ones(2))
    with pytest.raises(ValueError, match="a PerReplica is not a ReduceOp"):
        strategy.reduce(PerReplica([1]), "sum", None)
    with pytest.raises(TypeError, match=r"^mine$"):
        strategy.run(raise_type_error)
    with pytest.raises(TypeError, match=r"^unsupported operand"):
        strategy.run(operator.add, args=(1, "a"))


def raise_type_error() -> None:
    raise TypeError("mine")


def test_default_runs_the_function_and_nothing_else() -> None:
    value = PerReplica([1])
    assert DEFAULT.run(lambda x: x, args=(value,)) is value
    seen = DEFAULT.run(lambda: (distnb.has_strategy(), distnb.get_strategy()))
    assert seen == (False, DEFAULT)
    assert ONE.run(lambda x: x, args=({"a": [value]},)) == {"a": [1]}
    with pytest.raises(errors.StructureError, match="2 replica"):
        ONE.run(lambda x: x, args=(PerReplica([1, 2]),))


def where() -> tuple[bool, bool, bool]:
    return distnb.has_strategy(), distnb.in_cross_replica_context(), distnb.get_replica_context() is not None


def test_one_device_has_its_contexts() -> None:
    assert where() == (False, False, True)
    with ONE.scope():
        assert where() == (True, True, False)
        assert distnb.get_strategy() is ONE
        with pytest.raises(RuntimeError, match="Mixing different Strategy objects"):
            DEFAULT.scope()
        with pytest.raises(RuntimeError, match="Mixing"):
            distnb.MirroredStrategy().run(print)
        with ONE.scope():
            assert ONE.run(where) == (True, False, True)
    assert ONE.run(lambda: distnb.get_replica_context().merge_call(lambda s, x: (where(), s, x), args=(3,))) == (
        (True, True, False),
        ONE,
        3,
    )
    with DEFAULT.scope(), ONE.scope():
        assert where() == (True, True, False)
    assert where() == (False, False, True)
    for inner in (lambda: ONE.run(print), lambda: ONE.scope(), lambda: ONE.gather(torch.ones(1), 0)):
        with pytest.raises(RuntimeError, match="replica context"):
            ONE.run(inner)


def test_replicas_of_the_default_strategy_cannot_be_nested() -> None:
    inner = [
        lambda: DEFAULT.run(print),
        lambda: DEFAULT.reduce("sum", torch.ones(1), axis=None),
        lambda: DEFAULT.gather(torch.ones(1), 0),
        DEFAULT.scope,
    ]
    for each in inner:
        with pytest.raises(RuntimeError, match="replica context"):
            DEFAULT.run(each)
    merged = DEFAULT.run(
        lambda: distnb.get_replica_context().merge_call(lambda s, x: s.reduce("sum", x, axis=None), (torch.ones(1),))
    )
    assert merged == 1
    assert DEFAULT.run(lambda: 1) == 1


def test_contexts_are_per_thread() -> None:
    seen: list[Any] = []
    with ONE.scope():
        thread = threading.Thread(target=lambda: seen.append(where()))
        thread.start()
        thread.join()
    assert seen == [(False, False, True)]


def test_the_default_context() -> None:
    context = distnb.get_replica_context()
    assert context.strategy is DEFAULT
    assert (context.replica_id_in_sync_group, context.num_replicas_in_sync) == (0, 1)
    tensor = torch.ones(2)
    assert context.all_reduce("sum", tensor) is tensor
    assert context.all_reduce("MEAN", 3) == 3
    assert context.all_gather(tensor, -1) is tensor
    assert context.merge_call(lambda strategy, x: x + 1, (1,)) == 2
    with pytest.raises(ValueError, match="not a ReduceOp"):
        context.all_reduce("max", 1)
    with pytest.raises(ValueError, match="scalar"):
        context.all_gather(torch.tensor(1), 0)


def test_replica_id_and_chief_are_known(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert distnb.replica_id() == 0
    assert distnb.is_chief()
    distnb.on_chief(print)("written")
    assert capsys.readouterr().out == "written\n"
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert distnb.replica_id() == 1
    with pytest.raises(RuntimeError, match="decorator"):
        distnb.on_chief(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", [ONE, distnb.get_strategy()], ids=["one_device", "default"])
def test_a_call_of_run_in_which_optimizers_step_is_one_training_step(strategy: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(()))
    optimizers = [torch.optim.SGD([weight], 0.1), torch.optim.Adam([weight], 0.1)]

    def train(fail: bool = False) -> None:
        places.append(step_count.place()[0] - before)
        for optimizer in optimizers:
            weight.sum().backward()
            optimizer.step()
        places.append(step_count.place()[0] - before)
        if fail:
            raise KeyError("wrong")

    before, places = step_count.steps, list[int]()
    for _ in range(2):
        strategy.run(train)
    strategy.run(lambda: weight.sum())  # evaluation
    with pytest.raises(KeyError, match="wrong"):
        strategy.run(train, (True,))
    assert (step_count.steps - before, step_count.place()) == (2, (before + 2, 0))
    assert places == [1, 1, 2, 2, 3, 3]
    optimizers[0].step()  # outside of run, as in code for torchrun
    assert step_count.steps - before == 3


# -- reduce, gather, values -------------------------------------------------------------------------------------------


def test_reduce_works_in_one_process(strategy: Any) -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    for op in ("sum", "Mean", distnb.ReduceOp.SUM):
        assert strategy.reduce(op, tensor, axis=None) is tensor
        assert strategy.reduce(op, 3, axis=None) == 3
    assert float(strategy.reduce("sum", tensor, axis=(0, 1))) == 15
    assert strategy.reduce("mean", torch.tensor([1, 2]), axis=0).dtype is torch.float64
    assert strategy.reduce("sum", {"a": [tensor]}, axis=-1)["a"][0].tolist() == [3.0, 12.0]
    assert strategy.reduce("sum", np.ones(3), axis=0) == 3
    assert strategy.reduce("sum", PerReplica([2]), axis=None) == 2
    for value, axis in ((torch.tensor(1.0), 0), (tensor, 2), (tensor, -3), (tensor, "a"), (tensor, True)):
        with pytest.raises(ValueError, match="axis"):
            strategy.reduce("sum", value, axis=axis)
    for value in (True, torch.tensor([True])):
        with pytest.raises(TypeError, match="booleans"):
            strategy.reduce("sum", value, axis=None)
    with pytest.raises(ValueError, match="'SUM', 'MEAN'"):
        strategy.reduce("MAX", tensor, axis=None)
    with pytest.raises(TypeError):
        strategy.reduce("sum", tensor)


def test_gather_works_in_one_process(strategy: Any) -> None:
    tensor = torch.ones(2, 3)
    assert strategy.gather(tensor, axis=-1) is tensor
    assert strategy.gather({"a": tensor}, 1)["a"] is tensor
    for value, axis in ((torch.tensor(1.0), 0), (tensor, 2), (tensor, None), (tensor, (0, 1))):
        with pytest.raises(ValueError, match="axis"):
            strategy.gather(value, axis)
    with pytest.raises(NotImplementedError, match="sparse"):
        strategy.gather(torch.eye(2).to_sparse(), 0)


def test_values_work_in_one_process(strategy: Any) -> None:
    assert strategy.local_results(5) == (5,)
    assert strategy.local_results({"a": PerReplica([1, 2])}) == ({"a": 1}, {"a": 2})
    made = strategy.experimental_distribute_values_from_function(
        lambda c: (c.replica_id_in_sync_group, c.num_replicas_in_sync)
    )
    assert made == (0, 1)
    assert strategy.broadcast([1]) == [1]
    with pytest.raises(ValueError, match="one replica"):
        strategy.broadcast(1, source=1)
    assert strategy.num_replicas_in_sync == 1
    assert strategy.worker_devices == ("cpu:0",)
    assert strategy.cluster_resolver is None
    strategy.assert_in_sync(torch.ones(1))
    with strategy.no_sync(), strategy.colocate_with(torch.nn.Linear(1, 1)):
        assert torch.ones(1).device.type == "cpu"


def test_datasets_work_in_one_process() -> None:
    loader = torch.utils.data.DataLoader(torch.arange(5), batch_size=2)
    assert DEFAULT.distribute_dataset(loader) is loader
    assert [len(batch) for batch in DEFAULT.experimental_distribute_dataset(torch.arange(5), batch_size=2)] == [2, 2, 1]
    for wrong in ({"batch_size": 0}, {"batch_size": 2.5}, {"options": 3}):
        with pytest.raises(ValueError, match=r"batch_size|options"):
            ONE.distribute_dataset(torch.arange(5), **wrong)


# -- losses -----------------------------------------------------------------------------------------------------------


def test_compute_average_loss_divides_by_the_global_batch() -> None:
    average = distnb.nn.compute_average_loss
    losses = torch.tensor([1.0, 2.0, 3.0, 6.0])
    assert float(average(losses)) == 3.0
    assert float(average(losses, sample_weight=torch.tensor([1.0, 0.0, 1.0, 0.5]))) == 1.75
    assert float(average(losses, global_batch_size=8)) == 1.5
    assert float(average(losses, 0.5, torch.tensor(4))) == 1.5
    assert float(average([1, 2])) == 1.5
    assert float(average(torch.ones(2, 3), sample_weight=torch.tensor([1.0, 0.0]))) == 1.5
    assert float(average(torch.empty(0))) == 0.0
    with pytest.raises(ValueError, match="scalar"):
        average(torch.tensor(1.0))
    for wrong in (0, -1, 2.0, "4", True, torch.tensor(2.5)):
        with pytest.raises(ValueError, match="whole number"):
            average(losses, global_batch_size=wrong)
    with ONE.scope(), pytest.raises(RuntimeError, match="cross-replica"):
        average(losses)
    with ONE.scope(), pytest.raises(RuntimeError, match="cross-replica"):
        distnb.nn.scale_regularization_loss(losses)
    assert float(distnb.nn.scale_regularization_loss(losses)) == 12.0


# -- metrics ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def metrics() -> Any:
    return distnb.metrics


def test_metrics_are_torchmetrics(metrics: Any) -> None:
    import torchmetrics

    mean = metrics.Mean(name="loss")
    mean.update_state(torch.tensor([1.0, 3.0]))
    mean.update_state(torch.empty(0))
    assert float(mean.result()) == 2.0
    assert mean.name == "loss"
    mean.reset_state()
    mean.update_state(5.0, weight=2.0)
    assert float(mean.compute()) == 5.0
    assert metrics.MulticlassAccuracy is torchmetrics.classification.MulticlassAccuracy
    accuracy = metrics.Accuracy(task="multiclass", num_classes=2)
    accuracy.update_state(torch.tensor([0, 1]), torch.tensor([0, 0]))
    assert float(accuracy.result()) == 0.5
    both = torchmetrics.MetricCollection([metrics.Sum(), metrics.Max(), metrics.Min()])
    both.update_state(torch.tensor([1.0, 2.0]))
    assert {key: float(value) for key, value in both.result().items()} == {"Sum": 3.0, "Max": 2.0, "Min": 1.0}
    assert pickle.loads(pickle.dumps(mean)).result() == 5.0
    with pytest.raises(AttributeError, match="nonsense"):
        _ = metrics.nonsense
    with ONE.scope():
        plain = metrics.Mean()
    plain.update(1.0)
    assert float(plain.compute()) == 1.0


def test_experimental_names_still_work() -> None:
    assert distnb.experimental.ValueContext is distnb.ValueContext
    with pytest.raises(AttributeError, match="It has"):
        _ = distnb.experimental.nonsense


def test_the_error_for_a_wrong_name_or_number_suggests_the_right_one() -> None:
    with pytest.raises(AttributeError, match=r"has no attribute 'Run' \(did you mean run\?\)") as raised:
        _ = ONE.Run
    again = pickle.loads(pickle.dumps(raised.value))
    assert (type(again), str(again)) == (type(raised.value), str(raised.value))
    assert not hasattr(ONE, "_ipython_display_")
    with pytest.raises(errors.OptionError, match=r"devices=3: name the devices.*%distnb start -n 4"):
        distnb.MirroredStrategy(3)  # type: ignore[arg-type]


def test_an_error_within_a_property_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def runtime(strategy: Any) -> Any:
        return strategy.no_such_name_within

    monkeypatch.setattr(distnb.OneDeviceStrategy, "runtime", property(runtime))
    with pytest.raises(AttributeError, match="no_such_name_within"):
        _ = ONE.num_replicas_in_sync
