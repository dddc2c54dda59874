"""Optimizers whose steps run on the servers, which hold the variables and the optimizers' state."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import cloudpickle
import torch

from distnb.compat import torch_internals
from distnb.errors import ContextError, OptionError, ProgramError
from distnb.runtime import contexts
from distnb.servers.server_messages import Gradient, RowsGradient, SetOptimizer, Shard, StepOptimizer
from distnb.servers.variables.copies import same_value
from distnb.servers.variables.here import servers_here
from distnb.servers.variables.server_variable import ServerVariable
from distnb.servers.variables.shard_placement import Stored
from distnb.variables.elementwise import is_elementwise, not_known_elementwise

__all__ = [
    "RemoteSteps",
    "by_part",
    "changed_option",
    "check_options",
    "check_parts",
    "described",
    "is_remote",
    "joined",
    "make_remote",
    "opened",
    "piece_of_state",
    "will_be_remote",
]

_numbers = itertools.count(1)
_NOT_SENT = frozenset(
    {"state", "param_groups", "defaults", "_remote", "_loaded", "step"}
)  # `step`: learning rate schedules set a wrapper of it as an attribute


@dataclass(frozen=True)
class _ServerSide:
    """The identity of an optimizer on the servers."""

    number: int
    groups: tuple[tuple[Stored, ...], ...]

    @property
    def servers(self) -> tuple[int, ...]:
        return tuple(sorted({part.server for group in self.groups for stored in group for part in stored.parts}))


class RemoteSteps:
    """The methods that replace an optimizer's own. The optimizer's class becomes a subclass of this one and its own.

    `step` sends this process's gradients to the servers, which update the variables. The servers hold the state, and
    `state_dict` fetches it. Options in `param_groups`, such as the learning rate, are sent with each step.
    """

    _remote: _ServerSide
    _loaded: dict[str, Any] | None = None  # the state loaded in the scope, before the optimizer is on the servers
    _opt_called = True  # workers take the steps; without it, schedules warn that this process has taken none
    param_groups: list[dict[str, Any]]

    @property
    def iterations(self) -> int:
        """The number of steps that the servers have taken with this optimizer for all workers."""
        if not is_remote(self):
            return 0 if self._loaded is None else _steps_in_state(self._loaded)
        return self._steps_in(servers_here.access.optimizers.states(self._remote.number, self._remote.servers))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Send the gradients to the servers, which update the variables, atomically on each server."""
        innermost = contexts.innermost()
        if not is_remote(self) and innermost is not None:  # the scope that makes this optimizer is still open
            innermost[0].runtime.registration.register_made()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients: dict[int, dict[Shard, Gradient]] = {}
        for group, variables in zip(self.param_groups, self._remote.groups, strict=True):
            for parameter, stored in zip(group["params"], variables, strict=True):
                gradient = parameter.grad
                if gradient is None:
                    continue
                wants_sparse = not isinstance(parameter, ServerVariable) or parameter.sparse_gradients
                for (shard, part), piece in by_part(stored, gradient.detach(), wants_sparse):
                    gradients.setdefault(part.server, {})[shard] = piece
        options = tuple(
            {name: value for name, value in group.items() if name != "params"} for group in self.param_groups
        )
        servers = servers_here.access
        servers.optimizers.step(
            {
                server: StepOptimizer(
                    optimizer=self._remote.number, gradients=mine, options=options, seen=servers.copies.versions(mine)
                )
                for server, mine in gradients.items()
            }
        )
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, which is possible only while the optimizer is being made.

        Raises:
            ContextError: The optimizer is already on the servers.
        """
        if hasattr(self, "_remote"):
            raise ContextError(
                "add_param_group was called on an optimizer that is already on the servers. Create a new optimizer in "
                "strategy.scope(), with all the parameters."
            )
        super().add_param_group(param_group)  # type: ignore[misc]

    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch's format. The states of a variable's shards are joined."""
        if not is_remote(self):
            plain: dict[str, Any] = super().state_dict()  # type: ignore[misc]
            loaded = self._loaded
            return plain if loaded is None else {**plain, "state": loaded["state"], "iterations": self.iterations}
        return torch_internals.call_state_dict_hooks(self, self._state_on_servers)

    def _state_on_servers(self) -> dict[str, Any]:
        states = servers_here.access.optimizers.states(self._remote.number, self._remote.servers)
        kept: dict[Shard, Any] = {shard: each for found in states.values() for shard, each in found["state"].items()}
        variables = [stored for group in self._remote.groups for stored in group]
        state = {}
        for place, stored in enumerate(variables):
            parts = [kept[shard] for shard, _ in stored.shards() if kept.get(shard)]
            if parts:
                state[place] = {name: joined(stored, [part[name] for part in parts]) for name in parts[0]}
        numbers = iter(range(len(variables)))
        groups = [
            {
                **{name: value for name, value in group.items() if name != "params"},
                "params": [next(numbers) for _ in its],
            }
            for group, its in zip(self.param_groups, self._remote.groups, strict=True)
        ]
        return {"state": state, "param_groups": groups, "iterations": self._steps_in(states)}

    @staticmethod
    def _steps_in(states: dict[int, Any]) -> int:
        return max((found["steps"] for found in states.values()), default=0)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned, from an optimizer of such a strategy or from a plain one.

        In the scope that makes the optimizer, the state is kept here and sent to the servers when the scope ends.

        Raises:
            ValueError: The state belongs to an optimizer with other parameter groups.
        """
        torch_internals.call_load_hooks(self, state_dict, self._load)

    def _load(self, state_dict: dict[str, Any]) -> None:
        groups = state_dict["param_groups"]
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in self.param_groups]:
            raise ValueError("loaded state dict contains other parameter groups than this optimizer has")
        for own, given in zip(self.param_groups, groups, strict=True):
            own.update((name, value) for name, value in given.items() if name != "params")
        if is_remote(self):
            self._give_to_servers(state_dict)
        else:
            self._loaded = state_dict

    def _give_to_servers(self, state_dict: dict[str, Any]) -> None:
        variables = [stored for group in self._remote.groups for stored in group]
        groups = state_dict["param_groups"]
        names = [name for group in groups for name in group["params"]]
        by_server: dict[int, dict[Shard, Any]] = {server: {} for server in self._remote.servers}
        for name, stored in zip(names, variables, strict=True):
            kept = state_dict["state"].get(name, {})
            for shard, part in stored.shards():
                by_server[part.server][shard] = {
                    key: piece_of_state(stored, part, value) for key, value in kept.items()
                }
        steps = _steps_in_state(state_dict)
        servers_here.access.optimizers.set_states(
            {server: SetOptimizer(self._remote.number, state, steps) for server, state in by_server.items()}
        )


def by_part(stored: Stored, gradient: torch.Tensor, wants_sparse: bool) -> Iterable[tuple[Any, Gradient]]:
    """Return the part of a gradient for each part of its variable.

    A sparse gradient may have no rows in a part. That part takes the step all the same.
    """
    if not gradient.is_sparse:
        for each in stored.shards():
            yield each, stored.piece(gradient, each[1]).cpu().contiguous()
        return
    gradient = gradient.coalesce()
    rows, values = gradient.indices()[0].cpu(), gradient.values().cpu()
    for each in stored.shards():
        part = each[1]
        first, last = 0, len(rows)
        if len(stored.parts) > 1:
            first, last = torch.searchsorted(rows, torch.tensor([part.first, part.last])).tolist()
        yield each, RowsGradient(rows[first:last] - part.first, values[first:last], wants_sparse)


def joined(stored: Stored, parts: Sequence[Any]) -> Any:
    """Join the states of a variable's parts into that of the whole."""
    first = parts[0]
    if not isinstance(first, torch.Tensor):
        return first
    shapes = [stored.part_shape(part) for part in stored.parts]
    by_row = len(shapes) > 1 and [tuple(each.shape) for each in parts] == shapes
    return torch.cat(list(parts)) if by_row else first.clone()


