"""Changes in place of server variables with any torch function, without losing concurrent changes.

A change is an optimistic transaction, a compare-and-swap on the shard's version. Two workers run `v.mul_(2)` on 10,
which has version 4:

    worker A: reads (4, 10), writes 20 "if the version is 4"   accepted, the version is 5
    worker B: reads (4, 10), writes 20 "if the version is 4"   refused; reads (5, 20), writes 40 "if it is 5"
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from distnb.errors import ContextError
from distnb.servers.variables.copies import UNKNOWN, same_bits
from distnb.servers.variables.server_messages import Pull, PullRows, Shard, Token, WriteShard
from distnb.servers.variables.shard_placement import Stored

if TYPE_CHECKING:
    from distnb.servers.variables.access import ServerAccess

__all__ = ["change_in_place"]

_ATTEMPTS = 200


@dataclass(eq=False)
class _Piece:
    """The part of a change that concerns one shard.

    Attributes:
        rows: The row numbers within the shard. None: all rows.
        count: The number of rows in the block.
        token: The identity of the change, the same for all attempts.
        before, version: The value that the server had, and its version.
        after: The server's value after the change. None: the change was not made, or left the value as it was.
    """

    server: int
    shard: Shard
    rows: torch.Tensor | None
    count: int
    token: Token | None
    before: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    version: int = UNKNOWN
    after: torch.Tensor | None = None

    def read(self) -> Any:
        return Pull({self.shard: UNKNOWN}) if self.rows is None else PullRows(self.shard, self.rows)

    def take(self, answer: Any) -> None:
        self.version = (answer[self.shard] if self.rows is None else answer)[0]
        self.before = self.value_in(answer)

    def value_in(self, answer: Any) -> torch.Tensor:
        value: torch.Tensor = (answer[self.shard] if self.rows is None else answer)[1]
        return value.clone()  # the message's memory is reused

    def write(self, value: torch.Tensor) -> WriteShard:
        method = "assign" if self.rows is None else "scatter_update"
        return WriteShard(
            shard=self.shard,
            method=method,
            value=value.cpu().contiguous(),
            rows=self.rows,
            token=self.token,
            seen=self.version,
        )


def change_in_place(
    access: ServerAccess, stored: Stored, change: Callable[[torch.Tensor], Any], rows: torch.Tensor | None = None
) -> torch.Tensor:
    """Change a variable with a function that changes a tensor in place.

    The value is read, changed in this process, and written if the server still has the version that was read. If not,
    the function is called again with the new value. The change is atomic on each server, not across servers.

    Args:
        change: Changes its argument in place: the value, or the block of rows.
        rows: Ascending row numbers `[k]`, to change these rows only.

    Returns:
        The value, or the block of rows, as the servers have it after the change.

    Raises:
        ContextError: Other processes changed the variable during every attempt.
    """
    left = pieces = _pieces(access, stored, rows)
    if not pieces:
        return torch.empty((0, *stored.shape[1:]), dtype=stored.dtype, device=access.device)
    for each, (answer,) in _asked(access, [(each, [each.read()]) for each in pieces]):
        each.take(answer)
    for _ in range(_ATTEMPTS):
        block = _joined([each.before for each in pieces]).to(access.device, copy=True)
        with torch.no_grad():
            change(block)
        after = [block] if len(pieces) == 1 else block.split([each.count for each in pieces])
        changed = [
            (each, [each.write(value), each.read()])
            for each, value in zip(pieces, after, strict=True)
            if each in left and not same_bits(value.cpu(), each.before)
        ]
        left = []
        for each, (version, answer) in _asked(access, changed):
            if version is None:
                left.append(each)
                each.take(answer)
            else:
                each.after = each.value_in(answer)
        if not left:
            return _joined([each.before if each.after is None else each.after for each in pieces]).to(access.device)
    raise ContextError(
        f"{stored.name or 'A variable'} could not be changed in place: other processes changed it during each of "
        f"{_ATTEMPTS} attempts. Wait for them with coordinator.join(), or use assign, assign_add, assign_sub or "
        "scatter_*, which need one message."
    )


def _pieces(access: ServerAccess, stored: Stored, rows: torch.Tensor | None) -> list[_Piece]:
    if rows is None:
        whole = ((shard, part, None, part.last - part.first) for shard, part in stored.shards())
        return [
            _Piece(server=part.server, shard=shard, rows=no, count=count, token=access.token(shard))
            for shard, part, no, count in whole
        ]
    return [
        _Piece(server=part.server, shard=shard, rows=inside, count=len(inside), token=access.token(shard))
        for shard, part, inside in stored.shards_of_rows(rows)
    ]


def _joined(values: list[torch.Tensor]) -> torch.Tensor:
    return values[0] if len(values) == 1 else torch.cat(values)


def _asked(access: ServerAccess, asked: list[tuple[_Piece, list[Any]]]) -> list[tuple[_Piece, list[Any]]]:
    """Run operations on pieces, with one message to each server, and return each piece with its answers."""
    requests: dict[int, list[Any]] = {}
    for piece, operations in asked:
        requests.setdefault(piece.server, []).extend(operations)
    answers = {server: iter(found) for server, found in access.exchange(requests).items()}
    return [(piece, [next(answers[piece.server]) for _ in operations]) for piece, operations in asked]
