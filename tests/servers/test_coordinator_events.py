"""The coordinator's handling of events, in whichever order they come."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import distnb
from distnb.coordinator import ClusterCoordinator
from distnb.errors import ClosureCancelled, RemoteError, ServerLost
from distnb.servers.closure_messages import ClosureResult, RunClosure
from distnb.servers.coordinator.link import (
    ClosureAbandoned,
    ClosureEnded,
    ClosureReclaimed,
    ServerGone,
    ServerUp,
    WorkerUp,
)
from distnb.servers.variables import roles
from distnb.servers.variables.here import servers_here
from distnb.wire.messages import ErrorReport, Reply
from tests.servers.test_server_variables import InHouse
from tests.support.processes import wait_until


class Link(SimpleNamespace):
    """Remembers what it is to send."""

    def __init__(self) -> None:
        super().__init__(servers=InHouse(1), replicas_per_worker=1, workers=(0, 1), closed=False)
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
        return {"KeyError": KeyError, "ServerLost": ServerLost}[report.type_name](report.text)


def _failed(program: int, type_name: str, text: str) -> Reply:
    report = ErrorReport(pickled=None, type_name=type_name, text=text, traceback=(), rendered=())
    return Reply(program=program, status="error", error=report)


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

    def reclaims() -> bool:
        link.deliver(None)  # a deadline may have passed
        return bool(link.asked_back)

    wait_until(reclaims, 40)
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
    reply = _failed(program, "KeyError", "only here")
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


def test_a_closure_that_reports_a_lost_server_late_does_not_hide_its_replacement(link: Link) -> None:
    coordinator = ClusterCoordinator(distnb.ParameterServerStrategy())
    link.deliver(WorkerUp(0))
    value = coordinator.schedule(lambda: 1)
    [(_, message)] = link.sent
    link.deliver(ServerGone(0, "was killed by SIGKILL"))
    link.deliver(ServerUp(0))
    link.deliver(ClosureEnded(0, _failed(message.program, "ServerLost", "server 0 has ended")))
    for _ in range(2):
        with pytest.raises(ServerLost, match=r"killed by SIGKILL\. Its replacement is empty"):
            coordinator.schedule(lambda: 2)
    assert value.state == "failed"


def test_an_error_of_a_closure_is_raised_before_the_loss_of_a_server(link: Link) -> None:
    coordinator = ClusterCoordinator(distnb.ParameterServerStrategy())
    link.deliver(WorkerUp(0))
    coordinator.schedule(lambda: 1)
    [(_, message)] = link.sent
    link.deliver(ServerGone(0, "was killed by SIGKILL"))
    link.deliver(ClosureEnded(0, _failed(message.program, "KeyError", "its own")))
    with pytest.raises(KeyError, match="its own"):
        coordinator.join()
    with pytest.raises(ServerLost, match="Start a replacement"):
        coordinator.join()


def test_an_error_that_arrives_while_a_closure_is_packed_is_raised_instead(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = ClusterCoordinator(distnb.ParameterServerStrategy())
    link.deliver(WorkerUp(0))
    coordinator.schedule(lambda: 1)
    pack = coordinator._packer.pack

    def failing_meanwhile(*args: Any, **kwargs: Any) -> Any:
        link.deliver(ClosureEnded(0, _failed(link.sent[0][1].program, "KeyError", "meanwhile")))
        return pack(*args, **kwargs)

    monkeypatch.setattr(coordinator._packer, "pack", failing_meanwhile)
    with pytest.raises(KeyError, match="meanwhile"):
        coordinator.schedule(lambda: 2)
    assert len(link.sent) == 1, "the closure was not scheduled, and cannot fail later"
    assert coordinator.done()


def _end_all(link: Link, worker: int = 0) -> None:
    """Let each closure that the worker has, or gets meanwhile, return 1."""
    ended = 0
    while ended < len(link.sent):
        program, ended = link.sent[ended][1].program, ended + 1
        link.deliver(ClosureEnded(worker, Reply(program=program, status="ok", value=ClosureResult(1))))


def test_a_repeated_function_may_be_forgotten_while_it_is_queued(link: Link) -> None:
    coordinator = ClusterCoordinator(distnb.ParameterServerStrategy())
    values = [coordinator.schedule(_failed, args=(0, "", "")) for _ in range(2)]  # the second one by number
    values += [coordinator.schedule(functools.partial(pow, number, 2)) for number in range(300)]
    link.deliver(WorkerUp(0))
    assert len(link.sent[1][1].definitions) == 1, "the function that was forgotten here"
    _end_all(link)
    coordinator.join()
    assert coordinator.fetch(values) == [1] * 302


def test_a_closure_that_cannot_be_sent_fails_and_cancels_the_others(link: Link) -> None:
    coordinator = ClusterCoordinator(distnb.ParameterServerStrategy())
    send = link.send

    def full_disk(worker: int, message: RunClosure) -> None:
        raise OSError("no space is left")

    values = [coordinator.schedule(lambda: 1) for _ in range(5)]
    link.send = full_disk
    link.deliver(WorkerUp(0))
    with pytest.raises(OSError, match="no space is left") as caught:
        coordinator.join()
    assert "could not be sent to worker 0" in caught.value.__notes__[0]
    assert [value.state for value in values] == [*["failed"] * 3, *["cancelled"] * 2]
    link.send = send
    again = coordinator.schedule(lambda: 1)
    _end_all(link)
    assert again.fetch() == 1


def test_an_exception_that_cannot_be_shown_is_raised_as_its_text(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = ClusterCoordinator(distnb.ParameterServerStrategy())
    link.deliver(WorkerUp(0))
    coordinator.schedule(lambda: 1)
    reply = _failed(link.sent[0][1].program, "LookupError", "not in the table of the test's link")
    link.deliver(ClosureEnded(0, reply))
    with pytest.raises(RemoteError, match="LookupError: not in the table"):
        coordinator.join()


def test_a_defect_in_the_handling_of_an_event_is_raised_and_nothing_waits_for_ever(link: Link) -> None:
    coordinator = ClusterCoordinator(distnb.ParameterServerStrategy())
    link.deliver(WorkerUp(0))
    values = [coordinator.schedule(lambda: 1) for _ in range(5)]

    def broken(program: int) -> None:
        raise AssertionError("a defect")

    link.interrupt = broken
    link.deliver(ClosureEnded(0, _failed(link.sent[0][1].program, "KeyError", "first")))
    for _, message in link.sent[1:]:
        link.deliver(ClosureEnded(0, Reply(program=message.program, status="aborted")))
    with pytest.raises(KeyError, match="first") as caught:
        coordinator.join()
    assert [str(each) for each in caught.value.others] == ["a defect"]  # type: ignore[attr-defined]
    assert [value.ended for value in values] == [True] * 5
