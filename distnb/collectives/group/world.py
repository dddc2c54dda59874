"""torch.distributed's global state: which group is the default one, and what the user's calls to set it up mean.

torch knows one world at a time. Here each team has one of its own, with the subgroups that were made in it, and
`World.enter` exchanges the whole state.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d as c10d

from distnb.collectives.group.identity import GroupIdentity
from distnb.errors import CollectiveError

__all__ = ["World", "foreign_default", "install", "leave"]

_MAPS = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg", "pg_coalesce_state")
_register = torch._C._distributed_c10d._register_process_group
_unregister = torch._C._distributed_c10d._unregister_process_group

_current: World | None = None
_lock = threading.RLock()


class World:
    """One team's view of torch.distributed.

    Args:
        group: The default group.
        store: What torch's `new_group` and others use as the default store.
        backend_name: What `get_backend` says.
        backend_config: What `get_backend_config` says.
    """

    def __init__(self, group: Any, store: Store, backend_name: str, backend_config: str) -> None:
        self.group = group
        self._maps: dict[str, dict[Any, Any]] = {name: {} for name in _MAPS}
        self._count = 1
        name = "0"
        self._maps["pg_map"][group] = (backend_name, store)
        self._maps["pg_names"][group] = name
        self._maps["pg_group_ranks"][group] = {rank: rank for rank in range(group.size())}
        self._maps["pg_backend_config"][group] = backend_config
        self._maps["pg_to_tag"][group] = f"ptd:{name}"
        self._maps["tags_to_pg"].update({"": [group], f"ptd:{name}": [group]})
        group._set_group_name(name)
        group._set_group_desc("default_pg")

    def set_store(self, store: Store) -> None:
        """Use another store from now on."""
        backend_name, _ = self._maps["pg_map"][self.group]
        self._maps["pg_map"][self.group] = (backend_name, store)
        if _current is self:
            c10d._world.pg_map[self.group] = (backend_name, store)

    def enter(self) -> None:
        """Make this the world that torch knows. A world that was not ours, set up by the user before, is kept aside."""
        global _current
        with _lock:
            if _current is self:
                return
            if _current is not None:
                _current._leave()
            else:
                _set_aside()
            _load(self._maps, self._count, self.group)
            _current = self

    def _leave(self) -> None:
        global _current
        self._maps, self._count = _save()
        _current = None


_foreign: tuple[dict[str, dict[Any, Any]], int, Any] | None = None


def _set_aside() -> None:
    """Keep the state of a default group that the user's own init_process_group made: the group stays usable."""
    global _foreign
    if dist.is_initialized():
        default = c10d._world.default_pg
        maps, count = _save()
        _foreign = (maps, count, default)


def _save() -> tuple[dict[str, dict[Any, Any]], int]:
    world = c10d._world
    maps = {name: dict(getattr(world, name)) for name in _MAPS}
    for name in _MAPS:
        getattr(world, name).clear()
    for group_name in maps["pg_names"].values():
        _unregister(group_name)
    count = world.group_count
    world.group_count = 0
    c10d._update_default_pg(None)
    return maps, count


def _load(maps: dict[str, dict[Any, Any]], count: int, default: Any) -> None:
    world = c10d._world
    for name in _MAPS:
        getattr(world, name).update(maps[name])
    for group, group_name in maps["pg_names"].items():
        _register(group_name, group)
    world.group_count = count
    c10d._update_default_pg(default)


def leave() -> None:
    """Give torch.distributed back as it was before `World.enter`."""
    global _foreign
    with _lock:
        if _current is not None:
            _current._leave()
            if _foreign is not None:
                _load(*_foreign)
                _foreign = None


@dataclass(frozen=True)
class Foreign:
    """A default group that is not ours: its rank, size and store, and the time limit of its operations."""

    rank: int
    size: int
    store: Store
    timeout: timedelta | None


def foreign_default() -> Foreign | None:
    """The default group that is not ours, if there is one."""
    if _current is not None or not dist.is_initialized():
        return None
    group: Any = c10d._get_default_group()
    options = [getattr(group._get_backend(device), "options", None) for device in group._device_types]
    timeout = next((options._timeout for options in options if options is not None), None)
    return Foreign(dist.get_rank(), dist.get_world_size(), c10d._get_default_store(), timeout)


# -- what the user's own calls mean while a world of ours is entered ---------------------------------------------------

_installed = False


def install() -> None:
    """Teach init_process_group and destroy_process_group to adopt our group, and to give it back. Idempotent."""
    global _installed
    if _installed:
        return
    _installed = True
    hooks: dict[str, Callable[..., None]] = {
        "init_process_group": _init,
        "destroy_process_group": _destroy,
        "_set_pg_timeout": _set_timeout,
    }
    for name, replacement in hooks.items():
        original = getattr(c10d, name)
        wrapped = functools.wraps(original)(functools.partial(replacement, original))
        # A plain function: torch and others look at __name__ and __code__.
        function = _as_function(original, wrapped)
        for module in (dist, c10d):
            if hasattr(module, name):
                setattr(module, name, function)


def _as_function(original: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return function


def _init(
    original: Callable[..., None],
    backend: str | None = None,
    init_method: str | None = None,
    timeout: Any = None,
    world_size: int = -1,
    rank: int = -1,
    *args: Any,
    **kwargs: Any,
) -> None:
    if _current is None:
        return original(backend, init_method, timeout, world_size, rank, *args, **kwargs)
    group = _current.group
    for word, given, ours in (("world_size", world_size, group.size()), ("rank", rank, group.rank())):
        if given not in (-1, None) and int(given) != ours:
            raise CollectiveError(
                f"init_process_group({word}={given}) was called where this process is rank {group.rank()} of "
                f"{group.size()} replicas, which are connected already. Read RANK and WORLD_SIZE from the environment, "
                f"or leave {word} out."
            )
    if timeout is not None:
        c10d._check_valid_timeout(timeout)
    group.set_timeout(timeout)
    program_began()
    return None


def program_began() -> None:
    """A program finds the default group, also where an earlier one has destroyed it."""
    if _current is not None and not dist.is_initialized():
        c10d._update_default_pg(_current.group)


def _destroy(original: Callable[..., None], group: Any = None) -> None:
    if _current is None:
        return original(group)
    ours = _current.group
    if (group is not None and group is not ours) or not dist.is_initialized():
        return original(group)
    # The default group is given back, not ended: the strategies still use it. Its subgroups are the user's own.
    for subgroup in [each for each in c10d._world.pg_names if each is not ours]:
        original(subgroup)
    ours.set_timeout(None)
    c10d._update_default_pg(None)
    return None


def _set_timeout(original: Callable[..., None], timeout: Any, group: Any = None) -> None:
    """torch's own would set the backends' limits, which break their connections when they pass."""
    group = group or (_current.group if _current is not None else None)
    if not isinstance(group, GroupIdentity):
        return original(timeout, group)
    c10d._check_valid_timeout(timeout)
    group.set_timeout(timeout)
    return None
