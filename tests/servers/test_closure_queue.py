"""The assignment of closures to workers: the state machine, against simple cases and a random model."""

from __future__ import annotations

import random

import pytest

from distnb.errors import InvariantError
from distnb.servers.coordinator.queue import Cancel, ClosureQueue, Interrupt, Reclaim, ReportNoWorker, Send


def test_closures_go_in_order_to_the_worker_with_the_fewest() -> None:
    queue = ClosureQueue(depth=2)
    queue.worker_up(0, 0.0)
    queue.worker_up(1, 0.0)
    orders = [order for number in range(5) for order in queue.scheduled(number, 0.0)]
    assert orders == [Send(0, 0), Send(1, 1), Send(2, 0), Send(3, 1)]
    assert queue.ended(1, 1, "done", 0.0) == [Send(4, 1)]
    assert queue.counts[:3] == (0, 4, 1)
    assert queue.oldest == 0


def test_closures_of_a_lost_worker_come_next_and_in_order() -> None:
    queue = ClosureQueue(depth=2)
    queue.worker_up(0, 0.0)
    for number in range(4):
        queue.scheduled(number, 0.0)
    assert queue.worker_lost(0, 0.0) == [ReportNoWorker()]
    assert queue.counts.retried == 2
    assert queue.worker_up(1, 0.0) == [Send(0, 1), Send(1, 1)]
    assert queue.ended(0, 0, "done", 0.0) == []  # the lost worker's report arrives too late
    assert queue.counts.done == 0


def test_a_queue_without_workers_reports_it_once() -> None:
    queue = ClosureQueue()
    assert queue.scheduled(0, 0.0) == [ReportNoWorker()]
    assert queue.scheduled(1, 0.0) == []
    queue.worker_up(0, 0.0)
    assert queue.worker_lost(0, 0.0) == [ReportNoWorker()]


def test_an_error_ends_all_other_closures() -> None:
    queue = ClosureQueue(depth=1)
    queue.worker_up(0, 0.0)
    queue.worker_up(1, 0.0)
    for number in range(4):
        queue.scheduled(number, 0.0)
    assert queue.ended(0, 0, "failed", 0.0) == [Cancel(2), Cancel(3), Interrupt(1, 1)]
    assert queue.ending
    assert queue.ended(1, 1, "cancelled", 0.0) == [Cancel(1)]
    assert (queue.idle, queue.ending) == (True, False)
    assert queue.counts == (0, 0, 0, 1, 3, 0)
    assert queue.scheduled(4, 0.0) == [Send(4, 0)]


def test_a_closure_waits_for_the_closures_whose_results_it_needs() -> None:
    queue = ClosureQueue()
    queue.worker_up(0, 0.0)
    queue.scheduled(0, 0.0)
    queue.scheduled(1, 0.0)
    assert queue.scheduled(2, 0.0, after=[0, 1]) == []
    assert queue.ended(0, 0, "done", 0.0) == []
    assert queue.ended(0, 1, "done", 0.0) == [Send(2, 0)]


def test_closures_that_need_a_cancelled_result_are_cancelled() -> None:
    queue = ClosureQueue()
    queue.worker_up(0, 0.0)
    queue.scheduled(0, 0.0)
    queue.scheduled(1, 0.0, after=[0])
    queue.scheduled(2, 0.0, after=[1])
    assert queue.ended(0, 0, "cancelled", 0.0) == [Cancel(0), Cancel(1), Cancel(2)]
    assert queue.idle


def test_a_stuck_worker_gets_no_closure_until_it_is_free() -> None:
    queue = ClosureQueue(depth=1)
    queue.worker_up(0, 0.0)
    queue.scheduled(0, 0.0)
    assert queue.cancel(0.0) == [Interrupt(0, 0)]
    assert queue.abandoned(0, 0, 1.0) == [Cancel(0)]
    assert queue.scheduled(1, 1.0) == [ReportNoWorker()]
    assert queue.workers[0].stuck
    assert queue.ended(0, 0, "done", 2.0) == [Send(1, 0)]
    assert queue.counts.cancelled == 1
    assert queue.counts.done == 0


