"""The state of callbacks, such as the best value seen: replica 0, where they run, sends it to the others."""

from __future__ import annotations

import functools
import io
import pickle
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

import cloudpickle
import keras
import torch

from distnb.collectives.group.interface import Group
from distnb.keras import keras_internals
from distnb.keras.callbacks.callback_changes import parts_of
from distnb.runtime.reduction.gathering import broadcast_tree

__all__ = ["CallbackStates"]


_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)


class CallbackStates:
    """The states of the callbacks of one loop. All replicas have the same callbacks.

    Args:
        model: The model, to whose parts callbacks may refer.
        callbacks: The callbacks.
        group: The replicas.
    """

    def __init__(self, model: Any, callbacks: Sequence[Any], group: Group) -> None:
        self._model = model
        self._callbacks = callbacks
        self._group = group
        self._before = [_contents(model, each) for each in callbacks] if group.rank == 0 else []

    def share(self) -> None:
        """Set the attributes that have changed on replica 0 on the other replicas, as far as they can be sent."""
        states: Any = None
        if self._group.rank == 0:
            pairs = zip(self._callbacks, self._before, strict=True)
            states = [_changed(self._model, each, before) for each, before in pairs]
        for callback, state in zip(self._callbacks, broadcast_tree(self._group, states, 0), strict=True):
            if self._group.rank:
                opened = {sys.intern(name): _opened(self._model, content) for name, content in state.items()}
                vars(callback).update(opened)


def _changed(model: Any, callback: Any, before: Mapping[str, tuple[Any, bytes]]) -> dict[str, bytes]:
    """Pickle the attributes of a callback that changed. Remove a file that it has closed, such as CSVLogger's.

    The other replicas opened no file, and their callbacks must end up equal. A function that the callback was made with
    has not changed, even if the pickle has, which contains the values that the function reads.
    """
    for name, value in list(vars(callback).items()):
        if isinstance(value, io.IOBase) and value.closed:
            vars(callback)[name] = None
    changed = {}
    for name, (value, content) in _contents(model, callback).items():
        earlier, its_content = before.get(name, (None, b""))
        if content != its_content and not (value is earlier and isinstance(value, _FUNCTIONS)):
            changed[name] = content
    return changed


def _contents(model: Any, callback: Any) -> dict[str, tuple[Any, bytes]]:
    """Return a callback's attributes by name, as far as they can be sent, each with its pickle."""
    contents = {}
    for name, value in vars(callback).items():
        if name in ("_model", "params"):
            continue
        file = io.BytesIO()
        try:
            _StatePickler(file, model).dump(value)
        except Exception:  # noqa: BLE001  # the error of a file or a lock: the attribute stays on replica 0
            continue
        contents[name] = value, file.getvalue()
    return contents


class _StatePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler that sends the parts of a model by their places, and refuses other models."""

    def __init__(self, file: io.BytesIO, model: Any) -> None:
        super().__init__(file)
        self._places = {id(each): place for place, each in enumerate(parts_of(model))}

    def persistent_id(self, obj: Any) -> int | None:
        return self._places.get(id(obj))

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (torch.nn.Module, keras_internals.Saveable, keras.Variable, keras.KerasTensor)):
            raise pickle.PicklingError(f"a {type(obj).__name__} is not sent")
        return super().reducer_override(obj)


class _StateOpener(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, model: Any) -> None:
        super().__init__(file)
        self._parts = parts_of(model)

    def persistent_load(self, place: Any) -> Any:
        return self._parts[place]


def _opened(model: Any, content: bytes) -> Any:
    return _StateOpener(io.BytesIO(content), model).load()
