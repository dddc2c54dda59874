"""`distnb.estimator.Estimator`: training, evaluation and prediction with a model function."""

from __future__ import annotations

import inspect
import itertools
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from typing import Any

import torch

from distnb.checkpoint.checkpoint import Checkpoint
from distnb.checkpoint.manager import CheckpointManager, latest_checkpoint
from distnb.errors import CheckpointError, OptionError
from distnb.estimator.specs import EstimatorSpec, ModeKeys, RunConfig, check_count
from distnb.input.sources.choosing import check_batched
from distnb.metrics import Mean
from distnb.options import InputContext
from distnb.runtime.chief_work.together import on_chief
from distnb.runtime.scopes.mirrored_objects import is_mirrored
from distnb.strategies.base import Strategy
from distnb.strategies.context import get_strategy, is_chief
from distnb.strategies.nn import compute_average_loss
from distnb.strategies.variable_class import Variable
from distnb.values.structure import flatten, map_structure
from distnb.watching.live import live

__all__ = ["Estimator"]


class Estimator:
    """Trainer, evaluator and predictor of the model that a model function makes, under any strategy.

    `model_fn(features, labels, mode)` makes the model and defines the use of its outputs. Each `train`, `evaluate` and
    `predict` calls it once, in the strategy's scope: torch's modules are made once and called at each step, whereas
    tf.estimator's function built a graph once that was run at each step. `features` and `labels` are there for
    inspection, like a graph's placeholders: this replica's part of the first batch, which may have no rows. Values that
    depend on each batch are returned as functions (see `EstimatorSpec`). If the function has parameters `params` and
    `config`, it receives these, too.

    An estimator keeps only its options. The trained state is in the checkpoints of its directory, and each call starts
    with the newest. A checkpoint that was saved under one strategy can be continued under any other, or under none.

    In distributed cells and scripts all replicas call its methods, in cross-replica context. In ordinary cells the
    whole methods run on the engines.

    Args:
        model_fn: A function that returns an `EstimatorSpec`.
        model_dir: The directory for checkpoints; None for a temporary one, which is deleted with the estimator.
        config: See `RunConfig`.
        params: The model function's argument `params`.

    Raises:
        OptionError: An argument is invalid.

    Example:
        >>> import torch
        >>> from distnb.estimator import Estimator, EstimatorSpec
        >>> def model_fn(features, labels, mode):
        ...     layer = torch.nn.Linear(features.shape[1], 1)
        ...     optimizer = torch.optim.SGD(layer.parameters(), lr=0.2)
        ...     return EstimatorSpec(mode, layer, loss=torch.nn.MSELoss(reduction="none"), optimizer=optimizer)
        >>> estimator = Estimator(model_fn)
        >>> results = estimator.train(lambda: [(torch.ones(1, 1), torch.ones(1, 1))] * 100).evaluate(
        ...     lambda: [(torch.ones(1, 1), torch.ones(1, 1))]
        ... )
        >>> results["loss"] < 1e-9, results["global_step"]
        (True, 100)
    """

    def __init__(
        self,
        model_fn: Callable[..., EstimatorSpec],
        model_dir: str | os.PathLike[str] | None = None,
        config: RunConfig | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> None:
        if not callable(model_fn):
            raise OptionError(f"model_fn={model_fn!r}: give a function of (features, labels, mode).")
        if config is not None and not isinstance(config, RunConfig):
            raise OptionError(f"config={config!r}: give a distnb.estimator.RunConfig.")
        if params is not None and "params" not in inspect.signature(model_fn).parameters:
            raise OptionError("params were given, but model_fn has no parameter of that name.")
        self._model_fn = model_fn
        self.config = config if config is not None else RunConfig()
        self.params = dict(params or {})
        self.model_dir = os.path.abspath(on_chief(self._temporary) if model_dir is None else model_dir)

    def _temporary(self) -> str:
        folder = tempfile.mkdtemp(prefix="distnb-estimator-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return folder

    # Public methods -------------------------------------------------------------------------------------------------

    def train(self, input_fn: Callable[..., Any], steps: int | None = None, max_steps: int | None = None) -> Estimator:
        """Train from the newest checkpoint until the input or the number of steps ends. Save a checkpoint.

        Args:
            input_fn: A function without arguments, called at each call of this method. It returns a dataset for
                `strategy.distribute_dataset`: a DataLoader or an iterable of batches `(features, labels)`. If it has a
                parameter `input_context`, it receives an `InputContext`, as for
                `strategy.distribute_datasets_from_function`, and each of its batches is for one replica. It may have
                parameters `mode`, `params` and `config`, too.
            steps: The number of further steps.
            max_steps: The global step at which training ends; no step is taken if it is reached already.

        Returns:
            The estimator.

        Raises:
            OptionError: Both numbers were given, a number is invalid, or a function returned an invalid result.
            CheckpointError: The directory holds checkpoints of another model.
        """
        check_count("steps", steps)
        check_count("max_steps", max_steps)
        if steps is not None and max_steps is not None:
            raise OptionError(f"steps={steps} and max_steps={max_steps} were both given. Give one of them.")
        self._strategy(ModeKeys.TRAIN).runtime.call(self._train, input_fn, steps, max_steps)
        return self

    def evaluate(
        self,
        input_fn: Callable[..., Any],
        steps: int | None = None,
        checkpoint_path: str | os.PathLike[str] | None = None,
    ) -> dict[str, Any]:
        """Evaluate a checkpoint.

        Args:
            input_fn: See `train`.
            steps: The number of batches to read; None: all.
            checkpoint_path: The checkpoint; None for the newest one.

        Returns:
            "loss", the mean over all examples; the metrics, by name; "global_step".

        Raises:
            OptionError: An argument, or the result of a function, is invalid.
            CheckpointError: There is no checkpoint, or it is another model's.
        """
        check_count("steps", steps)
        results: dict[str, Any] = self._strategy(ModeKeys.EVAL).runtime.call(
            self._evaluate, input_fn, steps, checkpoint_path
        )
        return results

    def predict(
        self, input_fn: Callable[..., Any], checkpoint_path: str | os.PathLike[str] | None = None
    ) -> Iterator[Any]:
        """Predict example by example, in the order of the input, on every replica.

        All replicas must iterate equally far: they compute a batch together when its first row is requested.

        Args:
            input_fn: See `train`; batches may consist of features alone. Labels are ignored.
            checkpoint_path: The checkpoint; None for the newest one.

        Yields:
            A tensor in host memory, or a dict of them: a row of the result of the spec's `predictions`.

        Raises:
            OptionError: The result of a function is invalid.
            CheckpointError: There is no checkpoint, or it is another model's.
        """
        strategy = self._strategy(ModeKeys.PREDICT)
        for batch in strategy.runtime.call(self._predict, input_fn, checkpoint_path):
            whole = strategy.local_results(batch)[0]  # in a notebook the replicas hold it
            for row in range(len(flatten(whole)[0][0])):
                yield map_structure(itemgetter(row), whole)

    def latest_checkpoint(self) -> str | None:
        """Return the path of the newest checkpoint, or None if there is none."""
        path: str | None = self._strategy(ModeKeys.TRAIN).runtime.call(self._newest)
        return path

    # On the replicas ------------------------------------------------------------------------------------------------

    def _train(
        self,
        input_fn: Callable[..., Any],
        steps: int | None,
        max_steps: int | None,
        after_save: Callable[[], object] | None = None,
    ) -> None:
        strategy, config = self._strategy(ModeKeys.TRAIN), self.config
        spec, global_step, _, batches = self._begin(ModeKeys.TRAIN, input_fn)
        assert spec.optimizer is not None
        optimizer, averaged = spec.optimizer, strategy.spec.option("gradient_reduction") == "mean"
        schedule = {} if spec.scheduler is None else {"scheduler": spec.scheduler}
        saved = Checkpoint(model=spec.model, optimizer=optimizer, global_step=global_step, **schedule)
        manager = CheckpointManager(saved, self.model_dir, config.keep_checkpoint_max)
        manager.restore_or_initialize()
        step = first = int(global_step)
        more = steps if max_steps is None else max(max_steps - first, 0)

        def train_step(batch: Any) -> torch.Tensor:
            losses = _losses(spec, batch)
            loss = compute_average_loss(losses)
            optimizer.zero_grad()
            (losses.sum() / max(len(losses), 1) if averaged else loss).backward()
            optimizer.step()
            return loss.detach()

        def save() -> None:
            global_step.assign(step)
            manager.save(step, wait=after_save is not None)
            if after_save is not None:
                after_save()

        is_saved = True
        for batch in itertools.islice(batches, more):
            loss = strategy.run(train_step, args=(batch,))
            if spec.scheduler is not None:
                spec.scheduler.step()
            step += 1
            if _is_due(step, config.log_step_count_steps):
                loss = strategy.reduce("sum", loss, axis=None)
                if is_chief():
                    live(loss=loss)
            is_saved = _is_due(step, config.save_checkpoints_steps)
            if is_saved:
                save()
        if not is_saved:
            save()
        manager.close()

    def _evaluate(self, input_fn: Callable[..., Any], steps: int | None, checkpoint_path: Any) -> dict[str, Any]:
        strategy = self._strategy(ModeKeys.EVAL)
        spec, global_step, mean, batches = self._begin(ModeKeys.EVAL, input_fn)
        metrics = dict(spec.eval_metric_ops)
        for name, metric in metrics.items():
            if strategy.num_replicas_in_sync > 1 and not is_mirrored(metric):
                raise OptionError(f"eval_metric_ops[{name!r}] was made outside model_fn. Make it there, in the scope.")
        self._restore(checkpoint_path, spec, global_step)

        @torch.no_grad()
        def eval_step(batch: Any) -> None:
            features, labels = _parts(batch)
            outputs = spec.model(features)
            mean.update(_per_example(spec, outputs, labels))
            for metric in metrics.values():
                metric.update(outputs, labels)

        for batch in itertools.islice(batches, steps):
            strategy.run(eval_step, args=(batch,))
        results = {name: _plain(metric.compute()) for name, metric in {"loss": mean, **metrics}.items()}
        return results | {"global_step": int(global_step)}

    def _predict(self, input_fn: Callable[..., Any], checkpoint_path: Any) -> Iterator[Any]:
        strategy = self._strategy(ModeKeys.PREDICT)
        spec, global_step, _, batches = self._begin(ModeKeys.PREDICT, input_fn)
        self._restore(checkpoint_path, spec, global_step)

        @torch.no_grad()
        def predict_step(batch: Any) -> Any:
            outputs = spec.model(_parts(batch)[0])
            return outputs if spec.predictions is None else spec.predictions(outputs)

        for batch in batches:
            whole = strategy.gather(strategy.run(predict_step, args=(batch,)), axis=0)
            yield map_structure(lambda leaf: leaf.cpu(), whole)

    # Common parts ---------------------------------------------------------------------------------------------------

    def _strategy(self, mode: ModeKeys) -> Strategy:
        config = self.config
        own = config.train_distribute if mode is ModeKeys.TRAIN else config.eval_distribute or config.train_distribute
        return own if own is not None else get_strategy()

    def _begin(self, mode: ModeKeys, input_fn: Callable[..., Any]) -> tuple[EstimatorSpec, Any, Mean, Iterator[Any]]:
        """Return the model function's spec, a variable for the global step, a mean for the loss, and the batches."""
        strategy = self._strategy(mode)
        known = {"mode": mode, "params": self.params, "config": self.config}
        batches = iter(self._dataset(strategy, input_fn, known))
        first = list(itertools.islice(batches, 1))
        if not first:
            raise OptionError("input_fn returned no batch. Return a dataset with at least one.")
        features, labels = _parts(strategy.local_results(first[0])[0])
        with strategy.scope():  # a single scope, because the end of a scope costs a garbage collection
            spec = _call_with_known(self._model_fn, features, labels=labels, **known)
            global_step, mean = Variable(0, dtype=torch.int64), Mean()
        if not isinstance(spec, EstimatorSpec) or spec.mode != mode:
            raise OptionError(f"model_fn returned {spec!r}. It must return an EstimatorSpec of mode '{mode}'.")
        spec.model.train(mode is ModeKeys.TRAIN)
        return spec, global_step, mean, itertools.chain(first, batches)

    def _dataset(self, strategy: Strategy, input_fn: Callable[..., Any], known: Mapping[str, Any]) -> Any:
        accepts_context = "input_context" in inspect.signature(input_fn).parameters

        def make(context: InputContext | None = None) -> Any:
            if context is not None and context.num_input_pipelines > 1 and not accepts_context:
                raise OptionError(
                    f"batch_is_per_replica=True, and {context.num_input_pipelines} workers would all read the same. "
                    "Give input_fn a parameter input_context, and let it read the part of this worker: every "
                    "input_context.num_input_pipelines-th example, from input_context.input_pipeline_id on."
                )
            dataset = _call_with_known(input_fn, input_context=context, **known)
            check_batched(dataset)  # the default strategy would accept anything
            return dataset

        if accepts_context or self.config.batch_is_per_replica:
            return strategy.distribute_datasets_from_function(make)
        return strategy.distribute_dataset(make())

    def _newest(self) -> str | None:
        return on_chief(lambda: latest_checkpoint(self.model_dir))

    def _restore(self, checkpoint_path: Any, spec: EstimatorSpec, global_step: Any) -> None:
        path = self._newest() if checkpoint_path is None else checkpoint_path
        if path is None:
            raise CheckpointError(f"There is no checkpoint in {self.model_dir}: train the estimator first.")
        Checkpoint(model=spec.model, global_step=global_step).restore(path)


def _call_with_known(function: Callable[..., Any], *args: Any, **known: Any) -> Any:
    """Call a function, and pass only the named arguments that it has parameters for."""
    names = inspect.signature(function).parameters
    return function(*args, **{name: value for name, value in known.items() if name in names})


def _parts(batch: Any) -> tuple[Any, Any]:
    """Return the features and the labels of a batch, or None for missing labels."""
    if not isinstance(batch, (tuple, list)):
        return batch, None
    if not 1 <= len(batch) <= 2:
        raise OptionError(
            f"input_fn returned a batch of {len(batch)} parts. Return (features, labels); several features as a dict."
        )
    return batch[0], batch[1] if len(batch) == 2 else None


def _losses(spec: EstimatorSpec, batch: Any) -> torch.Tensor:
    features, labels = _parts(batch)
    return _per_example(spec, spec.model(features), labels)


def _per_example(spec: EstimatorSpec, outputs: Any, labels: Any) -> torch.Tensor:
    """Return the loss of each example, `[batch]`."""
    assert spec.loss is not None
    losses = spec.loss(outputs, labels)
    if not isinstance(losses, torch.Tensor) or losses.ndim == 0:
        raise OptionError(
            f"loss(outputs, labels) returned {'a scalar' if isinstance(losses, torch.Tensor) else repr(losses)}. It "
            "must return the loss of each example: reduction='none'."
        )
    return losses.flatten(1).mean(dim=1) if losses.ndim > 1 else losses


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