def piece_of_state(stored: Stored, part: Any, value: Any) -> Any:
    """Return a part's share of the state of a whole variable."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return stored.piece(value, part).contiguous() if value.shape == stored.shape else value
    return value


def _steps_in_state(state_dict: dict[str, Any]) -> int:
    """Return the number of steps that an optimizer had taken.

    A plain optimizer's state has the number only if the optimizer counts steps, as Adam does.
    """
    counted = (float(each["step"]) for each in state_dict["state"].values() if "step" in each)
    return int(state_dict["iterations"] if "iterations" in state_dict else max(counted, default=0))


# -- construction ------------------------------------------------------------------------------------------------------


@functools.cache
def _remote_class(cls: Any) -> type:
    return type(
        cls.__name__, (RemoteSteps, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "of": cls}
    )


def is_remote(optimizer: Any) -> bool:
    """Return whether an optimizer's steps are taken on the servers."""
    return isinstance(optimizer, RemoteSteps) and hasattr(optimizer, "_remote")


def will_be_remote(optimizer: Any) -> None:
    """Replace the methods of an optimizer that is made in a scope, before other code can wrap them."""
    cls: Any = type(optimizer)
    optimizer.__class__ = _remote_class(cls)
    torch_internals.patch_step(optimizer)  # makes torch call step hooks, one of which counts training steps


