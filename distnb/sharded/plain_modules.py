"""Modules without the attributes, hooks and classes that sharding has added to them."""

from __future__ import annotations

import copy
from typing import Any

import torch

from distnb.compat import fsdp_internals

__all__ = ["plain_attributes", "release"]

_HOOKS = {
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_backward_pre_hooks": (),
    "_backward_hooks": (),
    "_state_dict_hooks": (),
    "_state_dict_pre_hooks": (),
    "_load_state_dict_pre_hooks": (),
    "_load_state_dict_post_hooks": (),
}
"""The tables of hooks in a module, each with the tables of facts about its hooks."""


def plain_attributes(module: torch.nn.Module, room: str = "distnb.sharded.") -> dict[str, Any]:
    """Return a module's attributes without FSDP's, and with copies of the tables of hooks.

    The hooks of FSDP are left out, and those of distnb's modules whose names begin with `room`.
    """
    attributes = {key: value for key, value in vars(module).items() if not fsdp_internals.is_fsdps_attribute(key)}
    for name in {*_HOOKS, *(each for facts in _HOOKS.values() for each in facts)} & attributes.keys():
        attributes[name] = copy.copy(attributes[name])
    _remove_hooks(attributes, room)
    return attributes


def release(root: torch.nn.Module) -> None:
    """Remove FSDP from a model. Its parameters stay shards."""
    for module in list(root.modules()):
        _remove_hooks(vars(module), "distnb.sharded.")
        fsdp_internals.remove(module)


def _remove_hooks(attributes: dict[str, Any], room: str) -> None:
    for name, facts in _HOOKS.items():
        hooks = attributes.get(name, {})
        for key, hook in list(hooks.items()):
            function = getattr(hook, "hook", hook)
            if fsdp_internals.is_fsdps_hook(function) or (getattr(function, "__module__", "") or "").startswith(room):
                del hooks[key]
                for fact in facts:
                    attributes.get(fact, {}).pop(key, None)
