"""Model.fit with parameter servers: workers take the steps, and Keras's own loop runs on the coordinator."""

from __future__ import annotations

import functools
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import torch

from distnb.errors import OptionError
from distnb.keras import keras_internals
from distnb.keras.data import DatasetCreator, as_tensor
from distnb.options import InputOptions
from distnb.runtime.step_count import Reading
from distnb.runtime.this_process import this_process
from distnb.servers.coordinator.coordinator import ClusterCoordinator
from distnb.servers.coordinator.per_worker import PerWorkerDataset, is_function
from distnb.servers.keras.by_state import HERE, METHODS, READS
from distnb.servers.keras.server_optimizer import make_remote
from distnb.servers.variables.here import servers_here
from distnb.servers.variables.server_variable import ServerVariable
from distnb.watching.live import live

__all__ = ["ModelOnServers"]

_logger = logging.getLogger("distnb.keras")

_AHEAD = 8  # closures per worker that the loop may schedule ahead


# -- workers -----------------------------------------------------------------------------------------------------------


def _steps(model: Any, _optimizer: Any, data: Any, count: int, kind: str) -> dict[str, Any] | None:
    """Take some steps on a worker. Return the last step's logs, or None if the data ended."""
    make, run = getattr(model, f"make_{kind}_function"), f"{kind}_function"
    make()
    logs: Any = None
    with keras.device(str(servers_here.access.device)):
        for place in range(count):
            batch = data[place] if isinstance(data, list) else next(data, None)
            if batch is None:
                return None
            if not isinstance(data, list):
                batch = keras.tree.map_structure(as_tensor, batch, none_is_leaf=False)
            logs = getattr(model, run)([batch])
    return {name: float(value) if np.ndim(value) == 0 else value for name, value in logs.items()}


def _lookup(embedding: Any, inputs: Any) -> Any:
    """Return the result of Embedding's own `call`, reading only the rows it needs."""
    table = keras_internals.tensor_of(keras_internals.table_of(embedding))
    rows = torch.nn.functional.embedding(keras.ops.cast(inputs, "int64"), table)
    return keras.ops.cast(rows, embedding.compute_dtype)


# -- the coordinator ---------------------------------------------------------------------------------------------------


class _PerWorker(torch.utils.data.DataLoader[Any]):
    """Placeholder in Keras's loop for a dataset that each worker has. It yields a number for each requested step."""

    def __init__(self, source: Any) -> None:
        super().__init__(range(1 << 60), batch_size=None, generator=torch.Generator())  # type: ignore[arg-type]
        self.source = source


@dataclass
class _Loop:
    """A running loop of `fit` or `evaluate`.

    Attributes:
        source: The workers' iterators; None: the coordinator reads batches and sends them with each step.
        steps: The number of steps of an epoch; None if it is unknown.
        together: The number of steps per closure, `steps_per_execution`.
        waiting: The data for the next closure's steps.
        under_way: The closures that had not ended at the last check.
        taken: The number of steps of this epoch that were scheduled or wait.
        logs: The logs of the latest step of this epoch that is known to have ended.
    """

    kind: str
    source: Any
    steps: int | None
    together: int = 1
    waiting: list[Any] = field(default_factory=list)
    under_way: list[Any] = field(default_factory=list)
    taken: int = 0
    logs: dict[str, Any] = field(default_factory=dict)

    @property
    def what(self) -> str:
        """Keras's word for the loop."""
        return "training" if self.kind == "train" else "evaluating"


