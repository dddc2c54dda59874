"""What a checkpoint holds of an object, and giving it back: the same on every replica, and in the notebook."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch.utils.data import DataLoader

from distnb.checkpoint import keras_states
from distnb.errors import CheckpointError, OptionError
from distnb.input.dataset import DistributedDataset
from distnb.runtime.this_process import this_process
from distnb.values import DistributedValues, Mirrored
from distnb.values.structure import map_structure
from distnb.variables.variable import Variable

__all__ = ["check_object", "restore", "state_of"]


def check_object(value: Any, name: str) -> None:
    """Raise OptionError for what has no state that could be taken and given back."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            check_object(each, f"{name}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for number, each in enumerate(value):
            check_object(each, f"{name}[{number}]")
    elif type(value) is Mirrored:
        raise OptionError(
            f"A checkpoint cannot hold {name}: it is a Mirrored, which cannot be restored in place. Give a tensor, or "
            "a distnb.Variable that is made in `with strategy.scope():`."
        )
    elif isinstance(value, DistributedValues) and not isinstance(value, Mirrored):
        raise OptionError(
            f"A checkpoint cannot hold {name}: it is a {type(value).__name__}, whose components differ from replica to "
            "replica. Make models, optimizers and variables in `with strategy.scope():`."
        )
    elif isinstance(value, DataLoader) and not _has_state(value):
        raise OptionError(
            f"A checkpoint cannot hold {name}: a DataLoader does not tell how far it has been read, and the default "
            "strategy leaves it as it is. Distribute it by another one, such as OneDeviceStrategy, or use torchdata's "
            "StatefulDataLoader."
        )
    elif not (isinstance(value, (torch.Tensor, DistributedValues)) or _has_state(value)):
        raise OptionError(
            f"A checkpoint cannot hold {name}: a {type(value).__qualname__} cannot be restored in place. Give modules, "
            "optimizers and what else has state_dict() and load_state_dict(), distnb.Variable, tensors, or dicts and "
            "lists of these."
        )


def _has_state(value: Any) -> bool:
    has_both = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
    return has_both or keras_states.is_of_keras(value)


def state_of(value: Any, name: str) -> Any:
    """A tree of plain values and tensors. All replicas call it: some variables are read together."""
    if isinstance(value, Mapping):
        return {key: state_of(each, f"{name}[{key!r}]") for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [state_of(each, f"{name}[{number}]") for number, each in enumerate(value)]
    if keras_states.is_of_keras(value):
        return keras_states.state_of(value, name)
    if _has_state(value):
        state = _here(value.state_dict(), name)
        return _of_all_pipelines(state) if isinstance(value, DistributedDataset) else state
    return _here(value.read_value() if hasattr(value, "read_value") else _now(value), name)


def _now(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's value; on a coordinator of parameter servers, a parameter is a copy of what they have."""
    servers = this_process.servers
    stored = None if servers is None else servers.stored_of(tensor)
    if stored is None:
        return tensor.detach()
    servers.send_changes()
    return cast("torch.Tensor", servers.read(stored))


def _here(state: Any, name: str) -> Any:
    """What a handle stands for."""
    if not isinstance(state, DistributedValues):
        return state
    if not isinstance(state, Mirrored):
        raise OptionError(
            f"A checkpoint cannot hold {name}: its state differs from replica to replica. Save it in a %%distribute "
            "cell, where each replica gives its own."
        )
    return state.component(state.replica_ids[0])


def _of_all_pipelines(state: Any) -> Any:
    """Where workers read data of their own, each has a state."""
    process = this_process.replica
    if process is None or process.size == 1 or not state["pipelines"]:
        return state
    return {"of_replicas": process.group.all_gather_object(state)}


def restore(value: Any, state: Any, name: str) -> None:
    """Give an object its state back.

    Raises:
        CheckpointError: It is the state of something else.
    """
    if isinstance(value, Mapping):
        if not isinstance(state, Mapping) or not set(value) <= set(state):
            raise CheckpointError(f"The checkpoint has {_told(state)} for {name}, and here is {_told(value)}.")
        for key, each in value.items():
            restore(each, state[key], f"{name}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        if not isinstance(state, list) or len(state) != len(value):
            raise CheckpointError(f"The checkpoint has {_told(state)} for {name}, and here is {_told(value)}.")
        for number, (each, its) in enumerate(zip(value, state, strict=True)):
            restore(each, its, f"{name}[{number}]")
    elif keras_states.is_of_keras(value):
        keras_states.restore(value, state, name)
    elif _has_state(value):
        if not isinstance(state, Mapping):
            raise CheckpointError(f"The checkpoint has {_told(state)} for {name}, and here is what has a state_dict().")
        if keras_states.is_state_of_keras(state):
            raise CheckpointError(f"The checkpoint has a model of Keras for {name}, and here is none.")
        if "of_replicas" in state and isinstance(value, DistributedDataset):
            process = this_process.replica
            states, rank = state["of_replicas"], process.rank if process is not None else 0
            state = states[min(rank, len(states) - 1)]  # it says itself whether it fits
        # A module copies what it is given. An optimizer keeps it, and it lies in the file.
        own = state if isinstance(value, torch.nn.Module) else map_structure(_of_its_own, state)
        value.load_state_dict(own)
    elif not isinstance(state, torch.Tensor):
        raise CheckpointError(f"The checkpoint has {_told(state)} for {name}, and here is a tensor.")
    elif isinstance(value, torch.Tensor) and value.shape != state.shape:
        raise CheckpointError(
            f"The checkpoint has a tensor of shape {list(state.shape)} for {name}, and here is one of shape "
            f"{list(value.shape)}."
        )
    elif isinstance(value, Variable) or hasattr(value, "assign"):
        value.assign(state)
    else:
        value.detach().copy_(state)


def _of_its_own(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _told(state: Any) -> str:
    if isinstance(state, Mapping):
        return f"a dict of {', '.join(map(repr, list(state)[:8]))}"
    return f"a list of {len(state)}" if isinstance(state, (list, tuple)) else f"a {type(state).__name__}"
