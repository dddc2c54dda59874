"""The variables on the servers that tensors of this process stand for, and the tensors that keep them alive."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from distnb.errors import ServerLost
from distnb.servers.server_messages import Drop, Shard
from distnb.servers.variables.requests import Requests
from distnb.servers.variables.shard_placement import Stored

__all__ = ["Represented"]


class Represented:
    """The variables that tensors of this process represent or copy. Some tensors own theirs.

    Attributes:
        owners: The owner of each variable of this coordinator.
        freed: The numbers of the variables that the coordinator has freed.
        when_freed: Functions that are called with the variables that are freed.
    """

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._stored: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._unowned: dict[int, list[Shard]] = {}  # by server: the shards of gone owners, which it has not freed yet
        self.owners: dict[Stored, TensorWeakRef] = {}
        self.freed: list[int] = []
        self.when_freed: list[Callable[[list[Stored]], None]] = []

    def note(self, tensor: torch.Tensor, stored: Stored) -> None:
        """Note that a tensor stands for a variable."""
        self._stored[tensor] = stored

    def stored_of(self, tensor: Any) -> Stored | None:
        """Return the variable that a tensor copies or represents in this process, or None for other tensors."""
        found: Stored | None = getattr(tensor, "stored", None) or self._stored.get(tensor)
        return found

    def own(self, stored: Stored, owner: torch.Tensor) -> None:
        """Tie a variable's lifetime to a tensor of the coordinator that represents it.

        The servers free the variable's memory once the tensor is garbage-collected.
        """
        self.owners[stored] = TensorWeakRef(owner)
        self._stored[owner] = stored

    def free_unowned(self) -> None:
        """Free the variables on the servers whose owners were garbage-collected. One thread at a time calls this."""
        if not self.owners:
            return
        gone = [stored for stored, owner in self.owners.items() if owner() is None]
        for stored in gone:
            del self.owners[stored]
            self.freed.append(stored.number)
            for shard, part in stored.shards():
                self._unowned.setdefault(part.server, []).append(shard)
        if gone:
            for listener in self.when_freed:
                listener(gone)
        for server, shards in tuple(self._unowned.items()):
            with suppress(ServerLost):  # which frees its memory; the others must still receive theirs
                self._requests.exchange({server: [Drop(tuple(shards))]})
            del self._unowned[server]
