"""Keras's global settings and symbolic tensors, as far as the core knows them. Importing this does not import Keras.

Keras keeps the dtype policy and the random seeds for each thread, and makes them when they are first asked for. Reading
them here must make neither: `set_floatx` has no effect on the policy of new layers once there is one.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from typing import Any

from distnb.compat.versions import private_names

__all__ = [
    "make_input",
    "read_random_state",
    "read_settings",
    "reduce_input",
    "write_random_state",
    "write_settings",
]

_DEFAULTS: dict[str, Any] = {
    "floatx": "float32",
    "epsilon": 1e-7,
    "image_data_format": "channels_last",
    "dtype_policy": None,
    "flash_attention": None,
    "max_epochs": None,
    "max_steps_per_epoch": None,
}
_KEPT = {"flash_attention"}  # read and set as they are; the other settings have functions


def read_settings() -> dict[str, Any]:
    """Return the settings that differ from Keras's defaults, as plain data."""
    keras = _keras()
    if keras is None:
        return {}
    settings = {name: _attribute(name) if name in _KEPT else _read(keras, name) for name in _DEFAULTS}
    return {name: value for name, value in settings.items() if value != _DEFAULTS[name]}


def write_settings(settings: dict[str, Any]) -> None:
    """Set Keras's settings to a result of `read_settings` in another process. Do nothing if Keras is not installed."""
    keras = _keras() or _imported()
    if keras is None:
        return
    for name, value in {**_DEFAULTS, **settings}.items():
        if name in _KEPT or (name == "dtype_policy" and value is None):
            _set_attribute(name, value)
        elif name == "dtype_policy":
            policy = value if isinstance(value, str) else keras.dtype_policies.deserialize(value)
            keras.config.set_dtype_policy(policy)
        else:
            getattr(keras.config, f"set_{name}")(value)


def _read(keras: Any, name: str) -> Any:
    if name != "dtype_policy":
        return getattr(keras.config, name)()
    policy = _attribute(name)
    if policy is None or (type(policy) is keras.dtype_policies.DTypePolicy and policy.name == keras.config.floatx()):
        return None  # as for a program that has made no layer yet
    is_plain = type(policy) is keras.dtype_policies.DTypePolicy
    return policy.name if is_plain else keras.dtype_policies.serialize(policy)


def read_random_state() -> tuple[int | None, tuple[int, ...] | None]:
    """Return the seed of `keras.utils.set_random_seed`, and the state of the generator of `keras.random` for calls
    without a seed. They are None if there are none.
    """
    keras = _keras()
    if keras is None or keras.config.backend() != "torch":
        return None, None
    generator = _attribute("global_seed_generator")
    state = None if generator is None else tuple(int(each) for each in generator.state.value)
    return _attribute("global_random_seed"), state


def write_random_state(found: tuple[int | None, tuple[int, ...] | None]) -> None:
    """Set Keras's random state to a result of `read_random_state` in another process, if Keras is installed."""
    keras = _keras() or _imported()
    if keras is None:
        return
    seed, state = found
    _set_attribute("global_random_seed", seed)
    generator = _attribute("global_seed_generator")
    if state is not None and generator is None:
        generator = keras.random.SeedGenerator(0)
        generator._initial_seed = None
    if state is not None:
        generator.state.assign(state)
    _set_attribute("global_seed_generator", None if state is None else generator)


def reduce_input(obj: Any) -> Any:
    """Reduce a `keras.Input` for pickling, without a name that Keras made, because it counts the objects of a process.

    Return None for an output of layers, which is a part of a graph that is not sent. Return the object itself if it has
    no history.
    """
    history = getattr(obj, "_keras_history", None)
    if history is None:
        return obj
    layer = history.operation
    if not isinstance(layer, _keras().layers.InputLayer):
        return None
    config = layer.get_config()
    if re.fullmatch(r"input_layer(_\d+)?", config["name"]):
        del config["name"]
    return make_input, (config,)


def make_input(config: dict[str, Any]) -> Any:
    """Return a `keras.Input` that was reduced."""
    return _imported().layers.InputLayer.from_config(config).output


def _keras() -> Any:
    """Return Keras, or None if it is not loaded completely."""
    return sys.modules.get("keras") if "keras.src.backend.common.global_state" in sys.modules else None


def _imported() -> Any:
    try:
        return importlib.import_module("keras")
    except ImportError:
        return None


def _attribute(name: str) -> Any:
    return _global_state().get_global_attribute(name)


def _set_attribute(name: str, value: Any) -> None:
    _global_state().set_global_attribute(name, value)


@functools.cache
def _global_state() -> Any:
    with private_names("keras"):
        return importlib.import_module("keras.src.backend.common.global_state")
