"""Ending exactly the running program."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distnb.engine import guard as guarding
from distnb.engine.guard import Guard
from distnb.errors import ProgramAborted

BEGUN = threading.Event()


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> Guard:
    """Return a guard with more patience for protected code, for busy machines."""
    monkeypatch.setattr(guarding, "SPARED_S", dict.fromkeys(guarding.SPARED_S, 60.0))
    return Guard()


@pytest.fixture
def pressing(guard: Guard) -> Iterator[Callable[[int], None]]:
    """Order the end of a program from another thread, as the control thread does."""
    stop = threading.Event()
    threads = []
    BEGUN.clear()

    def order(program: int, interrupted: bool = False) -> None:
        def press() -> None:
            BEGUN.wait()
            assert guard.abort(program, "because", interrupted)
            while not stop.is_set():
                guard.press()
                time.sleep(0.001)

        threads.append(threading.Thread(target=press))
        threads[-1].start()

    yield order
    stop.set()
    BEGUN.set()
    for thread in threads:
        thread.join()


def spin() -> None:
    BEGUN.set()
    while True:
        time.sleep(0.01)


class Handler:
    """A program that handles an interrupt in a way. In the handler, signals arrive all the time for a while."""

    def __init__(self, guard: Guard, way: str) -> None:
        self.guard = guard
        self.way = way
        self.until = time.monotonic() + 0.5
        self.whole = False

    def __call__(self) -> None:
        getattr(self, self.way)()

    def clean_up(self) -> None:
        while time.monotonic() < self.until:
            try:
                time.sleep(0.001)
                raise KeyError("mine")
            except KeyError:
                pass
        self.whole = True

    def caught(self) -> None:
        try:
            spin()
        except KeyboardInterrupt:
            self.clean_up()

    def ended(self) -> None:
        try:
            spin()
        finally:
            self.clean_up()

    def entered(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self.clean_up)
            spin()

    def replaced(self) -> None:
        try:
            try:
                spin()
            except KeyboardInterrupt:
                raise ValueError("mine") from None
        except ValueError:
            self.clean_up()

    def generated(self) -> None:
        def batches() -> Iterator[int]:
            try:
                while True:
                    yield 1
            finally:
                self.clean_up()

        for _ in (generator := batches()):
            try:
                spin()
            except KeyboardInterrupt:
                generator.close()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("way", ["caught", "ended", "entered", "replaced", "generated"])
def test_an_interrupt_leaves_handlers_time(
    guard: Guard, pressing: Callable[..., None], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(guarding, "_RETRY_S", (0.0,))
    handler = Handler(guard, way)
    pressing(1, interrupted=True)
    if way in ("caught", "replaced", "generated"):
        guard.call(1, handler)
        assert guard.caught
    else:
        with pytest.raises(KeyboardInterrupt):
            guard.call(1, handler)
    assert handler.whole


@pytest.mark.timeout(30)
@pytest.mark.parametrize("by", ["time", "a second interrupt", "a failure"])
def test_a_handler_is_ended(
    guard: Guard, pressing: Callable[..., None], monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.setattr(guarding, "_CLEANING_S", 0.2 if by == "time" else 60.0)
    states: list[int | None] = []

    def handle() -> None:
        states.append(guard.cleans_up)
        if by == "a second interrupt":
            guard.abort(1, "again", interrupted=True)
        while True:
            time.sleep(0.001)

    def program() -> None:
        try:
            spin()
        finally:
            handle()

    pressing(1, interrupted=by != "a failure")
    with pytest.raises(ProgramAborted if by == "a failure" else KeyboardInterrupt):
        guard.call(1, program)
    assert states == [None if by == "a failure" else 1]
    assert guard.cleans_up is None


STUBBORN = """
tidied = []

def stubborn(press):
    while True:
        try:
            try:
                press()
            finally:
                tidied.append(1)
        except:
            continue
