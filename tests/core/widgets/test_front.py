"""The cell to which the display thread directs the replicas' output."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from distnb.widgets import front as front_module
from distnb.widgets.front import Front
from distnb.widgets.publisher import NotebookPublisher
from distnb.wire.messages import Output, Status
from tests.support.live_events import team_of
from tests.support.processes import wait_until

TEAM = team_of(1)


class _Publisher(NotebookPublisher):
    """A publisher that records output, and whether the writing thread was directed to this cell."""

    def __init__(self) -> None:
        self.current, self.cell_id = True, ""
        self.adopted: set[int] = set()
        self.written: list[tuple[str, bool]] = []

    def adopt_thread(self) -> None:
        self.adopted.add(threading.get_ident())

    def write(self, stream: str, text: str) -> None:
        self.written.append((text, threading.get_ident() in self.adopted))

    def display(self, *args: Any, **options: Any) -> None: ...

    def area(self, lines: tuple[str, ...]) -> None: ...


def test_the_first_output_is_shown_in_its_own_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    publishers: list[_Publisher] = []

    def publisher_for(_shell: Any) -> _Publisher:
        publishers.append(_Publisher())
        return publishers[-1]

    monkeypatch.setattr(front_module, "publisher_for", publisher_for)
    front: Any = Front(SimpleNamespace())  # type: ignore[arg-type]
    front.mode = "off"
    for number in (1, 2):
        front.begin_cell(number)
        with front._lock:  # so that the thread finds all at once: what a program wrote is shown when it has ended
            front._enqueue(Status(program=number, state="started", team=TEAM))
            front._enqueue(Output(engine=0, program=number, replica=0, stream="stdout", text="first\n"))
            front._enqueue(Status(program=number, state="ended", team=TEAM))
        wait_until(lambda: bool(publishers[-1].written), timeout_s=10)
        assert publishers[-1].written[0] == ("first\n", True)
