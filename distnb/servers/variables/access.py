"""Access of one process, the coordinator or a worker, to the variables on the servers."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from distnb.errors import ProgramError, ServerLost
from distnb.objects.modes.environment import capture_early
from distnb.runtime.this_process import this_process
from distnb.servers.closure_messages import Fence
from distnb.servers.variables.atomic_changes import change_in_place
from distnb.servers.variables.copies import UNKNOWN, Copy, difference
from distnb.servers.variables.model_tensors import ModelTensors
from distnb.servers.variables.server_messages import (
    Create,
    Describe,
    Drop,
    GetOptimizer,
    MakeOptimizer,
    Pull,
    PullRows,
    SetOptimizer,
    Shard,
    StepDone,
    StepOptimizer,
    Token,
    WriteShard,
)
from distnb.servers.variables.shard_placement import Part, PlacedShard, Stored

if TYPE_CHECKING:
    from distnb.servers.variables.client import ServerConnections
    from distnb.servers.variables.worker_replicas import WorkerReplicas

__all__ = ["ClosureRun", "ServerAccess"]

_PIECE_NBYTES = 4 << 20  # the size of the pieces in which `fill` sets a variable
_MOMENT_S = 0.01


@dataclass
class ClosureRun:
    """A closure that runs on this worker.

    Attributes:
        number: The closure's number.
        fence: The closures that had ended when this one was sent.
        is_new: Whether the function runs on this worker with these variables for the first time. Parameters are then
            compared with the values that were read. Only a comparison detects changes through `.data`, but it takes as
            long as reading the parameters, so later runs skip it.
        staleness: For each step, the number of updates that the worker's copies had missed.
        changes: The number of changes to each target that the closure has sent to the servers (see `Token`).
    """

    number: int
    fence: Fence
    is_new: bool = False
    staleness: list[int] = field(default_factory=list)
    changes: Counter[Shard | int] = field(default_factory=Counter)


def _creation(stored: Stored, shard: Shard, part: Part, value: torch.Tensor | None) -> Create:
    name = stored.name if len(stored.parts) == 1 else f"{stored.name}/part_{shard[1]}"
    own = None if value is None else stored.piece(value.detach().cpu(), part).contiguous()
    return Create(
        shard=shard, name=name, value=own, shape=stored.part_shape(part), dtype=stored.dtype, trainable=stored.trainable
    )


def _sent(value: torch.Tensor) -> torch.Tensor:
    return value.cpu().contiguous()


def _pulls(copies: Iterable[Copy]) -> dict[int, Pull]:
    """Return the operations that update the copies, by server."""
    known: dict[int, dict[Shard, int]] = {}
    for copy in copies:
        for place, (shard, part) in enumerate(copy.stored.shards()):
            known.setdefault(part.server, {})[shard] = copy.known(place)
    return {server: Pull(versions) for server, versions in known.items()}


class ServerAccess:
    """The access of this process to the variables on the servers. It is thread-safe.

    Args:
        servers: The connections to the servers.
        is_worker: Whether this process is a worker. A worker's copies are updated when a closure starts; the
            coordinator's are updated at each use.
        device: The device of the copies.

    Attributes:
        exchanges: The number of exchanges with the servers so far.
        fence: Returns the closures that have ended, as the coordinator knows them.
        next_is_here: Returns whether this worker has already received the next closure.
        representatives: The variables that have no copy here, by their description.
        made: The parameters created as copies since this list was last emptied.
        model_tensors: The tensors of a worker's models.
        freed: The numbers of the variables that the coordinator has freed.
        is_one_of_several: Whether this process is one replica of a worker with several.
    """

    def __init__(self, servers: ServerConnections, *, is_worker: bool, device: torch.device | None = None) -> None:
        self.servers = servers
        self.is_worker = is_worker
        self.device = device or torch.device("cpu")
        self.exchanges = 0
        self.fence: Callable[[], Fence] = Fence
        self.closure: ClosureRun | None = None
        self._turn = threading.RLock()
        self._ended_well = True  # whether the latest closure ended without an error
        self._recreated: dict[int, int] = {}  # by server: the generation that was last filled (see `recreate`)
        self._copies: dict[int, Copy] = {}
        self._stored: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._stale: set[int] = set()  # variables this process changed on the servers since it last read them
        self._variables: frozenset[int] = frozenset()  # the variables that the current closure reads
        self.next_is_here: Callable[[], bool] = lambda: False
        self._fresh: tuple[frozenset[int], float] = frozenset(), 0.0
        self._row_versions: dict[Shard, int] = {}
        self._owners: dict[Stored, TensorWeakRef] = {}
        self._unowned: dict[int, list[Shard]] = {}  # by server: the shards of gone owners, which it has not freed yet
        self._optimizers: dict[int, tuple[bytes, Sequence[Sequence[Stored]]]] = {}
        self.representatives: dict[Stored, Any] = {}
        self.is_one_of_several = False
        self._replicas: WorkerReplicas | None = None
        self.made: list[torch.nn.Parameter] = []
        self.model_tensors = ModelTensors()
        self.freed: list[int] = []

    @property
    def replicas(self) -> WorkerReplicas | None:
        """The replicas of this worker, including this one, or None if it has only one.

        All replicas issue the same requests, except those that read rows.
        """
        if self._replicas is None and self.is_one_of_several and this_process.replica is not None:
            from distnb.servers.variables.worker_replicas import WorkerReplicas

            self._replicas = WorkerReplicas(self)
        return self._replicas

    @replicas.setter
    def replicas(self, replicas: WorkerReplicas | None) -> None:
        self._replicas = replicas

    # Talking to the servers -----------------------------------------------------------------------------------------

    def exchange(self, requests: dict[int, list[Any]]) -> dict[int, tuple[Any, ...]]:
        """Send each server its operations in one message and wait for all answers.

        On a worker with several replicas only replica 0 asks, and all replicas return its answers.
        """
        if self.replicas is None:
            return self._exchange(requests)
        return self.replicas.ask_once(lambda: self._exchange(requests))  # type: ignore[no-any-return]

    def _exchange(self, requests: dict[int, list[Any]]) -> dict[int, tuple[Any, ...]]:
        if not requests:
            return {}
        self.exchanges += 1
        return self.servers.exchange(requests, self.fence() if self.closure is None else self.closure.fence)

    def token(self, target: Shard | int) -> Token | None:
        """Return the identity of the closure's next change to a shard, or step of an optimizer; None outside a closure.

        A closure that is run again, because its worker was lost, issues the same tokens, whatever else the other worker
        has and in whichever order. The servers skip a change whose token they have already applied.
        """
        if self.closure is None:
            return None
        self.closure.changes[target] += 1
        return self.closure.number, target, self.closure.changes[target]

    def _each_part(self, stored: Stored, operation: Callable[[Shard, Any], Any]) -> list[Any]:
        """Run one operation on each part of a variable and return the results in the order of the parts."""
        requests: dict[int, list[Any]] = {}
        places = []
        for shard, part in stored.shards():
            mine = requests.setdefault(part.server, [])
            places.append((part.server, len(mine)))
            mine.append(operation(shard, part))
        answers = self.exchange(requests)
        return [answers[server][place] for server, place in places]

    # Whole values ---------------------------------------------------------------------------------------------------

    def create(self, stored: Stored, value: torch.Tensor | None) -> list[int]:
        """Create a variable on its servers, filled with a value or with zeros.

        The variable exists until its owner is garbage-collected (see `own`).

        Args:
            value: The initial value. None: zeros.

        Returns:
            The version of each part.
        """
        return self._each_part(stored, lambda shard, part: _creation(stored, shard, part, value))

    def own(self, stored: Stored, owner: torch.Tensor) -> None:
        """Tie a variable's lifetime to a tensor of the coordinator that represents it.

        The servers free the variable's memory once the tensor is garbage-collected.
        """
        self._owners[stored] = TensorWeakRef(owner)
        self._stored[owner] = stored

    def drop_copy(self, stored: Stored) -> None:
        """Drop the copy of a variable's whole value."""
        self._copies.pop(stored.number, None)

    def free_unowned(self) -> None:
        """Free the variables on the servers whose owners were garbage-collected."""
        with self._turn:
            self._free_unowned()

    def _free_unowned(self) -> None:
        gone = [stored for stored, owner in self._owners.items() if owner() is None]
        for stored in gone:
            del self._owners[stored]
            self._copies.pop(stored.number, None)
            self.freed.append(stored.number)
            for shard, part in stored.shards():
                self._unowned.setdefault(part.server, []).append(shard)
        if gone:
            left = self._owners.keys()
            self._optimizers = {
                number: (factory, groups)
                for number, (factory, groups) in self._optimizers.items()
                if all(stored in left for group in groups for stored in group)
            }
        for server, shards in tuple(self._unowned.items()):
            with suppress(ServerLost):  # which frees its memory; the others must still receive theirs
                self.exchange({server: [Drop(tuple(shards))]})
            del self._unowned[server]

    def forget(self, numbers: Collection[int]) -> None:
        """Drop a worker's copies of variables that no longer exist."""
        for number in numbers:
            self._copies.pop(number, None)
        if numbers:
            self.representatives = {
                stored: each for stored, each in self.representatives.items() if stored.number not in numbers
            }
            self._row_versions = {
                shard: version for shard, version in self._row_versions.items() if shard[0] not in numbers
            }

    def recreate(self, server: int) -> None:
        """Fill a new, empty server once, with the values that the coordinator knows or with zeros."""
        with self._turn:
            self.free_unowned()
            generation = self.servers.generation(server)
            if self._recreated.get(server, 0) == generation:
                return  # another ClusterCoordinator has filled the server and may have restored its variables already
            for stored, owner in self._owners.items():
                self._recreate(stored, owner(), server)
            for number, (factory, groups) in self._optimizers.items():
                self.make_optimizer(number, factory, groups, (server,))
            self._recreated[server] = generation

    def _recreate(self, stored: Stored, owner: torch.Tensor | None, server: int) -> None:
        value = None if hasattr(owner, "stored") else owner  # a ServerVariable has no value
        places = [place for place, part in enumerate(stored.parts) if part.server == server]
        if not places:
            return
        shards = list(stored.shards())
        requests = [_creation(stored, *shards[place], value) for place in places]
        versions = self.exchange({server: requests})[server]
        copy = self._copies.get(stored.number)
        if copy is not None and value is not None and copy.base is not None:
            for place, version in zip(places, versions, strict=True):
                part = stored.parts[place]
                stored.piece(copy.base, part).copy_(stored.piece(value.detach(), part))
                copy.versions[place] = version

    def read(self, stored: Stored) -> torch.Tensor:
        """Return the variable's current value as a new tensor."""
        parts = [
            found[1]
            for found in self._each_part(stored, lambda shard, part: Pull({shard: UNKNOWN}))
            for found in found.values()
        ]
        whole = parts[0].clone() if len(parts) == 1 else torch.cat(parts)
        return whole.to(self.device)

    def write(self, stored: Stored, method: str, value: torch.Tensor) -> None:
        """Apply `assign`, `assign_add` or `assign_sub` (the `method`) with a value of the variable's shape."""
        value = value.detach().to("cpu", stored.dtype)
        self._each_part(
            stored,
            lambda shard, part: WriteShard(
                shard=shard, method=method, value=stored.piece(value, part).contiguous(), token=self.token(shard)
            ),
        )
        self._stale.add(stored.number)

    def change(
        self, stored: Stored, change: Callable[[torch.Tensor], Any], rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Change a variable, or some of its rows, with a function; see `change_in_place`."""
        try:
            return change_in_place(self, stored, change, rows)
        finally:
            self._stale.add(stored.number)

    # Rows -----------------------------------------------------------------------------------------------------------

    def read_rows(self, stored: Stored, rows: torch.Tensor) -> torch.Tensor:
        """Return some rows as `[k, ...]`. The row numbers `[k]` must ascend."""
        requests: dict[int, list[Any]] = {}
        places = []
        for shard, part, inside in stored.shards_of_rows(rows):
            mine = requests.setdefault(part.server, [])
            places.append((part.server, len(mine), shard))
            mine.append(PullRows(shard, inside))
        answers = self._exchange(requests)
        found = [answers[server][place] for server, place, _ in places]
        self._row_versions.update({shard: version for (_, _, shard), (version, _) in zip(places, found, strict=True)})
        values = [value for _, value in found]
        if not values:
            return torch.empty((0, *stored.shape[1:]), dtype=stored.dtype, device=self.device)
        return (values[0].clone() if len(values) == 1 else torch.cat(values)).to(self.device)

    def write_rows(self, stored: Stored, method: str, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Apply `scatter_add` or a related method to some rows, in the order in which `rows` lists them."""
        requests: dict[int, list[Any]] = {}
        for shard, part in stored.shards():
            inside = (rows >= part.first) & (rows < part.last)
            if bool(inside.any()):
                own, changes = (rows[inside] - part.first).cpu(), values[inside].detach().cpu().contiguous()
                requests.setdefault(part.server, []).append(
                    WriteShard(shard=shard, method=method, value=changes, rows=own, token=self.token(shard))
                )
        self.exchange(requests)
        self._stale.add(stored.number)

    def fill(self, stored: Stored, change: Callable[[torch.Tensor], Any], *, of_old: bool) -> None:
        """Set a variable piece by piece, so that this process holds no more than one piece in memory.

        Args:
            change: Changes a piece in place. Pieces have a multiple of 16 rows, because torch then draws the same
                random numbers as for the whole tensor.
            of_old: Whether `change` uses the old values.
        """
        if not stored.shape and of_old:
            self.change(stored, change)
            return
        if not stored.shape:
            value = torch.empty((), dtype=stored.dtype)
            with torch.no_grad():
                change(value)
            self.write(stored, "assign", value)
            return
        row_nbytes = max(1, stored.like()[:1].numel() * stored.dtype.itemsize)
        step = max(16, _PIECE_NBYTES // row_nbytes // 16 * 16)
        for first in range(0, stored.shape[0], step):
            rows = torch.arange(first, min(first + step, stored.shape[0]))
            if of_old:
                self.change(stored, change, rows)
                continue
            piece = torch.empty((len(rows), *stored.shape[1:]), dtype=stored.dtype)
            with torch.no_grad():
                change(piece)
            requests: dict[int, list[Any]] = {}
            for shard, part, inside in stored.shards_of_rows(rows):
                place = int(inside[0])
                own = piece[part.first + place - first :][: len(inside)].cpu().contiguous()
                requests.setdefault(part.server, []).append(
                    WriteShard(shard=shard, method="assign_rows", value=own, rows=place, token=self.token(shard))
                )
            self.exchange(requests)
        self._stale.add(stored.number)

    # Copies ---------------------------------------------------------------------------------------------------------

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
        guarded = self.is_worker and stored.trainable
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
        self._stored[tensor] = stored

    def opened_copy(self, stored: Stored, *, is_parameter: bool) -> torch.Tensor:
        """Return this worker's copy of a model's parameter or buffer. A new copy is read before its first use."""
        copy = self._copies.get(stored.number)
        if copy is None:
            tensor = torch.zeros(stored.shape, dtype=stored.dtype, device=self.device)
            if is_parameter:
                tensor = torch.nn.Parameter(tensor, stored.trainable)
                self.made.append(tensor)
            self.adopt(stored, tensor)
            copy = self._copies[stored.number]
        return copy.tensor

    def stored_of(self, tensor: Any) -> Stored | None:
        """Return the variable that a tensor copies or represents in this process, or None for other tensors."""
        found: Stored | None = getattr(tensor, "stored", None) or self._stored.get(tensor)
        return found

    def cached(self, stored: Stored) -> torch.Tensor:
        """Return a variable's whole value from this process's copy, which is updated first if it may be outdated.

        Callers must not change the tensor.
        """
        with self._turn:
            copy = self._copies.get(stored.number)
            if copy is None:
                tensor = torch.empty(stored.shape, dtype=stored.dtype, device=self.device)
                tensor.requires_grad_(stored.trainable)
                unread = [UNKNOWN] * len(stored.parts)
                copy = self._copies[stored.number] = Copy(
                    stored=stored, reference=lambda: tensor, versions=unread, doubtful=True
                )
            if copy.doubtful or not self.is_worker or stored.number in self._stale:
                self.refresh([stored.number])
            return copy.tensor

    def refresh(self, numbers: Iterable[int] | None = None) -> None:
        """Update the copies of some variables, or of all, with one message to each server."""
        with self._turn:
            self.free_unowned()
            wanted = self._copies if numbers is None else numbers
            copies = [self._copies[each] for each in wanted if each in self._copies]
            answers = self.exchange({server: [pull] for server, pull in _pulls(copies).items()})
            self._merge(copies, (news for (news,) in answers.values()))

    def _merge(self, copies: Sequence[Copy], news: Iterable[Mapping[Shard, tuple[int, torch.Tensor]]]) -> None:
        """Apply the servers' answers, which contain only the parts that have changed, to these copies."""
        changed: dict[int, dict[int, tuple[int, torch.Tensor]]] = {}
        for each in news:
            for (variable, number), found in each.items():
                place = number - self._copies[variable].stored.first_part
                changed.setdefault(variable, {})[place] = found
        for variable, parts in changed.items():
            self._copies[variable].take(parts)
        self._stale.difference_update(copy.stored.number for copy in copies)

    def mark_doubtful(self) -> None:
        """Mark all copies to be read completely before their next use: a program may have left them half changed."""
        for copy in self._copies.values():
            copy.doubtful = True

    def refresh_copies(self, copies: Iterable[torch.Tensor]) -> None:
        """Send the servers the coordinator's changes of some copies, and update those copies."""
        with self._turn:
            numbers = [stored.number for each in copies if (stored := self.stored_of(each)) is not None]
            self.send_changes(numbers)
            self.refresh(numbers)

    def versions(self, shards: Iterable[Shard]) -> dict[Shard, int]:
        """Return the versions of some shards that this process currently computes with."""
        found = {}
        for variable, place in shards:
            copy = self._copies.get(variable)
            found[variable, place] = (
                self._row_versions.get((variable, place), UNKNOWN) if copy is None else copy.versions[place]
            )
        return found

    def send_changes(self, numbers: Iterable[int] | None = None, *, thorough: bool = True) -> None:
        """Send the servers the changes that this process made in place to the copies of some variables, or of all.

        Args:
            thorough: See `Copy.is_changed`.
        """
        with self._turn:
            self.free_unowned()
            if self.is_worker:
                self.exchange(self._additions())
                return
            wanted = list(self._copies) if numbers is None else numbers
            copies = [self._copies[each] for each in wanted if each in self._copies]
            changed = [copy for copy in copies if copy.is_changed(thorough=thorough)]
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
                mine.append(WriteShard(shard=shard, method="assign", value=_sent(own), seen=copy.versions[place]))
        answers = self.exchange(requests)
        versions: dict[int, dict[int, int]] = {copy.stored.number: {} for copy in changed}
        others: dict[int, list[Any]] = {}
        for copy, place, server, asked, shard, own, before in parts:
            version = answers[server][asked]
            if version is None:
                method = "assign" if own.dtype is torch.bool else "assign_add"
                others.setdefault(server, []).append(
                    WriteShard(shard=shard, method=method, value=_sent(difference(own, before)))
                )
            versions[copy.stored.number][place] = UNKNOWN if version is None else version
        self.exchange(others)
        for copy in changed:
            copy.note_sent(versions[copy.stored.number])

    def _additions(self) -> dict[int, list[Any]]:
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
                    shard=shard, method=method, value=_sent(difference(own, before)), token=self.token(shard)
                )
                requests.setdefault(part.server, []).append(change)
            copy.note_sent({place: UNKNOWN for _, place, *_ in changes})
        return requests

    def fetch_changes(self) -> None:
        """Send the servers the coordinator's changes of its tensors, and read the workers' changes."""
        with self._turn:
            self.send_changes()
            self.refresh_tensors()

    def refresh_tensors(self) -> None:
        """Update the coordinator's tensors from the servers. Changes made here are kept."""
        with self._turn:
            owned = [(stored.number, owner()) for stored, owner in self._owners.items()]
            self.refresh([n for n, owner in owned if n in self._copies and self._copies[n].reference() is owner])

    # Optimizers -----------------------------------------------------------------------------------------------------

    def make_optimizer(
        self, number: int, factory: bytes, groups: Sequence[Sequence[Stored]], only: Iterable[int] | None = None
    ) -> None:
        """Make an optimizer on each server that holds a part of its variables.

        Args:
            number: The optimizer's number.
            factory: See `MakeOptimizer`.
            groups: The variables of each parameter group.
            only: The servers to make it on, if not all.
        """
        self._optimizers[number] = factory, groups
        servers = {part.server for group in groups for stored in group for part in stored.parts}
        if only is not None:
            servers &= set(only)
        environment = capture_early()
        if this_process.before_program is not None:
            this_process.before_program(())
        self.exchange(
            {
                server: [
                    MakeOptimizer(
                        optimizer=number,
                        factory=factory,
                        groups=tuple(
                            tuple(shard for stored in group for shard, part in stored.shards() if part.server == server)
                            for group in groups
                        ),
                        environment=environment,
                    )
                ]
                for server in sorted(servers)
            }
        )

    def step(self, requests: dict[int, StepOptimizer]) -> None:
        """Have the servers update variables with gradients, and update a worker's copies to the new values.

        The new values arrive with the answers. If the next closure is already here, it was scheduled before this step,
        so these values are recent enough for it and it need not read them again (see `take_fresh`).
        """
        if not self.is_worker:
            self.send_changes(thorough=False)
        operations = self._additions() if self.is_worker else {}
        tokens = {step.optimizer: self.token(step.optimizer) for step in requests.values()}
        for server, step in requests.items():
            operations.setdefault(server, []).append(step._replace(token=tokens[step.optimizer]))
        closure = self.closure
        copies = [self._copies[each] for each in self._variables if each in self._copies] if closure is not None else []
        pulls = _pulls(copies)
        for server, pull in pulls.items():
            operations.setdefault(server, []).append(pull)
        ahead = closure is not None and self.next_is_here()
        answers = self.exchange(operations)
        self._merge(copies, (answers[server][-1] for server in pulls))
        self._fresh = self._variables if ahead else frozenset(), time.monotonic()
        if closure is not None and requests:
            steps = (each for server in requests for each in answers[server] if isinstance(each, StepDone))
            closure.staleness.append(max(each.staleness for each in steps))

    def take_fresh(self) -> frozenset[int]:
        """Return the variables whose copies the latest step has just read, and reset the record.

        The closure that starts next need not read them again. After `_MOMENT_S` seconds the set is empty.
        """
        (fresh, when), self._fresh = self._fresh, (frozenset(), 0.0)
        return fresh if time.monotonic() - when < _MOMENT_S else frozenset()

    def optimizer_states(self, number: int, servers: Iterable[int]) -> dict[int, Any]:
        """Return the state of an optimizer, by server."""
        return {
            server: found
            for server, (found,) in self.exchange({each: [GetOptimizer(number)] for each in servers}).items()
        }

    def set_optimizer_states(self, states: dict[int, SetOptimizer]) -> None:
        """Restore an optimizer's state on each server."""
        self.exchange({server: [each] for server, each in states.items()})

    # Closures -------------------------------------------------------------------------------------------------------

    @contextmanager
    def running(
        self, closure: ClosureRun, variables: Iterable[int], fresh: Collection[int] = ()
    ) -> Iterator[ClosureRun]:
        """Return a context that runs a closure.

        Args:
            closure: The closure.
            variables: The variables that it reads. Their copies are updated first.
            fresh: The variables whose copies need no update (see `take_fresh`).
        """
        if not self._ended_well:
            self._forget_the_latest()
        self.closure, self._variables, self._ended_well = closure, frozenset(variables), False
        try:
            self.refresh(each for each in self._variables if each not in fresh or self._is_outdated(each))
            if closure.is_new:
                self._keep_values(True)
            yield closure
            self.send_changes()
            self._ended_well = True
        finally:
            self.closure = None
            if closure.is_new:
                self._keep_values(False)

    def _keep_values(self, kept: bool) -> None:
        """Keep or release the values of the closure's parameters, with which every change of them is detected."""
        for number in self._variables:
            copy = self._copies.get(number)
            if copy is not None and copy.guarded:
                copy.base = copy.tensor.detach().clone() if kept else None

    def _is_outdated(self, number: int) -> bool:
        return number in self._stale or number not in self._copies or self._copies[number].doubtful

    def _forget_the_latest(self) -> None:
        """Discard the changes and gradients left by a closure that failed, which must not affect the next one."""
        self.model_tensors.put_back()
        self.mark_doubtful()
        for copy in self._copies.values():
            copy.tensor.grad = None
        for variable in self.representatives.values():
            variable.grad = None

    def placement(self) -> tuple[PlacedShard, ...]:
        """Return the shards on the servers in the order of their creation, with one message to each server."""
        answers = self.exchange({server: [Describe()] for server in range(self.servers.count)})
        found = sorted(
            ((row, server) for server, (rows,) in answers.items() for row in rows), key=lambda each: each[0].shard
        )
        return tuple(
            PlacedShard(
                name=row.name, shape=row.shape, dtype=row.dtype, server=server, nbytes=row.nbytes, updates=row.updates
            )
            for row, server in found
        )
