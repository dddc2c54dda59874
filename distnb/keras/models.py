"""Methods of Keras models that were made in a scope, on several replicas."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras

from distnb.checkpoint.tensor_slices import is_sharded
from distnb.errors import ContextError, OptionError
from distnb.features import find
from distnb.keras import keras_internals
from distnb.keras.callbacks.chief_callbacks import ChiefCallbacks
from distnb.keras.data import SameBatches, resolve_data
from distnb.keras.model_state import buffers_in, share_state, state_of, whole_values
from distnb.keras.steps.forward import SharedForward
from distnb.runtime import contexts, randomness, step_count
from distnb.runtime.chief_work.chief_first import chief_first
from distnb.runtime.chief_work.together import raise_together
from distnb.runtime.reduction.equal_values import make_equal
from distnb.runtime.this_process import this_process

__all__ = ["adopt", "optimizer_tensors", "parts"]

_logger = logging.getLogger("distnb.keras")

_METHODS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
_SAVES = ("save", "save_weights", "export")
_LOAD = "load_weights"
_FUNCTIONS = ("train", "test", "predict")
_UNREAD: dict[str, Any] = {}
"""The logs of a step, in place of those that nobody reads."""
_MAKERS = tuple(f"make_{kind}_function" for kind in _FUNCTIONS)


def adopt(strategy: Any, model: Any) -> None:
    """Make a Keras model of a strategy's scope train as the strategy does, from its first call of `fit` on.

    The model is prepared only then, in the scope or after it: when it is created it has no layers, and Keras may still
    change its class.
    """
    if "fit" not in vars(model):
        training = find("models of Keras", strategy.feature) or ModelOnReplicas
        for name in training.methods:
            vars(model)[name] = _prepare_first(strategy, model, name, training)


def optimizer_tensors(model: Any) -> list[Any]:
    """Return the tensors of a model that torch does not count as its parameters: those of its optimizer."""
    optimizer = getattr(model, "optimizer", None)
    return [each.value for each in optimizer.variables] if optimizer is not None else []


def parts(model: Any) -> list[Any]:
    """Return the layers in a model, many of which torch does not know as its modules."""
    return keras_internals.parts(model)


def _prepare_first(strategy: Any, model: Any, name: str, training: Any) -> Callable[..., Any]:
    """Return a replacement for a method of the model. The first call of any replacement prepares the model."""

    @functools.wraps(getattr(model, name))
    def method(*args: Any, **kwargs: Any) -> Any:
        for each in training.methods:
            vars(model).pop(each)
        training(strategy, model)
        return getattr(model, name)(*args, **kwargs)

    return method


class ModelOnReplicas:
    """Replacements of a model's methods. The model refers to this object through them.

    A feature adds a class like this one at "models of Keras" for its strategy.

    Attributes:
        methods: The names of the methods that are replaced.
    """

    methods = (*_METHODS, *_SAVES, _LOAD, *_MAKERS)

    def __init__(self, strategy: Any, model: Any) -> None:
        self._strategy = strategy
        self._model = model
        self._forward = SharedForward()
        _logger.info("prepares model %s for the replicas of %s", model.name, type(strategy).__name__)
        self._callbacks: ChiefCallbacks | None = None
        keras_internals.disable_ddp(model)
        for name in _METHODS:
            setattr(model, name, self._on_replicas(getattr(model, name)))
        for name in _SAVES:
            setattr(model, name, self._on_chief_first(getattr(model, name)))
        setattr(model, _LOAD, self._read_by_chief(getattr(model, _LOAD)))
        for kind, name in zip(_FUNCTIONS, _MAKERS, strict=True):
            setattr(model, name, self._wrap_maker(getattr(model, name), kind))
        self._are_logs_unread = False
        if keras_internals.has_plain_logs(model):
            setattr(model, keras_internals.LOGS, self._unless_unread(getattr(model, keras_internals.LOGS)))
            name = keras_internals.METRICS_RESULT
            setattr(model, name, self._at_the_end(getattr(model, name)))

    # Loops: fit, evaluate, predict
    # -------------------------------------------------------------------------------------

    def _on_replicas(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method that all replicas call with the same arguments."""

        @functools.wraps(plain)
        def method(*args: Any, **kwargs: Any) -> Any:
            process = this_process.replica
            if process is None or process.size == 1:
                return plain(*args, **kwargs)
            if self._callbacks is not None and self._callbacks.acting:
                self._callbacks.check_computes(plain.__name__)
                return plain(*args, **kwargs)  # called by one of the chief's callbacks
            _refuse_in_replica(plain.__name__)
            _refuse_other_distribution(plain.__name__)
            process.runtime_of(self._strategy).before_optimizer()
            bound = inspect.signature(plain).bind(*args, **kwargs)
            resolve_data(plain.__name__, bound.arguments, self._strategy, lambda: process.group)
            with self._loop():
                self._share_callbacks(bound)
                return plain(*bound.args, **bound.kwargs)

        return method

    @contextmanager
    def _loop(self) -> Iterator[None]:
        """Run one of Keras's loops, which may call another. All replicas do the same, with whole batches."""
        before, callbacks = contexts.execution(), self._callbacks
        try:
            with contexts.executing(contexts.Execution(self._strategy, "replicated")):
                yield
        finally:
            self._callbacks = callbacks
            if before is None:
                self._strategy.home.end_loop()

    def _share_callbacks(self, bound: inspect.BoundArguments) -> None:
        """Run callbacks on the chief for all replicas, and show progress there only."""
        parameters = bound.signature.parameters
        if "callbacks" not in parameters:
            return
        process = this_process.replica
        assert process is not None
        given = bound.arguments.get("callbacks")
        if not isinstance(given, keras.callbacks.CallbackList):
            names = [type(each).__name__ for each in keras.tree.flatten(given or [])]
            _logger.info("callbacks run on replica 0: %s", ", ".join(names) or "none")
            self._callbacks = ChiefCallbacks(self._strategy, self._model, given, bound.arguments.get("verbose", "auto"))
            bound.arguments["callbacks"] = [self._callbacks]
        if process.rank:
            bound.arguments["verbose"] = 0

    def _on_chief_first(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method that writes a file: replica 0 writes, and the others wait for it.

        The chief may call it alone, unless the model is sharded.
        """

        @functools.wraps(plain)
        def method(*args: Any, **kwargs: Any) -> Any:
            with whole_values(self._model):
                return chief_first(f"model.{plain.__name__}", lambda: plain(*args, **kwargs))

        return method

    def _read_by_chief(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method that reads weights from a file of the chief: the chief reads them for all replicas."""

        @functools.wraps(plain)
        def method(*args: Any, **kwargs: Any) -> Any:
            process, execution = this_process.replica, contexts.execution()
            by_callback = execution is not None and execution.kind == "single"
            if process is None or process.size == 1 or not self._model.built:
                return plain(*args, **kwargs)
            if by_callback:
                with whole_values(self._model):  # raises for a sharded model after a batch
                    return plain(*args, **kwargs)
            group, result, error = process.group, None, None
            with whole_values(self._model) as is_sharded_model:
                if process.rank == 0:
                    try:
                        result = plain(*args, **kwargs)
                    except Exception as failure:  # noqa: BLE001  # raised below, on all replicas
                        error = failure
                values = state_of(self._model) if process.rank == 0 and is_sharded_model else None
            if is_sharded_model:
                share_state(group, self._model, values)
            else:
                loaded = [*map(keras_internals.tensor_of, self._model.variables), *optimizer_tensors(self._model)]
                loaded += buffers_in(self._model)
                make_equal(group, [(f"model.{plain.__name__}", each.detach()) for each in loaded])
            raise_together(error, f"model.{plain.__name__} raised this on replica 0.")
            return result

        return method

    def _register_built(self) -> None:
        """Register the weights and the optimizer's variables, which Keras creates with the first batch, with the
        replicas.
        """
        process = this_process.replica
        if process is None or process.size == 1 or (self._callbacks is not None and self._callbacks.acting):
            return
        registration = process.runtime_of(self._strategy).registration
        kept = [each for each in optimizer_tensors(self._model) if not is_sharded(each)]
        trained = [each.value for each in self._model.trainable_variables]
        if not all(map(registration.owns, [*trained, *kept])):
            registration.register_model(self._model, kept)

    def _share_randomness(self) -> None:
        """Make all replicas draw the same random numbers from here on, such as the order of rows.

        To build a model Keras reads a batch, which draws. A replica that has replaced a lost one builds the model
        again, and the others do not.
        """
        process = this_process.replica
        if process is not None and process.size > 1 and self._callbacks is not None and not self._callbacks.acting:
            randomness.share(process.group)

    # A step ---------------------------------------------------------------------------------------------------------

    def _wrap_maker(self, make: Callable[..., Any], kind: str) -> Callable[..., Any]:
        """Wrap `make_train_function` or a similar method: the function that it makes runs on all replicas."""
        name = f"{kind}_function"

        @functools.wraps(make)
        def made(*args: Any, **kwargs: Any) -> Any:
            result = make(*args, **kwargs)
            self._register_built()
            self._share_randomness()
            plain = getattr(self._model, name)
            if not isinstance(plain, _ReplicatedStep):
                setattr(self._model, name, _ReplicatedStep(self, plain, kind))
            return result

        return made

    def _unless_unread(self, plain: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap the method that computes the results of metrics for logs: a step whose logs nobody reads has none."""

        @functools.wraps(plain)
        def logs() -> Any:
            return _UNREAD if self._are_logs_unread else plain()

        return logs

    def _at_the_end(self, plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap the method that replaces the logs of the last step by the results of metrics."""

        @functools.wraps(plain)
        def logs_or_results(logs: Any) -> Any:
            return getattr(self._model, keras_internals.LOGS)() if logs is _UNREAD else plain(logs)

        return logs_or_results

    def run(self, plain: Callable[[Any], Any], data: Any, kind: str) -> Any:
        """Run one step ("train", "test" or "predict") on a global batch, which every replica has."""
        trains = kind == "train"
        process = this_process.replica
        if process is None or process.size == 1 or (self._callbacks is not None and self._callbacks.acting):
            return plain(data)
        batches = self._callbacks.batches if self._callbacks else SameBatches(self._strategy, lambda: process.group)
        batches.begin(data)
        if self._callbacks is not None and trains and self._callbacks.skips:
            batches.finish()
            return {}
        model = self._model
        self._forward.watch([model])
        if type(model).train_step is not keras.Model.train_step or type(model).test_step is not keras.Model.test_step:
            self._forward.watch(keras_internals.own_layers(model))  # the user's step may call layers one by one
        result: Any = None

        def step() -> None:
            nonlocal result
            self._are_logs_unread = self._callbacks is not None and not self._callbacks.reads_logs(kind)
            try:
                with self._forward.step(batches.finish):
                    result = plain(data)
            except Exception:
                batches.finish()  # that the data differ is the better reason
                raise
            finally:
                self._are_logs_unread = False
            if trains:
                step_count.note_step(self._forward.rows)

        self._strategy.run(step)
        return result


def _refuse_in_replica(method: str) -> None:
    """Raise ContextError if a replica calls a method in the function of `strategy.run`."""
    if contexts.in_replica():
        does = method.replace("_on_batch", "")
        raise ContextError(
            f"model.{method} was called in a function that strategy.run calls, where each replica has its own part of "
            f"a batch. It divides whole batches itself: call model.{method} outside strategy.run, with the global "
            f"batch. To {'train' if does == 'fit' else does} in strategy.run, call the model, the loss and the "
            "optimizer one by one."
        )


def _refuse_other_distribution(method: str) -> None:
    """Raise OptionError if Keras itself would distribute the training."""
    own = keras.distribution.distribution()
    if own is not None:
        raise OptionError(
            f"model.{method} was called for a model that was made in strategy.scope(), while Keras's own "
            f"{type(own).__name__} is in force: both would divide the rows. Call "
            "keras.distribution.set_distribution(None) first."
        )


class _ReplicatedStep:
    """A model's `train_function`, `test_function` or `predict_function` on all replicas."""

    def __init__(self, owner: ModelOnReplicas, plain: Callable[[Any], Any], kind: str) -> None:
        self._owner = owner
        self._plain = plain
        self._kind = kind

    def __call__(self, data: Any) -> Any:
        return self._owner.run(self._plain, data, self._kind)