def check_parts(cls: type, variables: Iterable[Stored]) -> None:
    """Raise OptionError if an optimizer of this class may need the whole of a variable that is divided."""
    divided = next((stored for stored in variables if len(stored.parts) > 1), None)
    if divided is not None and not is_elementwise(cls):
        name = f"{divided.name!r}" if divided.name else "a variable"
        raise not_known_elementwise(
            cls,
            f"{name}, which the variable_partitioner divides into {len(divided.parts)} parts",
            "leave the variable whole by another variable_partitioner",
        )


def make_remote(optimizer: Any) -> None:
    """Move the steps of an optimizer that was made in a scope to the servers, which hold its parameters.

    Raises:
        ContextError: Some of its parameters are not on the servers.
        OptionError: It computes the loss several times in each step, as LBFGS does; or it may need a whole variable
            that is divided; or it has another optimizer in it.
    """
    servers = servers_here.access
    if isinstance(optimizer, torch.optim.LBFGS):
        raise OptionError(
            "LBFGS computes the loss several times in each step, but the servers, which take the steps, cannot "
            "compute it. Use another optimizer with ParameterServerStrategy."
        )
    found = [
        [servers.represented.stored_of(parameter) for parameter in group["params"]] for group in optimizer.param_groups
    ]
    if not all(each for group in found for each in group):
        raise ContextError(
            f"This {type(optimizer).__name__} was made in the scope of a ParameterServerStrategy, but some of its "
            "parameters were not. Make the model in the scope too."
        )
    groups = tuple(tuple(stored for stored in group if stored is not None) for group in found)
    check_parts(getattr(type(optimizer), "of", type(optimizer)), itertools.chain(*groups))
    remote = _ServerSide(next(_numbers), groups)
    servers.optimizers.make(remote.number, _factory(optimizer), groups)
    before = optimizer.__dict__.pop("_loaded", None)
    if before is None and optimizer.state and not isinstance(optimizer, torch.optim.Adagrad):
        before = optimizer.state_dict()
    optimizer.state.clear()
    optimizer._remote = remote
    if before is not None:
        optimizer.load_state_dict(before)


