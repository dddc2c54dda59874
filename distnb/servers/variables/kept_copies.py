"""The copies of variables in this process: read from the servers, and changed in place by user code."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from distnb.errors import ProgramError
from distnb.servers.server_messages import Pull, Shard, WriteShard
from distnb.servers.variables.copies import UNKNOWN, Copy, difference
from distnb.servers.variables.model_tensors import ModelTensors
from distnb.servers.variables.represented import Represented
from distnb.servers.variables.requests import Requests, sent
from distnb.servers.variables.shard_placement import Stored

__all__ = ["KeptCopies"]


class KeptCopies:
    """The copies of this process. It is thread-safe.

    Args:
        requests: The requests to the servers.
        represented: The variables that tensors stand for.
        is_worker: Whether this process is a worker. A worker's copies are updated when a closure starts; the
            coordinator's are updated at each use.

    Attributes:
        turn: The lock of the copies, and of operations on several of them.
        made: The parameters created as copies since this list was last replaced.
        model_tensors: The tensors of a worker's models.
    """

    def __init__(self, requests: Requests, represented: Represented, *, is_worker: bool) -> None:
        self._requests = requests
        self._represented = represented
        self._is_worker = is_worker
        self._copies: dict[int, Copy] = {}
        self.turn = threading.RLock()
        self.made: list[torch.nn.Parameter] = []
        self.model_tensors = ModelTensors()
        represented.when_freed.append(lambda gone: self.drop(stored.number for stored in gone))

    def adopt(
        self, stored: Stored, tensor: torch.Tensor, versions: Sequence[int] | None = None, *, keep: bool = True
    ) -> None:
        """Register a parameter or buffer as this process's copy of a variable.

        Args:
            versions: The version of each part of the value that the tensor already holds. None: the value is read
                before its first use.
            keep: Whether to hold a strong reference to the tensor.
        """
        known = [UNKNOWN] * len(stored.parts) if versions is None else list(versions)
        reference = (lambda: tensor) if keep else TensorWeakRef(tensor)
        guarded = self._is_worker and stored.trainable
        base = None if guarded else tensor.detach().clone()
        self._copies[stored.number] = Copy(
            stored=stored,
            reference=reference,
            versions=known,
            base=base,
            guarded=guarded,
            noted=tensor._version,
            doubtful=versions is None,
        )
        self._represented.note(tensor, stored)

    def opened_copy(self, stored: Stored, *, is_parameter: bool) -> torch.Tensor:
        """Return this worker's copy of a model's parameter or buffer. A new copy is read before its first use."""
        copy = self._copies.get(stored.number)
        if copy is None:
            tensor = torch.zeros(stored.shape, dtype=stored.dtype, device=self._requests.device)
            if is_parameter:
                tensor = torch.nn.Parameter(tensor, stored.trainable)
                self.made.append(tensor)
            self.adopt(stored, tensor)
            copy = self._copies[stored.number]
        return copy.tensor

    def drop(self, numbers: Iterable[int]) -> None:
        """Drop the copies of some variables."""
        for number in numbers:
            self._copies.pop(number, None)

    def cached(self, stored: Stored) -> torch.Tensor:
        """Return a variable's whole value from this process's copy, which is updated first if it may be outdated.

        Callers must not change the tensor.
        """
        with self.turn:
            copy = self._copies.get(stored.number)
            if copy is None:
                tensor = torch.empty(stored.shape, dtype=stored.dtype, device=self._requests.device)
                tensor.requires_grad_(stored.trainable)
                unread = [UNKNOWN] * len(stored.parts)
                copy = self._copies[stored.number] = Copy(
                    stored=stored, reference=lambda: tensor, versions=unread, doubtful=True
                )
            if copy.doubtful or not self._is_worker or stored.number in self._requests.written:
                self.refresh([stored.number])
            return copy.tensor

    def refresh(self, numbers: Iterable[int] | None = None) -> None:
        """Update the copies of some variables, or of all, with one message to each server."""
        with self.turn:
            self._represented.free_unowned()
            copies = self._chosen(numbers)
            answers = self._requests.exchange({server: [pull] for server, pull in _pulls(copies).items()})
            self._merge(copies, (news for (news,) in answers.values()))

    def fetch_changes(self) -> None:
        """Send the servers the coordinator's changes of its tensors, and read the workers' changes."""
        with self.turn:
            self.send_changes()
            self.refresh_tensors()

    def refresh_tensors(self) -> None:
        """Update the coordinator's tensors from the servers. Changes made here are kept."""
        with self.turn:
            owned = [(stored.number, owner()) for stored, owner in self._represented.owners.items()]
            if owned:
                self.refresh([n for n, owner in owned if n in self._copies and self._copies[n].reference() is owner])

    def pulls(self, numbers: Iterable[int]) -> dict[int, Pull]:
        """Return the operations that update the copies of some variables, by server."""
        return _pulls(self._chosen(numbers))

    def merge(self, numbers: Iterable[int], news: Iterable[Mapping[Shard, tuple[int, torch.Tensor]]]) -> None:
        """Apply the servers' answers to these operations."""
        self._merge(self._chosen(numbers), news)

    def _chosen(self, numbers: Iterable[int] | None) -> list[Copy]:
        wanted = list(self._copies) if numbers is None else numbers
        return [self._copies[each] for each in wanted if each in self._copies]

    def _merge(self, copies: Sequence[Copy], news: Iterable[Mapping[Shard, tuple[int, torch.Tensor]]]) -> None:
        """Apply the servers' answers, which contain only the parts that have changed, to these copies."""
        changed: dict[int, dict[int, tuple[int, torch.Tensor]]] = {}
        for each in news:
            for (variable, number), found in each.items():
                place = number - self._copies[variable].stored.first_part
                changed.setdefault(variable, {})[place] = found
        for variable, parts in changed.items():
            self._copies[variable].merge(parts)
        self._requests.written.difference_update(copy.stored.number for copy in copies)

    def mark_doubtful(self) -> None:
        """Mark all copies to be read completely before their next use: a program may have left them half changed."""
        for copy in self._copies.values():
            copy.doubtful = True

    def is_outdated(self, number: int) -> bool:
        """Return whether a variable's copy must be read before its next use."""
        return number in self._requests.written or number not in self._copies or self._copies[number].doubtful

    def versions(self, shards: Iterable[Shard]) -> dict[Shard, int]:
        """Return the versions of some shards that this process currently computes with."""
        found = {}
        for variable, place in shards:
            copy = self._copies.get(variable)
            found[variable, place] = (
                self._requests.row_versions.get((variable, place), UNKNOWN) if copy is None else copy.versions[place]
            )
        return found

    def recreated(self, stored: Stored, value: torch.Tensor, versions: Mapping[int, int]) -> None:
        """Note that a new server was given the value of some parts of a variable, by place, with these versions."""
        copy = self._copies.get(stored.number)
        if copy is None or copy.base is None:
            return
        for place, version in versions.items():
            part = stored.parts[place]
            stored.piece(copy.base, part).copy_(stored.piece(value.detach(), part))
            copy.versions[place] = version

    def keep_values(self, numbers: Iterable[int], *, kept: bool) -> None:
        """Keep or release the values of parameters, with which every change of them is detected."""
        for copy in self._chosen(numbers):
            if copy.guarded:
                copy.base = copy.tensor.detach().clone() if kept else None

    def forget_changes(self) -> None:
        """Discard the changes and gradients of all copies, which a closure that failed has left."""
        self.model_tensors.put_back()
        self.mark_doubtful()
        for copy in self._copies.values():
            copy.tensor.grad = None

    def send_changes(self, numbers: Iterable[int] | None = None, *, thorough: bool = True) -> None:
        """Send the servers the changes that this process made in place to the copies of some variables, or of all.

        Args:
            thorough: See `Copy.is_changed`.
        """
        with self.turn:
            self._represented.free_unowned()
            if self._is_worker:
                self._requests.exchange(self.additions())
                return
            changed = [copy for copy in self._chosen(numbers) if copy.is_changed(thorough=thorough)]
            if changed:
                self._send_new_values(changed)

    def _send_new_values(self, changed: Sequence[Copy]) -> None:
        """Send the parts that the coordinator has changed.

        A part is assigned if the server still has the version that the coordinator read. If workers have changed it
        since, the coordinator's difference is added instead.
        """
        for copy in changed:
            copy.doubtful = True  # after an interrupt it is unknown whether the servers received the changes
        requests: dict[int, list[Any]] = {}
        parts = []
        for copy in changed:
            for shard, place, part, own, before in copy.changes():
                mine = requests.setdefault(part.server, [])
                parts.append((copy, place, part.server, len(mine), shard, own, before))
                mine.append(WriteShard(shard=shard, method="assign", value=sent(own), seen=copy.versions[place]))
        answers = self._requests.exchange(requests)
        versions: dict[int, dict[int, int]] = {copy.stored.number: {} for copy in changed}
        others: dict[int, list[Any]] = {}
        for copy, place, server, asked, shard, own, before in parts:
            version = answers[server][asked]
            if version is None:
                method = "assign" if own.dtype is torch.bool else "assign_add"
                others.setdefault(server, []).append(
                    WriteShard(shard=shard, method=method, value=sent(difference(own, before)))
                )
            versions[copy.stored.number][place] = UNKNOWN if version is None else version
        self._requests.exchange(others)
        for copy in changed:
            copy.note_sent(versions[copy.stored.number])

    def additions(self) -> dict[int, list[Any]]:
        """Return the operations that add a closure's in-place changes of values without gradients, such as buffers.

        Raises:
            ProgramError: The closure changed a parameter, which only optimizers and `assign` may do.
        """
        self.model_tensors.accept_assigned()
        requests: dict[int, list[Any]] = {}
        for copy in list(self._copies.values()):
            if not copy.is_changed():
                continue
            if copy.guarded:
                copy.doubtful = True
                raise ProgramError(
                    f"A function changed {copy.stored.name} in place on a worker, which has only a copy of the "
                    "servers' value. Change it by the optimizer, or outside scheduled functions, or make it a "
                    "distnb.Variable, whose assign, assign_add and scatter_* go to the servers."
                )
            changes = copy.changes()
            for shard, _, part, own, before in changes:
                method = "assign" if own.dtype is torch.bool else "assign_add"
                change = WriteShard(
                    shard=shard, method=method, value=sent(difference(own, before)), token=self._requests.token(shard)
                )
                requests.setdefault(part.server, []).append(change)
            copy.note_sent({place: UNKNOWN for _, place, *_ in changes})
        return requests


def _pulls(copies: Iterable[Copy]) -> dict[int, Pull]:
    """Return the operations that update the copies, by server."""
    known: dict[int, dict[Shard, int]] = {}
    for copy in copies:
        for place, (shard, part) in enumerate(copy.stored.shards()):
            known.setdefault(part.server, {})[shard] = copy.known(place)
    return {server: Pull(versions) for server, versions in known.items()}
