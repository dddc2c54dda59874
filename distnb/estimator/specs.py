"""What an estimator is told: what a model function returns, and how to train and evaluate. Values, nothing more."""

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
    """What a model function is called for."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "infer"


@dataclass(frozen=True, eq=False)
class EstimatorSpec:
    """What a model function returns: a module, and functions of its outputs that are called at each step.

    It may be the same in all modes: each uses what it needs.

    Attributes:
        mode: The mode that the model function was called with.
        model: Called as `model(features)`, once a step; in training mode where the mode is TRAIN.
        loss: `loss(outputs, labels)` gives the losses of each example, `[batch, ...]`. What the optimizer sees is their
            mean over the global batch, and what `evaluate` tells their mean over all batches. Needed for both.
        optimizer: Of the model's parameters. Needed to train.
        scheduler: A schedule of its learning rate, which steps after each step of the optimizer.
        eval_metric_ops: By name, metrics of `distnb.metrics` or torchmetrics that are made in the model function, and
            updated with `(outputs, labels)`.
        predictions: `predictions(outputs)` gives what `predict` yields the rows of: a tensor `[batch, ...]`, or a dict
            of them. None: the outputs.

    Raises:
        OptionError: What the mode needs is missing, or something is of another kind.
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
                f"function {name}{takes} of what the model returns.",
            )
        _require(mode == ModeKeys.PREDICT or self.loss is not None, f"loss is missing, and mode '{mode}' needs it.")
        _require(mode != ModeKeys.TRAIN or self.optimizer is not None, "optimizer is missing: training needs one.")
        for name, metric in self.eval_metric_ops.items():
            told = f"eval_metric_ops[{name!r}] is a {type(metric).__name__}"
            _require(isinstance(metric, Metric), f"{told}: give a metric of distnb.metrics or torchmetrics.")
            _require(name not in ("loss", "global_step"), f"{told}: the name is taken by what evaluate itself tells.")


@dataclass(frozen=True)
class RunConfig:
    """How an estimator runs.

    Attributes:
        train_distribute: The strategy that it trains under; None for the one that is in force (see `get_strategy`).
        eval_distribute: The one that it evaluates and predicts under; None for the one that it trains under.
        save_checkpoints_steps: A checkpoint is saved each time that the global step is a multiple of this; None: at the
            end of training only, where one is saved in any case.
        keep_checkpoint_max: The newest so many checkpoints stay; None: all.
        log_step_count_steps: The loss is shown (see `distnb.live`) each time that the global step is a multiple of
            this; None: never.
        batch_is_per_replica: A batch of the input is one replica's, and a step takes as many batches as there are
            replicas, as tf.contrib had it; else a batch is a global one, which the replicas share.

    Raises:
        OptionError: A value of another kind.
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
    """How `train_and_evaluate` trains.

    Attributes:
        input_fn: See `Estimator.train`.
        max_steps: Training ends at this global step; None: with the input. An evaluator task needs it.
    """

    input_fn: Callable[..., Any]
    max_steps: int | None = None

    def __post_init__(self) -> None:
        check_count("max_steps", self.max_steps)


@dataclass(frozen=True)
class EvalSpec:
    """How `train_and_evaluate` evaluates.

    Attributes:
        input_fn: See `Estimator.train`.
        steps: Batches of it that are read each time; None: all.
        timeout_s: An evaluator task ends when no checkpoint has come for so long; None: it waits for the last one.
    """

    input_fn: Callable[..., Any]
    steps: int | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        check_count("steps", self.steps)


def check_count(name: str, value: Any) -> None:
    """Raise OptionError for what is neither a whole number above 0 nor None."""
    _require(
        value is None or (type(value) is int and value > 0), f"{name}={value!r}: give a whole number from 1, or None."
    )


def _require(fits: bool, told: str) -> None:
    if not fits:
        raise OptionError(told)