def test_an_idle_worker_gets_closures_waiting_behind_a_long_one() -> None:
    queue = ClosureQueue(depth=2)
    queue.worker_up(0, 0.0)
    queue.worker_up(1, 0.0)
    for number in range(3):
        queue.scheduled(number, 0.0)
    assert queue.ended(1, 1, "done", 0.001) == []
    deadline = queue.next_deadline()
    assert deadline is not None
    assert queue.tick(deadline) == [Reclaim(2, 0)]
    assert queue.next_deadline() is None
    assert queue.reclaimed(0, 2, deadline) == [Send(2, 1)]
    assert queue.counts.retried == 0


def test_a_worker_of_short_closures_has_more_of_them() -> None:
    queue = ClosureQueue(depth=2)
    queue.worker_up(0, 0.0)
    for number in range(30):
        queue.scheduled(number, 0.0)
    assert len(queue.has(0)) == 2
    queue.ended(0, 0, "done", 0.0005)
    assert len(queue.has(0)) == 12
    queue.ended(0, 1, "done", 1.0)
    assert len(queue.has(0)) == 11, "the next closures may be as long as this one"


def test_large_closures_do_not_pile_up_at_a_worker_of_short_ones() -> None:
    queue = ClosureQueue(depth=2)
    queue.worker_up(0, 0.0)
    for number in range(5):
        queue.scheduled(number, 0.0, is_large=number > 2)
    queue.ended(0, 0, "done", 0.0005)
    assert queue.has(0) == (1, 2)
    queue.ended(0, 1, "done", 0.001)
    assert queue.has(0) == (2, 3)
    assert queue.scheduled(5, 0.001) == [], "closures begin in order"


@pytest.mark.parametrize("seed", range(60))
def test_every_closure_ends_exactly_once_in_random_sequences(seed: int) -> None:
    draw = random.Random(seed)
    queue = ClosureQueue(depth=draw.choice([1, 2, 3]))
    there: dict[int, list[int]] = {}  # the closures sent to each worker and not answered
    asked: set[tuple[int, int]] = set()
    stuck: set[tuple[int, int]] = set()
    ended: dict[int, str] = {}
    number, now = 0, 0.0

    def carry_out(orders: list[object]) -> None:
        for order in orders:
            if isinstance(order, Send):
                assert order.closure not in ended
                assert all(order.closure not in each for each in there.values())
                assert not any(worker == order.worker for worker, _ in stuck)
                there[order.worker].append(order.closure)
            elif isinstance(order, Cancel):
                assert order.closure not in ended
                ended[order.closure] = "cancelled"
            elif isinstance(order, Interrupt | Reclaim):
                assert order.closure in there[order.worker]
                asked.add((order.worker, order.closure))

    for _ in range(400):
        now += draw.random() * draw.choice([0.0005, 0.02])
        event = draw.randrange(10)
        busy = [worker for worker, closures in there.items() if closures]
        if event < 4:
            after = [each for each in draw.sample(range(number), min(number, 2)) if each not in ended]
            is_large = draw.random() < 0.2
            carry_out(queue.scheduled(number, now, after if draw.random() < 0.3 else (), is_large=is_large))
            number += 1
        elif event < 7 and busy:
            worker = draw.choice(busy)
            closure = there[worker].pop(0)
            how = draw.choices(["done", "failed", "cancelled"], [8, 1, 1 if (worker, closure) in asked else 0])[0]
            if how != "cancelled":
                ended[closure] = how
            carry_out(queue.ended(worker, closure, how, now))  # type: ignore[arg-type]
        elif event == 7:
            worker = draw.randrange(3)
            there.pop(worker, None)
            stuck -= {each for each in stuck if each[0] == worker}
            carry_out(queue.worker_lost(worker, now))
            if draw.random() < 0.8:
                there[worker] = []
                carry_out(queue.worker_up(worker, now))
        elif event == 8 and draw.random() < 0.2:
            carry_out(queue.cancel(now))
        elif event == 9:
            carry_out(queue.tick(now))
            for worker, closure in sorted(asked):
                if closure not in there.get(worker, ()):
                    asked.discard((worker, closure))
                elif closure in queue._ending and draw.random() < 0.3:
                    there[worker].remove(closure)
                    stuck.add((worker, closure))
                    carry_out(queue.abandoned(worker, closure, now))
                elif there[worker].index(closure) and draw.random() < 0.5:
                    there[worker].remove(closure)
                    carry_out(queue.reclaimed(worker, closure, now))
            for worker, closure in sorted(stuck):
                if draw.random() < 0.3:
                    stuck.discard((worker, closure))
                    carry_out(queue.ended(worker, closure, "done", now))
        counts = queue.counts
        assert counts.running == sum(map(len, there.values()))
        assert counts.waiting + counts.running + counts.done + counts.failed + counts.cancelled == number
        assert queue.oldest == min(set(range(number)) - ended.keys(), default=number)

    stuck.clear()
    for worker in range(3):  # the remaining closures can end
        there[worker] = []
        carry_out(queue.worker_up(worker, now))
    while any(there.values()):
        worker = next(worker for worker, closures in there.items() if closures)
        closure = there[worker].pop(0)
        ended[closure] = "done"
        carry_out(queue.ended(worker, closure, "done", now))
    assert queue.idle
    assert ended.keys() == set(range(number))


