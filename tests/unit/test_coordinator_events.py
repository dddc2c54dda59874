"""The coordinator's handling of events, in whichever order they come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import distnb
from distnb.coordinator import ClusterCoordinator
from distnb.coordinator.link import ClosureAbandoned, ClosureEnded, ClosureReclaimed, WorkerUp
from distnb.errors import ClosureCancelled
from distnb.runtime.servers import roles
from distnb.runtime.servers.here import servers_here
from distnb.wire.closure_messages import ClosureResult, RunClosure
from distnb.wire.messages import ErrorReport, Reply
from tests.unit.test_server_variables import InHouse


class Link(SimpleNamespace):
    """Remembers what it is to send."""

    def __init__(self) -> None:
        super().__init__(servers=InHouse(1), num_servers=1, replicas_per_worker=1, workers=(0, 1), closed=False)
        self.sent: list[tuple[int, RunClosure]] = []
        self.asked_back: list[int] = []
        self.interrupted: list[int] = []
        self._programs = 0

    def subscribe(self, listener: Callable[[Any], None], deadline: Any) -> None:
        self.deliver = listener

    def number(self) -> int:
        self._programs += 1
        return self._programs

    def send(self, worker: int, message: RunClosure) -> None:
        self.sent.append((worker, message))

    def reclaim(self, worker: int, program: int) -> None:
        self.asked_back.append(program)

    def watch(self, coordinator: ClusterCoordinator) -> None:
        pass

    def catch_up(self) -> None:
        pass

    def interrupt(self, program: int) -> None:
        self.interrupted.append(program)

    def error(self, report: ErrorReport, worker: int, name: str) -> BaseException:
        return KeyError(report.text)


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    link = Link()
    monkeypatch.setattr(servers_here, "link", lambda: link)
    monkeypatch.setattr(servers_here, "access", None)
    monkeypatch.setattr(servers_here, "require", lambda resolver: None)
    monkeypatch.setattr(roles, "_runtimes", {})
    yield link
    link.closed = True


@pytest.mark.parametrize("first", ["reply", "news"])
def test_a_returned_closure_runs_whichever_event_arrives_first(link: Link, first: str) -> None:
    coordinator = ClusterCoordinator(distnb.ParameterServerStrategy())
    link.deliver(WorkerUp(0))
    values = [coordinator.schedule(lambda: 1) for _ in range(2)]
    link.deliver(WorkerUp(1))  # it is idle, and worker 0 has two closures
    time.sleep(0.03)
    link.deliver(None)
    [program] = link.asked_back
    events = [ClosureEnded(0, Reply(program=program, status="aborted")), ClosureReclaimed(0, program)]
    for event in events if first == "reply" else reversed(events):
        link.deliver(event)
    assert [worker for worker, _ in link.sent] == [0, 0, 1]
    assert link.sent[2][1].closure == link.sent[1][1].closure
    for worker, message in (link.sent[0], link.sent[2]):
        link.deliver(ClosureEnded(worker, Reply(program=message.program, status="ok", value=ClosureResult(1))))
    coordinator.join()
    assert coordinator.fetch(values) == [1, 1]


def test_an_error_is_raised_even_if_another_replica_of_its_worker_does_not_end(link: Link) -> None:
    coordinator = ClusterCoordinator(distnb.ParameterServerStrategy())
    link.deliver(WorkerUp(0))
    value = coordinator.schedule(lambda: 1)
    program = link.sent[0][1].program
    reply = Reply(
        program=program,
        status="error",
        error=ErrorReport(pickled=None, type_name="KeyError", text="only here", traceback=(), rendered=()),
    )
    for _ in range(2):  # reported again when a third replica replies
        link.deliver(ClosureAbandoned(0, program, reply))
    with pytest.raises(KeyError, match="only here") as caught:
        coordinator.join()
    assert not hasattr(caught.value, "__notes__"), "it is one error"
    with pytest.raises(ClosureCancelled, match=r"failed on worker 0 .KeyError: only here"):
        value.fetch()
    assert coordinator.status().workers[0].state == "stuck"
    other = coordinator.schedule(lambda: 2)
    assert len(link.sent) == 1, "a stuck worker gets nothing"
    link.deliver(ClosureEnded(0, Reply(program=program, status="aborted")))
    link.deliver(ClosureEnded(0, Reply(program=link.sent[1][1].program, status="ok", value=ClosureResult(2))))
    assert other.fetch() == 2


def test_a_metric_that_rejects_counts_fails_the_closure(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = ClusterCoordinator(distnb.ParameterServerStrategy())
    link.deliver(WorkerUp(0))
    values = [coordinator.schedule(lambda: 1) for _ in range(2)]
    monkeypatch.setattr(coordinator._packer, "merge", lambda contributions: torch.zeros(2) + torch.zeros(3))
    first, second = (message.program for _, message in link.sent)
    link.deliver(ClosureEnded(0, Reply(program=first, status="ok", value=ClosureResult(1, {5: ()}))))
    link.deliver(ClosureEnded(0, Reply(program=second, status="aborted")))
    with pytest.raises(RuntimeError, match="must match") as caught:
        coordinator.join()
    assert "could not be added to the metric" in caught.value.__notes__[0]
    assert [value.state for value in values] == ["failed", "cancelled"]
    with pytest.raises(ClosureCancelled, match=r"counts of .* could not be added to a metric"):
        values[1].fetch()
