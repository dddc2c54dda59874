"""What stands, among a closure's arguments, for what only the worker has: results of closures, and its own values."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from distnb.errors import CannotTravelError

if TYPE_CHECKING:
    from distnb.coordinator.remote_values import RemoteValue

__all__ = ["Found", "collecting", "found", "open_input", "open_resource", "place"]


class Found:
    """What a pickle refers to.

    Attributes:
        needs: Resources that the worker must have, by number.
        inputs: Results of other closures.
    """

    def __init__(self) -> None:
        self.needs: dict[int, None] = {}
        self.inputs: dict[int, RemoteValue] = {}


class _Place(Protocol):
    """Where references are opened: a worker."""

    def resource(self, number: int) -> Any: ...

    def input(self, number: int) -> Any: ...


_packing = threading.local()
place: list[_Place] = []
"""The worker that this process is, if it is one."""


@contextmanager
def collecting() -> Iterator[Found]:
    """What is pickled within it, on this thread, is a closure's."""
    before, _packing.found = getattr(_packing, "found", None), Found()
    try:
        yield _packing.found
    finally:
        _packing.found = before


def found(what: str) -> Found:
    """What is being packed, for something that only makes sense in a closure. CannotTravelError: it is elsewhere."""
    current: Found | None = getattr(_packing, "found", None)
    if current is None:
        raise CannotTravelError(
            f"{what} can be sent as an argument of coordinator.schedule only, or in what the scheduled function refers "
            "to. Elsewhere use its value: coordinator.fetch(...)."
        )
    return current


def open_resource(number: int) -> Any:
    """On a worker: its own value."""
    return place[-1].resource(number)


def open_input(number: int) -> Any:
    """On a worker: another closure's result, which came with this one."""
    return place[-1].input(number)
