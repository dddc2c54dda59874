"""`distnb.estimator.train_and_evaluate`: training with an evaluation of each checkpoint."""

from __future__ import annotations

from typing import Any

from distnb.checkpoint.evaluating import evaluate_checkpoints
from distnb.cluster.resolvers import TFConfigClusterResolver
from distnb.errors import OptionError
from distnb.estimator.estimator import Estimator
from distnb.estimator.specs import EvalSpec, ModeKeys, TrainSpec
from distnb.strategies.context import is_chief
from distnb.watching.live import live

__all__ = ["train_and_evaluate"]


def train_and_evaluate(estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec) -> dict[str, Any] | None:
    """Train, and evaluate each checkpoint that is saved.

    All tasks of a cluster that TF_CONFIG describes run the same program. Workers train, and a task of the type
    "evaluator" evaluates their checkpoints in the estimator's directory, until the checkpoint of `max_steps`. Without
    TF_CONFIG, the replicas interrupt the training at each checkpoint to evaluate it.

    Returns:
        The results of the last evaluation; None in a worker.

    Raises:
        OptionError: A spec has the wrong type, or an evaluator does not know the last checkpoint or the directory.
    """
    if not isinstance(train_spec, TrainSpec) or not isinstance(eval_spec, EvalSpec):
        raise OptionError(f"train_and_evaluate takes a TrainSpec and an EvalSpec, and got {train_spec}, {eval_spec}.")
    task = TFConfigClusterResolver().task_type
    if task == "evaluator":
        return _evaluator(estimator, train_spec, eval_spec)
    if task is not None:
        estimator.train(train_spec.input_fn, max_steps=train_spec.max_steps)
        return None
    results: dict[str, Any] = estimator._strategy(ModeKeys.TRAIN).runtime.call(
        _by_turns, estimator, train_spec, eval_spec
    )
    return results


def _evaluator(estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec) -> dict[str, Any] | None:
    if train_spec.max_steps is None and eval_spec.timeout_s is None:
        raise OptionError(
            "An evaluator would wait forever: give TrainSpec(max_steps=…), at which training ends, or "
            "EvalSpec(timeout_s=…)."
        )
    lines = evaluate_checkpoints(
        estimator.model_dir,
        lambda path: estimator.evaluate(eval_spec.input_fn, eval_spec.steps, path),
        pattern="ckpt-*",
        last=f"ckpt-{train_spec.max_steps}",
        timeout_s=eval_spec.timeout_s,
    )
    return lines[-1]["results"] if lines else None


def _by_turns(estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec) -> dict[str, Any]:
    results: dict[str, Any] = {}

    def evaluate() -> None:
        results.update(estimator.evaluate(eval_spec.input_fn, eval_spec.steps))
        if is_chief():
            live(**{f"eval_{name}": value for name, value in results.items() if isinstance(value, float)})

    estimator._train(train_spec.input_fn, None, train_spec.max_steps, evaluate)
    if not results:  # the training had already reached max_steps
        evaluate()
    return results
