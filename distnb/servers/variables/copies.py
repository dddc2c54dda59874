"""A process's copies of variables on the servers, and the changes that the process has made to them.

The servers hold the authoritative values. A process reads a copy from them and finds its own in-place changes by
comparing the copy with the value that it read (`base`). Only changes are sent. While workers train, both sides change:

    base   10        the value that was read
    tensor 12        this process has added 2
    server 15        workers have added 5

`Copy.merge` makes `base` 15 and `tensor` 17. `KeptCopies.send_changes` then sends "assign 17 if the version is the one
that I read". If the server has a newer version by then, it sends the difference instead: "add 2".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from distnb.servers.server_messages import Shard
from distnb.servers.variables.shard_placement import Part, Stored

__all__ = ["UNKNOWN", "Copy", "difference", "same_value"]

UNKNOWN = -1
"""The version of a part that was not read."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Copy:
    """A process's copy of a variable's whole value.

    Attributes:
        reference: Returns the tensor. Its memory stays the same. It is a leaf of graphs if the variable is trainable.
        versions: The version of each part when it was read.
        base: The value that was read, if in-place changes are sent to the servers or have to be detected.
        guarded: Whether an in-place change is an error. A copy that is not guarded and has no `base` is a cache, which
            no program can change.
        noted: The tensor's `_version`, torch's count of in-place changes, when `tensor` was last known to equal `base`.
            torch does not count changes through `.data`.
        doubtful: Whether the content is unreliable: it was not read yet, or an exception left it half read or half
            sent. It is then read completely before it is used, and none of its changes are sent.
    """

    stored: Stored
    reference: Callable[[], torch.Tensor | None]
    versions: list[int]
    base: torch.Tensor | None = None
    guarded: bool = False
    noted: int = 0
    doubtful: bool = False

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor that holds the copy."""
        tensor = self.reference()
        assert tensor is not None, "copies whose tensors are gone are dropped before they are used"
        return tensor

    def known(self, place: int) -> int:
        """Return the version of a part that this process has, or UNKNOWN if the part must be read."""
        return UNKNOWN if self.doubtful else self.versions[place]

    def is_changed(self, *, thorough: bool = True) -> bool:
        """Return whether this process has changed the copy since it was read.

        Args:
            thorough: Whether to compare every element of a parameter instead of relying on torch's count of in-place
                changes. Buffers are always compared, because torch's BatchNorm kernels do not increase the count.
        """
        counted = self.tensor._version == self.noted
        if self.doubtful or (self.base is None and (counted or not self.guarded)):
            return False
        if self.base is None or (self.guarded and not counted):
            return True
        if counted and not thorough and isinstance(self.tensor, torch.nn.Parameter):
            return False
        if not _same_bits(self.tensor, self.base):
            return True
        self.noted = self.tensor._version
        return False

    def changes(self) -> list[tuple[Shard, int, Part, torch.Tensor, torch.Tensor]]:
        """Return the parts that this process has changed, as (shard, place, part, current value, value read)."""
        assert self.base is not None
        value, found = self.tensor.detach(), []
        for place, (shard, part) in enumerate(self.stored.shards()):
            own, before = self.stored.piece(value, part), self.stored.piece(self.base, part)
            if not _same_bits(own, before):
                found.append((shard, place, part, own, before))
        return found

    def merge(self, news: Mapping[int, tuple[int, torch.Tensor]]) -> None:
        """Merge the servers' news into the copy and keep the changes made here. The module's docstring has an example.

        Args:
            news: The version and value of each changed part, by the part's place.
        """
        was_doubtful, self.doubtful = self.doubtful, True
        tensor = self.tensor
        value, counted = tensor.detach(), tensor._version == self.noted
        with torch.no_grad():
            for place, (version, news_of_part) in news.items():
                part = self.stored.parts[place]
                own = self.stored.piece(value, part)
                before = None if self.base is None else self.stored.piece(self.base, part)
                change = None
                if before is not None and not was_doubtful and not _same_bits(own, before):
                    change, counted = difference(own, before), False
                own.copy_(news_of_part)
                if before is not None:
                    before.copy_(news_of_part)
                if change is not None:
                    _add(own, change)
                self.versions[place] = version
        self.noted = tensor._version if counted or was_doubtful or self.base is None else -1
        self.doubtful = was_doubtful and len(news) < len(self.versions)

    def note_sent(self, versions: Mapping[int, int]) -> None:
        """Record that the servers have received all changes.

        Args:
            versions: The new version of each part that was sent. UNKNOWN for a part to which a difference was added:
                its value on the server includes other changes and must be read again. This also holds if the server
                skipped the addition because it had already applied its token.
        """
        assert self.base is not None
        self.base.copy_(self.tensor.detach())
        for place, version in versions.items():
            self.versions[place] = version
        self.noted = self.tensor._version
        self.doubtful = False


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one shape and dtype hold the same bits. NaN therefore equals itself."""
    one, other = one.detach(), other.detach()
    if one.is_complex():
        one, other = torch.view_as_real(one.resolve_conj()), torch.view_as_real(other.resolve_conj())
    if one.is_floating_point():
        integers = _INTEGERS[one.element_size()]
        one, other = one.view(integers), other.view(integers)
    return torch.equal(one, other)


def same_value(one: Any, other: Any) -> bool:
    """Return whether two options of an optimizer, which may be tensors, are equal."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    return bool(type(one) is type(other) and one == other)


def difference(now: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Return the difference to add to a server's value. For booleans, return the new values, which are assigned."""
    return now.clone() if now.dtype is torch.bool else now - before


def _add(own: torch.Tensor, change: torch.Tensor) -> None:
    own.copy_(change) if change.dtype is torch.bool else own.add_(change)
