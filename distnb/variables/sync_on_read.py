"""Variables whose replicas' components are aggregated when they are read in cross-replica context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from distnb.errors import CollectiveMismatchError, ContextError, OptionError
from distnb.options import VariableAggregation
from distnb.values.structure import map_structure
from distnb.variables.homes import Home, homes
from distnb.variables.variable import Variable, component_of, is_fact

__all__ = ["SyncOnReadVariable"]


class SyncOnReadVariable(Variable):
    """A variable made with synchronization=ON_READ; see `Variable`."""

    def _seen(self, method: str) -> torch.Tensor:
        home = homes.of(self._strategy)
        own = component_of(self)
        if home.in_replica(writing=False) or home.alone:
            return own
        try:
            return self._aggregate(home, own, method)
        except CollectiveMismatchError as error:
            error.add_note(
                f"{method} of {self._settings.label} outside strategy.run brings the replicas' components together, so "
                "all replicas read it. To use the value on one of them, read it before `if distnb.is_chief():`."
            )
            raise

    def _from_replica(self, home: Home, value: torch.Tensor, method: str) -> torch.Tensor:
        return value

    def _from_outside(self, home: Home, value: torch.Tensor, method: str) -> torch.Tensor:
        if self.aggregation is not VariableAggregation.SUM or home.num_replicas == 1:
            return value
        if method != "assign":
            raise ContextError(
                f"{method} of {self._settings.label} in cross-replica context: it is the sum of the replicas' "
                "components, and each of them would change. Call it in the function that strategy.run calls, or "
                "assign the new sum."
            )
        return _share(value, home.num_replicas, self._settings.label)

    # In torch's operations ------------------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls, function: Any, _types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        if is_fact(function, name):
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        target = args[0] if args else kwargs.get("tensor")  # as torch.nn.init's functions call it
        if _changes(name) and isinstance(target, SyncOnReadVariable) and not _has_one_component(target):
            return _change(target, function, name, args, kwargs)
        if _changes(name) and isinstance(target, (list, tuple)):  # as torch._foreach_add_ is given them
            for each in target:
                if isinstance(each, SyncOnReadVariable) and not _has_one_component(each):
                    raise _refused(each, name)
        if isinstance(out := kwargs.get("out"), SyncOnReadVariable) and not _has_one_component(out):
            raise _refused(out, f"{name} with out=variable")
        args, kwargs = map_structure(lambda leaf: _as_seen(leaf, name), (tuple(args), kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)


def _share(value: torch.Tensor, num_replicas: int, label: str) -> torch.Tensor:
    """What each replica takes of a sum."""
    if value.is_floating_point() or value.is_complex():
        return value / num_replicas
    if bool((value % num_replicas).any()):
        raise OptionError(
            f"assign of {label} in cross-replica context: {value.tolist()} is to be the sum of {num_replicas} whole "
            "numbers that are equal, and cannot. Make the variable of floating-point numbers, or assign a multiple of "
            "strategy.num_replicas_in_sync."
        )
    return value // num_replicas


def _as_seen(leaf: Any, name: str) -> Any:
    if not isinstance(leaf, SyncOnReadVariable):
        if isinstance(leaf, Variable):
            homes.of(leaf._strategy).in_replica(writing=False)  # raises where another strategy is in force
        return leaf
    # What changes it in a replica is given the variable itself, and returns it.
    return leaf if _changes(name) else leaf._seen(name)


def _has_one_component(variable: SyncOnReadVariable) -> bool:
    home = homes.of(variable._strategy)
    return home.in_replica(writing=True) or home.alone


_IN_PLACE = frozenset({"iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor"})


def _changes(name: str) -> bool:
    if name.startswith("__"):
        return name in ("__set__", "__setitem__", "__delete__") or (name[2] == "i" and name[2:-2] in _IN_PLACE)
    return name.endswith("_")


def _change(
    variable: SyncOnReadVariable, function: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """A change in cross-replica context: the few that say what the whole variable becomes."""
    if name == "copy_":
        return variable.assign(args[1])
    if name == "zero_":
        return variable.assign(0)
    if name == "fill_":
        return variable.assign(args[1])
    owner = getattr(function, "__self__", None)
    if name in ("__set__", "__delete__"):
        attribute = getattr(owner, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            if attribute != "data":
                return function(*args, **kwargs)
            # As `module.to(...)` does: the whole value, converted or moved.
            variable.data = variable._from_outside(homes.of(variable._strategy), args[1], "assign")
            return None
    raise _refused(variable, name)


def _refused(variable: SyncOnReadVariable, what: str) -> ContextError:
    return ContextError(
        f"{what} of {variable._settings.label} in cross-replica context would change each replica's component. Use "
        "assign, which sets the whole variable, or call it in the function that strategy.run calls."
    )
