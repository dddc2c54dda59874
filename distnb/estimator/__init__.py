"""`distnb.estimator`: training, evaluation and prediction with a model function under any strategy.

See `Estimator`.
"""

from __future__ import annotations

from distnb.estimator.estimator import Estimator
from distnb.estimator.specs import EstimatorSpec, EvalSpec, ModeKeys, RunConfig, TrainSpec
from distnb.estimator.training import train_and_evaluate

__all__ = ["Estimator", "EstimatorSpec", "EvalSpec", "ModeKeys", "RunConfig", "TrainSpec", "train_and_evaluate"]
