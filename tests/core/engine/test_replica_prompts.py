"""A replica's questions, on both sides, without processes."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import IPython.core.debugger
import pytest
from IPython.core.interactiveshell import InteractiveShell

from distnb.engine.debugging import debugger, kept
from distnb.engine.debugging.console import Console
from distnb.engine.guard import Guard
from distnb.errors import ProgramAborted
from distnb.notebook.front_end import FrontEnd
from distnb.notebook.programs.prompts import Prompts
from distnb.notebook.programs.supervisor import EventHub
from distnb.runtime.interrupts import Interrupts
from distnb.wire.messages import Answer, Died, InputFinished, InputRequest, Output, ProgramEnded, Prompting

pytestmark = pytest.mark.timeout(60)

PROGRAM = (5, 1)


@pytest.fixture(autouse=True)
def _shell(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Return an engine's shell, which IPython's debugger needs."""
    shell = InteractiveShell()
    monkeypatch.setattr(IPython.core.debugger, "get_ipython", lambda: shell)
    yield
    shell.history_manager.end_session()
    shell.history_manager.close()
    atexit.unregister(shell.atexit_operations)


# -- the replica -------------------------------------------------------------------------------------------------------


class Replica:
    """A console whose questions are answered from another thread, as the control thread does."""

    def __init__(self, *answers: str | None) -> None:
        self.guard = Guard()
        self.events: list[Any] = []
        self.running: tuple[int, int] | None = PROGRAM
        self.console = Console(3, self.guard, lambda: self.running, self.emit)
        self.answers = list(answers)
        self.asked: queue.SimpleQueue[InputRequest] = queue.SimpleQueue()

    def emit(self, event: Any, *, urgent: bool = False) -> None:
        self.events.append(event)
        if isinstance(event, InputRequest):
            self.asked.put(event)
            if self.answers:
                answer = Answer(PROGRAM[0], self.answers.pop(0))
                threading.Thread(target=self.console.answer, args=(answer,)).start()

    def call(self, function: Callable[[], Any]) -> Any:
        return self.guard.call(PROGRAM[0], function)

    def shown(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, InputRequest | Output))


