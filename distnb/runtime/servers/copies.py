"""A process's copies of variables on the servers, and what the process has changed in them.

The servers hold the truth. A copy is read from them, and a change in place is found by comparison with the value that
was read (`base`), so that only changes are ever sent. While workers train, both sides change:

    base   10        the value that was read
    tensor 12        this process has added 2
    server 15        workers have added 5

`take` makes `base` 15 and `tensor` 17. `ServerAccess.send_changes` sends "17, if you still have what I read", and the
difference, 2, if the server has another version by then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from distnb.runtime.servers.server_messages import Shard
from distnb.runtime.servers.shard_placement import Part, Stored

__all__ = ["UNKNOWN", "Copy", "difference", "same_bits"]

UNKNOWN = -1
"""No version."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Copy:
    """A process's copy of a variable's whole value.

    Attributes:
        reference: Gives the tensor. Its memory stays the same; it is a leaf of graphs if the variable is trainable.
        versions: Of each part, when it was read.
        base: The value that was read, where changes in place are sent to the servers, or looked for.
        guarded: Whether a change in place is an error. Without `base` and `guarded` the copy is a cache: nobody can
            change it.
        noted: torch's count of changes in place when `tensor` was last known to equal `base`. torch does not count
            changes by way of `.data`.
        doubtful: Whether the content is not to be relied on: it was not read yet, or an exception left it half read or
            half sent. It is read whole before it is used, and nothing of it is sent.
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
        """The copy itself."""
        tensor = self.reference()
        assert tensor is not None, "copies whose tensors are gone are dropped before they are used"
        return tensor

    def known(self, place: int) -> int:
        """Return the version of a part that need not be read again."""
        return UNKNOWN if self.doubtful else self.versions[place]

    def is_changed(self, *, thorough: bool = True) -> bool:
        """Return whether this process has changed it since it was read.

        Args:
            thorough: Whether to compare every element of a parameter, and not to rely on torch's count. Buffers are
                always compared: torch's kernels for BatchNorm do not count.
        """
        counted = self.tensor._version == self.noted
        if self.doubtful or (self.base is None and (counted or not self.guarded)):
            return False
        if self.base is None or (self.guarded and not counted):
            return True
        if counted and not thorough and isinstance(self.tensor, torch.nn.Parameter):
            return False
        if not same_bits(self.tensor, self.base):
            return True
        self.noted = self.tensor._version
        return False

    def changes(self) -> list[tuple[Shard, int, Part, torch.Tensor, torch.Tensor]]:
        """Return the parts that this process has changed: shard, place, part, value now, and value that was read."""
        assert self.base is not None
        value, found = self.tensor.detach(), []
        for place, (shard, part) in enumerate(self.stored.shards()):
            own, before = self.stored.piece(value, part), self.stored.piece(self.base, part)
            if not same_bits(own, before):
                found.append((shard, place, part, own, before))
        return found

    def take(self, news: Mapping[int, tuple[int, torch.Tensor]]) -> None:
        """Take versions and values of some parts, by place, as the servers have them. Changes made here stay."""
        anew, self.doubtful = self.doubtful, True
        tensor = self.tensor
        value, counted = tensor.detach(), tensor._version == self.noted
        with torch.no_grad():
            for place, (version, news_of_part) in news.items():
                part = self.stored.parts[place]
                own = self.stored.piece(value, part)
                before = None if self.base is None else self.stored.piece(self.base, part)
                change = None
                if before is not None and not anew and not same_bits(own, before):
                    change, counted = difference(own, before), False
                own.copy_(news_of_part)
                if before is not None:
                    before.copy_(news_of_part)
                if change is not None:
                    _add(own, change)
                self.versions[place] = version
        self.noted = tensor._version if counted or anew or self.base is None else -1
        self.doubtful = anew and len(news) < len(self.versions)

    def note_sent(self, versions: Mapping[int, int]) -> None:
        """Note that the servers have got all changes.

        Args:
            versions: Of the parts that were sent; UNKNOWN for those to which something was added. The server's value is
                another one then, also where the same addition had been made before and was not made again.
        """
        assert self.base is not None
        self.base.copy_(self.tensor.detach())
        for place, version in versions.items():
            self.versions[place] = version
        self.noted = self.tensor._version
        self.doubtful = False


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one shape and dtype hold the same bits: NaN is equal to itself."""
    one, other = one.detach(), other.detach()
    if one.is_complex():
        one, other = torch.view_as_real(one.resolve_conj()), torch.view_as_real(other.resolve_conj())
    if one.is_floating_point():
        integers = _INTEGERS[one.element_size()]
        one, other = one.view(integers), other.view(integers)
    return torch.equal(one, other)


def difference(now: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Return what was added; of truth values, the new ones."""
    return now.clone() if now.dtype is torch.bool else now - before


def _add(own: torch.Tensor, change: torch.Tensor) -> None:
    own.copy_(change) if change.dtype is torch.bool else own.add_(change)
