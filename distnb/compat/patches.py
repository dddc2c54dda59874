"""The table of the functions of other libraries that distnb replaces for as long as a process lives.

A room passes its replacement to `wrap` or to `replace`. Not in the table are replacements that end with a `with` block,
those in a single object, such as a model or a shell, and the hooks of `sys`. `tests/core/house/test_patches.py` lists
them.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final, NamedTuple

from distnb.compat.versions import TESTED, private_names

__all__ = ["PATCHES", "Patch", "installed", "remove", "replace", "wrap"]

_GROUPS = "Our group acts as torch's default group: a program finds it, and only releases it when it would destroy it."
_WAITS = "torch waits in C++, where no signal ends the wait."
_HANDLES = "A handle in the notebook is not the object that it refers to. The error explains this, with the cure."
_SHARDS = "Numbers of a sharded tensor are those of the whole, not of one shard."
_MIXED = "torch takes tensors that are all sharded, or none of them. A model may have both."
_LOCAL = "FSDP keeps gradients that were made under no_sync elsewhere than in `grad`."
_METRICS = "Each replica updates its own copy of a metric, and reading the metric aggregates the copies."
_NAMES = "Metrics have Keras's method names, too."
_VARIABLES = "Keras's torch backend ignores how the values of several replicas are combined."
_SCOPES = "Models and metrics that were made outside the scope are refused, and distributed data is resolved."
_SEEDS = "An equal seed leaves the notebook's state as it was, and not the replicas', which have drawn numbers."
_PROMPTS = "A replica's prompt appears in the notebook."

_TABLE: Final = {
    # torch
    "torch.autograd:_engine_run_backward": "A backward pass aggregates the gradients of mirrored parameters.",
    "torch.nn:SyncBatchNorm.forward": "torch synchronises on GPUs only; replicas on the CPU need it, too.",
    "torch.nn.modules.lazy:LazyModuleMixin._infer_parameters": "In a replica, the values would differ by replica.",
    "torch.nn:Module.add_module": _HANDLES,
    "torch.nn:Module.zero_grad": _LOCAL,
    "torch.optim:Optimizer.zero_grad": _LOCAL,
    "torch.nn.parallel:DistributedDataParallel.__init__": "It would aggregate gradients a second time.",
    "torch.optim:Optimizer.add_param_group": f"{_HANDLES} An optimizer of a sharded model gets its shards.",
    "torch.utils.data.dataloader:_BaseDataLoaderIter.__next__": "The number of batches read is compared and measured.",
    # torch.distributed
    "torch.distributed:{init_process_group,destroy_process_group}": _GROUPS,
    "torch.distributed.distributed_c10d:{init_process_group,destroy_process_group}": _GROUPS,
    "torch.distributed.distributed_c10d:_set_pg_timeout": "torch's own limits break the backends' connections.",
    "torch.distributed.distributed_c10d:_new_process_group_helper": "Before torch 2.13, subgroups would not be ours.",
    "torch.distributed:Store.{get,multi_get,wait,queue_pop,barrier}": _WAITS,
    "torch.distributed:TCPStore.__init__": _WAITS,
    "torch.distributed.tensor:DTensor.{numpy,tolist,item,__array__,__float__,__int__,__bool__}": _SHARDS,
    "torch.distributed.tensor:DTensor.{__add__,__radd__,__iadd__,__sub__,__rsub__,__isub__}": _SHARDS,
    "torch.distributed.tensor:DTensor.{__mul__,__rmul__,__imul__,__truediv__,__rtruediv__,__itruediv__}": _SHARDS,
    "torch.distributed.tensor:DTensor.data": "torch replaces what a tensor says about its part, not the part.",
    "torch.distributed.tensor:DTensor.__format__": _SHARDS,
    "torch.nn.utils.clip_grad:{_get_total_norm,_has_foreach_support}": _MIXED,
    "torch.nn.utils:get_total_norm": _MIXED,
    "torch.amp.grad_scaler:GradScaler._unscale_grads_": _MIXED,
    "torch.distributed.tensor:DTensor.full_tensor": (
        "A callback on one replica would wait for the others. Gradients are aggregated over the replicas."
    ),
    # torchmetrics
    "torchmetrics:Metric.{__init__,__call__,reset,_wrap_update,update_called}": _METRICS,
    "torchmetrics:MetricCollection._merge_compute_groups": "An empty or small batch does not show that states differ.",
    "torchmetrics:Metric.{update_state,result,reset_state,reset_states,name}": _NAMES,
    "torchmetrics:MetricCollection.{update_state,result,reset_state,reset_states}": _NAMES,
    # Keras
    "keras:Variable.{_initialize,_direct_assign,assign_add,assign_sub,value,__repr__}": _VARIABLES,
    "keras.metrics:Metric.__init__": _METRICS,
    "keras.optimizers:Optimizer.{build,add_variable_from_reference}": "The slots of sharded parameters are sharded.",
    "keras:Model.__new__": _HANDLES,
    "keras:Sequential.add": _HANDLES,
    "keras.models:{clone_model,save_model}": _HANDLES,
    "keras:Model.compile": f"{_SCOPES} {_HANDLES}",
    "keras:Model.{fit,evaluate,predict,train_on_batch,test_on_batch,predict_on_batch}": _SCOPES,
    "keras.layers:{Discretization,IntegerLookup,Normalization,StringLookup,TextVectorization}.adapt": (
        "Each replica would adapt the layer to its own part of the data."
    ),
    "keras.utils:FeatureSpace.adapt": "Each replica would adapt it to its own part of the data.",
    # Transformers
    "transformers.training_args:TrainingArguments.{distributed_state,_n_gpu,accelerator_config}": (
        "Arguments from another process determine the processes again."
    ),
    "transformers.modeling_utils:PreTrainedModel.save_pretrained": "A sharded model is gathered before it is written.",
    # Jupyter
    "comm:create_comm": "A replica's widgets appear in the notebook.",
    # NumPy and Python
    "numpy.random:{seed,set_state}": _SEEDS,
    "random:{seed,setstate}": _SEEDS,
    "builtins:input": _PROMPTS,
    "getpass:getpass": _PROMPTS,
    "pdb:Pdb.{set_trace,set_trace_async}": _PROMPTS,
    "concurrent.futures:{ThreadPoolExecutor,ProcessPoolExecutor}.submit": "A program waits for the tasks of its pools.",
    "multiprocessing.process:BaseProcess.start": "A launcher in a cell would start ranks of another group.",
    "multiprocessing.reduction:ForkingPickler.reducer_override": "Spawned processes lack the notebook's definitions.",
}
"""The reason for each replacement, by its target. A name in braces stands for several targets."""

_ADDED = re.compile(
    r"torch\.distributed\.tensor:.*"
    r"|multiprocessing\.reduction:.*"  # the library calls the method if it exists
    r"|torchmetrics:.*\.(update_state|result|reset_state|reset_states|name)"
    r"|transformers\.training_args:.*"
)
"""Targets that the library need not have."""

_INHERITED = "keras:Model."
"""Targets that are replaced in the base class that defines them: Keras asks whether a model's class overrides them."""


