"""The base of all strategies: a strategy says what, the runtime that it finds says where."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

from distnb.errors import OptionError, UnknownNameError
from distnb.options import InputContext, InputOptions, ReduceOp, RunOptions, StrategySpec, ValueContext
from distnb.runtime import choice, contexts, variable_homes
from distnb.runtime.base import Runtime
from distnb.runtime.call_arguments import check_call, check_input_function, check_input_options
from distnb.runtime.this_process import this_process
from distnb.strategies.aliases import METHODS
from distnb.strategies.strategy_scope import StrategyScope
from distnb.strategies.word_options import WordOptions
from distnb.values.structure import flatten
from distnb.variables.homes import Home

if TYPE_CHECKING:
    from distnb.cluster.resolvers import ClusterResolver
    from distnb.collectives.algorithms.base import CrossDeviceOps
    from distnb.runtime.replica import Spmd
    from distnb.runtime.spmd import SpmdProcess

__all__ = ["WORDS", "Strategy", "class_of", "kept_options", "resolve"]

WORDS = {
    "default": "distnb.strategies.default:DefaultStrategy",
    "one_device": "distnb.strategies.one_device:OneDeviceStrategy",
    "mirrored": "distnb.strategies.mirrored:MirroredStrategy",
    "multi_worker": "distnb.strategies.multi_worker:MultiWorkerMirroredStrategy",
    "central_storage": "distnb.strategies.central_storage:CentralStorageStrategy",
    "tpu": "distnb.strategies.tpu:TPUStrategy",
    "parameter_server": "distnb.strategies.parameter_server:ParameterServerStrategy",
}
"""The classes that the words of `%%distribute` name. A class outside distnb is its own word, "module:Class"."""

_OF_DISTNB = ("replica_id", "is_chief", "on_chief", "live", "nn", "metrics", "get_replica_context")
_made: dict[StrategySpec, Strategy] = {}


def class_of(kind: str) -> type[Strategy]:
    """Return the class that a word of `%%distribute` names, or "module:Class".

    Raises:
        OptionError: There is no such class here.
    """
    module, colon, name = WORDS.get(kind, kind).partition(":")
    if not colon:
        raise OptionError(f"{kind!r} is no strategy. The strategies are {', '.join(sorted(WORDS))}.")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise OptionError(
            f"The strategy {kind} cannot be imported in this process: {error}. Define its class in a module (a file) "
            "that the notebook and the engines can import."
        ) from error
    if not (isinstance(found, type) and issubclass(found, Strategy)):
        raise OptionError(f"{kind} is no subclass of distnb.Strategy: {found!r}.")
    return found


def resolve(spec: StrategySpec) -> Strategy:
    """Return the strategy that a spec describes: the same object for equal specs, in each process.

    Raises:
        OptionError: There is no strategy of that kind.
    """
    strategy = _made.get(spec)
    return class_of(spec.kind)._of(spec) if strategy is None else strategy


class Strategy:
    """The distribution of a computation over devices. Subclasses are made by their own arguments.

    Equal arguments give the same object. Methods may be called in the notebook, on replicas, and in scripts; they do
    the same everywhere.

    A new strategy is one class in a module of its own. Its `__new__` returns `cls._of(StrategySpec(cls.kind, …))`. Its
    differences from a mirrored strategy are the attributes and methods of the section "For authors of strategies" that
    it overrides. A line in `WORDS` gives it a short word.

    Attributes:
        spec: The description from which every process makes the same strategy.
    """

    spec: StrategySpec

    # For authors of strategies ------------------------------------------------------------------------------------

    kind: ClassVar[str]
    """The word in `%%distribute`; for classes that do not set it, "module:Class"."""
    about: ClassVar[str] = ""
    """The line about it in the help of `%%distribute`."""
    is_default: ClassVar[bool] = False
    """Whether this is the strategy in force outside every scope. Every other strategy may use its variables."""
    is_local: ClassVar[bool] = False
    """Whether the notebook's own process runs a `%%distribute` cell, and not the replicas."""
    needs_engines: ClassVar[bool] = True
    """Whether a notebook needs a running cluster for it."""
    has_coordinator: ClassVar[bool] = False
    """Whether a ClusterCoordinator hands out its work to workers, one closure at a time."""
    device_type: ClassVar[str] = ""
    """The type that all its devices must have; "" for any."""
    cell_names: ClassVar[Mapping[str, str]] = {}
    """Further names that a local cell sees, each with the "module:Class" that is called with the strategy."""
    word_options: ClassVar[tuple[str, ...]] = ("-n", "--devices", "--gradients", "--oversubscribe")
    """The options of the word in `%%distribute`."""
    refusal: ClassVar[str] = ""
    """The reason why it takes no others, for the error."""
    _devices_argument: ClassVar[str] = "devices"

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "kind" not in vars(cls):
            cls.kind = f"{cls.__module__}:{cls.__qualname__}"

    @property
    def runtime(self) -> Runtime:
        """The place where the strategy runs from here: this process, one of several replicas, or engines."""
        return choice.on_replicas(self)

    @property
    def home(self) -> Home:
        """The place of the strategy's variables in this process."""
        return variable_homes.home_on_replicas(self)

    def make_runtime(self, process: SpmdProcess) -> Spmd:
        """Make the runtime for one replica of several."""
        from distnb.runtime.replica import Spmd

        return Spmd(process, self)

    def join(self) -> Runtime | None:
        """Make a script's process one of several replicas. Return a runtime if it trains alone instead."""
        choice.join_launched(self)
        return None

    def check_honoured(self, devices: tuple[str, ...], nccl: bool, workers: tuple[int, ...] = ()) -> None:
        """Raise OptionError if replicas on these devices cannot do what the strategy asks for.

        Args:
            devices: The replicas' devices, in order.
            nccl: Whether NCCL connects the replicas.
            workers: The machine of each replica, by number; empty for one machine.
        """
        ops: CrossDeviceOps | None = self.spec.option("cross_device_ops")
        if ops is not None:
            ops.check(devices, nccl)

    def check_cluster(self) -> None:
        """Raise if the notebook's running cluster is of the wrong kind."""

    def start_options(self) -> dict[str, Any]:
        """Return the arguments of `distnb.start` for a notebook in which no cluster runs."""
        spec = self.spec
        devices = spec.devices or ((self.device_type,) if self.device_type else None)
        return {
            "n": spec.num_replicas or None,
            "devices": devices,
            "oversubscribe": bool(spec.option("oversubscribe")),
        }

    @classmethod
    def spec_of_word(cls, given: WordOptions) -> StrategySpec:
        """Return the spec for a word and its options: that of the object which the class makes of equal arguments.

        Raises:
            OptionError: An option makes no sense, or cannot be honoured.
        """
        given.refuse_others(cls.word_options, cls.refusal)
        who, devices = f"%%distribute {given.word}", given.devices
        if given.num_replicas is not None and devices and given.num_replicas != len(devices):
            raise OptionError(
                f"{who}: -n {given.num_replicas} and {len(devices)} devices ({', '.join(devices)}) contradict each "
                "other. Give one of the two."
            )
        if len(set(devices)) < len(devices) and not given.oversubscribe:
            share = "--oversubscribe" in cls.word_options
            cure = "If replicas are to share it, add --oversubscribe" if share else "Name each once"
            raise OptionError(f"{who}: a device is named twice in {', '.join(devices)}. {cure}.")
        options = {"gradient_reduction": given.gradients, "oversubscribe": given.oversubscribe}
        kept = tuple(sorted((name, value) for name, value in options.items() if value and value != "sum"))
        spec = StrategySpec(
            kind=cls.kind, devices=devices, num_replicas=0 if devices else given.num_replicas or 0, options=kept
        )
        cls.check_here(spec, who)
        return spec

    @classmethod
    def check_here(cls, spec: StrategySpec, who: str) -> None:
        """Raise if this machine or notebook cannot have such a strategy, before anything starts.

        Args:
            spec: The strategy.
            who: The name of the caller, for the error.
        """

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self:
        raise OptionError(
            "distnb.Strategy is the base of strategies. Make a MirroredStrategy or OneDeviceStrategy, or ask "
            "get_strategy()."
        )

    def _meet(self) -> bool:
        """Return whether there are replicas: in a notebook engines, which start now, or a script's, which meet now.

        From here on a script's replicas share their random numbers. A strategy that they cannot honour is refused.
        """
        if this_process.remote is None:
            return choice.started_by_launcher() and self.num_replicas_in_sync > 0
        if type(self).__module__ == "__main__":
            raise OptionError(
                f"The engines cannot import {type(self).__name__}, a class that this notebook itself defines. Define "
                "it in a module (a file), and import that."
            )
        devices = self.worker_devices
        apart = len(set(devices)) == len(devices)
        self.check_honoured(devices, apart and all(name.startswith("cuda") for name in devices))
        return True

    @classmethod
    def _of(cls, spec: StrategySpec) -> Self:
        """Return the object of a spec, made at its first use."""
        strategy = _made.get(spec)
        if strategy is None:
            strategy = object.__new__(cls)
            strategy.spec = spec
            _made[spec] = strategy
        return cast("Self", strategy)

    def __reduce__(self) -> tuple[Callable[[StrategySpec], Strategy], tuple[StrategySpec]]:
        return resolve, (self.spec,)

    def __repr__(self) -> str:
        given = [f"{self._devices_argument}={list(self.spec.devices)}"] if self.spec.devices else []
        given += [f"{name}={value!r}" for name, value in self.spec.options]
        return f"{type(self).__name__}({', '.join(given)})"

    def __getattr__(self, name: str) -> Any:
        if hasattr(type(self), name):
            return object.__getattribute__(self, name)  # a property, whose own AttributeError is to be seen
        if name in METHODS:
            return getattr(self, METHODS[name])
        if name in _OF_DISTNB:
            call = "()" if name in ("replica_id", "is_chief") else ""
            raise UnknownNameError(type(self).__name__, name, cure=f"Write distnb.{name}{call}.")
        if name == "extended":
            raise AttributeError(
                "A strategy has no 'extended': its methods are the strategy's own (worker_devices, colocate_with, …)."
            )
        raise UnknownNameError(type(self).__name__, name, (each for each in dir(self) if not each.startswith("_")))

    # The cluster ----------------------------------------------------------------------------------------------------

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas that compute one global batch together."""
        return self.runtime.num_replicas()

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The device of each replica, in replica order."""
        return self.runtime.worker_devices()

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver of the strategy's machines; None where there are none but this one."""
        return None

    # Variables ----------------------------------------------------------------------------------------------------

    def scope(self) -> AbstractContextManager[Any]:
        """Return the context for making models, optimizers and metrics: equal on every replica, and kept in sync.

        Raises:
            ContextError: In a replica context, or in another strategy's scope.

        Example:
            >>> import distnb, torch
            >>> strategy = distnb.OneDeviceStrategy("cpu:0")
            >>> with strategy.scope():
            ...     model = torch.nn.Linear(64, 10)
        """
        contexts.require_cross_replica(self, "scope")
        _ = self.runtime  # raises where there are no replicas
        return StrategyScope(self)

    def colocate_with(self, variable: Any) -> AbstractContextManager[Any]:
        """Return a context in which new tensors are placed on the device of a variable.

        Args:
            variable: A tensor, or a module (the device of its first parameter).
        """
        import torch

        tensor = next(variable.parameters()) if isinstance(variable, torch.nn.Module) else variable
        if not isinstance(tensor, torch.Tensor):
            raise OptionError(f"colocate_with takes a tensor or a module and got a {type(variable).__name__}.")
        return tensor.device

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context whose backward passes accumulate on each replica; the next pass outside aggregates them.

        Gradients of all replicas cannot be added to: call `zero_grad()` before the first pass within.
        """
        return self.runtime.no_sync()

    def assert_in_sync(self, value: Any) -> None:
        """Check that all replicas hold the same bits.

        Args:
            value: A module, an optimizer, a tensor, or a nested structure of them.

        Raises:
            OutOfSyncError: It names what differs, where, and by how much.
        """
        contexts.require_cross_replica(self, "assert_in_sync")
        self.runtime.assert_in_sync(value)

    # Computing ------------------------------------------------------------------------------------------------------

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Call a function once on every replica.

        Args:
            fn: Called as `fn(*args, **kwargs)`, in replica context.
            args: A tuple or list, in which the replica's component replaces each distributed value, however deep.
            kwargs: Likewise.
            options: See `RunOptions`.

        Returns:
            What the replicas returned, leaf by leaf: None or a plain Python value that is the same on all, else a
            PerReplica. With one replica, what it returned.

        Raises:
            ContextError: In a replica context, or in another strategy's scope.
            StructureError: Replicas returned different structures, or an argument has other components.

        Example:
            >>> import distnb
            >>> distnb.OneDeviceStrategy("cpu:0").run(lambda x: x + 1, args=(2,))
            3
        """
        __tracebackhide__ = True  # IPython shows the user's function, and its debugger goes from it to the cell
        check_call(fn, args, kwargs, options)
        contexts.require_cross_replica(self, "run")
        return self.runtime.run(fn, args, kwargs if kwargs is not None else {}, options)

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | Sequence[int] | None) -> Any:
        """Combine what the replicas hold into one value.

        Args:
            reduce_op: "sum" or "mean".
            value: What `run` returned: tensors, arrays or numbers, in any structure.
            axis: None combines the components element by element. An axis (or several) is reduced too: components may
                differ in size along it, and a mean is over all examples.

        Raises:
            OptionError: An unknown op; an axis that the value does not have.
            DistributedValueError: A boolean, or (with SUM, on several replicas) a plain value.
            ContextError: In a replica context, or in another strategy's scope.

        Example:
            >>> import distnb, torch
            >>> distnb.OneDeviceStrategy("cpu:0").reduce("mean", torch.tensor([1.0, 3.0]), axis=0)
            tensor(2.)
        """
        op = ReduceOp.parse(reduce_op)
        contexts.require_cross_replica(self, "reduce")
        return self.runtime.reduce(op, value, tuple(axis) if isinstance(axis, list) else axis)

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenate what the replicas hold, in replica order.

        Args:
            value: Tensors or arrays of at least one axis, in any structure.
            axis: Along which; the components may differ in size along it only. Negative ones count from the end.

        Raises:
            OptionError: A scalar, or an axis out of range.
            StructureError: Components differ in dtype, or in size along another axis.
            ContextError: In a replica context, or in another strategy's scope.
        """
        contexts.require_cross_replica(self, "gather")
        return self.runtime.gather(value, axis)

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return one replica's value on all of them.

        Args:
            value: Any structure, of which the source's component is taken. It stays as it is.
            source: The replica whose value it is.

        Returns:
            The source's value, a new object on the others: `model.load_state_dict(strategy.broadcast(state))`.
        """
        contexts.require_cross_replica(self, "broadcast")
        return self.runtime.broadcast(value, source)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the components of a value that are here: all in the notebook, its own on a replica.

        Args:
            value: Any structure. A plain value is its only component.
        """
        return self.runtime.local_results(value)

    def group(self, value: Any) -> None:
        """Wait until every component of a value that is here has been computed."""
        torch = sys.modules.get("torch")
        components = flatten(self.local_results(value))[0]
        for component in components:
            if torch is not None and isinstance(component, torch.Tensor) and component.is_cuda:
                torch.cuda.current_stream(component.device).synchronize()

    # Data -----------------------------------------------------------------------------------------------------------

    def distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Return a distributed value whose components a function makes.

        Args:
            value_fn: Called once for each replica, where that replica runs, with a `ValueContext`.
        """
        contexts.require_cross_replica(self, "distribute_values_from_function")
        return self.runtime.distribute_values_from_function(value_fn)

    def distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None, *, batch_size: int | None = None
    ) -> Any:
        """Return a dataset whose batches are global batches, cut into one slice for each replica.

        Its batches have PerReplica leaves. To go on in mid-epoch it has `state_dict()` and `load_state_dict(state)`.
        The default strategy returns a dataset that is batched already as it is.

        Args:
            dataset: A torch DataLoader, or any iterable of batches; a Dataset, arrays or tensors with `batch_size`.
            options: See `InputOptions`; among them what each of several workers reads (`AutoShardPolicy`).
            batch_size: The size of global batches, where the dataset is not batched yet.

        Raises:
            OptionError: An option that cannot be honoured.
            ContextError: In a replica context, or in another strategy's scope.
        """
        check_input_options(options, batch_size)
        contexts.require_cross_replica(self, "distribute_dataset")
        return self.runtime.distribute_dataset(dataset, batch_size, options)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> Any:
        """Return a dataset of batches that a function makes, each as large as one replica's batch.

        Nothing is cut or sharded. A worker's replicas take the batches of its pipeline in turn, and empty ones after an
        odd or early end. Each replica makes its worker's pipeline for itself, with the same random numbers. The default
        strategy returns what the function returns.

        Args:
            dataset_fn: Called with an `InputContext`, in every replica's process; returns an iterable of batches.
            options: See `InputOptions`.

        Raises:
            DistributedValueError: (a TypeError) It is no function.
            OptionError: An option that cannot be honoured.
            ContextError: In a replica context, or in another strategy's scope.

        Example:
            >>> import distnb, torch
            >>> def make(context):
            ...     size = context.get_per_replica_batch_size(4)
            ...     return torch.utils.data.DataLoader(range(8), batch_size=size)
            >>> strategy = distnb.OneDeviceStrategy("cpu:0")
            >>> [batch.tolist() for batch in strategy.distribute_datasets_from_function(make)]
            [[0, 1, 2, 3], [4, 5, 6, 7]]
        """
        check_input_function(dataset_fn, options)
        contexts.require_cross_replica(self, "distribute_datasets_from_function")
        return self.runtime.distribute_datasets_from_function(dataset_fn, options)


def kept_options(gradient_reduction: str, check_mean_loss: bool, **others: Any) -> tuple[tuple[str, Any], ...]:
    """Return the options of a spec: those that differ from the defaults, so that equal arguments name one strategy.

    `others` are a strategy's own, whose defaults are None and False.
    """
    if not isinstance(check_mean_loss, bool):
        raise OptionError(f"check_mean_loss={check_mean_loss!r}: write True or False.")
    if gradient_reduction not in ("sum", "mean"):
        raise OptionError(f"gradient_reduction={gradient_reduction!r}: write 'sum' or 'mean'.")
    kept = {name: value for name, value in others.items() if value is not None and value is not False}
    if not check_mean_loss:
        kept["check_mean_loss"] = False
    if gradient_reduction != "sum":
        kept["gradient_reduction"] = gradient_reduction
    return tuple((name, kept[name]) for name in sorted(kept))
