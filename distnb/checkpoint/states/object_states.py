"""States of trees of objects: saved, compared with the objects, and restored, all or nothing.

In the notebook, objects may be handles. Each step then runs on their replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from distnb.checkpoint.joint_saving import JointSave
from distnb.checkpoint.states.base import Kind, copied, described, listed, outline
from distnb.checkpoint.states.dataset_states import Datasets
from distnb.checkpoint.states.metric_states import Metrics
from distnb.checkpoint.states.module_states import TorchModules
from distnb.checkpoint.states.optimizer_states import Optimizers
from distnb.checkpoint.states.other_states import OtherObjects, has_state
from distnb.checkpoint.states.tensor_states import Tensors
from distnb.checkpoint.tensor_slices import slice_of
from distnb.errors import CheckpointError, CheckpointMismatchError, OptionError
from distnb.runtime.scopes import foreign_libraries
from distnb.values import DistributedValues, Mirrored
from distnb.values.structure import flatten, map_structure

__all__ = [
    "Agree",
    "check_object",
    "handles_of_shards",
    "holds_shards",
    "on_replicas",
    "restore_all",
    "state_of",
    "unused",
    "write_parts_on_replicas",
]

Agree = Callable[[list[str]], list[str]]
"""A function that returns the lines of all replicas on each."""


class _Handles(Kind):
    """Handles. The kind is that of the object, and its methods are called on the replicas."""

    def covers(self, value: Any) -> bool:
        return isinstance(value, Mirrored)

    def state(self, value: Any, name: str) -> Any:
        return _fetched(on_replicas(state_of, value, name), name)

    def misfits(self, value: Any, saved: Any, name: str) -> list[str]:
        lines = on_replicas(_misfits_as_text, value, saved, name)
        return str(lines).split("\n") if lines else []

    def may_fail(self, value: Any) -> bool:
        return bool(on_replicas(_may_fail, value))

    def before(self, value: Any, name: str) -> Any:
        return on_replicas(_before, value, name)  # the copy stays on the replicas

    def restore(self, value: Any, state: Any, name: str) -> None:
        on_replicas(_restore_, value, state, name)

    def holds_shards(self, value: Any) -> bool:
        return bool(on_replicas(holds_shards, value))


_FIRST: tuple[Kind, ...] = (_Handles(), Datasets())
_LAST: tuple[Kind, ...] = (Metrics(), TorchModules(), Optimizers(), Tensors(), OtherObjects())


def _kind_of(value: Any) -> Kind | None:
    """Return the kind of an object. Features add kinds for other libraries ("kinds of states", by the library)."""
    kinds = (*_FIRST, *foreign_libraries.supports("kinds of states"), *_LAST)
    return next((kind for kind in kinds if kind.covers(value)), None)


def _kind(value: Any, name: str) -> Kind:
    kind = _kind_of(value)
    if kind is None:
        raise OptionError(
            f"A checkpoint cannot hold {name}: a {type(value).__qualname__} cannot be restored in place. Give modules, "
            "optimizers and other objects with state_dict() and load_state_dict(), distnb.Variable, tensors, or dicts "
            "and lists of these."
        )
    return kind


def check_object(value: Any, name: str) -> None:
    """Raise OptionError for an object whose state cannot be saved and restored."""
    if _is_tree(value):
        for inner, each in _children(value, name):
            check_object(each, inner)
        return
    if type(value) is Mirrored:
        raise OptionError(
            f"A checkpoint cannot hold {name}: it is a Mirrored, which cannot be restored in place. Give a tensor, or "
            "a distnb.Variable that is made in `with strategy.scope():`."
        )
    if isinstance(value, DistributedValues) and not isinstance(value, Mirrored):
        raise OptionError(
            f"A checkpoint cannot hold {name}: it is a {type(value).__name__}, whose components differ from replica to "
            "replica. Make models, optimizers and variables in `with strategy.scope():`."
        )
    if isinstance(value, DataLoader) and not has_state(value):
        raise OptionError(
            f"A checkpoint cannot hold {name}: a DataLoader does not report how far it has been read, and the default "
            "strategy leaves it as it is. Distribute it with another one, such as OneDeviceStrategy, or use "
            "torchdata's StatefulDataLoader."
        )
    _kind(value, name)


def _is_tree(value: Any) -> bool:
    """Return whether the value is a dict or a list of objects. A handle of one does not count."""
    return isinstance(value, (Mapping, list, tuple)) and not isinstance(value, DistributedValues)


def _children(tree: Any, name: str) -> list[tuple[str, Any]]:
    """Return the objects in a dict or a list, with their names."""
    if isinstance(tree, Mapping):
        return [(f"{name}[{key!r}]" if name else str(key), each) for key, each in tree.items()]
    return [(f"{name}[{number}]", each) for number, each in enumerate(tree)]


def state_of(value: Any, name: str) -> Any:
    """Return a tree of plain values and tensors. All replicas call it, because some variables are read together."""
    if not _is_tree(value):
        return _kind(value, name).state(value, name)
    states = [state_of(each, inner) for inner, each in _children(value, name)]
    return dict(zip(value, states, strict=True)) if isinstance(value, Mapping) else states


def holds_shards(value: Any) -> bool:
    """Return whether a tensor of an object, or of the objects in a tree, is sharded over the replicas."""
    if _is_tree(value):
        return any(holds_shards(each) for _, each in _children(value, ""))
    return _kind(value, "").holds_shards(value)


# -- restoring ---------------------------------------------------------------------------------------------------------


class _Pair(NamedTuple):
    """An object and the state to restore."""

    kind: Kind
    value: Any
    state: Any
    name: str


def restore_all(objects: Mapping[str, Any], states: Mapping[str, Any], path: str, agree: Agree) -> None:
    """Restore the states of all objects, or of none if one does not match.

    Args:
        objects: The objects by name.
        states: The states by name; there may be more.
        path: The path of the checkpoint, for errors.
        agree: A function that gathers lines of all replicas, so that every replica raises if one has to.

    Raises:
        CheckpointMismatchError: A state is missing, or belongs to another object.
        CheckpointError: An object's own code refused its state.
    """
    misfits: list[str] = []
    pairs = list(_paired(objects, states, "", misfits))
    for pair in pairs:
        misfits += pair.kind.misfits(pair.value, outline(pair.state), pair.name)
    lines = agree(misfits)
    if lines:
        raise CheckpointMismatchError(
            f"{path} does not match the objects, and nothing was restored.\n"
            + "\n".join(f"  {line}" for line in lines)
            + "\nMake the objects as they were when it was saved, or restore a Checkpoint of the matching objects. The "
            "tensors are in its safetensors files, under these names."
        )
    doubtful = [pair for pair in pairs if pair.kind.may_fail(pair.value)]
    _restore_doubtful(doubtful, path, agree)
    for pair in pairs:
        if not any(pair is each for each in doubtful):
            pair.kind.restore(pair.value, pair.state, pair.name)


def _misfits(value: Any, saved: Any, name: str) -> list[str]:
    lines: list[str] = []
    for pair in _paired(value, saved, name, lines):
        lines += pair.kind.misfits(pair.value, pair.state, pair.name)
    return lines


def _paired(value: Any, state: Any, name: str, lines: list[str]) -> Iterator[_Pair]:
    """Yield the state of each object in a tree. Add a line for each object without a state."""
    if not _is_tree(value):
        yield _Pair(kind=_kind(value, name), value=value, state=state, name=name)
        return
    if isinstance(value, Mapping):
        keys = list(value)
        lacking = [key for key in keys if not isinstance(state, Mapping) or key not in state]
        if lacking:
            what = "the checkpoint" if not name else f"{name}: the checkpoint"
            lines.append(f"{what} does not hold {listed(lacking)}: it holds {_held(state)}.")
    elif isinstance(state, list) and len(state) == len(value):
        keys, lacking = list(range(len(value))), []
    else:
        lines.append(f"{name}: the checkpoint has {described(state)}, but the object is {described(value)}.")
        return
    for key, (inner, each) in zip(keys, _children(value, name), strict=True):
        if key not in lacking:
            yield from _paired(each, state[key], inner, lines)


def _held(state: Any) -> str:
    return listed(state) if isinstance(state, Mapping) and state else described(state)


def _restore_doubtful(pairs: list[_Pair], path: str, agree: Agree) -> None:
    """Restore objects whose own code may refuse a state. If one does, restore the earlier states of all."""
    if not pairs:
        return
    earlier: list[_Pair] = []
    failure: Exception | None = None
    lines: list[str] = []
    for pair in pairs:
        try:
            earlier.append(pair._replace(state=pair.kind.before(pair.value, pair.name)))
            pair.kind.restore(pair.value, pair.state, pair.name)
        except Exception as error:  # noqa: BLE001 - raised below, once the others know
            failure, lines = error, [f"{pair.name}: {type(error).__name__}: {error}"]
            break
    lines = agree(lines)
    if lines:
        for pair in reversed(earlier):
            pair.kind.restore(pair.value, pair.state, pair.name)
        raise CheckpointError(
            f"{path} could not be restored, and nothing was changed. " + "\n".join(lines)
        ) from failure


def unused(objects: Any, states: Any, name: str = "") -> list[str]:
    """Return the names in a checkpoint without an object."""
    if not (_is_tree(objects) and isinstance(objects, Mapping) and isinstance(states, Mapping)):
        return []
    found = [inner for (inner, _), key in zip(_children(states, name), states, strict=True) if key not in objects]
    for (inner, each), key in zip(_children(objects, name), objects, strict=True):
        found += unused(each, states.get(key), inner)
    return found


# -- on the replicas of a handle's object
# -------------------------------------------------------------------------------


def on_replicas(function: Callable[..., Any], handle: Any, *others: Any) -> Any:
    """Call a function of distnb with a handle's object on the replicas."""
    return handle._on_replicas(function, *others)