def test_prompts_are_refused_when_idle_in_a_closure_and_in_a_child() -> None:
    replica = Replica()
    replica.running = None
    with pytest.raises(RuntimeError, match="where it cannot ask the user"):
        replica.console.input()
    replica.running, replica.console.refusal = PROGRAM, "{what} was called in a closure. Use %%distribute default."
    with pytest.raises(RuntimeError, match=r"input\(\) was called in a closure.*%%distribute default"):
        replica.console.input()
    replica.console.refusal = ""
    child = os.fork()
    if not child:
        try:
            replica.console.input()
        except RuntimeError as error:
            os._exit(0 if "num_workers=0" in str(error) else 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert replica.events == []


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_waiting_prompt_is_released_when_the_program_is_ended(interrupted: bool) -> None:
    replica = Replica()

    def end() -> None:
        replica.asked.get()
        replica.guard.abort(PROGRAM[0], "because", interrupted, lambda reason: replica.console.free())

    threading.Thread(target=end).start()
    with pytest.raises(KeyboardInterrupt if interrupted else ProgramAborted, match="because"):
        replica.call(lambda: replica.console.input())


def stops(replica: Replica, size: int = 2) -> int:
    x = 1
    debugger.at_breakpoint(replica.console, "replica 1 (cpu:0)", size, sys._getframe())
    x = x + 41
    return x


def run(replica: Replica) -> int:
    try:
        return int(replica.call(lambda: stops(replica)))
    finally:
        debugger.stop_stepping()
        replica.console.leave()


def test_an_order_to_end_passes_the_handlers_of_debuggers() -> None:
    replica = Replica()

    def end() -> None:
        replica.asked.get()
        replica.guard.abort(PROGRAM[0], "because", True, lambda reason: replica.console.free())

    threading.Thread(target=end).start()
    with pytest.raises(KeyboardInterrupt, match="because"):
        run(replica)


def test_a_signal_after_the_order_does_not_hide_the_users_frame() -> None:
    replica = Replica()

    def emit(event: Any, *, urgent: bool = False) -> None:
        replica.events.append(event)
        if isinstance(event, InputRequest):
            replica.guard.abort(PROGRAM[0], "because", free=lambda reason: replica.console.free())
        if isinstance(event, InputFinished):  # by the handler of the order
            replica.guard.press()

    replica.console._emit = emit
    with pytest.raises(ProgramAborted, match="because") as ended:
        run(replica)
    assert replica.console.stopped_in is not None
    error, where = replica.console.stopped_in
    assert error is ended.value
    frames = [frame.f_code for frame, _ in traceback.walk_tb(where)]
    assert frames[-1] is stops.__code__


def test_a_kept_frame_has_its_variables_unless_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing() -> None:
        large = bytearray(10)
        raise ValueError(len(large))

    for free, is_kept in ((1 << 40, True), (1 << 20, False)):
        monkeypatch.setattr(kept, "available_nbytes", lambda free=free: free)
        with pytest.raises(ValueError, match="10") as raised:
            failing()
        failure = kept.KeptFailure(who="replica 0 (cpu:0)", replica=0, error=raised.value)
        failure.limit()
        traceback = failure.traceback
        while traceback is not None and traceback.tb_next is not None:
            traceback = traceback.tb_next
        assert traceback is not None
        assert ("large" in traceback.tb_frame.f_locals) is is_kept
        assert ("kept until the next program" in failure.text) is is_kept
        assert ("were released" in failure.text) is not is_kept


# -- the notebook ------------------------------------------------------------------------------------------------------


class Notebook:
    """Prompts whose front end answers with a function."""

    def __init__(self, answer: Callable[[InputRequest], str]) -> None:
        self.sent: list[tuple[int | None, Any]] = []
        self.events = EventHub()
        supervisor: Any = SimpleNamespace(
            events=self.events,
            send=lambda engine, message: self.sent.append((engine, message)),
            send_to_all=lambda message: self.sent.append((None, message)),
        )
        self.interrupts = Interrupts()
        self.prompts = Prompts(supervisor, self.interrupts)
        self.prompts.front = lambda: FrontEnd(ask=answer)

    def serve(self) -> None:
        """Ask the next question, as the wait for a program does."""
        with self.interrupts:
            while (asks := self.prompts.next()) is not None:
                self.prompts.ask(asks)

    def close(self) -> None:
        self.prompts.close()
        self.interrupts.close()


def asks(engine: int, prompt: str = "") -> InputRequest:
    return InputRequest(engine=engine, program=5, replica=engine, text="", prompt=prompt)


@pytest.fixture
def notebook() -> Iterator[Callable[..., Notebook]]:
    made: list[Notebook] = []

    def make(answer: Callable[[InputRequest], str]) -> Notebook:
        made.append(Notebook(answer))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_replica_keeps_the_prompt_until_it_continues(notebook: Callable[..., Notebook]) -> None:
    here = notebook(lambda question: f"to {question.engine}")
    publish = here.events.publish
    publish(asks(1))
    publish(asks(0))
    here.serve()
    assert here.sent == [(None, Prompting(True)), (1, Answer(5, "to 1"))]
    publish(asks(1))
    here.serve()  # though the other has waited for longer
    assert here.sent[2:] == [(1, Answer(5, "to 1"))]
    publish(InputFinished(1, 5, 1))
    here.serve()
    assert here.sent[3:] == [(0, Answer(5, "to 0"))]
    publish(ProgramEnded(engine=0, program=5, status="ok"))
    assert here.sent[4:] == [(None, Prompting(False))]


@pytest.mark.parametrize("end", [Died(1, 1, "ended"), ProgramEnded(engine=1, program=5, status="aborted")])
def test_a_prompt_is_closed_with_its_program(notebook: Callable[..., Notebook], end: Any) -> None:
    asked = threading.Event()

    def wait(question: InputRequest) -> str:
        asked.set()
        with contextlib.suppress(KeyboardInterrupt):  # as if a destructor dropped it
            signal.pause()
        while True:
            signal.pause()

    here = notebook(wait)
    here.events.publish(asks(1))

    def close_prompt() -> None:
        asked.wait()
        here.events.publish(end)

    thread = threading.Thread(target=close_prompt)
    thread.start()
    here.serve()  # ends, and raises nothing
    thread.join()
    assert [message for _, message in here.sent] == [Prompting(True), Prompting(False)]


def test_no_further_prompt_opens_once_the_program_is_ended(notebook: Callable[..., Notebook]) -> None:
    here = notebook(lambda question: "")
    here.events.publish(asks(1))
    here.events.publish(ProgramEnded(engine=0, program=5, status="error"))
    here.serve()
    assert here.prompts.next() is None
    here.events.publish(InputRequest(engine=1, program=6, replica=1, text="", prompt=""))
    here.prompts.end([6])
    assert here.prompts.next() is None
    here.events.publish(InputRequest(engine=0, program=7, replica=0, text="", prompt=""))
    here.events.publish(InputFinished(1, 6, 1))
    assert here.prompts.next() is not None


def test_an_interrupt_at_the_prompt_is_recorded(notebook: Callable[..., Notebook]) -> None:
    def press(question: InputRequest) -> str:
        signal.raise_signal(signal.SIGINT)
        return ""

    here = notebook(press)
    here.events.publish(asks(1))
    with pytest.raises(KeyboardInterrupt):  # by `Interrupts`, since it was not handled
        here.serve()
    assert here.sent == [(None, Prompting(True))]


def test_a_refused_prompt_gives_the_reason(notebook: Callable[..., Notebook]) -> None:
    def refuse(question: InputRequest) -> str:
        raise NotImplementedError("no stdin.")

    here = notebook(refuse)
    here.events.publish(asks(1))
    here.serve()
    assert "the user cannot be asked here (no stdin)" in here.sent[-1][1].refusal
    here.events.publish(asks(1))
    thread = threading.Thread(target=here.serve)
    thread.start()
    thread.join()
    assert "in a thread that is not its main thread" in here.sent[-1][1].refusal