"""


@pytest.mark.timeout(30)
def test_failures_of_other_replicas_allow_a_grace_period_and_interrupts_do_not(guard: Guard) -> None:
    def order(interrupted: bool) -> Callable[[], str]:
        def body() -> str:
            guard.abort(guard._run.program, "because", interrupted)  # type: ignore[union-attr]
            guard.press()
            time.sleep(0.01)
            return "done"

        return body

    assert guard.call(1, order(interrupted=False), 60.0) == "done"
    with pytest.raises(KeyboardInterrupt):
        guard.call(2, order(interrupted=True), 60.0)


def test_an_order_for_another_program_does_nothing(guard: Guard) -> None:
    guard.call(3, lambda: None)
    assert not guard.abort(2, "late")

    def body() -> str:
        assert not guard.abort(2, "late")
        guard.press()
        return "done"

    assert guard.call(4, body) == "done"
    assert not guard.aborted


def test_an_order_that_arrives_before_its_program_ends_it_as_it_begins(guard: Guard) -> None:
    assert not guard.abort(8, "early")
    began = []
    with pytest.raises(ProgramAborted):
        guard.call(8, lambda: began.append(1))
    assert began == []
    assert guard.call(9, lambda: "next") == "next"


def test_an_idle_engine_survives_an_order(guard: Guard) -> None:
    guard.call(1, lambda: None)
    guard.abort(1, "late")
    guard.press()  # a signal to this thread, which handles it before the next line


@pytest.fixture
def reported(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return the reports of exceptions dropped by a destructor or callback."""
    reported: list[object] = []
    monkeypatch.setattr(guard, "_report_unraisable", reported.append)
    monkeypatch.setattr(sys, "unraisablehook", guard._unraisable)
    return reported


class Callback:
    """A callback that runs after every fork before the guard's, as logging's does, and can meet a signal."""

    def __init__(self) -> None:
        self.armed = False
        self.ended: list[bool] = []
        os.register_at_fork(after_in_parent=self)

    def __call__(self) -> None:
        if self.armed:
            self.ended.append(False)
            signal.raise_signal(signal.SIGRTMIN + 5)
            self.ended[-1] = True


CALLBACK = Callback()


@pytest.mark.timeout(30)
def test_a_signal_in_a_fork_waits_until_its_callbacks_have_ended(
    guard: Guard, pressing: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CALLBACK, "armed", True)

    def fork() -> None:
        assert guard.abort(1, "because")
        for _ in range(3):
            if (pid := os.fork()) == 0:
                os._exit(0)
            os.waitpid(pid, 0)
        spin()

    pressing(1)
    with pytest.raises(ProgramAborted):
        guard.call(1, fork)
    assert CALLBACK.ended == [True] * 3


class Delayed(multiprocessing.Process):
    """A program that starts slowly, so that an abort could catch it half started."""

    @staticmethod
    def _Popen(process: Any) -> Any:
        BEGUN.set()
        end = time.monotonic() + 0.2
        while time.monotonic() < end:
            time.sleep(0.01)
        return multiprocessing.get_context("fork").Process._Popen(process)  # type: ignore[attr-defined]


@pytest.mark.timeout(30)
def test_a_child_process_is_registered_before_its_program_ends(guard: Guard, pressing: Callable[..., None]) -> None:
    def start() -> None:
        Delayed(target=time.sleep, args=(600,)).start()
        spin()

    pressing(1)
    with pytest.raises(ProgramAborted):
        guard.call(1, start)
    (child,) = multiprocessing.active_children()
    child.kill()
    child.join()


class SlowLock:
    """A lock taken and released so slowly that a signal arrives meanwhile."""

    held = False

    def __enter__(self) -> bool:
        self.held = True
        self._dawdle()
        return True

    def __exit__(self, *error: object) -> None:
        self._dawdle()
        self.held = False

    def locked(self) -> bool:
        return self.held

    def _dawdle(self) -> None:
        BEGUN.set()
        end = time.monotonic() + 0.1
        while time.monotonic() < end:
            time.sleep(0.01)

    def acquire(self) -> None: ...

    release = acquire


