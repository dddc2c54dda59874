"""`distnb.estimator`: a model function, trained, evaluated and asked for predictions under any strategy.

See `Estimator`.
"""

from __future__ import annotations

from distnb.estimator.estimator import Estimator
from distnb.estimator.specs import EstimatorSpec, EvalSpec, ModeKeys, RunConfig, TrainSpec
from distnb.estimator.training import train_and_evaluate

__all__ = ["Estimator", "EstimatorSpec", "EvalSpec", "ModeKeys", "RunConfig", "TrainSpec", "train_and_evaluate"]
