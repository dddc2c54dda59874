"""The changes of the engines' values that the next snapshot reports."""

from __future__ import annotations

from collections.abc import Mapping

from distnb.wire.exchange import Upkeep
from distnb.wire.messages import ObjectId

__all__ = ["PendingUpkeep"]


class PendingUpkeep:
    """The changes that no snapshot has reported yet to one group of engines. See `Upkeep`."""

    def __init__(self) -> None:
        self.fresh = False
        self.renamed: dict[str, str] = {}
        self.forget: set[str] = set()
        self.unlike_parts: set[int] = set()
        self.adopt: dict[ObjectId, str | Mapping[int, int | ObjectId]] = {}
        self.released: list[ObjectId] = []  # grows at any time, when handles are freed

    def take(self) -> Upkeep | None:
        """Return the changes for a snapshot, and forget them. Return None if there are none."""
        if not (self.fresh or self.renamed or self.forget or self.unlike_parts or self.adopt or self.released):
            return None
        upkeep = Upkeep(
            fresh=self.fresh,
            renamed=self.renamed,
            forget=tuple(self.forget),
            unlike_parts=tuple(self.unlike_parts),
            adopt=self.adopt,
            release=tuple(self.released),
        )
        self.fresh, self.renamed, self.adopt = False, {}, {}
        self.forget.clear()
        self.unlike_parts.clear()
        del self.released[: len(upkeep.release)]
        return upkeep

    def take_released(self) -> tuple[ObjectId, ...] | None:
        """Return the ids to release, and forget them. Return None if there are other changes, too."""
        if self.fresh or self.renamed or self.forget or self.unlike_parts or self.adopt:
            return None
        released = tuple(self.released)
        del self.released[: len(released)]
        return released

    def send_again(self, upkeep: Upkeep | None) -> None:
        """Report the changes of a snapshot again that may not have arrived. All values are sent again anyway."""
        if upkeep is not None:
            self.released.extend(upkeep.release)
            self.adopt.update(upkeep.adopt)
