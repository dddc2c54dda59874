"""Changes in place by any function of torch: nothing that others change meanwhile is lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from distnb.errors import ContextError
from distnb.runtime.servers.copies import UNKNOWN, same_bits
from distnb.runtime.servers.server_messages import Pull, PullRows, Shard, Token, WriteShard
from distnb.runtime.servers.shard_placement import Stored

if TYPE_CHECKING:
    from distnb.runtime.servers.access import ServerAccess

__all__ = ["change_in_place"]

_ATTEMPTS = 200


@dataclass(eq=False)
class _Piece:
    """The part of a change that one server makes.

    Attributes:
        rows: Which rows of the shard; None: all.
        count: How many rows of the block these are.
        token: Names the change, however often it is tried.
        before, version: The value that the server had.
        after: The value that it has after the change; None: the change has not been made, or is none.
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
        return value.clone()  # the message's memory is used again

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
    """Change a variable by a function that changes its value in place.

    The value is read, changed here, and written if the server still has the version that was read; if not, the
    function is called again with the new value. Each server's part is changed in one piece.

    Args:
        change: Is given the value, or the block of rows.
        rows: Ascending row numbers `[k]`, for a change of some rows only.

    Returns:
        The value, or the block of rows, as the servers have it after the change.

    Raises:
        ContextError: Others have changed it every time.
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
        f"{stored.name or 'A variable'} could not be changed in place: in {_ATTEMPTS} attempts others were faster. "
        "Wait for them, coordinator.join(), or use assign, assign_add, assign_sub or scatter_*, which need one message."
    )


def _pieces(access: ServerAccess, stored: Stored, rows: torch.Tensor | None) -> list[_Piece]:
    if rows is None:
        whole = ((shard, part, None, part.last - part.first) for shard, part in stored.shards())
        return [
            _Piece(server=part.server, shard=shard, rows=no, count=count, token=access.token())
            for shard, part, no, count in whole
        ]
    return [
        _Piece(server=part.server, shard=shard, rows=inside, count=len(inside), token=access.token())
        for shard, part, inside in stored.shards_of_rows(rows)
    ]


def _joined(values: list[torch.Tensor]) -> torch.Tensor:
    return values[0] if len(values) == 1 else torch.cat(values)


def _asked(access: ServerAccess, asked: list[tuple[_Piece, list[Any]]]) -> list[tuple[_Piece, list[Any]]]:
    """Ask for operations on pieces, each server in one message. Returns the pieces, with their answers."""
    requests: dict[int, list[Any]] = {}
    for piece, operations in asked:
        requests.setdefault(piece.server, []).extend(operations)
    answers = {server: iter(found) for server, found in access.exchange(requests).items()}
    return [(piece, [next(answers[piece.server]) for _ in operations]) for piece, operations in asked]
