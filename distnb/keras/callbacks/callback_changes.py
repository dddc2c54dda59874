"""Changes of a model by callbacks, which run on replica 0: the other replicas make the same changes.

A change is a new value of a variable, of a plain attribute of the model, a layer, an optimizer or a loss (such as
`trainable`, a rate of dropout, or a factor of the user's), or of an entry in a list or dict that is such an attribute.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import torch

from distnb.checkpoint.tensor_slices import is_sharded
from distnb.errors import ContextError
from distnb.keras import keras_internals
from distnb.keras.model_state import State, fill, state_of
from distnb.runtime import contexts
from distnb.runtime.scopes.registration import Registration

__all__ = ["MIRRORED", "Changes", "ModelBefore", "make_changes", "parts_of"]

MIRRORED = "mirrored"
"""The first part of the keys of variables that do not belong to the model."""

_MISSING: Any = object()
_SCALARS = (bool, int, float, complex, str, bytes, type(None), np.generic)
_CONTAINERS = (list, dict, set, np.ndarray)
# Attributes without a meaning for the training, which evaluating and predicting in a callback may set, too.
_OF_LOOPS = {"train_function", "test_function", "predict_function", "history", "stop_evaluating", "stop_predicting"}
_OF_LOOPS |= {"stop_training"}  # shared with the end of each call
_PRIVATE = {"_trainable", "_learning_rate"}


@dataclass
class Changes:
    """Changes of a model.

    Attributes:
        tensors: The new values by their keys.
        trained: Whether tensors get gradients, by their keys, where that has changed.
        attributes: Pickled attributes, by the place of their object in `_objects` and their name.
    """

    tensors: State = field(default_factory=dict)
    trained: Mapping[Any, bool] = field(default_factory=dict)
    attributes: Mapping[tuple[int, str], bytes] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.tensors or self.trained or self.attributes)


class ModelBefore:
    """A model's state before callbacks run, on the replica where they run.

    Args:
        model: The model.
        registration: The registration of its strategy, which knows further variables.
    """

    def __init__(self, model: Any, registration: Registration) -> None:
        self._model = model
        self._tensors = {key: (each, *_state(each)) for key, each in _tensors(model, registration).items()}
        self._objects = _objects(model)
        self._attributes = [dict(vars(each)) for each in self._objects]
        self._contents = [_contents(attributes) for attributes in self._attributes]

    def changes(self) -> Changes:
        """Return the changes since then.

        Raises:
            ContextError: There are changes that the other replicas cannot make.
        """
        if list(map(id, _objects(self._model))) != list(map(id, self._objects)):
            raise ContextError(
                f"A callback added or removed layers or variables of {self._model.name}, and callbacks run on replica "
                "0 alone. Change the model's parts before or after model.fit, where every replica does it."
            )
        tensors, trained = {}, {}
        for key, (tensor, version, requires_grad) in self._tensors.items():
            if _state(tensor)[0] != version:
                if is_sharded(tensor):
                    contexts.require_all_replicas()  # raises
                tensors[key] = tensor.detach().cpu()
            if tensor.requires_grad != requires_grad:
                trained[key] = tensor.requires_grad
        attributes: dict[tuple[int, str], bytes] = {}
        for place, value in enumerate(self._objects):
            attributes |= {(place, name): content for name, content in self._changed_attributes(place, value)}
        return Changes(tensors, trained, attributes)

    def _changed_attributes(self, place: int, value: Any) -> list[tuple[str, bytes]]:
        before, contents, now = self._attributes[place], self._contents[place], vars(value)
        changed = [name for name, each in now.items() if before.get(name, _MISSING) is not each and _counts(name)]
        packed = []
        for name in changed:
            content = _packed(now[name])
            if content is not None:
                packed.append((name, content))
            elif name in before:
                raise ContextError(
                    f"A callback set {name!r} of {type(value).__name__} {getattr(value, 'name', '')!r} to a "
                    f"{type(now[name]).__name__}, and callbacks run on replica 0 alone. The other replicas take over "
                    "new values of variables, numbers, strings, arrays, and lists and dicts of these. Make other "
                    "changes before or after model.fit, where every replica makes them."
                )
        mutable = _contents({name: now[name] for name in contents if name not in changed and name in now})
        return packed + [(name, content) for name, content in mutable.items() if content != contents[name]]


def make_changes(model: Any, registration: Registration, changes: Changes) -> None:
    """Change this replica's model as the callbacks on replica 0 changed theirs."""
    here = _tensors(model, registration)
    for key, value in changes.tensors.items():
        fill(here[key], value)
    objects = _objects(model)
    for (place, name), content in changes.attributes.items():
        value, own = pickle.loads(content), objects[place]
        current = vars(own).get(name)
        if isinstance(current, dict) and isinstance(value, dict):
            current.clear()
            current.update(value)
        elif isinstance(current, list) and isinstance(value, list):
            current[:] = value
        elif name in _PRIVATE:
            vars(own)[name] = value
        else:
            setattr(own, name, value)
    for key, trained in changes.trained.items():
        here[key].requires_grad_(trained)


