"""The Estimator in one process: its calls of the user's functions, its checkpoints, its errors."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import distnb
from distnb import errors
from distnb.estimator import Estimator, EstimatorSpec, EvalSpec, ModeKeys, RunConfig, TrainSpec, train_and_evaluate

X = torch.arange(7.0)[:, None]
LOSS = torch.nn.MSELoss(reduction="none")


def model_fn(features: Any, labels: Any, mode: Any) -> EstimatorSpec:
    layer = torch.nn.Linear(features.shape[1], 1)
    torch.nn.init.zeros_(layer.weight)
    torch.nn.init.zeros_(layer.bias)
    return EstimatorSpec(mode, layer, loss=LOSS, optimizer=torch.optim.SGD(layer.parameters(), lr=0.01, momentum=0.9))


def input_fn() -> Any:
    return DataLoader(TensorDataset(X, 2 * X), batch_size=3)


def weight(estimator: Estimator) -> float:
    """Return the factor by which the model multiplies."""
    zero, one = estimator.predict(lambda: [torch.tensor([[0.0], [1.0]])])
    return float(one - zero)


def test_functions_are_called_with_the_documented_arguments(tmp_path: Path) -> None:
    calls, modes = [], []

    class Watched(torch.nn.Linear):
        def forward(self, features: Any) -> Any:
            modes.append((self.training, torch.is_grad_enabled()))
            return super().forward(features)

    def model(features: Any, labels: Any, mode: Any, params: Any, config: Any) -> EstimatorSpec:
        calls.append((features.tolist(), None if labels is None else labels.tolist(), mode, params, config))
        layer = Watched(1, 1)
        if mode == ModeKeys.PREDICT:
            return EstimatorSpec(mode, layer)
        if mode == ModeKeys.EVAL:
            return EstimatorSpec(mode, layer, loss=LOSS)
        return EstimatorSpec(mode, layer, loss=LOSS, optimizer=torch.optim.SGD(layer.parameters(), lr=0.01))

    def data(mode: str, params: Any) -> Any:
        assert params == {"rate": 3}
        return [(X, X)] * 2 if mode != ModeKeys.PREDICT else [X, X]

    config = RunConfig()
    estimator = Estimator(model, tmp_path, config, {"rate": 3})
    estimator.train(data).evaluate(data)
    assert len(list(estimator.predict(data))) == 14
    one = X.tolist()
    assert [call[:4] for call in calls] == [
        (one, one, "train", {"rate": 3}),
        (one, one, "eval", {"rate": 3}),
        (one, None, "infer", {"rate": 3}),
    ]
    assert all(call[4] is config for call in calls)
    assert modes == [(True, True)] * 2 + [(False, False)] * 4


def test_training_resumes_at_its_last_step(tmp_path: Path) -> None:
    whole = Estimator(model_fn, tmp_path / "whole").train(input_fn, steps=3).train(lambda: list(input_fn())[:2])
    assert whole.latest_checkpoint() == str(tmp_path / "whole" / "ckpt-5")
    assert whole.train(input_fn, max_steps=5).latest_checkpoint() == str(tmp_path / "whole" / "ckpt-5")
    assert whole.train(input_fn, max_steps=7).latest_checkpoint() == str(tmp_path / "whole" / "ckpt-7")
    at_once = Estimator(model_fn, tmp_path / "at once")
    batches = list(input_fn())
    at_once.train(lambda: [*batches, *batches[:2], *batches[:2], *batches], max_steps=7)
    assert weight(whole) == weight(at_once), "with the optimizer's momentum"


def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    config = RunConfig(save_checkpoints_steps=2, keep_checkpoint_max=2)
    estimator = Estimator(model_fn, tmp_path, config).train(input_fn, steps=2)
    estimator.train(lambda: [(X, 2 * X)] * 3)
    assert sorted(os.listdir(tmp_path)) == ["ckpt-4", "ckpt-5"]
    before = estimator.evaluate(input_fn, checkpoint_path=tmp_path / "ckpt-4")
    assert before["global_step"] == 4
    assert before["loss"] != estimator.evaluate(input_fn)["loss"]


def test_a_temporary_directory_is_removed_with_the_estimator() -> None:
    estimator = Estimator(model_fn)
    folder = estimator.model_dir
    assert os.path.isdir(folder)
    del estimator
    gc.collect()
    assert not os.path.exists(folder)


def test_the_loss_is_the_mean_over_examples_and_metrics_see_outputs_and_labels(tmp_path: Path) -> None:
    def model(features: Any, labels: Any, mode: Any) -> EstimatorSpec:
        spec = model_fn(features, labels, mode)
        metrics = {"error": distnb.metrics.MeanAbsoluteError(), "squared": distnb.metrics.MeanSquaredError()}
        return EstimatorSpec(mode, spec.model, spec.loss, spec.optimizer, eval_metric_ops=metrics)

    estimator = Estimator(model, tmp_path).train(lambda: [(X, torch.zeros(7, 1))])  # the weight remains zero
    results = estimator.evaluate(input_fn)  # 7 = 3 + 3 + 1
    assert results.keys() == {"loss", "error", "squared", "global_step"}
    assert results["loss"] == pytest.approx(results["squared"]) == pytest.approx(float((4 * X**2).mean()))
    assert results["error"] == pytest.approx(float(2 * X.mean()))
    assert estimator.evaluate(input_fn, steps=1)["loss"] == pytest.approx(float((4 * X[:3] ** 2).mean()))
    wide = torch.cat([X, 3 * X], dim=1)

    def of_two(features: Any, labels: Any, mode: Any) -> EstimatorSpec:
        spec = model_fn(features, labels, mode)
        return EstimatorSpec(mode, spec.model, lambda outputs, labels: (outputs - labels) ** 2)

    two = Estimator(of_two, tmp_path).evaluate(lambda: [(X[:4], wide[:4]), (X[4:], wide[4:])])
    assert two["loss"] == pytest.approx(float((wide**2).mean())), "of all losses of each example"


def test_a_schedule_steps_and_resumes(tmp_path: Path) -> None:
    rates = []

    def model(features: Any, labels: Any, mode: Any) -> EstimatorSpec:
        spec = model_fn(features, labels, mode)
        optimizer = torch.optim.SGD(spec.model.parameters(), lr=1e-3)
        optimizer.register_step_post_hook(lambda own, *_: rates.append(own.param_groups[0]["lr"]))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        return EstimatorSpec(mode, spec.model, LOSS, optimizer, scheduler)

    Estimator(model, tmp_path).train(input_fn, steps=2).train(input_fn, steps=2)
    assert rates == [1e-3, 5e-4, 2.5e-4, 1.25e-4]


def test_training_and_evaluation_alternate(tmp_path: Path) -> None:
    steps = []

    def data() -> Any:
        steps.append(estimator.latest_checkpoint())
        return [(X, 2 * X)]

    estimator = Estimator(model_fn, tmp_path, RunConfig(save_checkpoints_steps=2))
    found = train_and_evaluate(estimator, TrainSpec(lambda: list(input_fn()) * 2, 5), EvalSpec(data))
    assert [os.path.basename(str(each)) for each in steps] == ["ckpt-2", "ckpt-4", "ckpt-5"]
    assert found == estimator.evaluate(data)
    assert train_and_evaluate(estimator, TrainSpec(input_fn, 5), EvalSpec(data)) == found


def test_an_evaluator_that_would_wait_forever_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1"]}, "task": {"type": "evaluator", "index": 0}}')
    estimator = Estimator(model_fn, tmp_path)
    with pytest.raises(errors.OptionError, match="max_steps"):
        train_and_evaluate(estimator, TrainSpec(input_fn), EvalSpec(input_fn))
    with pytest.raises(errors.ClusterError, match="No checkpoint"):
        train_and_evaluate(estimator, TrainSpec(input_fn), EvalSpec(input_fn, timeout_s=0.01))
    estimator.train(input_fn, steps=2)
    found = train_and_evaluate(estimator, TrainSpec(input_fn, 2), EvalSpec(input_fn))
    assert found == estimator.evaluate(input_fn)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Estimator(3), "model_fn=3"),  # type: ignore[arg-type]
        (lambda: Estimator(model_fn, params={}), "no parameter of that name"),
        (lambda: Estimator(model_fn, config={}), "RunConfig"),  # type: ignore[arg-type]
        (lambda: RunConfig(train_distribute="mirrored"), "give a strategy"),  # type: ignore[arg-type]
        (lambda: RunConfig(save_checkpoints_steps=0), "save_checkpoints_steps=0"),
        (lambda: RunConfig(batch_is_per_replica=1), "True or False"),  # type: ignore[arg-type]
        (lambda: TrainSpec(input_fn, -1), "max_steps=-1"),
        (lambda: EvalSpec(input_fn, steps=0), "steps=0"),
        (lambda: train_and_evaluate(Estimator(model_fn), input_fn, input_fn), "a TrainSpec"),  # type: ignore[arg-type]
        (lambda: EstimatorSpec("test", torch.nn.Linear(1, 1)), "mode='test'"),  # type: ignore[arg-type]
        (lambda: EstimatorSpec(ModeKeys.PREDICT, X), "torch.nn.Module"),  # type: ignore[arg-type]
        (lambda: EstimatorSpec(ModeKeys.EVAL, torch.nn.Linear(1, 1)), "loss is missing"),
        (lambda: EstimatorSpec(ModeKeys.EVAL, torch.nn.Linear(1, 1), X.sum()), "called once, not at each step"),  # type: ignore[arg-type]
        (lambda: EstimatorSpec(ModeKeys.TRAIN, torch.nn.Linear(1, 1), LOSS), "optimizer is missing"),
        (lambda: EstimatorSpec("eval", torch.nn.Linear(1, 1), LOSS, eval_metric_ops={"a": 1}), "a metric"),  # type: ignore[arg-type,dict-item]
        (
            lambda: EstimatorSpec(
                ModeKeys.EVAL, torch.nn.Linear(1, 1), LOSS, eval_metric_ops={"loss": distnb.metrics.Mean()}
            ),
            "evaluate itself returns this name",
        ),
    ],
)
def test_invalid_arguments_are_refused(make: Any, text: str) -> None:
    with pytest.raises(errors.OptionError, match=text):
        make()


def test_functions_with_wrong_results_are_refused(tmp_path: Path) -> None:
    estimator = Estimator(model_fn, tmp_path)
    with pytest.raises(errors.CheckpointError, match="train the estimator first"):
        estimator.evaluate(input_fn)
    with pytest.raises(errors.CheckpointError, match="train the estimator first"):
        next(estimator.predict(input_fn))
    with pytest.raises(errors.OptionError, match="both given"):
        estimator.train(input_fn, steps=1, max_steps=1)
    with pytest.raises(errors.OptionError, match="steps=0"):
        estimator.train(input_fn, steps=0)
    with pytest.raises(errors.OptionError, match="no batch"):
        estimator.train(list)
    with pytest.raises(errors.OptionError, match="A tuple is not batched yet"):
        estimator.train(lambda: (X, X))
    with pytest.raises(errors.OptionError, match="a batch of 3 parts"):
        estimator.train(lambda: [(X, X, X)])
    with pytest.raises(errors.OptionError, match="EstimatorSpec of mode 'train'"):
        Estimator(lambda features, labels, mode: None, tmp_path).train(input_fn)  # type: ignore[arg-type,return-value]
    with pytest.raises(errors.OptionError, match="EstimatorSpec of mode 'train'"):
        Estimator(lambda features: EstimatorSpec(ModeKeys.PREDICT, torch.nn.Linear(1, 1)), tmp_path).train(input_fn)

    def scalar(features: Any, labels: Any, mode: Any) -> EstimatorSpec:
        spec = model_fn(features, labels, mode)
        return EstimatorSpec(mode, spec.model, torch.nn.MSELoss(), spec.optimizer)

    estimator.train(input_fn, steps=1)
    for call in (Estimator(scalar, tmp_path).train, Estimator(scalar, tmp_path).evaluate):
        with pytest.raises(errors.OptionError, match="reduction='none'"):
            call(input_fn)
