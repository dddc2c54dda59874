"""The placement of a value on devices, from the replicas' answers and from this process, as models for drawing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from distnb.features import find
from distnb.notebook import compose as sessions
from distnb.notebook.handles.handle import HANDLES, state_of_handle
from distnb.notebook.remote_dataset import RemoteDataset
from distnb.values import structure
from distnb.views.devices_model import DevicesModel
from distnb.views.placement_model import PlacementModel
from distnb.wire.value_facts import Holding

if TYPE_CHECKING:
    from distnb.strategies.base import Strategy

__all__ = ["devices_model", "devices_of", "placement_of", "stored_placement"]

_HERE = "this process"
_STUCK = "An engine is stuck and does not answer (%distnb status)."


def placement_of(value: Any) -> PlacementModel:
    """Return the placement of the tensors of a value.

    Args:
        value: A handle, a module, a dataset, an optimizer, a tensor, or a nested structure of these.

    Raises:
        OptionError: The value has no tensor.
    """
    from distnb.runtime.inspection.holdings import holdings_of, may_hold, no_tensor  # loads torch

    value = value.handle if isinstance(value, RemoteDataset) else value
    found_by_replica: dict[int, list[Holding]] = {}
    size, notes, kinds = 1, [], []
    for path, leaf in zip(structure.paths(value), structure.flatten(value)[0], strict=True):
        leaf = leaf.handle if isinstance(leaf, RemoteDataset) else leaf
        if not isinstance(leaf, HANDLES):
            found_by_replica.setdefault(0, []).extend(
                each._replace(name=_joined(path, each.name), holder=each.holder or _HERE) for each in holdings_of(leaf)
            )
            kinds.append(type(leaf).__name__)
            continue
        state = state_of_handle(leaf)
        state.check(())
        size = leaf.num_replicas
        kinds.append(state.type_name.rsplit(".", 1)[-1])
        found = state.operations.holdings(leaf)
        notes += [_STUCK] if found is None else []
        for replica, holdings in (found or {}).items():
            found_by_replica.setdefault(replica, []).extend(
                each._replace(name=_joined(path, each.name)) for each in holdings
            )
    if not any(found_by_replica.values()) and not notes:
        if not any(isinstance(leaf, HANDLES) or may_hold(leaf) for leaf in structure.flatten(value)[0]):
            raise no_tensor(value)
        notes.append("The value contains no tensor now.")
    kind = kinds[0] if len(set(kinds)) == 1 and not structure.children(value) else type(value).__name__
    title = f"{kind} on {size} replica{'s' * (size != 1)}" if size > 1 else kind
    return PlacementModel.of(title, size, found_by_replica, dict.fromkeys(notes))


def _joined(path: str, name: str) -> str:
    return path if not name else name if not path else f"{path}{'' if name[0] in '.[' else '.'}{name}"


def devices_model(user_ns: Mapping[str, Any], idle: Iterable[str]) -> DevicesModel:
    """Return the devices of the running cluster, with their memory use and the notebook's variables on them.

    Args:
        user_ns: The notebook's variables.
        idle: Devices of this machine, which have a row even if no engine uses them.
    """
    session = sessions.current()
    if session is None:
        return DevicesModel.without_engines(idle)
    return DevicesModel.of(session.status(), session.memory(), {} if session.stuck else _held(user_ns), idle=idle)


def devices_of(strategy: Strategy) -> DevicesModel:
    """Return the devices that a strategy's replicas compute on, with their memory use and the variables on them."""
    devices, session = strategy.worker_devices, sessions.current()
    if session is None or not strategy.needs_engines:
        return DevicesModel.without_engines(devices)
    rows = session.status()
    names = {row.engine: row.task for row in rows}
    if not strategy.is_local:
        names = {engine: f"replica {rank}" for rank, engine in enumerate(session.team(strategy.spec).engines)}
    memory = {engine: each for engine, each in session.memory().items() if engine in names}
    held = {} if session.stuck else _held(session.user_ns)
    return DevicesModel.of([row for row in rows if row.engine in names], memory, held, names)


def stored_placement(strategy: Strategy) -> PlacementModel | None:
    """Return the placement of a strategy's variables that no replica holds; None if it has no such variables."""
    placement = find("placements", strategy.feature)
    model: PlacementModel | None = None if placement is None else placement(strategy)
    return model


def _held(user_ns: Mapping[str, Any]) -> dict[int, dict[str, int]]:
    """Return the size in bytes of each of the notebook's variables on engines, by engine and name."""
    held: dict[int, dict[str, int]] = {}
    for name, value in list(user_ns.items()):
        if name.startswith("_") or type(value) not in HANDLES:
            continue
        state = state_of_handle(value)
        if state.tracked.ended:
            continue
        for replica, nbytes in (state.operations.nbytes(value) or {}).items():
            if nbytes:
                held.setdefault(state.tracked.key.engines[replica], {})[name] = nbytes
    return held
