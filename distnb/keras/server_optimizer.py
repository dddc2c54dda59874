"""Keras's optimizers with parameter servers: the same optimizer on each server, for the variables that it holds."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import cloudpickle
import keras
import torch

from distnb.coordinator.libraries import ResourceDescription
from distnb.errors import CannotTravelError, ContextError, OptionError
from distnb.keras import keras_internals
from distnb.runtime.servers import remote_optimizer
from distnb.runtime.servers.here import servers_here
from distnb.runtime.servers.server_messages import Gradient, SetOptimizer, Shard, StepOptimizer
from distnb.runtime.servers.shard_placement import Stored

__all__ = ["RemoteApply", "described", "make_remote", "set_options"]

_ITERATION = "iteration"
_PLAIN = (bool, int, float, type(None))
# What looks at gradients is done where all of them are, on the worker.
_ON_WORKERS = ("clipnorm", "global_clipnorm", "clipvalue", "loss_scale_factor")

# -- a server ----------------------------------------------------------------------------------------------------------


class _Variable(NamedTuple):
    """What an optimizer looks at of a variable, beside its value."""

    name: str
    constraint: Any
    decays: bool


class OnServer:
    """A Keras optimizer as a server has it, for some shards: to the server it is like one of torch's.

    There is one group for each variable; the first one's options are the optimizer's.
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
        self.state = _State(self._optimizer, self._variables, kept)

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


class _State(MutableMapping[torch.nn.Parameter, Mapping[str, Any]]):
    """What an optimizer keeps for each parameter, by name, with what it keeps for all of them together."""

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
        """What is given next takes its place."""

    def __iter__(self) -> Iterator[torch.nn.Parameter]:
        return iter(self._variables)

    def __len__(self) -> int:
        return len(self._variables)


def _built(optimizer: Any, variables: list[Any]) -> dict[int, dict[str, Any]]:
    """Have an optimizer make what it keeps. Returns that of each variable, by identity, by name."""
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
    """What an optimizer keeps for all variables together: how often it has stepped, and other numbers."""
    counted = {id(each) for own in kept.values() for each in own.values()} | {
        id(keras_internals.learning_rate_of(optimizer))
    }
    rest = [each for each in keras_internals.optimizer_variables(optimizer) if id(each) not in counted]
    if any(tuple(each.shape) for each in rest):
        raise OptionError(
            f"{type(optimizer).__name__} keeps something for several variables together, and with a "
            "ParameterServerStrategy each server has its own. Use an optimizer such as Adam, RMSprop or SGD."
        )
    steps = keras_internals.iterations_of(optimizer)
    others = [each for each in rest if each is not steps]
    return {_ITERATION: steps, **{f"of all {place}": each for place, each in enumerate(others)}}


# -- the coordinator and workers ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _KerasServerSide:
    """What an optimizer is to the servers.

    Attributes:
        stored: The variables that it was built with, in order.
        places: Of each, where in its `variables` that is which it keeps for them, by name; -1: for all together.
    """

    number: int
    stored: tuple[Stored, ...]
    places: Mapping[int, Mapping[str, int]]

    @property
    def servers(self) -> tuple[int, ...]:
        return tuple(sorted({part.server for stored in self.stored for part in stored.parts}))


class RemoteApply:
    """What takes the place of a Keras optimizer's own methods; its class is made of this one and the user's.

    `apply` sends gradients, and the servers update. What the optimizer keeps lives there, and is read when its
    `variables` are asked for; numbers such as the learning rate go with each step.
    """

    _remote: _KerasServerSide
    _seen: list[int]
    _trained: list[Any]

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Send gradients to the servers, which update the variables: each server's in one piece."""
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
            stored = servers.stored_of(variable.value)
            if stored is None or stored.number not in known:
                raise ContextError(
                    f"{own.name} got a gradient of {variable.path}, and was built with other variables. With a "
                    "ParameterServerStrategy it updates those that it was built with; make a new one for others."
                )
            for (shard, part), piece in remote_optimizer.by_part(stored, gradient.detach(), False):
                gradients.setdefault(part.server, {})[shard] = piece
        options = (_options(self), *({} for _ in self._remote.stored[1:]))
        servers.step(
            {
                each: StepOptimizer(
                    optimizer=self._remote.number, gradients=mine, options=options, seen=servers.versions(mine)
                )
                for each, mine in gradients.items()
            }
        )

    @property
    def iterations(self) -> Any:
        """How often the servers have updated with it, whoever sent the gradients."""
        _ = self.variables
        return super().iterations  # type: ignore[misc]

    @property
    def learning_rate(self) -> Any:
        """It, or what its schedule says now."""
        if not isinstance(keras_internals.learning_rate_of(self), keras.Variable):
            _ = self.variables
        return super().learning_rate  # type: ignore[misc]

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        keras.optimizers.Optimizer.learning_rate.fset(self, learning_rate)

    @property
    def variables(self) -> list[Any]:
        """What it keeps, as it is on the servers now."""
        own = keras_internals.optimizer_variables(self)
        if servers_here.access.is_worker:
            return own
        self.send_changes()
        states = servers_here.access.optimizer_states(self._remote.number, self._remote.servers)
        kept = {shard: each for found in states.values() for shard, each in found["state"].items()}
        for place, stored in enumerate(self._remote.stored):
            parts = [kept[shard] for shard, _ in stored.shards()]
            for name, where in (*self._remote.places[place].items(), *self._remote.places[-1].items()):
                own[where].assign(remote_optimizer.joined(stored, [part[name] for part in parts]))
        # A step without gradients for some server's variables is none there.
        keras_internals.iterations_of(self).assign(max(int(each[_ITERATION]) for each in kept.values()))
        self._note()
        return own

    def send_changes(self) -> None:
        """Tell the servers what was assigned to its variables here, by a callback, or from a file."""
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
        servers_here.access.set_optimizer_states(
            {server: SetOptimizer(self._remote.number, state, steps) for server, state in states.items()}
        )
        self._note()

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """With moving averages: they become the variables' values."""
        if self.use_ema:  # type: ignore[attr-defined]
            _ = self.variables
            super().finalize_variable_values(var_list)  # type: ignore[misc]
            servers_here.access.send_changes()

    def _note(self) -> None:
        vars(self)["_seen"] = _versions(keras_internals.optimizer_variables(self), self)