def _tensors(model: Any, registration: Registration) -> dict[Any, torch.Tensor]:
    """Return the tensors of a model, and the others that its strategy keeps equal, by keys equal on all replicas."""
    found: dict[Any, torch.Tensor] = dict(state_of(model))
    known = {id(each) for each in found.values()}
    for key, parameter in registration.mirrored().items():
        if id(parameter) not in known:
            found[MIRRORED, key] = parameter
    return found


def _state(tensor: torch.Tensor) -> tuple[int, bool]:
    """Return a tensor's version, which any write changes, and whether the tensor gets gradients."""
    return -1 if tensor.is_inference() else tensor._version, tensor.requires_grad


def _objects(model: Any) -> list[Any]:
    """Return the objects whose attributes decide how a model is trained, in an order that is equal on all replicas."""
    layers = [*keras_internals.with_layers(model)]
    modules = [each.module for each in layers if isinstance(each, keras.layers.TorchModuleWrapper)]
    optimizers = [getattr(model, "optimizer", None)]
    optimizers.append(getattr(optimizers[0], "inner_optimizer", None))
    losses = [each for each in keras.tree.flatten(getattr(model, "loss", None)) if isinstance(each, keras.losses.Loss)]
    found = [*layers, *(part for module in modules for part in module.modules()), *model.weights, *optimizers, *losses]
    return list({id(each): each for each in found if each is not None}.values())


def parts_of(model: Any) -> list[Any]:
    """Return the objects that belong to a model, in an order that is equal on all replicas."""
    symbolic = [
        *keras.tree.flatten(getattr(model, "inputs", None)),
        *keras.tree.flatten(getattr(model, "outputs", None)),
    ]
    found = [*_objects(model), *model.metrics, *model.variables, *symbolic]
    return list({id(each): each for each in found if each is not None}.values())


def _counts(name: str) -> bool:
    return (not name.startswith("_") and name not in _OF_LOOPS) or name in _PRIVATE


def _contents(attributes: Mapping[str, Any]) -> dict[str, bytes]:
    """Pickle the public attributes that can be changed in place, and have plain contents."""
    found = {
        name: _packed(each) for name, each in attributes.items() if isinstance(each, _CONTAINERS) and _counts(name)
    }
    return {name: content for name, content in found.items() if content is not None}


def _packed(value: Any) -> bytes | None:
    """Pickle a plain value. Return None for any other value."""
    try:
        return pickle.dumps(_plain(value))
    except TypeError:
        return None


def _plain(value: Any) -> Any:
    """Return a value without Keras's classes of containers. Raise TypeError if it has other than plain values."""
    if isinstance(value, _SCALARS) or (isinstance(value, np.ndarray) and not value.dtype.hasobject):
        return value
    if isinstance(value, dict):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if type(value) is tuple or isinstance(value, list | set | frozenset):
        kind: Any = next(each for each in (tuple, list, set, frozenset) if isinstance(value, each))
        return kind(map(_plain, value))
    raise TypeError(f"a {type(value).__name__} is no plain value")