def _template(optimizer: Any) -> tuple[type, dict[str, Any], list[dict[str, Any]]]:
    """Return an optimizer's class, its own attributes and its groups' options: all but its parameters and state."""
    cls = getattr(type(optimizer), "of", type(optimizer))
    own = {
        name: value
        for name, value in vars(optimizer).items()
        if name not in _NOT_SENT and torch_internals.is_own_attribute(name)
    }
    inner = next((each for each in own.values() if isinstance(each, torch.optim.Optimizer)), None)
    if inner is not None:
        raise OptionError(
            f"{cls.__name__} is an optimizer around another one ({type(inner).__name__}), whose steps cannot be taken "
            "on parameter servers. Use the inner optimizer alone."
        )
    options = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    return cls, {**own, "defaults": optimizer.defaults}, options


def _built(template: tuple[Any, dict[str, Any], list[dict[str, Any]]], params: Sequence[Sequence[Any]]) -> Any:
    cls, own, options = template
    optimizer = cls.__new__(cls)
    optimizer.__dict__.update(own)
    groups = [{"params": list(mine), **group} for mine, group in zip(params, options, strict=True)]
    optimizer.__setstate__({"defaults": own["defaults"], "state": defaultdict(dict), "param_groups": groups})
    return optimizer


def _factory(optimizer: Any) -> bytes:
    """Return the pickled function that makes a server's optimizer from the parameters of each group."""
    data: bytes = cloudpickle.dumps(functools.partial(_built_on_server, _template(optimizer)))
    return data


def _built_on_server(template: Any, params: Sequence[Sequence[Any]]) -> Any:
    optimizer = _built(template, params)
    if isinstance(optimizer, torch.optim.Adagrad):  # the only torch optimizer that has state before its first step
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                full = torch.full_like(parameter, group["initial_accumulator_value"])
                optimizer.state[parameter] = {"step": torch.tensor(0.0), "sum": full}
    return optimizer


class OpenOptimizer(NamedTuple):
    """An optimizer in the form that is sent to workers. `opened` makes the worker's optimizer from it.

    Attributes:
        number: The optimizer's number on the servers.
        template: The optimizer without its parameters and state.
        groups: The variables of each parameter group.
        params: The parameters of each group.
        hooks: The hooks for steps, which run on the worker.
    """

    number: int
    template: Any
    groups: tuple[tuple[Stored, ...], ...]
    params: list[list[Any]]
    hooks: dict[str, Any]


def opened(sent: OpenOptimizer) -> Any:
    """Return a worker's optimizer, whose steps run on the servers, from the form in which it was sent."""
    optimizer = _built(sent.template, sent.params)
    will_be_remote(optimizer)
    optimizer._remote = _ServerSide(sent.number, sent.groups)
    vars(optimizer).update(sent.hooks)
    return optimizer


def described(optimizer: Any) -> OpenOptimizer:
    """Return an optimizer in the form that is sent to workers."""
    return OpenOptimizer(
        number=optimizer._remote.number,
        template=_template(optimizer),
        groups=optimizer._remote.groups,
        params=[list(group["params"]) for group in optimizer.param_groups],
        hooks=torch_internals.step_hooks(optimizer),
    )


def check_options(optimizer: Any, sent: Sequence[dict[str, Any]]) -> None:
    """Raise ProgramError if a function has changed options of its worker's optimizer, such as the learning rate.

    Args:
        sent: The options of each group that the coordinator has sent with the function.
    """
    for group, options in zip(optimizer.param_groups, sent, strict=True):
        for name, value in group.items():
            if name != "params" and not same_value(value, options.get(name)):
                raise changed_option(type(optimizer).__name__, name, options.get(name), value)


def changed_option(optimizer: str, name: str, before: Any, after: Any) -> ProgramError:
    """Return the error for a function that has changed an option of its worker's optimizer."""
    return ProgramError(
        f"A function changed {name!r} of {optimizer} on a worker, from {before} to {after}. This would be lost: an "
        "optimizer's options are sent from the coordinator with each function. Change them there, where learning rate "
        "schedules step, too; or set them back before the function ends."
    )
