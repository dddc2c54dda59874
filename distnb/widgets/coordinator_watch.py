"""Looks at a coordinator for the cell that uses it: samples its status, and asks the servers what they hold."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING

from distnb.notebook.views.closures_model import ClosuresModel
from distnb.runtime.this_process import this_process

if TYPE_CHECKING:
    from distnb.coordinator.coordinator import ClusterCoordinator

__all__ = ["CoordinatorWatch"]

_LOOK_S = 0.2
_ASK_S = 1.0
_PATIENCE_S = 0.5


class CoordinatorWatch:
    """One coordinator, as one cell's view sees it.

    Servers are asked on a thread of their own: one that hangs must not hold up the view.

    Args:
        coordinator: Whose closures the cell schedules or waits for. None of the cell's has ended yet.

    Attributes:
        model: What is known of it.
        due: Closures may be under way: it is to be sampled.
    """

    def __init__(self, coordinator: ClusterCoordinator) -> None:
        self.coordinator = coordinator
        self.model = ClosuresModel(coordinator.status())
        self.due = True
        self._asking: threading.Thread | None = None
        self._looked = self._asked = -math.inf

    def look(self, now: float, *, servers: bool) -> bool:
        """Look at the queue some times a second, and with `servers` ask these once a second. Whether it looked."""
        if not self.due or now < self._looked + _LOOK_S:
            return False
        self._sample(now)
        if servers and now >= self._asked + _ASK_S and (self._asking is None or not self._asking.is_alive()):
            self._ask(now)
        return True

    def finish(self, now: float) -> None:
        """Look once more, and wait a moment for the servers' answer."""
        self._sample(now)
        if self._asking is not None:
            self._asking.join(_PATIENCE_S)
        if self._asking is None or not self._asking.is_alive():
            self._ask(now).join(_PATIENCE_S)

    def _sample(self, now: float) -> None:
        self._looked = now
        self.model.feed(self.coordinator.status(), now)
        self.due = self.model.under_way

    def _ask(self, now: float) -> threading.Thread:
        self._asked = now
        self._asking = threading.Thread(target=self._take_placement, name="distnb-placement", daemon=True)
        self._asking.start()
        return self._asking

    def _take_placement(self) -> None:
        try:
            self.model.place(this_process.servers.placement())
        except Exception:  # noqa: BLE001
            return  # a server that is gone is told of by whatever needs it
