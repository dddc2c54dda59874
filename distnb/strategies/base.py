"""The base of all strategies. A strategy describes the distribution, and its runtime carries it out."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
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
from distnb.values import Future
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
    "sharded": "distnb.strategies.sharded:ShardedStrategy",
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
        found = getattr(sys.modules.get(module) or importlib.import_module(module), name)
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
    """The distribution of a computation over devices. Each subclass has its own arguments.

    Equal arguments give the same object. You can call the methods in the notebook, on replicas, and in scripts, with
    the same effect.

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
    """The line about the strategy in the help of `%%distribute`."""
    is_default: ClassVar[bool] = False
    """Whether this is the strategy in force outside every scope. Every other strategy may use its variables."""
    is_local: ClassVar[bool] = False
    """Whether the notebook's own process runs a `%%distribute` cell, instead of the replicas."""
    needs_engines: ClassVar[bool] = True
    """Whether a notebook needs a running cluster for the strategy."""
    feature: ClassVar[str] = ""
    """The name under which a feature adds to the strategy at extension points (its runtime, say); "" for none."""
    device_type: ClassVar[str] = ""
    """The required type of all devices; "" for any."""
    cell_names: ClassVar[Mapping[str, str]] = {}
    """Further names that a local cell sees, each with the "module:Class" that is called with the strategy."""
    word_options: ClassVar[tuple[str, ...]] = ("-n", "--devices", "--gradients", "--oversubscribe")
    """The options of the word in `%%distribute`."""
    refusal: ClassVar[str] = ""
    """The reason why the word takes no other options, for the error."""
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

    def cell(self) -> AbstractContextManager[None]:
        """Return a context in which a replica runs a `%%distribute` cell."""
        return nullcontext()

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
        """Return the spec for a word and its options. The class returns an equal spec for equal arguments.

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
            "distnb.Strategy is the base class of strategies. Create a MirroredStrategy or OneDeviceStrategy, or call "
            "get_strategy()."
        )

    def _meet(self) -> bool:
        """Return whether there are replicas. A notebook's engines start, and a script's replicas meet, in this call.

        Afterwards a script's replicas share their random numbers. A strategy that they cannot honour is refused.
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
        """Return the object for a spec. Create it at its first use."""
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
            return object.__getattribute__(self, name)  # a property, whose own AttributeError must be shown
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
        """The number of replicas that compute one global batch together.

        It is 1 in a step of a Keras model, which sees the whole batch.
        """
        innermost = contexts.innermost()
        if innermost is not None and innermost[0] is self and innermost[1] is not None:
            return innermost[1].num_replicas_in_sync
        return self.runtime.num_replicas()

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The device of each replica, in replica order."""
        return self.runtime.worker_devices()

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver of the strategy's machines; None if this is the only machine."""
        return None

    # Variables ----------------------------------------------------------------------------------------------------

    def scope(self) -> AbstractContextManager[Any]:
        """Return a context in which models, optimizers and metrics are created equal on all replicas, and kept in sync.

        Raises:
            ContextError: In a replica context, or in another strategy's scope.

        Example:
            >>> import distnb, torch
            >>> strategy = distnb.OneDeviceStrategy("cpu:0")
            >>> with strategy.scope():
            ...     model = torch.nn.Linear(64, 10)
        """
        contexts.require_cross_replica(self, "scope")
        _ = self.runtime  # raises if there are no replicas
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
        """Return a context in which gradients accumulate on each replica. The next pass outside aggregates them.

        Aggregated gradients cannot be added to: call `zero_grad()` before the first pass in the context.
        """
        return self.runtime.no_sync()

    def assert_in_sync(self, value: Any) -> None:
        """Check that all replicas hold the same bits.

        Args:
            value: A module, an optimizer, a tensor, or a nested structure of them.

        Raises:
            OutOfSyncError: The replicas differ. The message names the parts, the replicas and the differences.
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
            fn: The function, which is called as `fn(*args, **kwargs)` in replica context.
            args: A tuple or list. The replica's component replaces each distributed value in it, at any depth.
            kwargs: A dict, treated likewise.
            options: See `RunOptions`.

        Returns:
            The replicas' results, combined leaf by leaf: None, or a plain Python value that is equal on all replicas,
            or else a PerReplica. With one replica, its result. With `RunOptions(wait=False)`, a `Future` of this.

        Raises:
            ContextError: In a replica context, or in another strategy's scope.
            StructureError: The replicas returned different structures, or an argument has components for another number
                of replicas.

        Example:
            >>> import distnb
            >>> distnb.OneDeviceStrategy("cpu:0").run(lambda x: x + 1, args=(2,))
            3
        """
        __tracebackhide__ = True  # IPython shows the user's function, and its debugger goes from it to the cell
        check_call(fn, args, kwargs, options)
        contexts.require_cross_replica(self, "run")
        result = self.runtime.run(fn, args, kwargs if kwargs is not None else {}, options)
        return result if options is None or options.wait or isinstance(result, Future) else Future.of(result)

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | Sequence[int] | None) -> Any:
        """Combine the replicas' components into one value.

        Args:
            reduce_op: "sum" or "mean".
            value: A result of `run`: tensors, arrays or numbers, in any structure.
            axis: None to combine the components element by element. An axis (or several) to reduce it as well. The
                components may differ in size along it, and a mean is taken over all examples.

        Raises:
            OptionError: The op is unknown, or the value has no such axis.
            DistributedValueError: The value is a boolean, or (with SUM, on several replicas) a plain value.
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
        """Concatenate the replicas' components, in replica order.

        Args:
            value: Tensors or arrays of at least one axis, in any structure.
            axis: The axis, along which the components may differ in size. A negative number counts from the end.

        Raises:
            OptionError: The value is a scalar, or the axis is out of range.
            StructureError: The components differ in dtype, or in size along another axis.
            ContextError: In a replica context, or in another strategy's scope.
        """
        contexts.require_cross_replica(self, "gather")
        return self.runtime.gather(value, axis)

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return one replica's value on all replicas.

        Args:
            value: Any structure. The source's component of it is sent. The value itself does not change.
            source: The number of the sending replica.

        Returns:
            The source's value, which is a new object on the other replicas. Example:
            `model.load_state_dict(strategy.broadcast(state))`.
        """
        contexts.require_cross_replica(self, "broadcast")
        return self.runtime.broadcast(value, source)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the components of a value in this process: all in the notebook, and its own on a replica.

        Args:
            value: Any structure. A plain value is its only component.
        """
        return self.runtime.local_results(value)

    def group(self, value: Any) -> None:
        """Wait until every component of a value in this process has been computed."""
        torch = sys.modules.get("torch")
        components = flatten(self.local_results(value))[0]
        for component in components:
            if torch is not None and isinstance(component, torch.Tensor) and component.is_cuda:
                torch.cuda.current_stream(component.device).synchronize()

    # Data -----------------------------------------------------------------------------------------------------------

    def distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Return a distributed value whose components a function creates.

        Args:
            value_fn: The function. Each replica calls it once, with a `ValueContext`.
        """
        contexts.require_cross_replica(self, "distribute_values_from_function")
        return self.runtime.distribute_values_from_function(value_fn)

    def distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None, *, batch_size: int | None = None
    ) -> Any:
        """Return a dataset whose batches are global batches, cut into one slice for each replica.

        Its batches have PerReplica leaves. `state_dict()` and `load_state_dict(state)` resume it in the middle of an
        epoch. The default strategy returns a batched dataset unchanged.

        Args:
            dataset: A torch DataLoader, or any iterable of batches; a Dataset, arrays or tensors with `batch_size`.
            options: See `InputOptions`. They include the part that each of several workers reads (`AutoShardPolicy`).
            batch_size: The size of global batches, if the dataset is not batched yet.

        Raises:
            OptionError: An option cannot be honoured.
            ContextError: In a replica context, or in another strategy's scope.
        """
        check_input_options(options, batch_size)
        contexts.require_cross_replica(self, "distribute_dataset")
        return self.runtime.distribute_dataset(dataset, batch_size, options)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> Any:
        """Return a dataset of the batches of a function's pipeline, each as large as one replica's batch.

        Nothing is cut or sharded. A worker's replicas take the batches of its pipeline in turn, and empty batches after
        an odd or early end. Each replica creates its worker's pipeline for itself, with the same random numbers. The
        default strategy returns the function's result.

        Args:
            dataset_fn: The function. Every replica calls it with an `InputContext`. It returns an iterable of batches.
            options: See `InputOptions`.

        Raises:
            DistributedValueError: (a TypeError) `dataset_fn` is no function.
            OptionError: An option cannot be honoured.
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

    `others` are the strategy's own options, whose defaults are None and False.
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