def test_closures_that_may_still_run_are_remembered_until_all_before_them_have_ended() -> None:
    queue = ClosureQueue(depth=2)
    queue.worker_up(0, 0.0)
    queue.worker_up(1, 0.0)
    for number in range(1, 5):
        queue.scheduled(number, 0.0)
    queue.ended(0, 1, "done", 0.0)
    queue.worker_lost(0, 0.0)  # it has 3, which waits for worker 1
    assert queue.astray(1) == set(), "another worker's changes for it are wanted"
    queue.ended(1, 2, "failed", 0.0)
    queue.abandoned(1, 4, 0.0)
    assert queue.idle
    assert queue.astray(0) == {2, 3, 4}, "another queue's closure 0 has not ended"
    assert queue.astray(3) == {3, 4}
    assert queue.astray(5) == set()


def test_the_queue_records_each_transition() -> None:
    queue = ClosureQueue(depth=1)
    queue.worker_up(3, 0.0)
    queue.scheduled(1, 1.0)
    queue.scheduled(2, 1.5, after=[1])
    queue.ended(3, 1, "failed", now=2.0)
    up, first, second, failed = queue.story
    assert up.after == "[worker 3: idle]"
    assert (first.details, first.orders) == ((1,), (Send(1, 3),))
    assert second.details == (2, [1])
    assert second.after == "[worker 3: 1; 1 queued]"
    assert (failed.time, failed.details, failed.orders) == (2.0, (3, 1, "failed"), (Cancel(2),))
    assert failed.after == "[worker 3: idle; 1 failed; 1 cancelled]"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda queue: queue._waiting.append(1), "several places"),
        (lambda queue: queue._unfinished.discard(1), "either placed or unfinished"),
        (lambda queue: queue._ending.add(9), r"\[9\] are ending, but no worker has them"),
        (lambda queue: queue._workers[0].closures.extend(range(5, 17)), "more than 12"),
        (lambda queue: setattr(queue._workers[0], "reclaiming", 9), "closure 9 is being reclaimed"),
        (lambda queue: setattr(queue, "_done", 1), "does not add up"),
        (lambda queue: queue.done_by.update([0]), "0 closures are done"),
        (lambda queue: queue._blocked.update({2: set()}), "blocked by"),
        (lambda queue: queue._workers[0].stuck_in.add(1), "were abandoned"),
    ],
)
def test_a_violation_of_the_queue_is_reported_with_the_story(spoil: object, message: str) -> None:
    queue = ClosureQueue(depth=2)
    queue.worker_up(0, 0.0)
    queue.scheduled(1, 1.0)
    spoil(queue)  # type: ignore[operator]
    with pytest.raises(InvariantError, match=f"{message}(?s:.*)scheduled"):
        queue.scheduled(2, 2.0)
