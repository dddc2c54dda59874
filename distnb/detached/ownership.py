"""The ownership of a cluster by one notebook at a time. A state machine without IO.

A client is a connection of a notebook. The notebook that starts the cluster is its first owner::

                engines started
    [starting] ──────────────────▶ [owned] ──owner left──▶ [free] ──connected──▶ [owned]
        │                            │ ▲
        │ owner left      connected, │ │ owner left: the first taker is granted the cluster, others are refused
        ▼                  with take ▼ │
     [ended]                      [claimed]   the owner was asked to leave; takers wait for a limited time

A stop or the time limit ends the cluster in any state. An owner leaves by closing its connection, also when its process
ends. So does a taker that no longer waits.
"""

from __future__ import annotations

import logging
from typing import Literal, NamedTuple

from distnb.story import StateMachine, transition

__all__ = ["EndCluster", "Grant", "Order", "Ownership", "Refuse", "Release"]

_PATIENCE_S = 15.0  # the time in which an owner releases the cluster to a taker


class Grant(NamedTuple):
    """The order to notify a client that it is the owner now."""

    client: int


class Refuse(NamedTuple):
    """The order to notify a client that it does not become the owner.

    Attributes:
        cause: "starting" or "owned", if another client is the owner; "silent", if the owner did not release the
            cluster in time; "taken", if another taker was first; or "ended".
        by: The owner's name, or the reason of the cluster's end.
    """

    client: int
    cause: Literal["starting", "owned", "silent", "taken", "ended"]
    by: str


class Release(NamedTuple):
    """The order to ask the owner to leave, since the notebook `by` takes the cluster over."""

    client: int
    by: str


class EndCluster(NamedTuple):
    """The order to end the cluster."""

    why: str


Order = Grant | Refuse | Release | EndCluster


class _Taker(NamedTuple):
    who: str
    deadline: float


class Ownership(StateMachine):
    """The owner of a cluster, and the clients that wait to take it over. Each event returns orders.

    Args:
        client: The client that starts the cluster, and is its first owner.
        who: The name of its notebook.
        ends: The time at which the cluster ends; None for no limit.
        limit: The reason of that end, in words.

    Attributes:
        owner: The client that owns the cluster, or None.
        who: The name of the owner's notebook; "" without an owner.
        ended: The reason of the cluster's end; "" before that.
    """

    log = logging.getLogger("distnb.detached.ownership")

    def __init__(self, client: int, who: str, ends: float | None = None, limit: str = "") -> None:
        super().__init__()
        self.owner: int | None = client
        self.who = who
        self.ended = ""
        self._ends, self._limit = ends, limit
        self._starting = True
        self._claimed = False  # whether the owner was asked to leave
        self._takers: dict[int, _Taker] = {}

    def state(self) -> str:
        """Return the state in words."""
        if self.ended:
            return f"ended: {self.ended}"
        owned = "free" if self.owner is None else f"{'claimed' if self._claimed else 'owned'} by {self.owner}"
        takers = f", awaited by {', '.join(map(str, self._takers))}" if self._takers else ""
        return f"{'starting, ' * self._starting}{owned}{takers}"

    def violations(self) -> list[str]:
        """Return a sentence for each invariant that does not hold."""
        lines = []
        if self._takers and not (self._claimed and self.owner is not None):
            lines.append("takers wait for an owner that was not asked to leave")
        if self.owner in self._takers:
            lines.append("the owner waits for itself")
        if self.owner is None and (self._starting or self._claimed) and not self.ended:
            lines.append("nobody owns a cluster that starts or is claimed")
        if self.ended and self._takers:
            lines.append("takers wait for a cluster that has ended")
        return lines

    @property
    def deadline(self) -> float | None:
        """The time at which `tick` is due, or None."""
        if self.ended:
            return None
        times = [taker.deadline for taker in self._takers.values()]
        return min(times if self._ends is None else [*times, self._ends], default=None)

    # -- events ------------------------------------------------------------------------------------------------------

    @transition
    def started(self, now: float) -> list[Order]:
        """Handle the end of the start: all engines are ready. From now on the cluster stays when its owner leaves."""
        self._starting = False
        return []

    @transition
    def connected(self, client: int, who: str, take: bool, now: float) -> list[Order]:
        """Handle the request of a client to become the owner. With `take`, another owner has to leave."""
        if self.ended:
            return [Refuse(client, "ended", self.ended)]
        if self.owner is None:
            return self._grant(client, who)
        if self._starting or not take or client == self.owner:
            return [Refuse(client, "starting" if self._starting else "owned", self.who)]
        self._takers[client] = _Taker(who, now + _PATIENCE_S)
        claimed, self._claimed = self._claimed, True
        return [] if claimed else [Release(self.owner, who)]

    @transition
    def left(self, client: int, now: float) -> list[Order]:
        """Handle the end of a client's connection."""
        self._takers.pop(client, None)
        if client != self.owner or self.ended:
            return []
        self.owner, self.who, self._claimed = None, "", False
        if self._starting:
            return self._end("the notebook ended before the engines had started")
        if not self._takers:
            return []
        (first, taker), *others = self._takers.items()
        self._takers.clear()
        return [*self._grant(first, taker.who), *(Refuse(other, "taken", taker.who) for other, _ in others)]

    @transition
    def stopped(self, why: str, now: float) -> list[Order]:
        """Handle a request to end the cluster."""
        return self._end(why)

    @transition
    def tick(self, now: float) -> list[Order]:
        """End the cluster at its time limit, and refuse takers that have waited for long."""
        if self._ends is not None and now >= self._ends:
            return self._end(self._limit)
        late = [client for client, taker in self._takers.items() if now >= taker.deadline]
        for client in late:
            del self._takers[client]
        return [Refuse(client, "silent", self.who) for client in late]

    # -- decisions ---------------------------------------------------------------------------------------------------

    def _grant(self, client: int, who: str) -> list[Order]:
        self.owner, self.who = client, who
        return [Grant(client)]

    def _end(self, why: str) -> list[Order]:
        if self.ended:
            return []
        self.ended = why
        refused = [Refuse(client, "ended", why) for client in self._takers]
        self._takers.clear()
        return [*refused, EndCluster(why)]