@pytest.mark.timeout(30)
def test_a_condition_is_not_left_locked(guard: Guard, pressing: Callable[..., None]) -> None:
    lock: Any = SlowLock()
    condition = threading.Condition(lock)

    def use() -> None:
        while True:
            with condition:
                time.sleep(0.01)

    pressing(1)
    with pytest.raises(ProgramAborted):
        guard.call(1, use)
    assert not lock.held


@pytest.mark.timeout(30)
def test_a_program_waiting_for_a_lock_is_ended(
    guard: Guard, pressing: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(guarding.SPARED_S, threading.Condition.__enter__.__code__, 0.1)
    lock = threading.Lock()
    lock.acquire()

    def use() -> None:
        BEGUN.set()
        with threading.Condition(lock):
            pass

    pressing(1)
    with pytest.raises(ProgramAborted):
        guard.call(1, use)


class Endless:
    def __del__(self) -> None:
        BEGUN.set()
        while True:
            time.sleep(0.01)


@pytest.mark.timeout(30)
def test_an_order_dropped_in_a_destructor_is_repeated_and_not_reported(
    guard: Guard, pressing: Callable[..., None], reported: list[object]
) -> None:
    def drop() -> None:
        Endless()
        spin()

    pressing(1)
    with pytest.raises(ProgramAborted):
        guard.call(1, drop)
    assert reported == []


@pytest.mark.timeout(30)
@pytest.mark.parametrize("by", ["destructor", "callback"])
def test_a_destructor_of_an_earlier_program_is_ended_by_a_later_order(
    guard: Guard, pressing: Callable[..., None], reported: list[object], by: str
) -> None:
    guard.call(1, int)
    held: list[Any] = [Held() if by == "callback" else Endless()]
    finalizer = weakref.ref(held[0], lambda _: spin()) if by == "callback" else None
    pressing(2)
    guard.release(held.clear)
    assert finalizer is None or finalizer() is None
    with pytest.raises(ProgramAborted):
        guard.call(2, spin)
    assert reported == []


class Held:
    pass


@pytest.mark.timeout(30)
def test_an_order_between_programs_affects_only_destructors(guard: Guard) -> None:
    guard.call(1, int)
    guard.abort(2, "because")
    for _ in range(20):
        guard.press()
        time.sleep(0.01)
    with pytest.raises(ProgramAborted):
        guard.call(2, spin)


def test_other_dropped_exceptions_are_reported(guard: Guard, reported: list[object]) -> None:
    class Bad:
        def __del__(self) -> None:
            raise ValueError("mine")

    guard.call(1, Bad)
    assert len(reported) == 1


SLOW_TO_LOAD = """
import time, told_to_it
told_to_it.begun.set()
while not told_to_it.guard.waiting:
    time.sleep(0.001)
for _ in range(20):
    time.sleep(0.01)
whole = True
"""


@pytest.mark.timeout(30)
def test_an_import_is_not_left_incomplete(
    guard: Guard, pressing: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_to_load.py").write_text(SLOW_TO_LOAD)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "told_to_it", SimpleNamespace(begun=BEGUN, guard=guard))

    def load() -> None:
        import slow_to_load  # noqa: F401

        spin()

    pressing(1)
    with pytest.raises(ProgramAborted):
        guard.call(1, load)
    assert sys.modules.pop("slow_to_load").whole


@pytest.mark.timeout(30)
def test_waits_of_the_next_program_are_not_released_by_an_earlier_order(guard: Guard) -> None:
    inside, freed = threading.Event(), []

    def free(reason: str) -> None:
        inside.set()
        time.sleep(0.2)  # meanwhile the program ends by itself, and the next one comes
        freed.append(reason)

    ending = threading.Thread(target=lambda: (BEGUN.wait(), guard.abort(1, "because", free=free)))
    BEGUN.clear()
    ending.start()
    guard.call(1, lambda: (BEGUN.set(), inside.wait()))
    assert guard.call(2, freed.copy) == ["because"]
    ending.join()
    assert not guard.abort(1, "too late", free=freed.append)
    assert freed == ["because"]