def handles_of_shards(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return the objects in the notebook that are sharded over replicas: handles, and trees of handles."""
    if not any(isinstance(each, Mirrored) for each in flatten(objects)[0]):
        return {}
    return {name: each for name, each in objects.items() if holds_shards(each)}


def write_parts_on_replicas(objects: dict[str, Any], unfinished: Path) -> tuple[dict[str, Any], Any]:
    """Have the replicas write the parts of objects. Return the facts of each, and the description of the states."""
    handle = next(each for each in flatten(objects)[0] if isinstance(each, Mirrored))
    parts, described = on_replicas(_write_parts, handle, objects, str(unfinished))
    return dict(parts), described


def _write_parts(_handle: Any, objects: Mapping[str, Any], unfinished: str) -> tuple[dict[str, Any], Any]:
    states = {name: state_of(value, name) for name, value in objects.items()}
    save = JointSave(map_structure(slice_of, states), others=1)
    save.begin("", unfinished)
    return save.write_parts()


def _fetched(state: Any, name: str) -> Any:
    """Replace the handles in an object's state by their content."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, DistributedValues) and not isinstance(leaf, Mirrored):
            raise OptionError(
                f"A checkpoint cannot hold {name}: its state differs from replica to replica. Save it in a "
                "%%distribute cell, where each replica saves its own."
            )
        return leaf.component(leaf.replica_ids[0]) if isinstance(leaf, Mirrored) else leaf

    return one(state) if isinstance(state, DistributedValues) else map_structure(one, state)


def _misfits_as_text(value: Any, saved: Any, name: str) -> str:
    return "\n".join(_misfits(value, saved, name))


def _may_fail(value: Any) -> bool:
    if _is_tree(value):
        return any(_may_fail(each) for _, each in _children(value, ""))
    return _kind(value, "").may_fail(value)


def _before(value: Any, name: str) -> Any:
    if _is_tree(value):
        return map_structure(copied, state_of(value, name))
    return _kind(value, name).before(value, name)


def _restore_(value: Any, state: Any, name: str) -> None:
    """Restore. As in torch, the trailing underscore declares that the first argument is changed in place."""
    for pair in _paired(value, state, name, []):
        pair.kind.restore(pair.value, pair.state, pair.name)
