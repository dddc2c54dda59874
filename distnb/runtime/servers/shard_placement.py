"""The placement of a variable's parts on the servers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from distnb.runtime.servers.server_messages import Shard
from distnb.variables.partitioning import checked_shards, shard_sizes

__all__ = ["Part", "PlacedShard", "Placement", "Stored"]

_numbers = itertools.count(1)  # strategies share the servers


def _device(server: int) -> str:
    """Return a server's name in TensorFlow's spelling."""
    return f"/job:ps/replica:0/task:{server}/device:CPU:0"


@dataclass(frozen=True)
class PlacedShard:
    """A variable, or a part of one, on a parameter server: a row of `ParameterServerStrategy.placement`.

    Attributes:
        server: Which parameter server holds it.
        updates: How often it was changed since that server has it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    server: int
    nbytes: int
    updates: int

    @property
    def device(self) -> str:
        """The server, as TensorFlow spells it: `/job:ps/replica:0/task:1/device:CPU:0`."""
        return _device(self.server)


class Part(NamedTuple):
    """The rows `first` to `last` (without it) of a variable, on one server."""

    server: int
    first: int
    last: int

    @property
    def device(self) -> str:
        """The server's name in TensorFlow's spelling."""
        return _device(self.server)


class Stored(NamedTuple):
    """The description of a variable on the servers, which every process has.

    Attributes:
        number: Which of the strategy's variables it is.
        parts: In the order of rows.
        first_part: Which of the variable's parts the first one is, for a part that stands by itself.
    """

    number: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    parts: tuple[Part, ...]
    first_part: int = 0

    def shards(self) -> Iterator[tuple[Shard, Part]]:
        """Return its parts, each with its name on the servers."""
        return (((self.number, self.first_part + place), part) for place, part in enumerate(self.parts))

    def shards_of_rows(self, rows: torch.Tensor) -> Iterator[tuple[Shard, Part, torch.Tensor]]:
        """Return the parts that ascending row numbers are in, with the numbers within each."""
        rows = rows.cpu()
        if len(self.parts) == 1:
            yield from ((shard, part, rows) for shard, part in self.shards() if len(rows))
            return
        edges = torch.tensor([part.last for part in self.parts])
        ends = torch.searchsorted(rows, edges).tolist()
        begin = 0
        for (shard, part), end in zip(self.shards(), ends, strict=True):
            if end > begin:
                yield shard, part, rows[begin:end] - part.first
            begin = end

    def only(self, place: int) -> Stored:
        """Return a part as a variable by itself."""
        part = self.parts[place]
        name = f"{self.name}/part_{place}" if self.name else f"part_{place}"
        alone = Part(part.server, 0, part.last - part.first)
        return self._replace(name=name, shape=self.part_shape(part), parts=(alone,), first_part=place)

    def piece(self, value: torch.Tensor, part: Part) -> torch.Tensor:
        """Return the rows of a value that belong to a part; the value itself where there is one part."""
        return value if len(self.parts) == 1 else value[part.first : part.last]

    def like(self) -> torch.Tensor:
        """Return a tensor of its shape and dtype that takes no memory, and has no content to be read."""
        return torch.empty((), dtype=self.dtype).expand(self.shape)

    def part_shape(self, part: Part) -> tuple[int, ...]:
        """Return the shape of a part."""
        return (part.last - part.first, *self.shape[1:]) if self.shape else ()


class Placement:
    """Deals variables, and the parts of large ones, out to the servers in turn, in the order of making."""

    def __init__(self, num_servers: int, partitioner: Any = None) -> None:
        self.num_servers = num_servers
        self._partitioner = partitioner
        self._next_server = itertools.cycle(range(num_servers))

    def place(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, *, trainable: bool, whole: bool = False
    ) -> Stored:
        """Choose the servers of a new variable. `whole`: it is not divided, whatever the partitioner says."""
        shape = tuple(shape)
        shards = 1
        if self._partitioner is not None and not whole and shape and shape[0] > 1:
            shards = checked_shards(self._partitioner, shape, dtype)
        parts, first = [], 0
        for size in shard_sizes(shape[0], shards) if shape else (1,):
            parts.append(Part(next(self._next_server), first, first + size))
            first += size
        return Stored(
            number=next(_numbers), name=name, shape=shape, dtype=dtype, trainable=trainable, parts=tuple(parts)
        )
