"""Shards in the objects of other libraries. The modules for Keras are loaded once it is used on replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from distnb.runtime.scopes import foreign_libraries

__all__ = ["modules_in", "put_parameters", "shards_in", "whole_copy"]


def modules_in(value: torch.nn.Module) -> list[torch.nn.Module] | None:
    """Return the torch modules that a layer of another library wraps, or None for an ordinary torch module.

    Raises:
        ContextError: The layer has parameters outside them.
    """
    if not foreign_libraries.is_prepared("keras"):
        return None
    from distnb.sharded.keras import torch_layers

    return torch_layers.modules_in(value)


def put_parameters(layer: torch.nn.Module, current: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace the parameters that a library keeps for the torch modules in its layer, after they were replaced there.

    Args:
        layer: The layer.
        current: Returns the parameter in place of another one.
    """
    from distnb.sharded.keras import torch_layers

    torch_layers.put_parameters(layer, current)


def shards_in(value: Any) -> list[torch.Tensor]:
    """Return the sharded tensors in an object of another library; an empty list for any other object."""
    if not foreign_libraries.is_prepared("keras"):
        return []
    from distnb.sharded.keras import whole_models

    return whole_models.shards_in(value)


def whole_copy(value: Any) -> Any:
    """Return a copy of another library's object with whole tensors in place of shards, which can be pickled.

    All replicas call this, and replica 0 gets the content. Return None for any other object.
    """
    if not foreign_libraries.is_prepared("keras"):
        return None
    from distnb.sharded.keras import whole_models

    return whole_models.whole_copy(value)
