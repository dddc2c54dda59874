"""The order and the names of parameters in Keras layers, the same on all replicas."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import keras
import torch

from distnb.keras import keras_internals

__all__ = ["same_everywhere"]

_OF_KERAS = "_torch_params."
_COUNT = re.compile(r"_[0-9]+(?!\w)")
_FUNCTIONAL = re.compile(r"\b_functional\.")


def same_everywhere(module: torch.nn.Module, given: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return a module's named parameters or buffers in an order and by names that are the same on all replicas.

    Keras's names are paths that count the layers made in a process, such as `sequential_1/dense_2/bias`, and the names
    in a copy lack the beginning of the path. A replica that was replaced, or that made further models by itself, has
    other counts. So only the last two parts of the path are kept, without counts, and a running number is added:
    `dense/bias 3`. torch sorts the parameters by name, with `variable_10` before `variable_9`; here they are in the
    order of the layers' variables, which a copy shares.
    """
    layers = [part for part in module.modules() if isinstance(part, keras.Layer)]
    tensors = (keras_internals.tensor_of(variable) for layer in layers for variable in layer.variables)
    places: dict[int, int] = {}
    for tensor in tensors:
        places.setdefault(id(tensor), len(places))
    of_keras, others = {}, []
    for name, value in given:
        before, found, path = name.partition(_OF_KERAS)
        if found:
            # A Sequential's inner functional model lists the same parameters again, once its parameters have been
            # read. Keep one of each.
            before = _FUNCTIONAL.sub("", before)
            of_keras[before, path, id(value)] = before + _COUNT.sub("", "/".join(path.split("/")[-2:])), value
        else:
            others.append((name, value))
    ordered = sorted(of_keras.values(), key=lambda each: places.get(id(each[1]), len(places)))
    return [*others, *((f"{name} {number}", value) for number, (name, value) in enumerate(ordered))]
