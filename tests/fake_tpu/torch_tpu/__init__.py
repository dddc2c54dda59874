"""A replacement for the package `torch_tpu` without a TPU: a device type `tpu` in Python, on host memory.

Put its folder on PYTHONPATH: torch loads it by its entry point, as it loads the real one. It registers a PrivateUse1
backend under torch's own rules: tensors whose device is `tpu:0`, which no CPU code can touch, with a generator and
(where FAKE_TPU_C10D is set) a c10d backend of their own. FAKE_TPU_CHIPS says how many chips there are.
"""

from __future__ import annotations

import copyreg
import functools
import os
import sys
import types
from typing import Any

import torch
from torch.utils import _pytree, backend_registration

_CHIPS = int(os.environ.get("FAKE_TPU_CHIPS", "0"))
_HOST = torch.device("cpu")
_generator = torch.Generator()
_kept: list[Any] = []


class ChipTensor(torch.Tensor):
    """A tensor on the chip. Its data is `host`, which only the kernels below see."""

    __slots__ = ("host",)  # so that it has no instance attributes, like any tensor
    host: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: torch.Tensor, requires_grad: bool = False) -> ChipTensor:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            host.size(),
            strides=host.stride(),
            dtype=host.dtype,
            device=torch.device("tpu", 0),
            requires_grad=requires_grad,
        )
        made.host = host
        return made

    def __repr__(self, **_: Any) -> str:
        return f"{self.host!r} on tpu:0"

    @property  # type: ignore[override]
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined,no-any-return]

    @data.setter
    def data(self, new: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, new)  # type: ignore[attr-defined]
        self.host = new.host  # type: ignore[attr-defined]

    def tolist(self) -> Any:  # torch refuses subclasses; this is one only because it is written in Python
        return self.host.tolist()

    @classmethod
    def __torch_dispatch__(cls, op: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(op, args, kwargs or {})


def _saved(tensor: ChipTensor) -> Any:
    """Save as torch does on devices whose memory it cannot read, so that loading needs no class of ours."""
    rebuild = torch._utils._rebuild_device_tensor_from_cpu_tensor
    return rebuild, (tensor.host, tensor.dtype, "tpu:0", tensor.requires_grad)


_plain_make_subclass = torch.Tensor._make_subclass


def _make_subclass(cls: Any, data: torch.Tensor, requires_grad: bool = False, **kwargs: Any) -> torch.Tensor:
    """Replace torch's own function, which would make a tensor of `cls` without the chip's data."""
    if not isinstance(data, ChipTensor):
        return _plain_make_subclass(cls, data, requires_grad, **kwargs)
    return _on_chip(cls)(data.host, requires_grad)


@functools.cache
def _on_chip(cls: Any) -> Any:
    names = {"__new__": ChipTensor.__new__, "__module__": cls.__module__}
    becomes = getattr(cls, "cls_to_become", None)  # for a lazy module's parameter, once its shape is known
    if becomes is not None:
        names["cls_to_become"] = _on_chip(becomes)
    return ChipTensor if cls is torch.Tensor else type(cls.__name__, (cls, ChipTensor), names)


def _run(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run one operation on the host's tensors, and return the results on the chip."""
    chip = {id(leaf.host): leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, ChipTensor)}
    device = kwargs.get("device")
    stays = bool(chip) if device is None else torch.device(device).type == "tpu"
    args, kwargs = _pytree.tree_map(_lowered, (args, kwargs))
    if torch.Tag.nondeterministic_seeded in op.tags and any(each.name == "generator" for each in op._schema.arguments):
        kwargs = {"generator": _generator} | {name: value for name, value in kwargs.items() if value is not None}
    result = op(*args, **kwargs)
    if op is torch.ops.aten.copy_.default:
        stays = id(args[0]) in chip

    def raised(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not stays:
            return leaf
        known = chip.get(id(leaf))
        return ChipTensor(leaf) if known is None else known

    return _pytree.tree_map(raised, result)


def _lowered(leaf: Any) -> Any:
    if isinstance(leaf, torch.device) and leaf.type == "tpu":
        return _HOST
    return leaf.host if isinstance(leaf, ChipTensor) else leaf


def _factories() -> list[tuple[str, Any]]:
    """Define the functions that make new tensors: torch calls the device's own kernel for them."""
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        space, _, rest = name.partition("::")
        name, _, overload = rest.partition(".")
        if space != "aten" or "sparse" in name:
            continue
        op = getattr(getattr(torch.ops.aten, name, None), overload or "default", None)
        kinds = {} if op is None else {each.name: str(each.type) for each in op._schema.arguments}
        if "device" not in kinds or any("Tensor" in kind for kind in kinds.values()):
            continue
        returned = [str(each.type) for each in op._schema.returns]
        composite = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")
        if returned == ["Tensor"] and not composite:
            found.append((rest, op))
    return found


def _kernel(op: Any) -> Any:
    def make(*args: Any, **kwargs: Any) -> Any:
        return _run(op, args, {**kwargs, "device": torch.device("tpu", 0), "pin_memory": None})

    return make


def _recurrent(name: str) -> Any:
    """Compute a recurrent layer with simple operations. Torch would call fused ones, for which no CPU has kernels."""

    def run(*args: Any) -> Any:
        from torch._decomp import decompositions

        return getattr(decompositions, name)(*args)

    return run


class _Backend:
    """The chips' own c10d backend: Gloo on the chips' memory."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        self._gloo = torch.distributed.ProcessGroupGloo(store, rank, size, timeout)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._gloo, name)
        return lambda *args: method(*_pytree.tree_map(_lowered, args))


def _module() -> types.ModuleType:
    module = types.ModuleType("torch.tpu")
    module.__path__ = []
    module.__dict__.update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        device_count=_internal,
        current_device=_internal,
        set_device=_internal,
        manual_seed=_generator.manual_seed,
        manual_seed_all=_generator.manual_seed,
        default_generators=(_generator,),
        distributed=types.ModuleType("torch.tpu.distributed"),
    )
    module.distributed.set_tpu_launch_env = _set_tpu_launch_env
    return module


def _internal(*_: Any) -> Any:
    raise RuntimeError("internal to TorchTPU: use torch.accelerator")  # like the real package since 0.2


def _set_tpu_launch_env(*, nnodes: int | None = None, nproc_per_node: int | None = None) -> None:
    count = _CHIPS if nproc_per_node is None else nproc_per_node
    if not _CHIPS:
        raise ValueError("set_tpu_launch_env(): expected TPU devices, got none")
    if count > _CHIPS:
        raise RuntimeError(f"No TPU topology found for count: {count}")
    os.environ["TORCH_TPU_SLICEBUILDER_ADDRESSES"] = ",".join(f"localhost:{8000 + index}" for index in range(count))
    os.environ["TORCH_TPU_TOPOLOGY"] = f"{count},1,1"


def load() -> None:
    """Register the device; torch calls this on import."""
    module = _module()
    if not _CHIPS:
        sys.modules |= {"torch.tpu": module, "torch.tpu.distributed": module.distributed}
        return
    backend_registration._setup_privateuseone_for_python_backend("tpu", backend_module=module)
    sys.modules |= {"torch.tpu": module, "torch.tpu.distributed": module.distributed}
    copyreg.pickle(ChipTensor, _saved)
    torch.Tensor._make_subclass = staticmethod(_make_subclass)  # type: ignore[assignment,method-assign]
    library = torch.library.Library("aten", "IMPL")
    _kept.append(library)
    for name, op in _factories():
        library.impl(name, _kernel(op), "PrivateUse1")
    library.impl("lstm.input", _recurrent("lstm_impl"), "AutogradPrivateUse1")
    library.impl("gru.input", _recurrent("gru_impl"), "AutogradPrivateUse1")
    library.impl(
        "_copy_from",
        lambda source, target, wait=False: _run(torch.ops.aten.copy_.default, (target, source), {}),
        "PrivateUse1",
    )
    if "FAKE_TPU_C10D" in os.environ:
        torch.distributed.Backend.register_backend("tpu_dist", _Backend, devices=["tpu"])
