"""What sources that load by the slice have in common: a map-style DataLoader, and whether a slice may be collated."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from distnb.input.sources.base import Place, Shared, Source
from distnb.input.sources.loaders import generators_of, peek_at
from distnb.input.splitting.collating import CollateRule

__all__ = ["SlicedSource"]


class SlicedSource(Source):
    """The examples of a DataLoader, of which each replica loads its own slice of each global batch.

    Args:
        loader: The user's loader; its dataset is map-style and it collates batches.
        place: The replica that reads.
        rule: Whether its collate function may see only a slice.
        shared: The stream that all replicas share.
    """

    def __init__(self, loader: DataLoader[Any], place: Place, rule: CollateRule, shared: Shared) -> None:
        self.data = self._loader = loader
        self._place = place
        self._rule = rule
        self._shared = shared

    def length(self) -> int:
        return len(self._loader)

    def peek(self) -> Any:
        return peek_at(self._loader)

    def generators(self) -> list[Any]:
        return list(generators_of(self._loader))
