"""The results of model functions, and the options of training and evaluation."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torchmetrics import Metric

from distnb.errors import OptionError
from distnb.strategies.base import Strategy

__all__ = ["EstimatorSpec", "EvalSpec", "ModeKeys", "RunConfig", "TrainSpec"]


class ModeKeys(enum.StrEnum):
    """Purpose of a call of the model function."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "infer"


@dataclass(frozen=True, eq=False)
class EstimatorSpec:
    """The result of a model function: a module, and functions of its outputs that are called at each step.

    It may be the same in all modes: each uses the parts it needs.

    Attributes:
        mode: The mode that the model function was called with.
        model: The module, called as `model(features)` once per step; in training mode if the mode is TRAIN.
        loss: `loss(outputs, labels)` returns the losses of each example, `[batch, ...]`. The optimizer minimises their
            mean over the global batch, and `evaluate` returns their mean over all batches. Both need it.
        optimizer: The optimizer of the model's parameters. Training needs it.
        scheduler: A schedule of its learning rate, which steps after each step of the optimizer.
        eval_metric_ops: By name, metrics of `distnb.metrics` or torchmetrics that are made in the model function, and
            updated with `(outputs, labels)`.
        predictions: `predictions(outputs)` returns a tensor `[batch, ...]`, or a dict of them, whose rows `predict`
            yields. None: the outputs.

    Raises:
        OptionError: A part that the mode needs is missing, or has the wrong type.
    """

    mode: ModeKeys
    model: torch.nn.Module
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    optimizer: torch.optim.Optimizer | None = None
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
    eval_metric_ops: Mapping[str, Metric] = field(default_factory=dict)
    predictions: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        mode = self.mode
        _require(mode in list(ModeKeys), f"mode={mode!r}: give the mode that the model function was called with.")
        _require(isinstance(self.model, torch.nn.Module), f"model={self.model!r}: give a torch.nn.Module.")
        for name, takes in (("loss", "(outputs, labels)"), ("predictions", "(outputs)")):
            given = getattr(self, name)
            _require(
                given is None or callable(given),
                f"{name} is a {type(given).__name__}. A model function is called once, not at each step: give a "
                f"function {name}{takes} of the model's outputs.",
            )
        _require(mode == ModeKeys.PREDICT or self.loss is not None, f"loss is missing, and mode '{mode}' needs it.")
        _require(mode != ModeKeys.TRAIN or self.optimizer is not None, "optimizer is missing: training needs one.")
        for name, metric in self.eval_metric_ops.items():
            described = f"eval_metric_ops[{name!r}] is a {type(metric).__name__}"
            _require(isinstance(metric, Metric), f"{described}: give a metric of distnb.metrics or torchmetrics.")
            _require(name not in ("loss", "global_step"), f"{described}: evaluate itself returns this name.")


@dataclass(frozen=True)
class RunConfig:
    """Options of an estimator.

    Attributes:
        train_distribute: The strategy for training; None for the current one (see `get_strategy`).
        eval_distribute: The strategy for evaluation and prediction; None for that of training.
        save_checkpoints_steps: Save a checkpoint whenever the global step is a multiple of this. A checkpoint is saved
            at the end of training in any case; None: only there.
        keep_checkpoint_max: The number of newest checkpoints to keep; None: all.
        log_step_count_steps: Show the loss (see `distnb.live`) whenever the global step is a multiple of this; None:
            never.
        batch_is_per_replica: Whether a batch of the input belongs to one replica, so that a step takes as many batches
            as there are replicas, as in tf.contrib. Otherwise a batch is a global one, which the replicas share.

    Raises:
        OptionError: A value has the wrong type.
    """

    train_distribute: Strategy | None = None
    eval_distribute: Strategy | None = None
    save_checkpoints_steps: int | None = 1000
    keep_checkpoint_max: int | None = 5
    log_step_count_steps: int | None = 100
    batch_is_per_replica: bool = False

    def __post_init__(self) -> None:
        for name in ("train_distribute", "eval_distribute"):
            given = getattr(self, name)
            _require(given is None or isinstance(given, Strategy), f"{name}={given!r}: give a strategy, or None.")
        for name in ("save_checkpoints_steps", "keep_checkpoint_max", "log_step_count_steps"):
            check_count(name, getattr(self, name))
        each = self.batch_is_per_replica
        _require(isinstance(each, bool), f"batch_is_per_replica={each!r}: write True or False.")


@dataclass(frozen=True)
class TrainSpec:
    """Options of the training in `train_and_evaluate`.

    Attributes:
        input_fn: See `Estimator.train`.
        max_steps: The global step at which training ends; None: the end of the input. An evaluator task needs it.
    """

    input_fn: Callable[..., Any]
    max_steps: int | None = None

    def __post_init__(self) -> None:
        check_count("max_steps", self.max_steps)


@dataclass(frozen=True)
class EvalSpec:
    """Options of the evaluation in `train_and_evaluate`.

    Attributes:
        input_fn: See `Estimator.train`.
        steps: The number of batches to read in each evaluation; None: all.
        timeout_s: The time without a new checkpoint after which an evaluator task ends; None: it waits for the last
            one.
    """

    input_fn: Callable[..., Any]
    steps: int | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        check_count("steps", self.steps)


def check_count(name: str, value: Any) -> None:
    """Raise OptionError for a value that is neither a positive whole number nor None."""
    _require(
        value is None or (type(value) is int and value > 0), f"{name}={value!r}: give a whole number from 1, or None."
    )


def _require(fits: bool, message: str) -> None:
    if not fits:
        raise OptionError(message)
