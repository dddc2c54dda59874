"""Private names of torch: graphs of operations, tensors, modules and optimizers."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

from distnb.compat.versions import private_names

with private_names("torch"):
    import torch
    import torch.autograd
    import torch.utils._device
    from torch import _foreach_add_ as add_each
    from torch import _foreach_copy_ as copy_each
    from torch import _foreach_mul_ as scale_each
    from torch import _foreach_zero_ as zero_each
    from torch import _is_functional_tensor
    from torch import _neg_view as negative_view
    from torch._tensor_str import PRINT_OPTS
    from torch._tensor_str import _tensor_str as elements_as_text
    from torch.nn.modules.batchnorm import _NormBase as NormBase
    from torch.nn.utils.parametrize import _inject_new_class, _inject_property, is_parametrized
    from torch.utils._device import _device_constructors as factories
    from torch.utils._pytree import tree_leaves as leaves
    from torch.utils._pytree import tree_map as map_leaves

    # The public names of cuDNN's flags are properties of a module's replacement, which take ten times as long when no
    # code is cached.
    cudnn_benchmark = torch._C._get_cudnn_benchmark
    cudnn_deterministic = torch._C._get_cudnn_deterministic
    deterministic = torch._C._get_deterministic_algorithms
    deterministic_warns = torch._C._get_deterministic_algorithms_warn_only
    matmul_precision = torch._C._get_float32_matmul_precision
    is_view = torch.Tensor._is_view
    make_subclass: Any = torch.Tensor._make_subclass
    _make_wrapper_subclass = torch.Tensor._make_wrapper_subclass
    no_torch_function = torch._C._disabled_torch_function_impl
    _run_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    patch_step = torch.optim.Optimizer._patch_step_function
    _uses_of_storage = getattr(torch._C, "_storage_Use_Count", None)

__all__ = [
    "CAN_COUNT_USES",
    "PRINT_OPTS",
    "NormBase",
    "add_each",
    "backward_function",
    "check_batch",
    "copy_each",
    "call_load_hooks",
    "call_state_dict_hooks",
    "cudnn_benchmark",
    "cudnn_deterministic",
    "default_device",
    "deterministic",
    "deterministic_warns",
    "elements_as_text",
    "factories",
    "has_gradient_hook",
    "has_no_memory",
    "has_state_hooks",
    "identity_of_storage",
    "is_own_attribute",
    "is_unplaced",
    "is_view",
    "leaves",
    "local_tensor",
    "make_subclass",
    "matmul_precision",
    "make_wrapper",
    "load_compiler_on_demand",
    "map_leaves",
    "negative_view",
    "never_trace",
    "no_torch_function",
    "original_class",
    "patch_step",
    "plain_data",
    "pre_hooks",
    "reduce_module",
    "reduce_parametrized",
    "save_own",
    "refuses_cuda_after_fork",
    "replace_local",
    "saved",
    "scale_each",
    "shape_and_offset",
    "shape_and_offset_of_shard",
    "shapes_of_outputs",
    "sparse_parts",
    "sparse_tensor",
    "step_hooks",
    "surround_step",
    "typed_storage",
    "unplaced_shard",
    "untyped_storage",
    "uses_of_storage",
    "written",
    "zero_each",
]

# -- graphs of operations ----------------------------------------------------------------------------------------------


def backward_function() -> Callable[..., Any]:
    """Return the function that runs every backward pass started from Python."""
    return torch.autograd._engine_run_backward  # type: ignore[attr-defined]


def saved(node: Any, name: str, default: Any = None) -> Any:
    """Return the value that a node of a graph has saved under a name, or the default if there is none.

    Raises:
        RuntimeError: An earlier backward pass has freed it.
    """
    return getattr(node, f"_saved_{name}", default)


def shapes_of_outputs(node: Any) -> list[torch.Size]:
    """Return the shapes of a node's outputs, or [] if they are unknown."""
    return [each.shape for each in getattr(node, "_input_metadata", ())]


# -- tensors -----------------------------------------------------------------------------------------------------------

CAN_COUNT_USES = _uses_of_storage is not None


def uses_of_storage(tensor: torch.Tensor) -> int:
    """Return how many tensors and arrays share a tensor's memory."""
    assert _uses_of_storage is not None
    uses: int = _uses_of_storage(tensor.untyped_storage()._cdata)
    return uses


def has_no_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor on the host has no memory: a zero of autograd, or a tracer's tensor."""
    with torch._C.DisableTorchFunctionSubclass():  # prevents the reading of a distributed variable
        return tensor._is_zerotensor() or bool(_is_functional_tensor(tensor))


