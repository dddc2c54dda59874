"""Keras's models, optimizers, metrics and other objects: variables in order, since their names depend on counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import torch

from distnb.checkpoint.states.base import Kind, described
from distnb.checkpoint.stored_tensors import StoredTensor, whole
from distnb.checkpoint.tensor_slices import is_sharded, read_like
from distnb.errors import OptionError
from distnb.keras.model_state import buffers_in
from distnb.runtime.this_process import this_process

__all__ = ["KERAS_OBJECTS"]

_CLASS = "optimizer_class"
_BUFFERS = "buffers"


class _KerasObjects(Kind):
    """Keras's objects with variables. The state of a metric is that of all replicas together."""

    def covers(self, value: Any) -> bool:
        trained = (keras.layers.Layer, keras.optimizers.Optimizer)
        return isinstance(value, (*trained, keras.metrics.Metric, keras.Variable, keras.random.SeedGenerator))

    def state(self, value: Any, name: str) -> Any:
        """Return the values of the variables. Raise OptionError for an object that Keras has not built yet."""
        if not getattr(value, "built", True):
            raise OptionError(
                f"A checkpoint cannot hold {name}: Keras creates its variables with the first batch. Save it "
                "after `fit`, or call `build`."
            )
        parts = _parts(value).items()
        if this_process.store is not None:  # the variables may be copies
            kept = [each for part, variables in parts if part != _BUFFERS for each in variables]
            this_process.store.refresh_copies([each.value for each in kept])
        values: dict[str, Any] = {part: [_tensor(each).detach() for each in variables] for part, variables in parts}
        return values | ({_CLASS: _class_of_optimizer(value)} if "optimizer" in values else {})

    def misfits(self, value: Any, saved: Any, name: str) -> list[str]:
        optimizer, lines = getattr(value, "optimizer", None), []
        if optimizer is not None and value.built and not optimizer.built:
            optimizer.build(value.trainable_variables)
        for part, variables in _parts(value).items():
            found = saved.get(part) if isinstance(saved, Mapping) else None
            here = [list(each.shape) for each in variables]
            there = [list(each.shape) for each in found] if isinstance(found, list) else described(saved)
            if there != here:
                lines.append(
                    f"{name}: the checkpoint has variables of shapes {there} for its {part}, but the object has "
                    f"{here}. A model that Keras has not built yet has none: call `build` first. Some metrics create "
                    "theirs at their first update."
                )
        known = saved.get(_CLASS) if isinstance(saved, Mapping) else None
        if not lines and known is not None and "optimizer" in _parts(value) and known != _class_of_optimizer(value):
            lines.append(
                f"{name}: the checkpoint has the state of {known}, but the object is {_class_of_optimizer(value)}."
            )
        return lines

    def restore(self, value: Any, state: Any, name: str) -> None:
        for part, variables in _parts(value).items():
            for variable, saved in zip(variables, state[part], strict=True):
                if isinstance(variable, torch.Tensor):
                    variable.copy_(whole(saved))
                    continue
                # Reading the value may communicate.
                variable.assign(read_like(saved, variable.value) if isinstance(saved, StoredTensor) else saved)

    def holds_shards(self, value: Any) -> bool:
        parts = [variables for part, variables in _parts(value).items() if part in ("weights", "optimizer")]
        return any(is_sharded(each.value) for variables in parts for each in variables)


def _class_of_optimizer(value: Any) -> str:
    """Return the name of Keras's own class of an optimizer, or of the one that a model was compiled with."""
    optimizer = value if not hasattr(value, "weights") else value.optimizer
    return next((cls.__name__ for cls in type(optimizer).__mro__ if cls.__module__.startswith("keras.")), "")


def _tensor(variable: Any) -> Any:
    """Return the tensor of a variable, or a buffer itself."""
    return variable if isinstance(variable, torch.Tensor) else variable.value


def _parts(value: Any) -> dict[str, Sequence[Any]]:
    """Return the variables of a model, of its optimizer, and the buffers of its torch modules; or those of an object.

    The optimizer is the one that the model was compiled with.
    """
    if hasattr(value, "apply_gradients"):
        return {"optimizer": value.variables}
    if not hasattr(value, "weights"):
        # A seed generator has a single variable, and a variable is one itself.
        return {"variables": value.variables if hasattr(value, "variables") else [getattr(value, "state", value)]}
    optimizer, buffers = getattr(value, "optimizer", None), buffers_in(value)
    further = {"optimizer": optimizer.variables if optimizer is not None else None, _BUFFERS: buffers or None}
    return {"weights": value.weights} | {part: each for part, each in further.items() if each is not None}


KERAS_OBJECTS = _KerasObjects()
