"""Requests of this process to the servers: one message to each server, and operations on the values that they hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from distnb.servers.closure_messages import Fence
from distnb.servers.server_messages import (
    Create,
    Describe,
    Pull,
    PullRows,
    Shard,
    Token,
    WriteShard,
)
from distnb.servers.variables.copies import UNKNOWN
from distnb.servers.variables.shard_placement import Part, PlacedShard, Stored

if TYPE_CHECKING:
    from distnb.servers.client import ServerConnections
    from distnb.servers.variables.worker_replicas import WorkerReplicas

__all__ = ["ClosureRun", "Requests", "creation", "sent"]

_PIECE_NBYTES = 4 << 20  # the size of the pieces in which `fill` sets a variable


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
    changes: defaultdict[Shard | int, int] = field(default_factory=lambda: defaultdict(int))


class Requests:
    """The requests of this process to the servers. It is thread-safe.

    Args:
        servers: The connections to the servers.
        device: The device of the values that are read.
        replicas: Returns the replicas of this worker, if it has several.

    Attributes:
        fence: Returns the closures that have ended, as the coordinator knows them.
        closure: The closure that runs on this worker.
        written: The variables that this process changed on the servers since it last read their copies.
        row_versions: By shard, the version of the rows that were read last.
    """

    def __init__(
        self, servers: ServerConnections, device: torch.device, replicas: Callable[[], WorkerReplicas | None]
    ) -> None:
        self.servers = servers
        self.device = device
        self.fence: Callable[[], Fence] = Fence
        self.closure: ClosureRun | None = None
        self.written: set[int] = set()
        self.row_versions: dict[Shard, int] = {}
        self._replicas = replicas

    def exchange(self, requests: dict[int, list[Any]]) -> dict[int, tuple[Any, ...]]:
        """Send each server its operations in one message and wait for all answers.

        On a worker with several replicas only replica 0 asks, and all replicas return its answers.
        """
        replicas = self._replicas()
        if replicas is None:
            return self._exchange(requests)
        return replicas.ask_once(lambda: self._exchange(requests))  # type: ignore[no-any-return]

    def _exchange(self, requests: dict[int, list[Any]]) -> dict[int, tuple[Any, ...]]:
        if not requests:
            return {}
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

    def create(self, stored: Stored, value: torch.Tensor | None) -> list[int]:
        """Create a variable on its servers, filled with a value or with zeros.

        The variable exists until its owner is garbage-collected (see `own`).

        Args:
            value: The initial value. None: zeros.

        Returns:
            The version of each part.
        """
        return self._each_part(stored, lambda shard, part: creation(stored, shard, part, value))

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
        self.written.add(stored.number)

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
        self.row_versions.update({shard: version for (_, _, shard), (version, _) in zip(places, found, strict=True)})
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
        self.written.add(stored.number)

    def fill(self, stored: Stored, change: Callable[[torch.Tensor], Any]) -> None:
        """Set a variable piece by piece, so that this process holds no more than one piece in memory.

        Args:
            change: Sets a piece. Pieces have a multiple of 16 rows, because torch then draws the same random numbers as
                for the whole tensor.
        """
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
        self.written.add(stored.number)

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


def creation(stored: Stored, shard: Shard, part: Part, value: torch.Tensor | None) -> Create:
    """Return the operation that makes a part of a variable, with a value or with zeros."""
    name = stored.name if len(stored.parts) == 1 else f"{stored.name}/part_{shard[1]}"
    own = None if value is None else stored.piece(value.detach().cpu(), part).contiguous()
    return Create(
        shard=shard, name=name, value=own, shape=stored.part_shape(part), dtype=stored.dtype, trainable=stored.trainable
    )


def sent(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor as it is sent."""
    return value.cpu().contiguous()