def identity_of_storage(storage: Any) -> int:
    """Return a number that identifies a storage as long as it is alive, even if it is resized."""
    identity: int = storage._cdata
    return identity


def untyped_storage(storage: Any) -> Any:
    """Return a storage without a dtype. torch's public function warns about the change of storages."""
    return getattr(storage, "_untyped_storage", storage)


def typed_storage(storage: Any, dtype: torch.dtype) -> Any:
    """Return a storage with a dtype, as `tensor.storage()` does."""
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def make_wrapper(cls: type, like: torch.Tensor, device: torch.device) -> Any:
    """Make a tensor of a subclass that has the shape, strides and dtype of another tensor, and no memory."""
    return _make_wrapper_subclass(
        cls, like.size(), strides=like.stride(), storage_offset=like.storage_offset(), dtype=like.dtype, device=device
    )


plain_data: Any = torch.Tensor.data
"""The property `data` of plain tensors, for subclasses that replace it."""


def written(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments to which an operator of torch writes."""
    found: list[Any] = []
    for place, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += value if isinstance(value, list | tuple) else [value]
    return found


def has_gradient_hook(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a hook that runs when its gradient was computed or accumulated."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def move_gradient_hooks(tensor: torch.Tensor, source: torch.Tensor) -> None:
    """Give a tensor the hooks on the gradient of another, which it replaces."""
    if source._backward_hooks:
        tensor._backward_hooks = source._backward_hooks
    if source._post_accumulate_grad_hooks:
        tensor._post_accumulate_grad_hooks = source._post_accumulate_grad_hooks


def local_tensor(tensor: Any) -> Any:
    """Return this process's part of a DTensor, or None for any other tensor."""
    return getattr(tensor, "_local_tensor", None)


def replace_local(tensor: Any, by: Any) -> None:
    """Give a DTensor the part and the dtype of another one."""
    plain_data.__set__(tensor, by)
    tensor._local_tensor, tensor._spec = by._local_tensor.detach(), by._spec


def shape_and_offset_of_shard(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of this process's part of a DTensor, and its offset in the whole."""
    return shape_and_offset(tuple(tensor.shape), tensor.device_mesh, tensor.placements)


def shape_and_offset(
    whole: tuple[int, ...], mesh: Any, placements: Sequence[Any]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of this process's part of a tensor that is divided over a mesh, and its offset in the whole."""
    coordinate = mesh.get_coordinate()
    if coordinate is not None and all(_is_cut_in_order(each) for each in placements):
        # torch's function, from version 2.13 on, makes a list of all rows of the part.
        shape, offset = list(whole), [0] * len(whole)
        for number, placement in enumerate(placements):
            if placement.is_shard():
                rows = shape[placement.dim]
                each = -(-rows // mesh.size(number))
                first = min(each * coordinate[number], rows)
                shape[placement.dim] = min(each, rows - first)
                offset[placement.dim] += first
        return tuple(shape), tuple(offset)
    with private_names("torch"):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # slow to import

    return compute_local_shape_and_global_offset(torch.Size(whole), mesh, placements)


_UNPLACED = ("unplaced",)


def unplaced_shard(shape: tuple[int, ...], stride: tuple[int, ...], dtype: Any, device_type: str) -> Any:
    """Return a DTensor of a shape, without memory, on a mesh without processes. `replace_local` gives it a part."""
    with private_names("torch"):
        from torch.distributed.device_mesh import DeviceMesh  # slow to import
        from torch.distributed.tensor import DTensor, Shard

    ranks = torch.zeros(1, dtype=torch.int)
    mesh = DeviceMesh(device_type, ranks, mesh_dim_names=_UNPLACED, _init_backend=False, _rank=0)
    part = torch.empty((0, *shape[1:]), dtype=dtype, device=device_type)
    return DTensor.from_local(part, mesh, (Shard(0),), run_check=False, shape=torch.Size(shape), stride=stride)


def is_unplaced(tensor: Any) -> bool:
    """Return whether a DTensor is an `unplaced_shard`."""
    return bool(tensor.device_mesh.mesh_dim_names == _UNPLACED)


def _is_cut_in_order(placement: Any) -> bool:
    """Return whether the parts are consecutive rows, in the order of the replicas."""
    return not hasattr(placement, "split_factor") and (placement.is_shard() or placement.is_replicate())


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return indices and values of a sparse COO tensor, coalesced or not."""
    return tensor._indices(), tensor._values()


def sparse_tensor(
    indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...], *, is_coalesced: bool | None = None
) -> torch.Tensor:
    """Return a sparse COO tensor without a check of its indices.

    Before torch 2.13 the argument `check_invariants=False` does not prevent the warning that they are not checked.
    """
    with torch.sparse.check_sparse_tensor_invariants(False):
        return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=is_coalesced)


def default_device() -> torch.device | None:
    """Return the default device, or None if none was set.

    torch.get_default_device returns "cpu" in both cases. No default device costs less, since it sets no function mode.
    """
    device: torch.device | None = torch.utils._device.CURRENT_DEVICE
    return device


def original_class(value: Any) -> type:
    """Return the class of an object as its program made it: FSDP derives a class of its own for each sharded module."""
    kind, fsdp = type(value), sys.modules.get("torch.distributed.fsdp")
    return kind.__mro__[2] if fsdp is not None and isinstance(value, fsdp.FSDPModule) else kind


# -- the compiler ------------------------------------------------------------------------------------------------------


def never_trace(function: FunctionType) -> None:
    """Exclude a function, and everything it calls, from torch.compile's tracing. Imports no compiler.

    If torch lacks the means, the function is traced, which is slow and noisy but correct.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    try:
        from torch._C._dynamo import eval_frame
    except ImportError:
        return
    skip = getattr(getattr(eval_frame, "_FrameAction", None), "SKIP", None)
    strategy = getattr(eval_frame, "_FrameExecStrategy", None)
    if skip is not None and strategy is not None:
        eval_frame.set_code_exec_strategy(function.__code__, strategy(skip, skip))


def refuses_cuda_after_fork() -> bool:
    """Return whether torch would refuse CUDA in a process that is forked now: it does once CUDA was asked for GPUs.

    A forked process answers the question, because torch notes it in each of them.
    """
    asked = getattr(torch._C, "_cuda_isInBadFork", None)  # missing in a build without CUDA
    if asked is None:
        return False
    pid = os.fork()
    if pid == 0:
        os._exit(bool(asked()))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0


_COMPILER = "torch._dynamo"


def load_compiler_on_demand() -> None:
    """Have torch's compiler, `torch._dynamo`, loaded at its first use, and not by the first optimizer. Idempotent.

    It takes 70 to 100 MB of each process and more than a second. torch's optimizers import it in order to be excluded
    from compilation, by `disable` and `graph_break`, which have no effect until something is compiled. A proxy with
    these two functions represents it. Any other attribute, and the import of a module in it, loads the compiler,
    which replaces the proxy:

        torch.optim.Adam(…)                    → proxy.disable(add_param_group)
        torch.compile(model)                   → proxy.optimize             → loads torch._dynamo
        import torch._dynamo.config            → proxy.__path__             → loads torch._dynamo
    """
    if _COMPILER not in sys.modules:
        proxy = _CompilerProxy(_COMPILER)
        proxy.__spec__ = importlib.util.find_spec(_COMPILER)
        sys.meta_path.insert(0, _CompilerFinder())
        sys.modules[_COMPILER] = torch._dynamo = proxy


class _CompilerProxy(ModuleType):
    """The proxy of the compiler. It answers for no special attribute but `__path__`.

    Python and IPython ask every loaded module for attributes such as `__file__`.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(f"module {_COMPILER!r} has no attribute {name!r}")
        return getattr(_compiler(), name)

    def disable(self, fn: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Return the function, excluded from compilation as soon as the compiler is loaded."""
        if not isinstance(fn, FunctionType):
            return _compiler().disable(fn, *args, **kwargs)
        excluded = None

        @functools.wraps(fn)
        def function(*its_args: Any, **its_kwargs: Any) -> Any:
            nonlocal excluded
            if excluded is None:
                if isinstance(sys.modules[_COMPILER], _CompilerProxy):
                    return fn(*its_args, **its_kwargs)
                excluded = _compiler().disable(fn, *args, **kwargs)
            return excluded(*its_args, **its_kwargs)

        return function

    def graph_break(self, msg: str = "") -> None:
        """Do nothing, as the compiler's function does in code that is not compiled."""


def _compiler() -> Any:
    """Return the compiler. Its first use loads it."""
    if isinstance(sys.modules.get(_COMPILER), _CompilerProxy):
        del sys.modules[_COMPILER]
    return importlib.import_module(_COMPILER)


class _CompilerFinder(MetaPathFinder, Loader):
    """The finder of the compiler's modules that were loaded with it while Python imported one of them.

    `import torch._dynamo.config` asks the proxy for the place of `config`. That loads the compiler and its `config`,
    which Python would then load a second time.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a specification for a module of the compiler that is loaded, or None."""
        loaded = fullname.startswith(f"{_COMPILER}.") and target is None and fullname in sys.modules
        return ModuleSpec(fullname, self) if loaded else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the loaded module."""
        module = sys.modules[spec.name]
        spec.loader_state = getattr(module, "__spec__", None)  # torch's modules of settings have none
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Keep the module as it is."""
        spec = getattr(module, "__spec__", None)
        if spec is not None and spec.loader is self:
            module.__spec__ = spec.loader_state


# -- modules and optimizers --------------------------------------------------------------------------------------------

_OWN_HOOKS = re.compile(r"(distnb|torch\.distributed\.fsdp)\.")


def check_batch(layer: Any, batch: torch.Tensor) -> None:
    """Raise ValueError if a batch norm cannot take a batch of this shape."""
    layer._check_input_dim(batch)
    layer._check_non_zero_input_channels(batch)


def pre_hooks(module: torch.nn.Module) -> list[Any]:
    """Return the forward pre-hooks of a module."""
    return list(module._forward_pre_hooks.values())


def save_own(module: torch.nn.Module, states: dict[str, Any], prefix: str) -> None:
    """Add a module's own parameters and buffers to `states`, without those of the modules in it."""
    module._save_to_state_dict(states, prefix, keep_vars=True)


def has_state_hooks(module: torch.nn.Module) -> bool:
    """Return whether a module has hooks that change its state when it is saved or loaded.

    FSDP's only free what it has gathered, and those of distnb only replace whole tensors by shards.
    """
    hooks = [getattr(each, "hook", each) for each in module._load_state_dict_pre_hooks.values()]
    others = [each for each in hooks if not _OWN_HOOKS.match(getattr(each, "__module__", None) or "")]
    return bool(others or module._state_dict_hooks)


_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def step_hooks(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's own hooks for steps, by the names of attributes."""
    return {name: found for name in _STEP_HOOKS if (found := vars(optimizer).get(name))}


def surround_step(
    optimizer: torch.optim.Optimizer, before: Callable[..., Any], after: Callable[..., Any]
) -> Callable[[], None]:
    """Call functions right before and after the next step of an optimizer, within all its other hooks.

    Call this in a global hook, which comes before the optimizer's own. Return a function that removes both.
    """
    first, last = optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)
    optimizer._optimizer_step_post_hooks.move_to_end(last.id, last=False)  # type: ignore[attr-defined]

    def remove() -> None:
        first.remove()
        last.remove()

    return remove


def call_state_dict_hooks(optimizer: Any, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what `make` returns, as changed by an optimizer's hooks for `state_dict`."""
    for pre_hook in optimizer._optimizer_state_dict_pre_hooks.values():
        pre_hook(optimizer)
    state = make()
    for hook in optimizer._optimizer_state_dict_post_hooks.values():
        changed = hook(optimizer, state)
        state = state if changed is None else changed
    return state


def call_load_hooks(optimizer: Any, state: dict[str, Any], load: Callable[[dict[str, Any]], None]) -> None:
    """Call `load` with a state, as changed by an optimizer's hooks for `load_state_dict`."""
    state = state.copy()
    for pre_hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed = pre_hook(optimizer, state)
        state = state if changed is None else changed
    load(state)
    for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        hook(optimizer)


def reduce_parametrized(module: Any) -> tuple[Any, ...] | None:
    """Return the reduction, as `__reduce__` does, of a module with parametrizations, whose class torch has made.

    Return None for any other object.
    """
    if not isinstance(module, torch.nn.Module) or not is_parametrized(module):
        return None
    return reduce_module(type(module), dict(vars(module)))


def reduce_module(cls: type, attributes: dict[str, Any]) -> tuple[Any, ...]:
    """Return the reduction of a module of a class with these attributes."""
    if "parametrizations" in attributes["_modules"]:
        return _new_object, (cls.__base__,), attributes, None, None, _set_parametrized
    return _new_object, (cls,), attributes


def _new_object(cls: Any) -> Any:
    return cls.__new__(cls)


def _set_parametrized(module: torch.nn.Module, state: dict[str, Any]) -> None:
    vars(module).update(state)
    _inject_new_class(module)
    for name in state["_modules"]["parametrizations"]:
        _inject_property(module, name)


def is_own_attribute(name: str) -> bool:
    """Return whether an optimizer's attribute is its own, and not one of the hooks and labels that torch adds."""
    return not name.startswith(("_optimizer_", "_zero_grad_profile"))