class ModelOnServers:
    """Replacements of the methods of a model whose variables are on servers. The model refers to this object through
    them.

    Attributes:
        methods: The names of the methods that are replaced.
    """

    methods = (*METHODS, *READS, *HERE)

    def __init__(self, strategy: Any, model: Any) -> None:
        if strategy.num_replicas_in_sync > 1:
            raise OptionError(
                "In Keras's loop one replica takes each step, but each worker of this cluster has "
                f"{strategy.num_replicas_in_sync}. Start a cluster of more workers, with replicas_per_worker=1; or "
                "train with scheduled functions that call strategy.run."
            )
        _logger.info("prepares model %s for workers and parameter servers", model.name)
        self._model = model
        self._registration = strategy.runtime.registration
        self._access = strategy.runtime.access
        self._coordinator = ClusterCoordinator(strategy)
        self._ahead = _AHEAD * len(servers_here.link().workers)
        self._loops: list[_Loop] = []
        keras_internals.disable_ddp(model)
        own: dict[str, Callable[..., Any]] = {
            "fit": self._fit,
            "evaluate": self._evaluate,
            keras_internals.SYMBOLIC_BUILD: self._build,
            keras_internals.METRICS_RESULT: self._end,
            "make_train_function": functools.partial(self._make, "train"),
            "make_test_function": functools.partial(self._make, "test"),
            **dict.fromkeys(READS, self._read),
            **dict.fromkeys(HERE, self._here),
        }
        for name, method in own.items():
            plain = getattr(model, name)
            setattr(model, name, functools.wraps(plain)(functools.partial(method, plain)))

    # Building the model -----------------------------------------------------------------------------------------------

    def _build(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Let Keras create the variables that are missing, then move them to the servers."""
        plain(*args, **kwargs)
        self._registration.register_model(self._model)
        for layer in keras_internals.plain_embeddings(self._model):
            variable = keras_internals.table_of(layer)
            if not isinstance(keras_internals.tensor_of(variable), ServerVariable):
                keras_internals.put_tensor(variable, self._registration.as_table(keras_internals.tensor_of(variable)))
                vars(layer)["call"] = functools.partial(_lookup, layer)
        keras_internals.track_again((self._model, *keras_internals.own_layers(self._model)))
        if self._model.optimizer is not None:
            make_remote(self._model.optimizer)

    def _build_for(self, source: Any) -> None:
        """Build the model for batches that workers will make. If a batch is needed, one is made here."""
        batch = None
        if not keras_internals.is_built(self._model):
            batch = keras.tree.map_structure(as_tensor, next(iter(source.maker.make_for_worker(0))), none_is_leaf=False)
        keras_internals.build(self._model, batch)

    def _data_for_loop(self, data: Any) -> Any:
        """Return the data for Keras's loop: the data itself, or a placeholder for batches that workers make."""
        if isinstance(data, DatasetCreator):
            if data.input_options not in (None, InputOptions()):
                raise OptionError(
                    f"DatasetCreator(input_options={data.input_options!r}): workers of a ParameterServerStrategy make "
                    "their batches themselves, where they are used. Prefetch in the dataset, as by "
                    "DataLoader(num_workers=2)."
                )
            data = data.dataset_fn
        if data is not None and not isinstance(data, type) and is_function(data):
            data = self._coordinator.create_per_worker_dataset(data)
        if not isinstance(data, PerWorkerDataset):
            return data
        self._build_for(data)
        return _PerWorker(iter(data))

    # fit and evaluate -------------------------------------------------------------------------------------------------

    def _fit(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(plain).bind(*args, **kwargs)
        given = bound.arguments
        steps = given.get("steps_per_epoch")
        if steps is None:
            raise OptionError(
                "model.fit with a ParameterServerStrategy needs steps_per_epoch: the workers' datasets have no common "
                "end. Give the number of steps that all workers together take in an epoch."
            )
        given["x"] = self._data_for_loop(given.get("x"))
        if isinstance(given["x"], _PerWorker):
            given["shuffle"] = False  # prevents Keras's warning that it ignores the argument
            _refuse_batch_size("fit", given)
        validation = given.get("validation_data")
        if validation is not None and not isinstance(validation, tuple):
            given["validation_data"] = self._data_for_loop(validation)
            if isinstance(given["validation_data"], _PerWorker) and given.get("validation_steps") is None:
                raise OptionError(
                    "model.fit got validation_data that workers make, without a common end: give validation_steps."
                )
        if this_process.live_sink is not None and not isinstance(given.get("callbacks"), keras.callbacks.CallbackList):
            given["callbacks"] = [*keras.tree.flatten(given.get("callbacks") or []), _Live(self._coordinator)]
        with self._loop("train", given["x"], steps):
            return plain(*bound.args, **bound.kwargs)

    def _evaluate(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(plain).bind(*args, **kwargs)
        given = bound.arguments
        given["x"] = self._data_for_loop(given.get("x"))
        if isinstance(given["x"], _PerWorker):
            if not self._loops:
                _refuse_batch_size("evaluate", given)
            if given.get("steps") is None:
                raise OptionError(
                    "model.evaluate got a dataset that each worker makes, without a common end: give steps, the number "
                    "of batches that all workers together evaluate."
                )
        with self._loop("test", given["x"], given.get("steps")):
            return plain(*bound.args, **bound.kwargs)

    @contextmanager
    def _loop(self, kind: str, data: Any, steps: int | None) -> Iterator[None]:
        if not self._loops:
            self._coordinator.join()
            self._coordinator.forget(self._model)  # it may have been compiled again, or layers frozen
        source, together = data.source if isinstance(data, _PerWorker) else None, self._model.steps_per_execution
        loop = _Loop(kind=kind, source=source, steps=steps, together=together)
        depth = len(self._loops)
        try:
            self._loops.append(loop)
            self._model.steps_per_execution = 1  # Keras would only accept whole executions
            yield
        finally:
            del self._loops[depth:]
            self._model.steps_per_execution = together
            setattr(self._model, f"{kind}_function", None)
            if not self._loops:
                self._access.copies.refresh()

    def _make(self, kind: str, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Replace `make_train_function` or `make_test_function`: in a loop a step is scheduled, else it runs here."""
        if self._loops and self._loops[-1].kind == kind:
            setattr(self._model, f"{kind}_function", self._schedule)
        else:
            plain(*args, **kwargs)

    def _schedule(self, data: list[Any]) -> dict[str, Any]:
        """Schedule the next step on a worker, perhaps in a closure with others. Return the logs of steps that have
        ended.
        """
        loop = self._loops[-1]
        loop.waiting += data
        loop.taken += 1
        if loop.taken == loop.steps:
            self._send(loop, 0)
        elif len(loop.waiting) >= loop.together:
            self._send(loop, self._ahead)
        return self._logs(loop)

    def _send(self, loop: _Loop, left: int) -> None:
        """Schedule the waiting steps, and wait until at most `left` closures are under way."""
        if loop.waiting:
            optimizer = self._model.optimizer if loop.kind == "train" else None
            data = loop.waiting if loop.source is None else loop.source
            args = (self._model, optimizer, data, len(loop.waiting), loop.kind)
            loop.under_way.append(self._coordinator.schedule(_steps, args=args))
            loop.waiting = []
        self._collect(loop, left)

    def _collect(self, loop: _Loop, left: int) -> None:
        """Wait until at most `left` closures are under way, and collect the logs of the others."""
        self._coordinator.wait(loop.under_way, left)
        ended = [each for each in loop.under_way if each.ended]
        loop.under_way = [each for each in loop.under_way if each not in ended]
        for each in ended:
            if each.state != "done":
                self._coordinator.join()  # raises the closure's error, once
            logs = each.fetch()
            if logs is not None:
                loop.logs = logs
            elif not getattr(self._model, f"stop_{loop.what}"):
                self._run_out(loop)

    def _run_out(self, loop: _Loop) -> None:
        warnings.warn(
            f"A worker's dataset ran out of data, which ends the {loop.what}: with a ParameterServerStrategy any "
            "worker may take any number of the steps. Let the dataset function repeat its data without end.",
            stacklevel=2,
        )
        setattr(self._model, f"stop_{loop.what}", True)

    def _logs(self, loop: _Loop) -> dict[str, Any]:
        """Return the metrics' values after all steps of the epoch that have ended, and the last step's other logs.

        Before any step has ended the logs are empty: a metric without updates would read as 0.
        """
        if not loop.logs:
            return {}
        found = self._model.get_metrics_result()
        return {name: found.get(name, value) for name, value in loop.logs.items()}

    def _end(self, plain: Callable[..., Any], logs: Any) -> Any:
        """End an epoch: wait for all its steps before callbacks run."""
        if self._loops:
            loop = self._loops[-1]
            self._send(loop, 0)
            self._coordinator.join()
            self._access.copies.refresh()
            loop.taken, logs = 0, self._logs(loop)
            loop.logs = {}
        return plain(logs)

    # Computation on the coordinator -----------------------------------------------------------------------------------

    def _read(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method that reads weights."""
        self._access.refresh_copies((*self._model.parameters(), *self._model.buffers()))
        return plain(*args, **kwargs)

    def _here(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method that computes in this process, batch by batch, even if a callback of `fit` calls it."""
        names = ("steps_per_execution", *(f"{kind}_function" for kind in ("train", "test", "predict")))
        before = {name: getattr(self._model, name) for name in names}
        loop, depth = _Loop(kind="here", source=None, steps=None), len(self._loops)
        try:
            self._loops.append(loop)
            for name in names:
                setattr(self._model, name, 1 if name == names[0] else None)
            return self._read(plain, *args, **kwargs)
        finally:
            del self._loops[depth:]
            for name, value in before.items():
                setattr(self._model, name, value)


def _refuse_batch_size(method: str, given: dict[str, Any]) -> None:
    if given.get("batch_size") is not None:
        raise OptionError(
            f"model.{method} got batch_size={given['batch_size']!r} with a dataset that each worker makes: the "
            "dataset function determines its batches. Leave it out."
        )


class _Live(keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that plots the numbers of each epoch, and reports the progress of the training."""

    def __init__(self, coordinator: ClusterCoordinator) -> None:
        super().__init__()
        self._coordinator = coordinator
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        params = self.params
        self._coordinator.reading = Reading(
            epoch=self._epoch, batch=batch + 1, batches=params.get("steps"), epochs=params.get("epochs")
        )

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs:
            live(**{name: float(value) for name, value in logs.items()})
