"""What one process, the coordinator or a worker, does with the variables on the servers."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from distnb.collectives.digests import digest
from distnb.errors import ProgramError
from distnb.runtime.servers.messages import (
    Create,
    Describe,
    Drop,
    GetOptimizer,
    MakeOptimizer,
    Pull,
    PullRows,
    SetOptimizer,
    Shard,
    Step,
    StepDone,
    Token,
    Write,
)
from distnb.runtime.servers.placement import Part, PlacedShard, Stored

if TYPE_CHECKING:
    from distnb.runtime.servers.client import Servers
    from distnb.runtime.servers.replicas import Replicas

__all__ = ["ClosureRun", "Copy", "ServerAccess"]

_PIECE_NBYTES = 4 << 20  # of a variable that is filled row by row
_UNKNOWN = -1
_MOMENT_S = 0.01


@dataclass
class Copy:
    """This process's copy of a variable's whole value.

    Attributes:
        reference: Gives the tensor. Its memory stays the same; it is a leaf of graphs if the variable is trainable.
        versions: Of each part, as it was when it was read.
        noted: torch's own count of changes in place, after it was read: another one tells of a change made here.
        base: What was read, of buffers, and of other variables without gradients on a worker, which sends differences.
        unseen: Digest of a parameter that a scope made, until it is first looked at: torch does not count what
            initializes it by way of `.data`.
    """

    stored: Stored
    reference: Callable[[], torch.Tensor | None]
    versions: list[int]
    noted: int = 0
    base: torch.Tensor | None = None
    unseen: int | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """The copy itself."""
        tensor = self.reference()
        assert tensor is not None, "copies whose tensors are gone are dropped before they are looked at"
        return tensor

    def is_changed(self) -> bool:
        """Whether it was changed in place since it was read. Of buffers torch does not count all changes."""
        unseen, self.unseen = self.unseen, None
        if self.tensor._version != self.noted or (unseen is not None and digest(self.tensor.detach()) != unseen):
            return True
        if self.base is None or isinstance(self.tensor, torch.nn.Parameter):
            return False
        return not torch.equal(self.tensor, self.base)

    def note(self) -> None:
        """It is as it was read, or as the servers have been told."""
        self.noted = self.tensor._version
        if self.base is not None:
            self.base.copy_(self.tensor.detach())


@dataclass
class ClosureRun:
    """A closure that runs on this worker.

    Attributes:
        number, oldest: Its number, and the smallest one that is unfinished.
        staleness: Of each step: how many updates its copies had missed.
    """

    number: int
    oldest: int
    staleness: list[int] = field(default_factory=list)
    changes: int = 0


def _creation(stored: Stored, shard: Shard, part: Part, value: torch.Tensor | None) -> Create:
    name = stored.name if len(stored.parts) == 1 else f"{stored.name}/part_{shard[1]}"
    own = None if value is None else stored.piece(value.detach().cpu(), part).contiguous()
    return Create(shard, name, own, stored.part_shape(part), stored.dtype, stored.trainable)


def _pulls(copies: Iterable[Copy]) -> dict[int, Pull]:
    """What reads copies anew, by server."""
    known: dict[int, dict[Shard, int]] = {}
    for copy in copies:
        for shard, part in copy.stored.shards():
            known.setdefault(part.server, {})[shard] = copy.versions[shard[1]]
    return {server: Pull(versions) for server, versions in known.items()}


class ServerAccess:
    """The variables on the servers, as this process reads and changes them.

    Args:
        servers: The connections.
        is_worker: Whether copies are fresh by themselves: a worker's are when a closure starts. The coordinator's are
            read anew at each use.
        device: Where copies are made.

    Attributes:
        next_is_here: Whether a worker has the next closure already.
        stand_ins: What stands for variables that have no copy here.
        made: The copies of parameters that were made since this was last emptied.
        replicas: Of a worker that has several, this one among them. They do alike, but for reading rows.
    """

    def __init__(self, servers: Servers, *, is_worker: bool, device: torch.device | None = None) -> None:
        self.servers = servers
        self.is_worker = is_worker
        self.device = device or torch.device("cpu")
        self.closure: ClosureRun | None = None
        self._copies: dict[int, Copy] = {}
        self._stored: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._stale: set[int] = set()  # this process has changed them on the servers since it read them
        self._variables: frozenset[int] = frozenset()  # the closure's
        self.next_is_here: Callable[[], bool] = lambda: False
        self._fresh: tuple[frozenset[int], float] = frozenset(), 0.0
        self._row_versions: dict[Shard, int] = {}
        self._owners: dict[Stored, TensorWeakRef] = {}
        self._optimizers: dict[int, tuple[bytes, Sequence[Sequence[Stored]]]] = {}
        self.stand_ins: dict[Stored, Any] = {}
        self.replicas: Replicas | None = None
        self.made: list[torch.nn.Parameter] = []

    # Talking to the servers -----------------------------------------------------------------------------------------

    def exchange(self, requests: dict[int, list[Any]]) -> dict[int, tuple[Any, ...]]:
        """Send each server its operations, in one message, and wait for all answers; those that replica 0 gets."""
        if self.replicas is None:
            return self._exchange(requests)
        return self.replicas.ask_once(lambda: self._exchange(requests))  # type: ignore[no-any-return]

    def _exchange(self, requests: dict[int, list[Any]]) -> dict[int, tuple[Any, ...]]:
        return (
            self.servers.exchange(requests, self.closure.oldest if self.closure is not None else 0) if requests else {}
        )

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

    def create(self, stored: Stored, value: torch.Tensor | None) -> None:
        """Make a variable on its servers, of a value, or of zeros. It is there as long as its owner (`own`) is."""
        self._each_part(stored, lambda shard, part: _creation(stored, shard, part, value))

    def own(self, stored: Stored, owner: torch.Tensor) -> None:
        """This tensor of the coordinator's stands for a variable: once it is gone, the servers' memory is free."""
        self._owners[stored] = TensorWeakRef(owner)
        self._stored[owner] = stored

    def drop_copy(self, stored: Stored) -> None:
        """A variable's whole value is not kept here any more."""
        self._copies.pop(stored.number, None)

    def free_what_is_gone(self) -> None:
        """Have the servers drop variables whose owners are gone."""
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
        """A server is new and empty: make anew what was on it, of what the coordinator knows, or of zeros."""
        self.free_what_is_gone()
        for stored, owner in self._owners.items():
            tensor = owner()
            value = None if hasattr(tensor, "stored") else tensor  # what stands in for a variable has no value
            requests = [
                _creation(stored, shard, part, value) for shard, part in stored.shards() if part.server == server
            ]
            self.exchange({server: requests} if requests else {})
        for number, (factory, groups) in self._optimizers.items():
            self.make_optimizer(number, factory, groups, (server,))

    def read(self, stored: Stored) -> torch.Tensor:
        """Its value now, a new tensor."""
        parts = [
            found[1]
            for found in self._each_part(stored, lambda shard, part: Pull({shard: _UNKNOWN}))
            for found in found.values()
        ]
        whole = parts[0].clone() if len(parts) == 1 else torch.cat(parts)
        return whole.to(self.device)

    def write(self, stored: Stored, method: str, value: torch.Tensor) -> None:
        """`assign`, `assign_add` or `assign_sub` a value of its shape."""
        value = value.detach().to("cpu", stored.dtype)
        self._each_part(
            stored,
            lambda shard, part: Write(shard, method, stored.piece(value, part).contiguous(), None, self.token()),
        )
        self._stale.add(stored.number)

    # Rows -----------------------------------------------------------------------------------------------------------

    def read_rows(self, stored: Stored, rows: torch.Tensor) -> torch.Tensor:
        """Some rows, whose numbers ascend: `[k, ...]`."""
        requests: dict[int, list[Any]] = {}
        places = []
        for shard, part, inside in self._by_part(stored, rows):
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
        """`scatter_add` and its kin: change some rows, in the order in which they are named."""
        requests: dict[int, list[Any]] = {}
        for shard, part in stored.shards():
            inside = (rows >= part.first) & (rows < part.last)
            if bool(inside.any()):
                own, changes = (rows[inside] - part.first).cpu(), values[inside].detach().cpu().contiguous()
                requests.setdefault(part.server, []).append(Write(shard, method, changes, own, self.token()))
        self.exchange(requests)
        self._stale.add(stored.number)

    @staticmethod
    def _by_part(stored: Stored, rows: torch.Tensor) -> Iterator[tuple[Shard, Any, torch.Tensor]]:
        """The parts that ascending row numbers are in, with the numbers within each."""
        rows = rows.cpu()
        if len(stored.parts) == 1:
            yield from ((shard, part, rows) for shard, part in stored.shards() if len(rows))
            return
        edges = torch.tensor([part.last for part in stored.parts])
        ends = torch.searchsorted(rows, edges).tolist()
        begin = 0
        for (shard, part), end in zip(stored.shards(), ends, strict=True):
            if end > begin:
                yield shard, part, rows[begin:end] - part.first
            begin = end

    def fill(self, stored: Stored, change: Callable[[torch.Tensor], Any], *, of_old: bool) -> None:
        """Set its rows piece by piece, so that no more than a piece is in this process's memory.

        Args:
            change: Changes a piece in place. torch draws the same numbers for pieces of a multiple of 16 as for all.
            of_old: Whether it looks at what is there.
        """
        if not stored.shape:
            value = self.read(stored) if of_old else torch.empty((), dtype=stored.dtype)
            with torch.no_grad():
                change(value)
            self.write(stored, "assign", value)
            return
        row_nbytes = max(1, stored.like()[:1].numel() * stored.dtype.itemsize)
        step = max(16, _PIECE_NBYTES // row_nbytes // 16 * 16)
        for first in range(0, stored.shape[0], step):
            rows = torch.arange(first, min(first + step, stored.shape[0]))
            piece = (
                self.read_rows(stored, rows)
                if of_old
                else torch.empty((len(rows), *stored.shape[1:]), dtype=stored.dtype)
            )
            with torch.no_grad():
                change(piece)
            requests: dict[int, list[Any]] = {}
            for shard, part, inside in self._by_part(stored, rows):
                place = int(inside[0])
                own = piece[part.first + place - first :][: len(inside)].cpu().contiguous()
                requests.setdefault(part.server, []).append(Write(shard, "assign_rows", own, place, self.token()))
            self.exchange(requests)
        self._stale.add(stored.number)

    # Copies ---------------------------------------------------------------------------------------------------------

    def adopt(self, stored: Stored, tensor: torch.Tensor, *, keep: bool = True) -> None:
        """A parameter or buffer that holds the value already is this process's copy of a variable.

        With `keep` it is not freed before this object is.
        """
        unread = [_UNKNOWN] * len(stored.parts)
        reference = (lambda: tensor) if keep else TensorWeakRef(tensor)
        copy = self._copies[stored.number] = Copy(stored, reference, unread, tensor._version)
        if not stored.trainable and (self.is_worker or not isinstance(tensor, torch.nn.Parameter)):
            copy.base = tensor.detach().clone()
        elif not self.is_worker:
            copy.unseen = digest(tensor.detach())
        self._stored[tensor] = stored

    def opened_copy(self, stored: Stored, *, is_parameter: bool) -> torch.Tensor:
        """This worker's copy of a model's parameter or buffer; it is read before it is used."""
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
        """The variable that a tensor is this process's copy of; None: of none."""
        found: Stored | None = getattr(tensor, "stored", None) or self._stored.get(tensor)
        return found

    def copy_of(self, stored: Stored) -> Copy:
        """The whole value, as new as a read gives it here."""
        copy = self._copies.get(stored.number)
        if copy is None:
            tensor = torch.empty(stored.shape, dtype=stored.dtype, device=self.device).requires_grad_(stored.trainable)
            self.adopt(stored, tensor)
            self.refresh([stored.number])
            return self._copies[stored.number]
        if not self.is_worker or stored.number in self._stale:
            self.refresh([stored.number])
        return copy

    def refresh(self, numbers: Iterable[int] | None = None) -> None:
        """Bring copies up to date: those of some variables, or all. One message for each server."""
        self.free_what_is_gone()
        copies = [self._copies[each] for each in (self._copies if numbers is None else numbers) if each in self._copies]
        answers = self.exchange({server: [pull] for server, pull in _pulls(copies).items()})
        self._take_in(copies, (news for (news,) in answers.values()))

    def _take_in(self, copies: Sequence[Copy], news: Iterable[Mapping[Shard, tuple[int, torch.Tensor]]]) -> None:
        """These copies were read: what had changed since is news."""
        touched = set()
        with torch.no_grad():
            for each in news:
                for (variable, number), (version, value) in each.items():
                    copy = self._copies[variable]
                    copy.stored.piece(copy.tensor.detach(), copy.stored.parts[number]).copy_(value)
                    copy.versions[number] = version
                    touched.add(variable)
        for variable in touched:
            self._copies[variable].note()
        self._stale.difference_update(copy.stored.number for copy in copies)

    def forget_versions(self) -> None:
        """All copies are read whole when they are next refreshed."""
        for copy in self._copies.values():
            copy.versions = [_UNKNOWN] * len(copy.versions)

    def read_anew(self, copies: Iterable[torch.Tensor]) -> None:
        """Of the coordinator's copies, tell the servers what was changed here, and bring some up to date."""
        self.send_changes()
        held = (self.stored_of(each) for each in copies)
        self.refresh([each.number for each in held if each is not None])

    def versions(self, shards: Iterable[Shard]) -> dict[Shard, int]:
        """The versions of which this process computes with parts of variables."""
        found = {}
        for variable, place in shards:
            copy = self._copies.get(variable)
            found[variable, place] = (
                self._row_versions.get((variable, place), _UNKNOWN) if copy is None else copy.versions[place]
            )
        return found

    def send_changes(self) -> None:
        """Tell the servers of copies that were changed in place here: on the coordinator they are the new values.

        On a worker they are differences, so that those of several workers add up; what has gradients is changed by
        optimizers and `assign` alone.
        """
        self.free_what_is_gone()
        self.exchange(self._changes())

    def _changes(self) -> dict[int, list[Any]]:
        """The operations that tell the servers of changes."""
        requests: dict[int, list[Any]] = {}
        for copy in list(self._copies.values()):
            if not copy.is_changed():
                continue
            stored, value, method = copy.stored, copy.tensor.detach(), "assign"
            if copy.base is not None and self.is_worker and stored.dtype is not torch.bool:
                value, method = value - copy.base, "assign_add"
            elif copy.base is None and self.is_worker:
                copy.noted = copy.tensor._version
                copy.versions = [_UNKNOWN] * len(stored.parts)
                raise ProgramError(
                    f"A function changed {stored.name} in place on a worker, where it is a copy of what the servers "
                    "hold. Change it by the optimizer, or outside scheduled functions, or make it a distnb.Variable, "
                    "whose assign, assign_add and scatter_* go to the servers."
                )
            value = value.to("cpu", stored.dtype)
            for shard, part in stored.shards():
                own = stored.piece(value, part).contiguous()
                requests.setdefault(part.server, []).append(Write(shard, method, own, None, self.token()))
            copy.note()
        return requests

    def bring_home(self) -> None:
        """Tell the servers what was changed here, and read what workers have changed, of the coordinator's tensors."""
        self.send_changes()
        owned = ((stored.number, owner()) for stored, owner in self._owners.items())
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
        self.exchange(
            {
                server: [
                    MakeOptimizer(
                        number,
                        factory,
                        tuple(
                            tuple(shard for stored in group for shard, part in stored.shards() if part.server == server)
                            for group in groups
                        ),
                    )
                ]
                for server in sorted(servers)
            }
        )

    def step(self, requests: dict[int, Step]) -> None:
        """Have the servers update variables by gradients. A worker's copies are those after the step, as torch's are.

        The values come with the answers. If the next closure is here already, they are as new as it may ask for: it was
        scheduled before.
        """
        operations = self._changes()
        for server, step in requests.items():
            operations.setdefault(server, []).append(step._replace(token=self.token()))
        closure = self.closure
        copies = [self._copies[each] for each in self._variables if each in self._copies] if closure is not None else []
        pulls = _pulls(copies)
        for server, pull in pulls.items():
            operations.setdefault(server, []).append(pull)
        ahead = closure is not None and self.next_is_here()
        answers = self.exchange(operations)
        self._take_in(copies, (answers[server][-1] for server in pulls))
        self._fresh = self._variables if ahead else frozenset(), time.monotonic()
        if closure is not None and requests:
            steps = (each for server in requests for each in answers[server] if isinstance(each, StepDone))
            closure.staleness.append(max(each.staleness for each in steps))

    def take_fresh(self) -> frozenset[int]:
        """Variables whose copies are as new as the closure that comes now may ask for, and were read a moment ago."""
        (fresh, when), self._fresh = self._fresh, (frozenset(), 0.0)
        return fresh if time.monotonic() - when < _MOMENT_S else frozenset()

    def optimizer_states(self, number: int, servers: Iterable[int]) -> dict[int, Any]:
        """What an optimizer keeps, by server."""
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
        """A closure runs, and reads these variables. Their copies are read first, but for those that are `fresh`."""
        self.closure, self._variables = closure, frozenset(variables)
        try:
            self.refresh(each for each in self._variables if each in self._stale or each not in fresh)
            yield closure
            self.send_changes()
        finally:
            self.closure = None

    def placement(self) -> tuple[PlacedShard, ...]:
        """What the servers hold, in the order in which it was made. One message for each server."""
        answers = self.exchange({server: [Describe()] for server in range(self.servers.count)})
        found = sorted(
            ((row, server) for server, (rows,) in answers.items() for row in rows), key=lambda each: each[0].shard
        )
        return tuple(
            PlacedShard(row.name, row.shape, row.dtype, server, row.nbytes, row.updates) for row, server in found
        )