def _versions(variables: Sequence[Any], optimizer: Any) -> list[int]:
    """torch's counts of changes in place; the learning rate goes with each step."""
    rate = keras_internals.learning_rate_of(optimizer)
    return [each.value._version for each in variables if each is not rate]


def _options(optimizer: Any) -> dict[str, Any]:
    """The numbers that callbacks may change."""
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
    """Have the servers do an optimizer's updates, from now on. It is built, with variables that live there.

    Raises:
        OptionError: It looks at what several servers have.
        ContextError: It was built with variables that are not on the servers.
    """
    if isinstance(optimizer, RemoteApply):
        return
    _check(optimizer)
    servers = servers_here.access
    trained = keras_internals.trained_variables(optimizer)
    stored = [servers.stored_of(each.value) for each in trained]
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
                "Leave one of them out: the constraint, or the variable_partitioner's division of this variable."
            )
    cls: Any = type(optimizer)
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
    servers.make_optimizer(remote.number, factory, tuple((each,) for each in remote.stored))
    optimizer.__class__ = _remote_class(cls)
    vars(optimizer).update(_remote=remote, _seen=[], _trained=trained)
    optimizer.send_changes()


def _check(optimizer: Any) -> None:
    name = type(optimizer).__name__
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise OptionError(
            "LossScaleOptimizer, which mixed_float16 brings along, leaves a step out when a gradient of any variable "
            "is not finite, and parameter servers each see their own alone. Use mixed_bfloat16, or "
            "loss_scale_factor of another optimizer."
        )
    clips = any(getattr(optimizer, each) for each in ("clipnorm", "global_clipnorm", "clipvalue"))
    if clips and optimizer.gradient_accumulation_steps:
        raise OptionError(
            f"{name} has gradient_accumulation_steps and clips gradients: with a ParameterServerStrategy a worker "
            "clips, before servers accumulate. Leave one of them out."
        )


def _config(optimizer: Any) -> dict[str, Any]:
    """What `from_config` takes; a schedule is the object itself, whatever its class."""
    rate = keras_internals.learning_rate_of(optimizer)
    config = optimizer.get_config()
    return config if isinstance(rate, keras.Variable) else {**config, "learning_rate": rate}


# -- closures ----------------------------------------------------------------------------------------------------------


class _Opener(NamedTuple):
    """What a worker makes its optimizer of."""

    cls: Callable[..., Any]
    config: dict[str, Any]
    remote: _KerasServerSide
    trained: list[Any]

    def make_for_worker(self, _worker: int) -> Any:
        """An optimizer that sends gradients."""
        cls: Any = self.cls
        optimizer = cls.from_config(self.config)
        optimizer.__class__ = _remote_class(cls)
        vars(optimizer).update(_remote=self.remote, _seen=[], _trained=self.trained, built=True)
        return optimizer


def described(optimizer: Any) -> ResourceDescription:
    """An optimizer in a scheduled function.

    Raises:
        CannotTravelError: It has not been built.
    """
    if not isinstance(optimizer, RemoteApply):
        if not optimizer.built:
            raise CannotTravelError(
                f"{optimizer.name} is used in a function that is scheduled, and has not been built. Call "
                "optimizer.build(model.trainable_variables) first, on the coordinator."
            )
        make_remote(optimizer)
    optimizer.send_changes()
    shown: Any = optimizer
    return ResourceDescription(
        lambda: _Opener(cls=type(shown).of, config=_config(shown), remote=shown._remote, trained=shown._trained),
        _options(optimizer),
    )


def set_options(optimizer: Any, options: Mapping[str, Any]) -> None:
    """Give a worker's optimizer the numbers that the coordinator's has."""
    for name, value in options.items():
        setattr(optimizer, name, value)
