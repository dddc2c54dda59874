"""torch.distributed's own state: its default group, and the user's calls that set it up.

torch has one world at a time. Here each team has a world, with the subgroups that were made in it, and
`TorchDistributed.enter` exchanges the whole state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from distnb.collectives.group import stores
from distnb.collectives.group.process_group import GuardedProcessGroup
from distnb.compat import c10d_internals
from distnb.compat.c10d_internals import NOT_IN_GROUP, PrefixStore, Store
from distnb.errors import CollectiveError, OptionError

__all__ = ["Foreign", "TorchDistributed", "TorchState"]

_MAPS = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg", "pg_coalesce_state")


class TorchState:
    """The state of torch.distributed for one default group and its subgroups, kept while another world is current."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.maps: dict[str, dict[Any, Any]] = {name: {} for name in _MAPS}
        self.count = 1

    @classmethod
    def of_group(cls, group: Any, store: Store, backend_name: str, backend_config: str) -> TorchState:
        """Return the world of a new default group, given its store and the results of `get_backend` and its config."""
        made, name = cls(group), "0"
        made.maps["pg_map"][group] = (backend_name, store)
        made.maps["pg_names"][group] = name
        made.maps["pg_group_ranks"][group] = {rank: rank for rank in range(group.size())}
        made.maps["pg_backend_config"][group] = backend_config
        made.maps["pg_to_tag"][group] = f"ptd:{name}"
        made.maps["tags_to_pg"].update({"": [group], f"ptd:{name}": [group]})
        group._set_group_name(name)
        group._set_group_desc("default_pg")
        return made

    def save(self) -> None:
        """Move the state out of torch."""
        world = c10d_internals.world
        self.maps = {name: dict(getattr(world, name)) for name in _MAPS}
        for name in _MAPS:
            getattr(world, name).clear()
        for group_name in self.maps["pg_names"].values():
            c10d_internals.unregister_group(group_name)
        self.count, world.group_count = world.group_count, 0
        c10d_internals.set_default_group(None)

    def load(self) -> None:
        """Move the state into torch."""
        world = c10d_internals.world
        for name in _MAPS:
            getattr(world, name).update(self.maps[name])
        for group, group_name in self.maps["pg_names"].items():
            c10d_internals.register_group(group_name, group)
        world.group_count = self.count
        c10d_internals.set_default_group(self.group)


@dataclass(frozen=True)
class Foreign:
    """A default group that distnb did not make: its rank, size, store, and the time limit of its operations."""

    rank: int
    size: int
    store: Store
    timeout: timedelta | None


