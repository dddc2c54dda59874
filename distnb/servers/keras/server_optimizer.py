"""Keras's optimizers with parameter servers: each server has the same optimizer, for the variables that it holds."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import cloudpickle
import keras
import torch

from distnb.errors import CannotTravelError, ContextError, OptionError
from distnb.keras import keras_internals
from distnb.servers.coordinator.libraries import ResourceDescription
from distnb.servers.server_messages import Gradient, SetOptimizer, Shard, StepOptimizer
from distnb.servers.variables import remote_optimizer
from distnb.servers.variables.here import servers_here
from distnb.servers.variables.shard_placement import Stored

__all__ = ["RemoteApply", "check_options", "described", "make_remote", "set_options"]

_ITERATION = "iteration"
_PLAIN = (bool, int, float, type(None))
# These need all gradients, which only the worker has.
_ON_WORKERS = ("clipnorm", "global_clipnorm", "clipvalue", "loss_scale_factor")

# -- a server ----------------------------------------------------------------------------------------------------------


class _Variable(NamedTuple):
    """The properties of a variable that an optimizer uses, except its value."""

    name: str
    constraint: Any
    decays: bool


class OnServer:
    """A Keras optimizer on a server, for some shards. To the server it looks like one of torch's.

    There is one group for each variable. The options of the first one are the optimizer's.
    """

    def __init__(self, cls: Any, config: dict[str, Any], kinds: Sequence[_Variable], groups: list[list[Any]]) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": list(group)} for group in groups]
        self._optimizer = cls.from_config(
            {name: None if name in _ON_WORKERS else each for name, each in config.items()}
        )
        self._set: dict[str, Any] = {}
        shown = [(kind, each) for kind, group in zip(kinds, groups, strict=True) for each in group]
        with keras.device("cpu"):
            self._variables = {each: _wrapped(each, kind) for kind, each in shown}
            variables = list(self._variables.values())
            keras_internals.fix_decays(
                self._optimizer, {id(each): kind.decays for each, (kind, _) in zip(variables, shown, strict=True)}
            )
            kept = _built(self._optimizer, variables)
        self.state = _ParameterState(self._optimizer, self._variables, kept)

    def step(self) -> None:
        """Update the variables that have gradients."""
        for name, value in self.param_groups[0].items():
            if name != "params" and self._set.get(name, self) != value:
                setattr(self._optimizer, name, value)
                self._set[name] = value
        ready = [each for parameter, each in self._variables.items() if parameter.grad is not None]
        with torch.no_grad(), keras.device("cpu"):
            self._optimizer.apply([each.value.grad for each in ready], ready)


def _wrapped(parameter: torch.nn.Parameter, kind: _Variable) -> Any:
    variable = keras.Variable(parameter, dtype=str(parameter.dtype).removeprefix("torch."), name=kind.name)
    keras_internals.put_tensor(variable, parameter)
    variable.constraint = kind.constraint
    return variable


class _ParameterState(MutableMapping[torch.nn.Parameter, Mapping[str, Any]]):
    """The optimizer's state for each parameter, by name, together with its state for all parameters."""

    def __init__(self, optimizer: Any, variables: Mapping[Any, Any], kept: Mapping[int, Mapping[str, Any]]) -> None:
        self._variables = variables
        self._kept = kept
        self._of_all = _of_all(optimizer, kept)

    def _of(self, parameter: torch.nn.Parameter) -> dict[str, Any]:
        return {**self._kept[id(self._variables[parameter])], **self._of_all}

    def __getitem__(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        return {name: each.value.detach() for name, each in self._of(parameter).items()}

    def __setitem__(self, parameter: torch.nn.Parameter, values: Mapping[str, Any]) -> None:
        own = self._of(parameter)
        for name, value in values.items():
            own[name].assign(value)

    def __delitem__(self, parameter: torch.nn.Parameter) -> None:
        """Do nothing: the next assignment replaces the state."""

    def __iter__(self) -> Iterator[torch.nn.Parameter]:
        return iter(self._variables)

    def __len__(self) -> int:
        return len(self._variables)


def _built(optimizer: Any, variables: list[Any]) -> dict[int, dict[str, Any]]:
    """Build an optimizer. Return its state for each variable (by identity), by name."""
    kept: dict[int, dict[str, Any]] = {id(each): {} for each in variables}
    plain = optimizer.add_variable_from_reference

    @functools.wraps(plain)
    def noting(reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
        made = plain(reference_variable, *args, **kwargs)
        own = kept[id(reference_variable)]
        own[f"{kwargs.get('name') or (args[0] if args else None) or 'variable'} {len(own)}"] = made
        return made

    vars(optimizer)["add_variable_from_reference"] = noting
    try:
        optimizer.build(variables)
    finally:
        del vars(optimizer)["add_variable_from_reference"]
    return kept


def _of_all(optimizer: Any, kept: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return an optimizer's state for all variables together: its count of steps, and other numbers."""
    counted = {id(each) for own in kept.values() for each in own.values()} | {
        id(keras_internals.learning_rate_of(optimizer))
    }
    rest = [each for each in keras_internals.optimizer_variables(optimizer) if id(each) not in counted]
    if any(tuple(each.shape) for each in rest):
        raise OptionError(
            f"{type(optimizer).__name__} keeps tensors that do not have the shape of a variable, so distnb cannot tell "
            "which of them each parameter server needs. Use an optimizer such as Adam, RMSprop or SGD."
        )
    steps = keras_internals.iterations_of(optimizer)
    others = [each for each in rest if each is not steps]
    return {_ITERATION: steps, **{f"of all {place}": each for place, each in enumerate(others)}}


# -- the coordinator and workers ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _KerasServerSide:
    """The servers' counterpart of an optimizer.

    Attributes:
        number: The number of the optimizer on the servers.
        stored: The variables that it was built with, in order.
        places: For the position of each variable, the positions of its state in the optimizer's `variables`, by name.
            Position -1 has those of the state for all variables.
    """

    number: int
    stored: tuple[Stored, ...]
    places: Mapping[int, Mapping[str, int]]

    @property
    def servers(self) -> tuple[int, ...]:
        return tuple(sorted({part.server for stored in self.stored for part in stored.parts}))


class RemoteApply:
    """Replacements of a Keras optimizer's own methods. Its class is derived from this one and the user's.

    `apply` sends gradients, and the servers update. The optimizer's state lives there, and is read when its `variables`
    are read. Numbers such as the learning rate are sent with each step.
    """

    _remote: _KerasServerSide
    _seen: list[int]
    _trained: list[Any]

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Send gradients to the servers. Each server updates all of its variables together."""
        own: Any = self
        variables = self._trained if trainable_variables is None else list(trainable_variables)
        if not len(grads):
            return
        found, variables = keras_internals.without_missing(own, list(grads), variables)
        if own.loss_scale_factor is not None:
            found = [each / own.loss_scale_factor for each in found]
        if any(getattr(own, name) for name in ("clipnorm", "global_clipnorm", "clipvalue")):
            found = keras_internals.clip(own, [each.to_dense() for each in found])
        servers = servers_here.access
        known = {stored.number for stored in self._remote.stored}
        gradients: dict[int, dict[Shard, Gradient]] = {}
        for variable, gradient in zip(variables, found, strict=True):
            stored = servers.represented.stored_of(variable.value)
            if stored is None or stored.number not in known:
                raise ContextError(
                    f"{own.name} got a gradient of {variable.path}, but was built with other variables. With a "
                    "ParameterServerStrategy it updates only those it was built with; make a new one for others."
                )
            for (shard, part), piece in remote_optimizer.by_part(stored, gradient.detach(), False):
                gradients.setdefault(part.server, {})[shard] = piece
        options = (_options(self), *({} for _ in self._remote.stored[1:]))
        servers.optimizers.step(
            {
                each: StepOptimizer(
                    optimizer=self._remote.number, gradients=mine, options=options, seen=servers.copies.versions(mine)
                )
                for each, mine in gradients.items()
            }
        )

    @property
    def iterations(self) -> Any:
        """The number of updates that the servers have made with it, from any sender."""
        _ = self.variables
        return super().iterations  # type: ignore[misc]

    @property
    def learning_rate(self) -> Any:
        """The learning rate, or the current value of its schedule."""
        if not isinstance(keras_internals.learning_rate_of(self), keras.Variable):
            _ = self.variables
        return super().learning_rate  # type: ignore[misc]

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        keras.optimizers.Optimizer.learning_rate.fset(self, learning_rate)

    @property
    def variables(self) -> list[Any]:
        """The optimizer's state, as it is on the servers now."""
        own = keras_internals.optimizer_variables(self)
        if servers_here.access.is_worker:
            return own
        self.send_changes()
        states = servers_here.access.optimizers.states(self._remote.number, self._remote.servers)
        kept = {shard: each for found in states.values() for shard, each in found["state"].items()}
        for place, stored in enumerate(self._remote.stored):
            parts = [kept[shard] for shard, _ in stored.shards()]
            for name, where in (*self._remote.places[place].items(), *self._remote.places[-1].items()):
                own[where].assign(remote_optimizer.joined(stored, [part[name] for part in parts]))
        # A server that received no gradients has not counted the step.
        keras_internals.iterations_of(self).assign(max(int(each[_ITERATION]) for each in kept.values()))
        self._note()
        return own

    def send_changes(self) -> None:
        """Send the servers the values that a callback, or a load from a file, assigned to its variables here."""
        own = keras_internals.optimizer_variables(self)
        if self._seen == _versions(own, self):
            return
        states: dict[int, dict[Shard, Any]] = {server: {} for server in self._remote.servers}
        for place, stored in enumerate(self._remote.stored):
            names = {**self._remote.places[place], **self._remote.places[-1]}
            for shard, part in stored.shards():
                states[part.server][shard] = {
                    name: remote_optimizer.piece_of_state(stored, part, own[where].value)
                    for name, where in names.items()
                }
        steps = int(keras_internals.iterations_of(self).value)
        servers_here.access.optimizers.set_states(
            {server: SetOptimizer(self._remote.number, state, steps) for server, state in states.items()}
        )
        self._note()

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Assign the moving averages, if there are some, to the variables."""
        if self.use_ema:  # type: ignore[attr-defined]
            _ = self.variables
            super().finalize_variable_values(var_list)  # type: ignore[misc]
            servers_here.access.copies.send_changes()

    def _note(self) -> None:
        vars(self)["_seen"] = _versions(keras_internals.optimizer_variables(self), self)


def _versions(variables: Sequence[Any], optimizer: Any) -> list[int]:
    """Return torch's counts of in-place changes, except for the learning rate, which is sent with each step."""
    rate = keras_internals.learning_rate_of(optimizer)
    return [each.value._version for each in variables if each is not rate]


def _options(optimizer: Any) -> dict[str, Any]:
    """Return the numbers that callbacks may change."""
    found = {name: each for name, each in vars(optimizer).items() if name[0] != "_" and type(each) in _PLAIN}
    found = {name: each for name, each in found.items() if name not in _ON_WORKERS and name != "built"}
    rate = keras_internals.learning_rate_of(optimizer)
    return {**found, "learning_rate": float(rate.value)} if isinstance(rate, keras.Variable) else found


@functools.cache
def _remote_class(cls: Any) -> Any:
    names = ("__module__", "__qualname__", "__doc__")
    return type(cls.__name__, (RemoteApply, cls), {**{name: getattr(cls, name) for name in names}, "of": cls})


_numbers = itertools.count(1 << 32)  # torch's optimizers count from 1


def make_remote(optimizer: Any) -> None:
    """Move an optimizer's updates to the servers from now on. It has been built with variables that live there.

    Raises:
        OptionError: It uses values that several servers hold.
        ContextError: It was built with variables that are not on the servers.
    """
    if isinstance(optimizer, RemoteApply):
        return
    _check(optimizer)
    servers = servers_here.access
    trained = keras_internals.trained_variables(optimizer)
    stored = [servers.represented.stored_of(each.value) for each in trained]
    if not all(stored):
        lost = next(each.path for each, its in zip(trained, stored, strict=True) if its is None)
        raise ContextError(
            f"{optimizer.name} was built with {lost}, which is not on the parameter servers. Make the model within "
            "`with strategy.scope():`."
        )
    for variable, its in zip(trained, stored, strict=True):
        if variable.constraint is not None and len(its.parts) > 1:
            raise OptionError(
                f"{variable.path} has a constraint, and is divided among servers, which see only their part of it. "
                "Remove the constraint, or the variable_partitioner's division of this variable."
            )
    cls: Any = type(optimizer)
    remote_optimizer.check_parts(cls, (its._replace(name=each.path) for each, its in zip(trained, stored, strict=True)))
    config = _config(optimizer)
    twin = cls.from_config(config)
    kept = _built(twin, trained)
    places = {id(each): place for place, each in enumerate(keras_internals.optimizer_variables(twin))}
    named: dict[int, dict[str, int]] = {
        place: {name: places[id(made)] for name, made in kept[id(each)].items()} for place, each in enumerate(trained)
    }
    named[-1] = {name: places[id(made)] for name, made in _of_all(twin, kept).items()}
    kinds = [_Variable(each.name, each.constraint, keras_internals.decays(optimizer, each)) for each in trained]
    remote = _KerasServerSide(next(_numbers), tuple(stored), named)
    factory = cloudpickle.dumps(functools.partial(OnServer, cls, config, kinds))
    servers.optimizers.make(remote.number, factory, tuple((each,) for each in remote.stored))
    optimizer.__class__ = _remote_class(cls)
    vars(optimizer).update(_remote=remote, _seen=[], _trained=trained)
    optimizer.send_changes()


def _check(optimizer: Any) -> None:
    name = type(optimizer).__name__
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise OptionError(
            "LossScaleOptimizer, which mixed_float16 uses, skips a step when a gradient of any variable "
            "is not finite, but each parameter server sees only its own gradients. Use mixed_bfloat16, or "
            "loss_scale_factor of another optimizer."
        )
    if isinstance(optimizer, getattr(keras.optimizers, "MultiOptimizer", ())):
        raise OptionError(
            "A MultiOptimizer consists of other optimizers, whose states a parameter server cannot tell apart. Use one "
            "optimizer for each part of the model in a loop of your own."
        )
    clips = any(getattr(optimizer, each) for each in ("clipnorm", "global_clipnorm", "clipvalue"))
    if clips and optimizer.gradient_accumulation_steps:
        raise OptionError(
            f"{name} has gradient_accumulation_steps and clips gradients: with a ParameterServerStrategy a worker "
            "clips, before servers accumulate. Leave one of them out."
        )


def _config(optimizer: Any) -> dict[str, Any]:
    """Return the argument of `from_config`. It contains a schedule as an object, since its class may be the user's."""
    rate = keras_internals.learning_rate_of(optimizer)
    config = optimizer.get_config()
    return config if isinstance(rate, keras.Variable) else {**config, "learning_rate": rate}


# -- closures ----------------------------------------------------------------------------------------------------------


class _Opener(NamedTuple):
    """The data from which a worker makes its optimizer."""

    cls: Callable[..., Any]
    config: dict[str, Any]
    remote: _KerasServerSide
    trained: list[Any]

    def make_for_worker(self, _worker: int) -> Any:
        """Return an optimizer that sends gradients."""
        cls: Any = self.cls
        optimizer = cls.from_config(self.config)
        optimizer.__class__ = _remote_class(cls)
        vars(optimizer).update(_remote=self.remote, _seen=[], _trained=self.trained, built=True)
        return optimizer


def described(optimizer: Any) -> ResourceDescription:
    """Describe an optimizer that a scheduled function uses.

    Raises:
        CannotTravelError: It has not been built.
    """
    if not isinstance(optimizer, RemoteApply):
        if not optimizer.built:
            raise CannotTravelError(
                f"{optimizer.name} is used in a scheduled function, but has not been built. Call "
                "optimizer.build(model.trainable_variables) first, on the coordinator."
            )
        make_remote(optimizer)
    optimizer.send_changes()
    shown: Any = optimizer
    return ResourceDescription(
        lambda: _Opener(cls=type(shown).of, config=_config(shown), remote=shown._remote, trained=shown._trained),
        _options(optimizer),
    )


def check_options(optimizer: Any, options: Mapping[str, Any]) -> None:
    """Raise ProgramError if a function has changed a number of its worker's optimizer."""
    now = _options(optimizer)
    changed = next((name for name, value in options.items() if now.get(name) != value), None)
    if changed is not None:
        raise remote_optimizer.changed_option(optimizer.name, changed, options[changed], now.get(changed))


def set_options(optimizer: Any, options: Mapping[str, Any]) -> None:
    """Set the numbers of a worker's optimizer to those of the coordinator's."""
    for name, value in options.items():
        setattr(optimizer, name, value)
