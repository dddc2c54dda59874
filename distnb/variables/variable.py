"""`distnb.Variable`: a tensor whose copies on the replicas a strategy keeps in sync."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch

from distnb.compat import torch_internals
from distnb.errors import CollectiveMismatchError, ContextError, OptionError
from distnb.options import VariableAggregation, VariableSynchronization
from distnb.variables import scattering
from distnb.variables.homes import Home, homes
from distnb.variables.intercepted import Intercepted
from distnb.variables.settings import Settings, initial_tensor, parse_settings, value_for
from distnb.variables.torch_functions import changes

__all__ = ["SyncOnReadVariable", "Variable", "component_of", "create", "make", "settings_of"]


def _scattering(method: str, summary: str) -> Callable[..., Any]:
    def scatter(self: Variable, indices: Any, updates: Any = None) -> Variable:
        return self._scatter(method, indices, updates)

    scatter.__name__, scatter.__doc__ = method, f"{summary}; see `scatter_add`."
    return scatter


class Variable(Intercepted, torch.nn.Parameter):
    """A value that programs read and assign to, kept by the strategy in whose scope (or `run`) it is made.

    Under a strategy of several replicas each of them has a copy. With ON_WRITE, which AUTO means, the copies are
    always equal: the aggregation combines the values that the replicas assign in `strategy.run`. With ON_READ each
    replica assigns to its own component. A read in cross-replica context returns the aggregate of the components; all
    replicas must read it together. In cross-replica context an assigned value is the value of the whole variable.
    Under the default and one-device strategies there is one copy, and neither setting has an effect. Under central
    storage there is one copy, too, and ON_READ means ON_WRITE.

    A variable is a `torch.nn.Parameter` and works in torch's operations. A trainable one has gradients, which are
    aggregated like those of all parameters made in a scope. As an attribute of a module it is in `parameters()` and
    `state_dict()`, which holds the value read in cross-replica context.

    Args:
        initial_value: A number, a list, an array, a tensor, or a function that returns one. It is copied. All replicas
            use the value of replica 0.
        trainable: Whether the variable has gradients. None: floating-point variables have, unless they are ON_READ.
        name: A name for errors and logs.
        dtype: A torch.dtype; None takes the initial value's.
        synchronization: A `VariableSynchronization` or its name.
        aggregation: A `VariableAggregation` or its name.

    Raises:
        OptionError: An unknown name, synchronization NONE, or incompatible options: MEAN of integers, a trainable
            ON_READ variable.

    Example:
        >>> import distnb
        >>> total = distnb.Variable(10.0, aggregation="sum")
        >>> float(total.assign_add(2.0))
        12.0
    """

    _settings: Settings
    _strategy: Any

    number: int
    """The number of the variable among those of its strategy, the same on every replica; 0 for a copy."""

    def __new__(
        cls,
        initial_value: Any,
        trainable: bool | None = None,
        name: str | None = None,
        dtype: torch.dtype | None = None,
        synchronization: VariableSynchronization | str = VariableSynchronization.AUTO,
        aggregation: VariableAggregation | str = VariableAggregation.NONE,
    ) -> Variable:
        strategy = homes.current()
        home = strategy.home
        component = initial_tensor(initial_value, dtype, home.device)
        settings = parse_settings(trainable, name, component.dtype, synchronization, aggregation)
        if home.once and settings.on_read:
            settings = replace(settings, synchronization=VariableSynchronization.ON_WRITE)
        return create(component, settings, strategy)

    # Options --------------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str | None:
        """The name that the variable was made with."""
        return self._settings.name

    @property
    def trainable(self) -> bool:
        """True if the variable was made to have gradients."""
        return self._settings.trainable

    @property
    def synchronization(self) -> VariableSynchronization:
        """The synchronization that the variable was made with."""
        return self._settings.synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        """The aggregation that the variable was made with."""
        return self._settings.aggregation

    @property
    def distribute_strategy(self) -> Any:
        """The strategy that made the variable."""
        return self._strategy

    # Reading --------------------------------------------------------------------------------------------------------

    def read_value(self) -> torch.Tensor:
        """Return a copy of the value: in a replica its component, in cross-replica context the whole value."""
        return self._seen("read_value").clone()

    value = read_value

    def numpy(self, *, force: bool = False) -> Any:
        """Return a copy of the value as an array.

        Args:
            force: Accepted for compatibility with `torch.Tensor.numpy`. A copy is made in any case.
        """
        return self.read_value().cpu().numpy()

    def item(self) -> Any:
        """Return the value as a Python number."""
        return self._seen("item").item()

    def __float__(self) -> float:
        return float(self._seen("float"))

    def __int__(self) -> int:
        return int(self._seen("int"))

    def _seen(self, method: str) -> torch.Tensor:
        """Return the value in this context. It may share memory with the variable."""
        self._strategy.home.in_replica(writing=False)
        return component_of(self)

    @property
    def _table(self) -> Variable:
        """The variable whose rows are looked up: this one, or the one that this is a shard of."""
        return self

    def _rows_at(self, rows: torch.Tensor) -> torch.Tensor:
        """Return some rows, `[*rows.shape, ...]`, with gradients if the variable has gradients."""
        return torch.nn.functional.embedding(rows, self)

    # Assigning ------------------------------------------------------------------------------------------------------

    def assign(self, value: Any, *, read_value: bool = True) -> Any:
        """Set the variable to a value.

        Args:
            value: A number, a list, an array or a tensor that can be broadcast to the variable's shape.
            read_value: Whether to return the variable.

        Returns:
            The variable; None with read_value=False.

        Raises:
            OptionError: In a replica, the variable has no aggregation to combine the replicas' values.
            ContextError: Another strategy is in force.
            DistributedValueError: A PerReplica in cross-replica context, or an incompatible dtype.
            StructureError: A shape that does not match.
        """
        self._write("assign", value)
        return self if read_value else None

    def assign_add(self, value: Any, *, read_value: bool = True) -> Any:
        """Add a value to the variable; see `assign`."""
        self._write("assign_add", value)
        return self if read_value else None

    def assign_sub(self, value: Any, *, read_value: bool = True) -> Any:
        """Subtract a value from the variable; see `assign`."""
        self._write("assign_sub", value)
        return self if read_value else None

    def __iadd__(self, value: Any) -> Self:  # type: ignore[misc]
        return self._write("assign_add", value)

    def __isub__(self, value: Any) -> Self:  # type: ignore[misc]
        return self._write("assign_sub", value)

    def scatter_add(self, *args: Any, **kwargs: Any) -> Any:
        """Add to some rows: `variable[indices[i]] += updates[i]` for each i.

        In a replica, the updates of all replicas are combined first. Aggregation SUM changes the rows of all of them.
        MEAN (only for additions and subtractions) divides their updates by the number of replicas. ONLY_FIRST_REPLICA
        changes replica 0's rows. An ON_READ variable changes the replica's own component.

        Args:
            indices: Row numbers along the first axis. Alone, without `updates`, one object with both: the attributes
                `indices` and `values`, a pair, or a sparse (COO) tensor.
            updates: A value for each index. The shape is that of the indices and the variable's other axes, or can be
                broadcast to it.

        Returns:
            The variable. (With three arguments this is torch's own `scatter_add(dim, index, src)`, a new tensor.)

        Raises:
            OptionError: There is no such row, or the aggregation does not define the combination of the replicas' rows.
            ContextError: An ON_READ variable in cross-replica context, or another strategy is in force.
            StructureError: A shape that does not match.
        """
        if len(args) + len(kwargs) == 3:
            return super().scatter_add(*args, **kwargs)
        return self._scatter("scatter_add", *args, **kwargs)

    scatter_update = _scattering("scatter_update", "Set some rows. If a row is named twice, the last value remains")
    scatter_sub = _scattering("scatter_sub", "Subtract from some rows")
    scatter_min = _scattering("scatter_min", "Replace some rows by the smaller of their value and the update")
    scatter_max = _scattering("scatter_max", "Replace some rows by the larger of their value and the update")
    scatter_mul = _scattering("scatter_mul", "Multiply some rows")
    scatter_div = _scattering("scatter_div", "Divide some rows")

    def _scatter(self, method: str, indices: Any, updates: Any = None) -> Self:
        home, settings = self._strategy.home, self._settings
        in_replica = home.in_replica(writing=True)
        own = component_of(self)
        rows, changes = scattering.parse_scatter(own, settings.label, method, indices, updates)
        if not home.alone:
            if settings.on_read and not in_replica:
                raise ContextError(
                    f"{method} of {settings.label} in cross-replica context: each replica has a component of its own, "
                    "and all of them would change. Call it in the function that strategy.run calls."
                )
            if in_replica and not settings.on_read:
                rows, changes = scattering.combine_replicas(home, settings, method, rows, changes)
        scattering.apply(method, own, rows, changes)
        return self

    def _write(self, method: str, value: Any) -> Self:
        home = self._strategy.home
        in_replica = home.in_replica(writing=True)
        own = component_of(self)
        new = value_for(own, self._settings.label, method, value)
        if not home.alone:
            new = self._from_replica(home, new, method) if in_replica else self._from_outside(home, new, method)
        with torch.no_grad():
            if method == "assign":
                own.copy_(new)
            else:
                own.add_(new, alpha=1 if method == "assign_add" else -1)
        return self

    def _from_replica(self, home: Home, value: torch.Tensor, method: str) -> torch.Tensor:
        """Return the value to store on each replica when each replica assigns one."""
        if self.aggregation is VariableAggregation.NONE:
            raise OptionError(
                f"{method} of {self._settings.label} in a function that strategy.run calls: every replica assigns a "
                "value, and the variable has no aggregation to combine them. Make it with aggregation='sum', 'mean' or "
                "'only_first_replica', or with synchronization='on_read' and one of these; or assign outside run."
            )
        return self._aggregate(home, value, "")

    def _from_outside(self, home: Home, value: torch.Tensor, method: str) -> torch.Tensor:
        """Return the value to store on this replica when a value is assigned in cross-replica context."""
        return value

    def _aggregate(self, home: Home, value: torch.Tensor, method: str) -> torch.Tensor:
        if self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return home.first(value)
        if self.aggregation is VariableAggregation.SUM:
            return home.sum(value)
        if self.aggregation is VariableAggregation.MEAN:
            return home.sum(value) / home.num_replicas
        raise ContextError(
            f"{method} of {self._settings.label} in cross-replica context: each replica has a component of its own, "
            "and aggregation='NONE' does not combine them. Make it with an aggregation, or read the components: "
            "strategy.local_results(variable)."
        )

    # Operations of torch --------------------------------------------------------------------------------------------

    # A variable of another strategy must not be read. An ON_READ variable is aggregated when it is read.

    def _operand(self, name: str) -> torch.Tensor:
        self._strategy.home.in_replica(writing=False)
        return self

    def _refused(self, what: str) -> ContextError:
        return ContextError(f"{what} of {self._settings.label} is not possible here. Use assign.")

    # Object protocol ------------------------------------------------------------------------------------------------

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        # Never communicate here: only some replicas may show the variable.
        settings, home = self._settings, self._strategy.home
        name = f" {settings.name!r}" if settings.name else ""
        if home.alone:
            return f"<Variable{name}: {component_of(self)!r}>"
        kind = settings.synchronization.name if settings.on_read else "ON_WRITE"
        here = "this replica's component " if settings.on_read else ""
        return f"<Variable{name} ({kind}, {settings.aggregation.name}): {here}{component_of(self)!r}>"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec and not self.dim() else object.__format__(self, spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        if id(self) not in memo:
            # Like a copy of any parameter, the copy is not kept in sync unless a scope registers it.
            memo[id(self)] = make(component_of(self).clone(), self._settings, self._strategy)
        copied: Variable = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return make, (component_of(self), self._settings, self._strategy, self.number)


class SyncOnReadVariable(Variable):
    """A variable made with synchronization=ON_READ; see `Variable`.

    If all replicas run a library's loop on the same whole batches, they compute whole values. In such a loop each
    component holds the whole value. It becomes a part again when the loop ends, or when a replica works on its own
    part.
    """

    is_whole = False
    """True if every replica's component holds the whole value."""

    def _seen(self, method: str) -> torch.Tensor:
        home = self._strategy.home
        if home.in_replica(writing=False) or home.alone or home.execution is not None:
            self._prepare(home, assigning=False)
            return component_of(self)
        return self.aggregate(method)

    def content(self) -> torch.Tensor:
        """Return the value that a read returns here, as a plain tensor that may share memory with the variable."""
        return self._seen("reading")

    def aggregate(self, method: str) -> torch.Tensor:
        """Return the whole value, even in a replica. All replicas call this."""
        home = self._strategy.home
        own = component_of(self)
        if home.alone or self.is_whole:
            return own
        try:
            return self._aggregate(home, own, method)
        except CollectiveMismatchError as error:
            error.add_note(
                f"{method} of {self._settings.label} outside strategy.run combines the replicas' components, so all "
                "replicas must read it. To use the value on one of them, read it before `if distnb.is_chief():`."
            )
            raise

    def prepare(self) -> None:
        """Make the component hold the part or the whole that the calling code works on, without reading it."""
        self._prepare(self._strategy.home, assigning=False)

    def _prepare(self, home: Home, *, assigning: bool) -> None:
        """Make the component hold what the calling code works on: this replica's part, or the whole value."""
        execution = home.execution
        if execution == "replicated" and not self.is_whole:
            if not assigning and self.aggregation is not VariableAggregation.NONE:
                whole = self.aggregate("reading")
                with torch.no_grad():
                    component_of(self).copy_(whole)
            self.is_whole = True
            home.whole.append(self)
        elif execution != "replicated" and execution != "single" and self.is_whole:
            self.become_part(home)

    def become_part(self, home: Home) -> None:
        """Turn the components, each of which holds the whole value, into parts of it."""
        self.is_whole = False
        if self.aggregation is VariableAggregation.SUM and home.rank:
            with torch.no_grad():
                component_of(self).zero_()

    def _from_replica(self, home: Home, value: torch.Tensor, method: str) -> torch.Tensor:
        self._prepare(home, assigning=method == "assign")
        return value

    def _from_outside(self, home: Home, value: torch.Tensor, method: str) -> torch.Tensor:
        if home.execution is not None:
            self._prepare(home, assigning=method == "assign")
            return value
        if self.aggregation is not VariableAggregation.SUM or home.num_replicas == 1:
            return value
        if method != "assign":
            raise ContextError(
                f"{method} of {self._settings.label} in cross-replica context: it is the sum of the replicas' "
                "components, and each of them would change. Call it in the function that strategy.run calls, or "
                "assign the new sum."
            )
        return _part(value, home)

    def _is_elsewhere(self) -> bool:
        home = self._strategy.home
        return not (home.in_replica(writing=True) or home.alone or home.execution is not None)

    def _operand(self, name: str) -> torch.Tensor:
        if not changes(name):
            return self._seen(name)
        self._prepare(self._strategy.home, assigning=name in ("copy_", "fill_", "zero_"))
        return self  # an in-place function in a replica receives the variable itself, and returns it

    def _change_whole(self, function: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Apply a change in cross-replica context. Only the few that define the whole variable are supported."""
        if name in ("copy_", "fill_", "zero_"):
            return self.assign(0 if name == "zero_" else args[1])
        if name not in ("__set__", "__delete__"):
            raise self._refused(name)
        with torch._C.DisableTorchFunctionSubclass():
            if getattr(getattr(function, "__self__", None), "__name__", "") != "data":
                return function(*args, **kwargs)
            # From `module.to(...)`: the whole value, converted or moved.
            self.data = self._from_outside(self._strategy.home, args[1], "assign")
            return None

    def _refused(self, what: str) -> ContextError:
        return ContextError(
            f"{what} of {self._settings.label} in cross-replica context would change each replica's component. Use "
            "assign, which sets the whole variable, or call it in the function that strategy.run calls."
        )


def _part(value: torch.Tensor, home: Home) -> torch.Tensor:
    """Return the part of a sum that this replica stores. Of whole numbers, replica 0 has the remainder, too."""
    if value.is_floating_point() or value.is_complex():
        return value / home.num_replicas
    part = value // home.num_replicas
    return part if home.rank else part + value % home.num_replicas


def component_of(variable: Variable) -> torch.Tensor:
    """Return this process's copy, as a tensor in the same memory, without communication."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch.Tensor.detach(variable)


def settings_of(variable: Variable) -> Settings:
    """Return the options that the variable was made with."""
    return variable._settings


def create(component: torch.Tensor, settings: Settings, strategy: Any) -> Variable:
    """Make a variable of a strategy that holds this tensor, and register it with the strategy."""
    home: Home = strategy.home
    variable = home.create(component, settings)
    if variable is None:
        variable = make(component, settings, strategy)
        home.register(variable)
    return variable


def make(component: torch.Tensor, settings: Settings, strategy: Any, number: int = 0) -> Variable:
    """Make a variable of a strategy that holds this tensor, without registering it."""
    cls = SyncOnReadVariable if settings.on_read else Variable
    variable: Variable = torch_internals.make_subclass(cls, component, settings.trainable)
    variable._settings = settings
    variable._strategy = strategy
    variable.number = number
    return variable