class Patch(NamedTuple):
    """The replacement of a function.

    Attributes:
        reason: What would go wrong without it.
        versions: The first and the last tested version of the library. It is () for Python's own modules, for `comm`,
            which has its users set the function, and for NumPy's public functions.
    """

    reason: str
    versions: tuple[str, ...]


def _targets(pattern: str) -> list[str]:
    """Return the targets of a line of the table: `m:C.{a,b}` stands for `m:C.a` and `m:C.b`."""
    before, brace, rest = pattern.partition("{")
    names, _, after = rest.partition("}")
    return [f"{before}{name}{after}" for name in names.split(",")] if brace else [pattern]


def _library(target: str) -> str:
    return target.partition(":")[0].partition(".")[0]


PATCHES: Final = {
    target: Patch(reason, TESTED.get(_library(target), ()))
    for pattern, reason in _TABLE.items()
    for target in _targets(pattern)
}
"""The replacements by their targets: `module:attribute` or `module:class.attribute`."""


class _Replaced(NamedTuple):
    owner: Any
    attribute: str
    was_own: bool  # False: the owner inherited the attribute, or had none
    original: Any
    wrappers: list[Callable[..., Any]]


_replaced: dict[str, _Replaced] = {}


def replace(target: str, replacement: Any) -> None:
    """Replace a target of the table. An earlier replacement is replaced, too.

    Raises:
        LibraryVersionError: The library is too old, or has no such attribute.
    """
    owner, attribute = _find(target)
    was_own = attribute in vars(owner)
    _replaced.setdefault(target, _Replaced(owner, attribute, was_own, vars(owner).get(attribute), []))
    setattr(owner, attribute, replacement)


def wrap(target: str, wrapper: Callable[..., Any]) -> None:
    """Replace a function, or the getter of a property, by a call of `wrapper(function, *args, **kwargs)`.

    Wrappers of one target are nested. A wrapper that is installed already is not installed again.

    Raises:
        LibraryVersionError: The library is too old, or has no such attribute.
    """
    if target in _replaced and wrapper in _replaced[target].wrappers:
        return
    owner, attribute = _find(target)

    def wrapped(plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        # not a callable object: torch and others read __name__ and __code__
        def function(*args: Any, **kwargs: Any) -> Any:
            return wrapper(plain, *args, **kwargs)

        if inspect.ismodule(owner):  # pickled by its name, also in place of a bound method
            function.__module__, function.__qualname__ = owner.__name__, attribute
        return function

    found = inspect.getattr_static(owner, attribute)
    if isinstance(found, property):
        assert found.fget is not None
        replace(target, property(wrapped(found.fget)))
    else:
        function = wrapped(getattr(owner, attribute))
        replace(target, staticmethod(function) if isinstance(found, staticmethod) else function)
    _replaced[target].wrappers.append(wrapper)


def _find(target: str) -> tuple[Any, str]:
    """Return the module or class that a target belongs to, and the name of the attribute."""
    assert target in PATCHES, f"{target} is missing from the table of patches"
    module, _, path = target.partition(":")
    *names, attribute = path.split(".")
    library = _library(target)
    with private_names(library) if library in TESTED else nullcontext():
        owner: Any = functools.reduce(getattr, names, importlib.import_module(module))
        if not _ADDED.fullmatch(target):
            getattr(owner, attribute)
        if target.startswith(_INHERITED):
            owner = next(cls for cls in owner.__mro__ if attribute in vars(cls))
    return owner, attribute


def installed(library: str | None = None) -> list[str]:
    """Return the targets that are replaced in this process: all, or those of one library."""
    return [target for target in _replaced if library in (None, _library(target))]


def remove(library: str | None = None) -> None:
    """Put the originals back: all, or those of one library."""
    for target in installed(library):
        found = _replaced.pop(target)
        if found.was_own:
            setattr(found.owner, found.attribute, found.original)
        else:
            delattr(found.owner, found.attribute)
