"""Private names of torch.distributed: its process groups, its backends, and its functions to replace."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, cast

from distnb.compat import patches
from distnb.compat.versions import private_names

with private_names("torch"):
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import (
        AllgatherOptions,
        AllreduceOptions,
        AllToAllOptions,
        Backend,
        BarrierOptions,
        BroadcastOptions,
        FileStore,
        HashStore,
        PrefixStore,
        ReduceScatterOptions,
        Store,
        TCPStore,
        _DistributedBackendOptions,
    )
    from torch._C._distributed_c10d import _register_process_group as register_group
    from torch._C._distributed_c10d import _unregister_process_group as unregister_group
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed.distributed_c10d import GroupMember
    from torch.distributed.distributed_c10d import _check_valid_timeout as check_timeout
    from torch.distributed.distributed_c10d import _get_default_group as default_group
    from torch.distributed.distributed_c10d import _get_default_store as default_store
    from torch.distributed.distributed_c10d import _update_default_pg as set_default_group
    from torch.distributed.distributed_c10d import _use_torchcomms_enabled as uses_torchcomms
    from torch.distributed.distributed_c10d import _world as world
    from torch.distributed.rendezvous import _rendezvous_handlers as rendezvous_handlers

    _plugins = dist.Backend._plugins
    _gloo_options = cast(Any, dist.ProcessGroupGloo)._Options

__all__ = [
    "ASKS_FOR_SUBGROUPS",
    "NOT_IN_GROUP",
    "AllToAllOptions",
    "AllgatherOptions",
    "AllreduceOptions",
    "Backend",
    "BarrierOptions",
    "BroadcastOptions",
    "FileStore",
    "HashStore",
    "PrefixStore",
    "ReduceScatterOptions",
    "Store",
    "TCPStore",
    "abort_nccl",
    "add_to_world",
    "backend_from_plugin",
    "check_timeout",
    "default_group",
    "default_store",
    "gloo_options",
    "has_plugin",
    "is_nccl",
    "nccl_options",
    "register_backends",
    "register_group",
    "rendezvous_handlers",
    "replace_function",
    "set_default_group",
    "timeout_of",
    "unregister_group",
    "uses_torchcomms",
    "world",
]

ASKS_FOR_SUBGROUPS = torch.__version__ >= "2.13"
"""True if `new_group` asks a default group that is written in Python to make the new one."""

NOT_IN_GROUP: Any = GroupMember.NON_GROUP_MEMBER


def replace_function(name: str, replacement: Callable[..., Any]) -> None:
    """Replace one of torch.distributed's functions by `replacement(original, *args, **kwargs)`."""
    original = getattr(c10d, name)

    @functools.wraps(original)
    # not a callable object: torch and others read __name__ and __code__
    def function(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    for module in (dist, c10d):
        if hasattr(module, name):
            patches.replace(f"{module.__name__}:{name}", function)


def add_to_world(group: Any, name: Any, backend: Any, store: Store, tag: str | None) -> None:
    """Register a subgroup with torch.distributed under a name, and under the user's tag, if any."""
    world.pg_map[group] = (backend, store)
    world.pg_names[group] = name
    world.pg_backend_config[group] = str(c10d.BackendConfig(backend))
    world.pg_to_tag[group] = tag = f"user:{tag}" if tag else f"ptd:{name}"
    for each in (tag,) if tag.startswith("user:") else ("", tag):
        world.tags_to_pg.setdefault(each, []).append(group)
    register_group(name, group)


def gloo_options(device: Any, threads: int, timeout: timedelta) -> Any:
    """Return options for a Gloo backend."""
    options = _gloo_options()
    options._devices = [device]
    options._threads = threads
    options._timeout = timeout
    return options


def nccl_options(timeout: timedelta) -> Any:
    """Return options for an NCCL backend."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return options


def timeout_of(group: Any) -> timedelta | None:
    """Return the time limit of the operations of one of torch's own groups, if its backends have one."""
    options = [getattr(group._get_backend(device), "options", None) for device in group._device_types]
    return next((each._timeout for each in options if each is not None), None)


def is_nccl(backend: Any) -> bool:
    """Return whether a backend is NCCL's."""
    return hasattr(backend, "_group_start")


def abort_nccl(backends: Sequence[Any]) -> None:
    """Abort NCCL's backends inside one NCCL group, so that the aborts of several cannot wait for each other."""
    if backends:
        backends[0]._group_start()
        for each in backends:
            each.abort()
        backends[0]._group_end()


def register_backends(group: dist.ProcessGroup, backends: Mapping[str, Any]) -> None:
    """Register the backends of a C++ process group by the type of device whose tensors they carry."""
    types = dist.ProcessGroup.BackendType
    known = {"gloo": types.GLOO, "nccl": types.NCCL}
    # An external backend may be a process group written in Python, which C++ cannot hold.
    held = {kind: each for kind, each in backends.items() if isinstance(each, Backend)}
    kinds = {kind: known.get(each.name(), types.CUSTOM) for kind, each in held.items()}
    group._set_default_backend(list(kinds.values())[-1])
    for kind, backend_type in kinds.items():
        group._register_backend(torch.device(kind), backend_type, held[kind])


def has_plugin(name: str) -> bool:
    """Return whether an external package has registered a backend of this name."""
    return name.upper() in _plugins


def backend_from_plugin(
    name: str, store: Store, rank: int, ranks: Sequence[int], label: str, timeout: timedelta
) -> Any:
    """Make a backend of an external package, as `init_process_group` does.

    Args:
        rank: This process's rank in the group.
        ranks: The global rank of each rank of the group.
        label: The name of the group.
    """
    plugin = _plugins[name.upper()]
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, len(ranks), timeout)
    options = _DistributedBackendOptions()
    options.store, options.group_rank, options.group_size = store, rank, len(ranks)
    options.timeout, options.group_id = timeout, label
    options.global_ranks_in_group = list(ranks)
    return plugin.creator_fn(options, None)
