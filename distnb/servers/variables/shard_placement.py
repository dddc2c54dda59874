"""The placement of a variable's parts on the servers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from distnb.servers.server_messages import Shard
from distnb.variables.partitioning import checked_shards, shard_sizes
from distnb.wire.value_facts import Holding

__all__ = ["Part", "PlacedShard", "Placement", "Stored"]

_numbers = itertools.count(1)  # all strategies share the servers, so numbers are unique in the process


def _device(server: int) -> str:
    """Return a server's name in TensorFlow's spelling."""
    return f"/job:ps/replica:0/task:{server}/device:CPU:0"


@dataclass(frozen=True)
class PlacedShard:
    """A variable, or a part of one, on a parameter server: a row of `ParameterServerStrategy.placement`.

    Attributes:
        server: The number of the parameter server that holds it.
        updates: The number of changes since this server has held it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    server: int
    nbytes: int
    updates: int

    @property
    def device(self) -> str:
        """The server in TensorFlow's spelling: `/job:ps/replica:0/task:1/device:CPU:0`."""
        return _device(self.server)


class Part(NamedTuple):
    """The rows from `first` up to but not including `last` of a variable, which one server holds."""

    server: int
    first: int
    last: int

    @property
    def device(self) -> str:
        """The server's name in TensorFlow's spelling."""
        return _device(self.server)


class Stored(NamedTuple):
    """The description of a variable on the servers, the same in all processes.

    Attributes:
        number: The variable's number, unique on the servers.
        parts: The parts in the order of their rows.
        first_part: The number of the first of `parts` in the variable; not 0 only if `only` made this description.
    """

    number: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    parts: tuple[Part, ...]
    first_part: int = 0

    def shards(self) -> Iterator[tuple[Shard, Part]]:
        """Return the parts, each with the name of its shard on the servers."""
        return (((self.number, self.first_part + place), part) for place, part in enumerate(self.parts))

    def shards_of_rows(self, rows: torch.Tensor) -> Iterator[tuple[Shard, Part, torch.Tensor]]:
        """Return the parts that contain ascending row numbers, each with the numbers within the part.

        For example, with the parts 0..9 and 10..19 the rows `[2, 10, 15]` give `[2]` in the first part and `[0, 5]` in
        the second. Parts without any of the rows are left out.
        """
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
        """Return the description of one part as a variable in its own right."""
        part = self.parts[place]
        name = f"{self.name}/part_{place}" if self.name else f"part_{place}"
        alone = Part(part.server, 0, part.last - part.first)
        return self._replace(name=name, shape=self.part_shape(part), parts=(alone,), first_part=place)

    def piece(self, value: torch.Tensor, part: Part) -> torch.Tensor:
        """Return the rows of a whole value that belong to a part, or the value itself if there is only one part."""
        return value if len(self.parts) == 1 else value[part.first : part.last]

    def like(self) -> torch.Tensor:
        """Return a tensor of the variable's shape and dtype that takes no memory. Its content is undefined."""
        return torch.empty((), dtype=self.dtype).expand(self.shape)

    def holdings(self) -> Iterator[Holding]:
        """Yield the parts as they are drawn."""
        for part in self.parts:
            yield Holding(
                name=self.name,
                whole=self.shape,
                bounds=((part.first, part.last), *((0, size) for size in self.shape[1:])) if self.shape else (),
                kind="stored",
                dtype=str(self.dtype).removeprefix("torch."),
                device="cpu",
                nbytes=self.dtype.itemsize * torch.Size(self.part_shape(part)).numel(),
                holder=f"ps {part.server}",
            )

    def part_shape(self, part: Part) -> tuple[int, ...]:
        """Return the shape of a part."""
        return (part.last - part.first, *self.shape[1:]) if self.shape else ()


class Placement:
    """The placement of one strategy's variables: variables and parts go to the servers round-robin as they are made.

    Args:
        num_servers: The number of servers.
        partitioner: The strategy's `variable_partitioner`, which divides large variables. None: none is divided.
    """

    def __init__(self, num_servers: int, partitioner: Any = None) -> None:
        self.num_servers = num_servers
        self._partitioner = partitioner
        self._next_server = itertools.cycle(range(num_servers))

    def place(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, *, trainable: bool, whole: bool = False
    ) -> Stored:
        """Choose the servers of a new variable and return its description.

        Args:
            whole: Whether to keep the variable in one part, regardless of the partitioner.
        """
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
