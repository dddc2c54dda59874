"""The description of a mode: how it is read and set, and when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["MOMENTS", "Mode", "Moment"]

Moment = Literal["call", "end", "beginning"]
MOMENTS: tuple[Moment, ...] = ("call", "end", "beginning")


@dataclass(frozen=True)
class Mode:
    """A mode: a row of the table.

    Attributes:
        name: The name under which the mode is sent.
        capture: Returns the mode's value as plain data, which can be opened before any module of the user is imported.
        apply: Sets the mode to a value that `capture` returned in another process.
        when: The moments at which the mode is compared: around each "call" and each cell; at the "end" of cells, too,
            but not around calls; or at the "beginning" of cells only, so that changes on the replicas are not returned
            (imports on the replicas change warning filters, too). The first call in an ordinary cell is its beginning.
        early: True if the mode is set before the objects that are sent with it are opened. The other modes would
            disturb the opening, and are set after it.
    """

    name: str
    capture: Callable[[], Any]
    apply: Callable[[Any], Any]
    when: Moment = "call"
    early: bool = False
