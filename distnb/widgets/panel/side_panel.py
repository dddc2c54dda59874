"""The connection between a kernel and the pages that show its notebook.

To the pages, the kernel publishes a complete snapshot on iopub whenever a state has changed, and each second while a
cell runs. The snapshot is a comm message, which front ends without the extension ignore.

The pages send requests on the control channel, which a kernel serves on a separate thread while a cell runs. (In some
versions of ipykernel, comm callbacks wait until the cell has ended.)
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from distnb.notebook import compose
from distnb.notebook.reports import stacks_text
from distnb.views.live_model import LiveModel
from distnb.widgets.panel.snapshot import mark_of, snapshot

if TYPE_CHECKING:
    from distnb.notebook.session import Session
    from distnb.widgets.cell_view import CellView
    from distnb.widgets.front import Front
    from distnb.wire.messages import TelemetrySample

__all__ = ["NAME", "REQUEST", "SidePanel"]

NAME: Final = "distnb"
"""The comm's target and id. A page looks for it in a kernel to detect whether the kernel has loaded distnb."""

REQUEST: Final = "distnb_request"
"""The type of the messages that pages send on the control channel. The reply's type is `distnb_reply`."""

_SOONEST_S = 0.2
_PERIOD_S = 1.0
_SHARE = 0.05  # the largest share of a processor that snapshots take: those of hundreds of engines come less often
_KEPT_MARKS = 100


class SidePanel:
    """The publisher of a front's content, and the handler of the pages' requests.

    Args:
        kernel: The ipykernel kernel.
        front: The front end of the kernel's shell.
    """

    def __init__(self, kernel: Any, front: Front) -> None:
        self._kernel = kernel
        self._front = front
        self._wake = threading.Event()
        self._marks: dict[str, dict[str, Any]] = {}  # by cell
        self._doing = ""  # the progress of a start or a stop, in words
        self._error = ""  # the reason why the latest start or stop failed
        self._error_of: Session | None = None  # the cluster at that time
        self._acting = threading.Lock()
        self._published: dict[str, Any] = {}
        self._has_printed_error = False

    def install(self) -> None:
        """Start to publish snapshots and to accept requests."""
        self._kernel.comm_manager.register_comm(SimpleNamespace(target_name=NAME, comm_id=NAME))
        self._kernel.control_handlers[REQUEST] = self._handle_request
        self._front.on_news = self._wake.set
        self._front.on_end = self._ended
        threading.Thread(target=self._serve, name="distnb-panel", daemon=True).start()

    # -- to the pages ----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            self._wake.wait(_PERIOD_S if self._front.busy or self._doing else None)
            self._wake.clear()
            began = time.thread_time()
            try:
                self._publish()
            except Exception:  # noqa: BLE001  (an error must not end the thread)
                if not self._has_printed_error:
                    self._has_printed_error = True
                    traceback.print_exc(file=sys.__stderr__)
            time.sleep(max(_SOONEST_S, (time.thread_time() - began) / _SHARE))

    def _publish(self) -> None:
        state = self.state()
        if state != self._published or self._front.busy:
            self._published = state
            content = {"comm_id": NAME, "data": {NAME: state}}
            # A message without a parent belongs to no cell, so clients that wait for a cell's output ignore it.
            self._kernel.session.send(self._kernel.iopub_socket, "comm_msg", content, ident=f"comm-{NAME}".encode())

    def state(self) -> dict[str, Any]:
        """Return the complete snapshot. Any thread may call this."""
        error = self._error if self._error_of is compose.current() else ""
        return {**self._front.read(self._draw), "doing": self._doing, "error": error}

    def _draw(self, views: list[CellView], samples: Mapping[int, TelemetrySample]) -> dict[str, Any]:
        for view in views:
            self._mark(view)
        latest = (view for view in reversed(views) if not view.has_old_replicas)
        shown = next((view for view in latest if view.model.rows or view.model.work), None)
        model: LiveModel | None = shown.model if shown else None
        state = snapshot(compose.current(), model, samples, time.monotonic())
        return {**state, "cell": shown.publisher.cell_id if shown else "", "cells": dict(self._marks)}

    def _mark(self, view: CellView) -> None:
        mark = mark_of(view.model)
        if mark is not None and view.publisher.cell_id:
            self._marks.pop(view.publisher.cell_id, None)
            self._marks[view.publisher.cell_id] = mark
            while len(self._marks) > _KEPT_MARKS:
                del self._marks[next(iter(self._marks))]

    def _ended(self, view: CellView) -> None:
        """Update the mark of a cell that has ended, because the front may drop the cell before the next snapshot."""
        self._mark(view)
        self._wake.set()

    # -- from the pages --------------------------------------------------------------------------------------------

    def _handle_request(self, stream: Any, idents: Any, message: dict[str, Any]) -> None:
        """Handle a request on the kernel's control thread. Starts and stops run on separate threads."""
        actions: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "snapshot": lambda content: {"snapshot": self.state()},
            "stacks": lambda content: {"text": self._stacks()},
            "interrupt": lambda content: {"interrupted": self._interrupt()},
            "start": lambda content: self._run_in_thread(lambda: self._start(content.get("n"))),
            "stop": lambda content: self._run_in_thread(self._stop),
        }
        content = message["content"]
        action = actions.get(str(content.get("action")))
        try:
            reply = action(content) if action else {"error": f"distnb has no action {content.get('action')!r}."}
        except Exception as error:  # noqa: BLE001  (the page waits for a reply in any case)
            reply = {"error": str(error) or type(error).__name__}
        self._kernel.session.send(stream, "distnb_reply", reply, parent=message, ident=idents)
        asyncio.get_running_loop().call_soon(self._publish_busy)

    def _publish_busy(self) -> None:
        """Publish that the kernel is busy, if a cell runs.

        A kernel publishes "idle" after each message of the control channel, and pages interpret that as the cell's end.
        """
        if self._front.busy:
            content = {"execution_state": "busy"}
            self._kernel.session.send(self._kernel.iopub_socket, "status", content, ident=b"kernel.status")

    def _stacks(self) -> str:
        return stacks_text(compose.require())

    def _interrupt(self) -> bool:
        session = compose.current()
        return session is not None and session.interrupt()

    def _run_in_thread(self, action: Callable[[], None]) -> dict[str, Any]:
        """Run a slow action on a separate thread. The snapshots show its progress."""
        if not self._acting.acquire(blocking=False):
            return {"error": f"distnb is still starting or stopping engines ({self._doing}). Try again later."}

        def run() -> None:
            try:
                action()
            except Exception as error:  # noqa: BLE001  (the page shows any error to the user)
                self._error, self._error_of = str(error) or type(error).__name__, compose.current()
            finally:
                self._doing = ""
                self._acting.release()
                self._wake.set()

        self._error = ""
        threading.Thread(target=run, name="distnb-request", daemon=True).start()
        return {}

    def _report(self, text: str) -> None:
        self._doing = text
        self._wake.set()

    def _start(self, count: int | None) -> None:
        self._report("starting")
        compose.start(count, on_progress=self._report)

    def _stop(self) -> None:
        self._report("stopping")
        session = compose.current()
        if session is not None:
            session.interrupt()
            with session.between_programs():
                compose.stop()
