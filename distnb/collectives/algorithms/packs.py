"""Into how many messages the tensors go that are reduced together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Packs"]


@dataclass(frozen=True)
class Packs:
    """When a pack is closed, so that the next tensor begins another. Without arguments one pack holds everything.

    Attributes:
        nbytes: Once it holds so much.
        count: Once it holds its share, if there were so many; 0 for a pack of its own for each tensor.
    """

    nbytes: int | None = None
    count: int | None = None

    @classmethod
    def larger_than(cls, nbytes: int) -> Packs:
        """Packs that are closed once they are larger than so many bytes; 0 for one pack."""
        return cls(nbytes=nbytes + 1) if nbytes else cls()

    @property
    def one(self) -> bool:
        """Whether everything goes into one pack."""
        return self.nbytes is None and self.count in (None, 1)

    def limit(self, total_nbytes: int) -> int | None:
        """How much closes a pack, where all tensors together have so many bytes; None if nothing does."""
        if self.nbytes is not None or self.count is None:
            return self.nbytes
        return -(-total_nbytes // self.count) if self.count else 0

    def cut(self, sizes: Sequence[int]) -> list[list[int]]:
        """Places of tensors, pack by pack, in order.

        Args:
            sizes: Each tensor's bytes.
        """
        limit = self.limit(sum(sizes))
        packs: list[list[int]] = []
        held = None
        for place, size in enumerate(sizes):
            if held is None:
                packs.append([])
                held = 0
            packs[-1].append(place)
            held += size
            if limit is not None and held >= limit:
                held = None
        return packs