class TorchDistributed:
    """torch.distributed in this process."""

    def __init__(self) -> None:
        self._current: TorchState | None = None
        self._set_aside: TorchState | None = None
        self._installed = False

    def enter(self, world: TorchState) -> None:
        """Make a world torch's current world."""
        if self._current is world:
            return
        if self._current is not None:
            self._current.save()
        elif dist.is_initialized():
            self._set_aside = TorchState(
                c10d_internals.world.default_pg
            )  # the user's own; it continues to exist, unused
            self._set_aside.save()
        world.load()
        self._current = world

    def set_store(self, world: TorchState, store: Store) -> None:
        """Use another store in a world from now on."""
        maps = c10d_internals.world.pg_map if self._current is world else world.maps["pg_map"]
        maps[world.group] = (maps[world.group][0], store)

    def foreign_default(self) -> Foreign | None:
        """Return the default group if distnb did not make it, or None."""
        if self._current is not None or not dist.is_initialized():
            return None
        group: Any = c10d_internals.default_group()
        timeout = c10d_internals.timeout_of(group)
        return Foreign(
            rank=dist.get_rank(), size=dist.get_world_size(), store=c10d_internals.default_store(), timeout=timeout
        )

    def program_began(self) -> None:
        """Undo what an earlier program may have left in torch: a destroyed default group, an open coalescing block.

        torch collects the collectives of a `_coalescing_manager` block in a list. If an error or an interrupt leaves
        the block, the list remains, and all later collectives would be appended to it instead of being called.
        """
        c10d_internals.world.pg_coalesce_state.clear()
        if self._current is not None and c10d_internals.world.default_pg is None:
            c10d_internals.set_default_group(self._current.group)

    # -- the user's own calls while a world of distnb is current
    # --------------------------------------------------------

    def install(self) -> None:
        """Make init_process_group and destroy_process_group adopt and return distnb's group. Idempotent.

        Raises:
            OptionError: torch is set to communicate by torchcomms.
        """
        if c10d_internals.uses_torchcomms():
            raise OptionError(
                "torch.distributed is set to communicate by torchcomms (TORCH_DISTRIBUTED_USE_TORCHCOMMS, or "
                "torch.distributed.config.use_torchcomms). Replicas communicate by Gloo and NCCL, whose operations "
                "can be ended when a replica fails. Unset the variable before %distnb start, or set the option to "
                "False."
            )
        if self._installed:
            return
        self._installed = True
        stores.install()
        hooks: dict[str, Callable[..., Any]] = {
            "init_process_group": self._init,
            "destroy_process_group": self._destroy,
            "_set_pg_timeout": self._set_timeout,
        }
        if not c10d_internals.ASKS_FOR_SUBGROUPS:
            hooks["_new_process_group_helper"] = self._new_group
        for name, replacement in hooks.items():
            c10d_internals.replace_function(name, replacement)

    def _init(
        self,
        original: Callable[..., None],
        backend: str | None = None,
        init_method: str | None = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if self._current is None:
            return original(backend, init_method, timeout, world_size, rank, *args, **kwargs)
        group = self._current.group
        for word, given, ours in (("world_size", world_size, group.size()), ("rank", rank, group.rank())):
            if given not in (-1, None) and int(given) != ours:
                raise CollectiveError(
                    f"init_process_group({word}={given}) was called where this process is rank {group.rank()} of "
                    f"{group.size()} replicas, which are connected already. Read RANK and WORLD_SIZE from the "
                    f"environment, or leave {word} out."
                )
        if timeout is not None:
            c10d_internals.check_timeout(timeout)
        group.set_timeout(timeout)
        self.program_began()
        return None

    def _destroy(self, original: Callable[..., None], group: Any = None) -> None:
        ours = self._current.group if self._current is not None else None
        if ours is None or (group is not None and group is not ours) or not dist.is_initialized():
            return original(group)
        # The default group is returned, not ended, because strategies still use it. Its subgroups are the user's own.
        for subgroup in [each for each in c10d_internals.world.pg_names if each is not ours]:
            original(subgroup)
        ours.set_timeout(None)
        c10d_internals.set_default_group(None)
        return None

    def _set_timeout(self, original: Callable[..., None], timeout: Any, group: Any = None) -> None:
        """Set the group's own time limit. torch would set the backends' limits, which break their connections."""
        group = group or (self._current.group if self._current is not None else None)
        if not isinstance(group, GuardedProcessGroup):
            return original(timeout, group)
        c10d_internals.check_timeout(timeout)
        group.set_timeout(timeout)
        return None

    def _new_group(
        self,
        original: Callable[..., Any],
        size: int,
        rank: int | None,
        ranks: list[int],
        backend: Any,
        store: Store,
        name: str,
        **given: Any,
    ) -> Any:
        """Make a subgroup by the group's own method, as torch 2.13 does; earlier versions would use their own backends.

        Returns:
            The group, and its store.
        """
        whole = c10d_internals.world.default_pg
        if not isinstance(whole, GuardedProcessGroup):
            return original(size, rank, ranks, backend, store, name, **given)
        options = given.get("backend_options")
        made = whole.new_group(ranks, given.get("timeout"), options, name, given.get("group_desc"))
        if made is None:
            return NOT_IN_GROUP, None
        part = PrefixStore(f"{name}/", store)
        c10d_internals.add_to_world(made, name, backend, part, given.get("pg_tag"))
        return made, part
