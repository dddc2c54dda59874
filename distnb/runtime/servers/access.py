"""Access of one process, the coordinator or a worker, to the variables on the servers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from distnb.errors import ProgramError
from distnb.objects.modes import capture_early
from distnb.runtime.servers.atomic_changes import change_in_place
from distnb.runtime.servers.copies import UNKNOWN, Copy, difference
from distnb.runtime.servers.server_messages import (
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
from distnb.runtime.servers.shard_placement import Part, PlacedShard, Stored
from distnb.runtime.this_process import this_process
from distnb.wire.closure_messages import Fence

if TYPE_CHECKING:
    from distnb.runtime.servers.client import Servers
    from distnb.runtime.servers.worker_replicas import WorkerReplicas

__all__ = ["ClosureRun", "ServerAccess"]

_PIECE_NBYTES = 4 << 20  # of a variable that is filled row by row
_MOMENT_S = 0.01


@dataclass
class ClosureRun:
    """A closure that runs on this worker.

    Attributes:
        number: Its number.
        fence: The closures that had ended when it was sent.
        is_new: Whether its function has not run here yet. Then its parameters are compared with what was read: only so
            are changes by way of `.data` seen, and to do it each time would take as long as reading them.
        staleness: Of each step: how many updates its copies had missed.
    """

    number: int
    fence: Fence
    is_new: bool = False
    staleness: list[int] = field(default_factory=list)
    changes: int = 0


def _creation(stored: Stored, shard: Shard, part: Part, value: torch.Tensor | None) -> Create:
    name = stored.name if len(stored.parts) == 1 else f"{stored.name}/part_{shard[1]}"
    own = None if value is None else stored.piece(value.detach().cpu(), part).contiguous()
    return Create(
        shard=shard, name=name, value=own, shape=stored.part_shape(part), dtype=stored.dtype, trainable=stored.trainable
    )


def _sent(value: torch.Tensor) -> torch.Tensor:
    return value.cpu().contiguous()


def _pulls(copies: Iterable[Copy]) -> dict[int, Pull]:
    """Return the operations that read copies again, by server."""
    known: dict[int, dict[Shard, int]] = {}
    for copy in copies:
        for place, (shard, part) in enumerate(copy.stored.shards()):
            known.setdefault(part.server, {})[shard] = copy.known(place)
    return {server: Pull(versions) for server, versions in known.items()}


class ServerAccess:
    """The variables on the servers, as this process reads and changes them. Several threads may use it.

    Args:
        servers: The connections.
        is_worker: Whether copies are fresh by themselves: a worker's are when a closure starts. The coordinator's are
            read again at each use.
        device: Where copies are made.

    Attributes:
        exchanges: How many there have been with servers.
        fence: Gives the closures that have ended, as the coordinator knows them.
        next_is_here: Whether a worker has the next closure already.
        representatives: The variables that have no copy here, by their place on the servers.
        made: The copies of parameters that were made since this was last emptied.
        is_one_of_several: Whether it is one replica of a worker that has several.
    """

    def __init__(self, servers: Servers, *, is_worker: bool, device: torch.device | None = None) -> None:
        self.servers = servers
        self.is_worker = is_worker
        self.device = device or torch.device("cpu")
        self.exchanges = 0
        self.fence: Callable[[], Fence] = Fence
        self.closure: ClosureRun | None = None
        self._turn = threading.RLock()
        self._ended_well = True  # the latest closure
        self._recreated: dict[int, int] = {}  # by server: which of those in its place
        self._copies: dict[int, Copy] = {}
        self._stored: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._stale: set[int] = set()  # this process has changed them on the servers since it read them
        self._variables: frozenset[int] = frozenset()  # the closure's
        self.next_is_here: Callable[[], bool] = lambda: False
        self._fresh: tuple[frozenset[int], float] = frozenset(), 0.0
        self._row_versions: dict[Shard, int] = {}
        self._owners: dict[Stored, TensorWeakRef] = {}
        self._optimizers: dict[int, tuple[bytes, Sequence[Sequence[Stored]]]] = {}
        self.representatives: dict[Stored, Any] = {}
        self.is_one_of_several = False
        self._replicas: WorkerReplicas | None = None
        self.made: list[torch.nn.Parameter] = []

    @property
    def replicas(self) -> WorkerReplicas | None:
        """The replicas of a worker that has several, this one among them. They do alike, but for reading rows."""
        if self._replicas is None and self.is_one_of_several and this_process.replica is not None:
            from distnb.runtime.servers.worker_replicas import WorkerReplicas

            self._replicas = WorkerReplicas(self)
        return self._replicas

    @replicas.setter
    def replicas(self, replicas: WorkerReplicas | None) -> None:
        self._replicas = replicas

    # Talking to the servers -----------------------------------------------------------------------------------------

    def exchange(self, requests: dict[int, list[Any]]) -> dict[int, tuple[Any, ...]]:
        """Send each server its operations, in one message, and wait for all answers; those that replica 0 gets."""
        if self.replicas is None:
            return self._exchange(requests)
        return self.replicas.ask_once(lambda: self._exchange(requests))  # type: ignore[no-any-return]

    def _exchange(self, requests: dict[int, list[Any]]) -> dict[int, tuple[Any, ...]]:
        if not requests:
            return {}
        self.exchanges += 1
        return self.servers.exchange(requests, self.fence() if self.closure is None else self.closure.fence)

    def token(self) -> Token | None:
        """Names a change, so that the same one of a closure that runs again is not applied twice."""
        if self.closure is None:
            return None
        self.closure.changes += 1
        return self.closure.number, self.closure.changes

    def _each_part(self, stored: Stored, operation: Callable[[Shard, Any], Any]) -> list[Any]:
        """Do one operation on each part of a variable: the results, in order."""
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
        """Make a variable on its servers, of a value, or of zeros. It is there as long as its owner (`own`) is.

        Returns:
            The version of each part.
        """
        return self._each_part(stored, lambda shard, part: _creation(stored, shard, part, value))

    def own(self, stored: Stored, owner: torch.Tensor) -> None:
        """Free a variable's memory on the servers once this tensor of the coordinator, which represents it, is gone."""
        self._owners[stored] = TensorWeakRef(owner)
        self._stored[owner] = stored

    def drop_copy(self, stored: Stored) -> None:
        """Forget the copy of a variable's whole value."""
        self._copies.pop(stored.number, None)

    def free_what_is_gone(self) -> None:
        """Have the servers drop variables whose owners are gone."""
        with self._turn:
            self._free_what_is_gone()

    def _free_what_is_gone(self) -> None:
        gone = [stored for stored, owner in self._owners.items() if owner() is None]
        if not gone:
            return
        requests: dict[int, list[Any]] = {}
        for stored in gone:
            del self._owners[stored]
            self._copies.pop(stored.number, None)
            for shard, part in stored.shards():
                requests.setdefault(part.server, []).append(Drop((shard,)))
        left = self._owners.keys()
        self._optimizers = {
            number: (factory, groups)
            for number, (factory, groups) in self._optimizers.items()
            if all(stored in left for group in groups for stored in group)
        }
        self.exchange(requests)

    def recreate(self, server: int) -> None:
        """Fill a server that is new and empty, once: with the values that the coordinator knows, or zeros."""
        with self._turn:
            self.free_what_is_gone()
            generation = self.servers.generation(server)
            if self._recreated.get(server, 0) == generation:
                return  # several coordinators recover, and the first may have restored its variables already
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
        """Return the variable's value now, a new tensor."""
        parts = [
            found[1]
            for found in self._each_part(stored, lambda shard, part: Pull({shard: UNKNOWN}))
            for found in found.values()
        ]
        whole = parts[0].clone() if len(parts) == 1 else torch.cat(parts)
        return whole.to(self.device)

    def write(self, stored: Stored, method: str, value: torch.Tensor) -> None:
        """`assign`, `assign_add` or `assign_sub` a value of its shape."""
        value = value.detach().to("cpu", stored.dtype)
        self._each_part(
            stored,
            lambda shard, part: WriteShard(
                shard=shard, method=method, value=stored.piece(value, part).contiguous(), token=self.token()
            ),
        )
        self._stale.add(stored.number)

    def change(
        self, stored: Stored, change: Callable[[torch.Tensor], Any], rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Change a variable, or some rows, by a function; see `change_in_place`."""
        try:
            return change_in_place(self, stored, change, rows)
        finally:
            self._stale.add(stored.number)

    # Rows -----------------------------------------------------------------------------------------------------------

    def read_rows(self, stored: Stored, rows: torch.Tensor) -> torch.Tensor:
        """Return some rows, whose numbers ascend: `[k, ...]`."""
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
        """Change some rows, in the order in which they are named: `scatter_add` and related methods."""
        requests: dict[int, list[Any]] = {}
        for shard, part in stored.shards():
            inside = (rows >= part.first) & (rows < part.last)
            if bool(inside.any()):
                own, changes = (rows[inside] - part.first).cpu(), values[inside].detach().cpu().contiguous()
                requests.setdefault(part.server, []).append(
                    WriteShard(shard=shard, method=method, value=changes, rows=own, token=self.token())
                )
        self.exchange(requests)
        self._stale.add(stored.number)

    def fill(self, stored: Stored, change: Callable[[torch.Tensor], Any], *, of_old: bool) -> None:
        """Set its rows piece by piece, so that no more than a piece is in this process's memory.

        Args:
            change: Changes a piece in place. torch draws the same numbers for pieces of a multiple of 16 as for all.
            of_old: Whether it looks at what is there.
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
                    WriteShard(shard=shard, method="assign_rows", value=own, rows=place, token=self.token())
                )
            self.exchange(requests)
        self._stale.add(stored.number)

    # Copies ---------------------------------------------------------------------------------------------------------

    def adopt(
        self, stored: Stored, tensor: torch.Tensor, versions: Sequence[int] | None = None, *, keep: bool = True
    ) -> None:
        """Make a parameter or buffer this process's copy of a variable.

        Args:
            versions: Of the value that it holds already; None: it is read before it is used.
            keep: Whether it is held here.
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
        """Return this worker's copy of a model's parameter or buffer; it is read before it is used."""
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
        """Return the variable that a tensor is this process's copy of; None of other tensors."""
        found: Stored | None = getattr(tensor, "stored", None) or self._stored.get(tensor)
        return found

    def cached(self, stored: Stored) -> torch.Tensor:
        """Return a variable's whole value, as new as a read gives it here. Nobody else may change the tensor."""
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
        """Bring copies up to date: those of some variables, or all. One message for each server."""
        with self._turn:
            self.free_what_is_gone()
            wanted = self._copies if numbers is None else numbers
            copies = [self._copies[each] for each in wanted if each in self._copies]
            answers = self.exchange({server: [pull] for server, pull in _pulls(copies).items()})
            self._merge(copies, (news for (news,) in answers.values()))

    def _merge(self, copies: Sequence[Copy], news: Iterable[Mapping[Shard, tuple[int, torch.Tensor]]]) -> None:
        """Apply to these copies the parts that were read: those that had changed since."""
        changed: dict[int, dict[int, tuple[int, torch.Tensor]]] = {}
        for each in news:
            for (variable, number), found in each.items():
                place = number - self._copies[variable].stored.first_part
                changed.setdefault(variable, {})[place] = found
        for variable, parts in changed.items():
            self._copies[variable].take(parts)
        self._stale.difference_update(copy.stored.number for copy in copies)

    def distrust(self) -> None:
        """Have all copies read whole before they are used: a program may have left them half changed."""
        for copy in self._copies.values():
            copy.doubtful = True

    def refresh_copies(self, copies: Iterable[torch.Tensor]) -> None:
        """Send the servers the changes of the coordinator's copies, and update some of these."""
        with self._turn:
            numbers = [stored.number for each in copies if (stored := self.stored_of(each)) is not None]
            self.send_changes(numbers)
            self.refresh(numbers)

    def versions(self, shards: Iterable[Shard]) -> dict[Shard, int]:
        """Return the versions with which this process computes, of parts of variables."""
        found = {}
        for variable, place in shards:
            copy = self._copies.get(variable)
            found[variable, place] = (
                self._row_versions.get((variable, place), UNKNOWN) if copy is None else copy.versions[place]
            )
        return found

    def send_changes(self, numbers: Iterable[int] | None = None, *, thorough: bool = True) -> None:
        """Send the servers the changes of copies that were made in place here: of some variables, or all.

        Args:
            thorough: See `Copy.is_changed`.
        """
        with self._turn:
            self.free_what_is_gone()
            if self.is_worker:
                self.exchange(self._additions())
                return
            wanted = list(self._copies) if numbers is None else numbers
            copies = [self._copies[each] for each in wanted if each in self._copies]
            changed = [copy for copy in copies if copy.is_changed(thorough=thorough)]
            if changed:
                self._send_new_values(changed)

    def _send_new_values(self, changed: Sequence[Copy]) -> None:
        """Set parts that the coordinator has changed, or add its changes where workers have changed them, too."""
        for copy in changed:
            copy.doubtful = True  # if an interrupt comes meanwhile, the servers may or may not have got them
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
        """Return the operations that add up closures' changes in place: of values without gradients, such as buffers.

        Raises:
            ProgramError: A parameter was changed, which only optimizers and `assign` may do.
        """
        requests: dict[int, list[Any]] = {}
        for copy in list(self._copies.values()):
            if not copy.is_changed():
                continue
            if copy.guarded:
                copy.doubtful = True
                raise ProgramError(
                    f"A function changed {copy.stored.name} in place on a worker, where it is a copy of what the "
                    "servers hold. Change it by the optimizer, or outside scheduled functions, or make it a "
                    "distnb.Variable, whose assign, assign_add and scatter_* go to the servers."
                )
            changes = copy.changes()
            for shard, _, part, own, before in changes:
                method = "assign" if own.dtype is torch.bool else "assign_add"
                change = WriteShard(
                    shard=shard, method=method, value=_sent(difference(own, before)), token=self.token()
                )
                requests.setdefault(part.server, []).append(change)
            copy.note_sent({place: UNKNOWN for _, place, *_ in changes})
        return requests

    def fetch_changes(self) -> None:
        """Send the servers the changes made here, and read those of workers, of the coordinator's tensors."""
        with self._turn:
            self.send_changes()
            self.refresh_tensors()

    def refresh_tensors(self) -> None:
        """Bring the coordinator's tensors up to date; what was changed here stays changed."""
        with self._turn:
            owned = [(stored.number, owner()) for stored, owner in self._owners.items()]
            self.refresh([n for n, owner in owned if n in self._copies and self._copies[n].reference() is owner])

    # Optimizers -----------------------------------------------------------------------------------------------------

    def make_optimizer(
        self, number: int, factory: bytes, groups: Sequence[Sequence[Stored]], only: Iterable[int] | None = None
    ) -> None:
        """Make an optimizer on each server that holds something of its variables, or on some of them."""
        self._optimizers[number] = factory, groups
        servers = {part.server for group in groups for stored in group for part in stored.parts}
        if only is not None:
            servers &= set(only)
        environment = capture_early()
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
        """Have the servers update variables by gradients. A worker's copies are those after the step, as torch's are.

        The values come with the answers. If the next closure is here already, they are as new as it may ask for: it was
        scheduled before.
        """
        if not self.is_worker:
            self.send_changes(thorough=False)
        operations = self._additions() if self.is_worker else {}
        for server, step in requests.items():
            operations.setdefault(server, []).append(step._replace(token=self.token()))
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
        """Variables whose copies are as new as the closure that comes now may ask for, and were read a moment ago."""
        (fresh, when), self._fresh = self._fresh, (frozenset(), 0.0)
        return fresh if time.monotonic() - when < _MOMENT_S else frozenset()

    def optimizer_states(self, number: int, servers: Iterable[int]) -> dict[int, Any]:
        """Return the state of an optimizer, by server."""
        return {
            server: found
            for server, (found,) in self.exchange({each: [GetOptimizer(number)] for each in servers}).items()
        }

    def set_optimizer_states(self, states: dict[int, SetOptimizer]) -> None:
        """Give an optimizer what it kept."""
        self.exchange({server: [each] for server, each in states.items()})

    # Closures -------------------------------------------------------------------------------------------------------

    @contextmanager
    def running(
        self, closure: ClosureRun, variables: Iterable[int], fresh: Collection[int] = ()
    ) -> Iterator[ClosureRun]:
        """Run a closure that reads these variables. Their copies are read first, but for those that are `fresh`."""
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
        """Keep the values of parameters, to find every change of them."""
        for number in self._variables:
            copy = self._copies.get(number)
            if copy is not None and copy.guarded:
                copy.base = copy.tensor.detach().clone() if kept else None

    def _is_outdated(self, number: int) -> bool:
        return number in self._stale or number not in self._copies or self._copies[number].doubtful

    def _forget_the_latest(self) -> None:
        """Undo what a closure that raised or was ended has left here: it has no effect on the next one."""
        self.distrust()
        for copy in self._copies.values():
            copy.tensor.grad = None
        for variable in self.representatives.values():
            variable.grad = None

    def placement(self) -> tuple[PlacedShard, ...]:
        """Return the shards on the servers, in the order in which they were made, with one message to each server."""
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
