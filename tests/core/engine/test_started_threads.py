"""The end of a block waits for threads that work, and not for idle ones."""

from __future__ import annotations

import asyncio
import io
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from distnb.engine.programs import started_threads
from distnb.engine.programs.started_threads import note_work_of_pools, threads_awaited

pytestmark = pytest.mark.timeout(20)


def test_a_thread_and_the_threads_that_it_starts_are_waited_for() -> None:
    done = []

    def begin() -> None:
        threading.Thread(target=end).start()

    def end() -> None:
        time.sleep(0.1)
        done.append(1)

    with threads_awaited():
        threading.Thread(target=begin).start()
    assert done


def test_the_work_of_a_pool_is_waited_for_and_its_threads_are_not() -> None:
    note_work_of_pools()
    done: list[int] = []

    def work(number: int) -> None:
        time.sleep(0.01)
        done.append(number)

    with ThreadPoolExecutor(2) as pool:
        pool.submit(done.append, 0).result()
        with threads_awaited():
            for number in range(1, 10):
                pool.submit(work, number)
        assert sorted(done) == list(range(10))


def test_timers_and_idle_threads_are_not_waited_for() -> None:
    loop = asyncio.new_event_loop()
    runs = threading.Event()
    loop.call_soon(runs.set)
    timer = threading.Timer(3600, print)
    with threads_awaited():
        timer.start()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        runs.wait()
    timer.cancel()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    timer.join()


def test_daemons_earlier_threads_and_threads_of_failed_programs_are_not_waited_for() -> None:
    go_on = threading.Event()

    def work() -> None:
        go_on.wait()

    threads = [threading.Thread(target=work) for _ in range(2)]
    daemon = threading.Thread(target=work, daemon=True)
    threads[0].start()
    with threads_awaited():
        daemon.start()
    failing = threads_awaited()
    failing.__enter__()
    threads[1].start()
    failing.__exit__(KeyError, KeyError(), None)
    assert not go_on.is_set()
    go_on.set()
    for thread in (*threads, daemon):
        thread.join()


def test_a_slow_thread_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(started_threads, "_PATIENCE_S", 0.0)
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)

    def work() -> None:
        while not shown.getvalue():
            time.sleep(0.001)

    with threads_awaited():
        threading.Thread(target=work, name="the-saver").start()
    notice = shown.getvalue()
    assert "the-saver" in notice
    assert "in work" in notice
    assert "daemon=True" in notice
