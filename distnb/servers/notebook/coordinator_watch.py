"""Sampling of a coordinator for the cell that uses it: its status, and the contents of the parameter servers."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING

from distnb.servers.notebook.closures_model import ClosuresModel
from distnb.servers.variables.here import servers_here
from distnb.views.watch import Watch

if TYPE_CHECKING:
    from distnb.servers.coordinator.coordinator import ClusterCoordinator
    from distnb.views.live_model import LiveModel

__all__ = ["CoordinatorWatch"]

_POLL_S = 0.2
_QUERY_S = 1.0
_PATIENCE_S = 0.5


class CoordinatorWatch(Watch):
    """The sampled state of a coordinator, for the view of a cell.

    Servers are queried on a separate thread, so that a server that hangs does not hold up the view.

    Args:
        coordinator: The coordinator whose closures the cell schedules or waits for. None of these has ended yet.

    Attributes:
        model: The data about the coordinator that the view shows.
    """

    def __init__(self, coordinator: ClusterCoordinator) -> None:
        super().__init__(coordinator)
        self.coordinator = coordinator
        self.model = ClosuresModel(coordinator.status())
        self._query: threading.Thread | None = None
        self._polled = self._queried = -math.inf

    def add_to(self, model: LiveModel, now: float) -> None:
        """Show the coordinator's closures in a cell's model."""
        model.follow(self.model, self.coordinator.strategy.spec.kind, now)

    def poll(self, now: float, *, drawn: bool) -> bool:
        """Sample the queue a few times a second; while the view is `drawn`, query the servers once a second."""
        if not self.due or now < self._polled + _POLL_S:
            return False
        self._sample(now)
        if drawn and now >= self._queried + _QUERY_S and (self._query is None or not self._query.is_alive()):
            self._start_query(now)
        return True

    def finish(self, now: float) -> None:
        """Sample once more, and wait briefly for the servers' answer."""
        self._sample(now)
        if self._query is not None:
            self._query.join(_PATIENCE_S)
        if self._query is None or not self._query.is_alive():
            self._start_query(now).join(_PATIENCE_S)

    def _sample(self, now: float) -> None:
        self._polled = now
        self.model.feed(self.coordinator.status(), now)
        self.due = self.model.under_way

    def _start_query(self, now: float) -> threading.Thread:
        self._queried = now
        self._query = threading.Thread(target=self._fetch_placement, name="distnb-placement", daemon=True)
        self._query.start()
        return self._query

    def _fetch_placement(self) -> None:
        try:
            self.model.place(servers_here.access.requests.placement())
        except Exception:  # noqa: BLE001
            return  # the program that needs a lost server reports the loss
