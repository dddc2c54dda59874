"""The replicas' questions to the user, asked one after another while the notebook waits for the program."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from distnb.notebook.front_end import FrontEnd
from distnb.notebook.programs.supervision import GiveUpOn
from distnb.notebook.programs.supervisor import Supervisor
from distnb.runtime.interrupts import Interrupts
from distnb.wire.messages import Answer, Died, InputFinished, InputRequest, ProgramEnded, Prompting

__all__ = ["Prompts"]

_ELSEWHERE = (
    "the notebook waits for this program in a thread that is not its main thread, and only the main one can ask the "
    "user. Run the program in a cell."
)
_CANNOT = (
    "the user cannot be asked here ({error}): nbconvert, nbclient and papermill run notebooks without a user, and "
    "jupyter-server-documents shows no prompts. Take the question out of the cell, or run it in a plain JupyterLab."
)


class Prompts:
    """The questions of all replicas. While a replica is at a debugger's prompt, only its questions are asked.

    Attributes:
        fd: A descriptor that is readable when a replica has begun to ask.
        front: Returns the front end that asks the user.
        latest: The question that was asked last.
    """

    def __init__(self, supervisor: Supervisor, interrupts: Interrupts) -> None:
        self._supervisor = supervisor
        self._interrupts = interrupts
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.front: Callable[[], FrontEnd] = FrontEnd
        self.latest: InputRequest | None = None
        self._lock = threading.Lock()  # guards the following
        self._waiting: dict[int, InputRequest] = {}  # by engine, in order of arrival
        self._over: set[int] = set()  # programs that are being ended: their replicas' questions are not asked any more
        self._prompting: set[int] = set()  # engines with a question or a debugger, until they continue
        self._current: int | None = None  # the engine whose question was asked last
        supervisor.events.subscribe(self._handle)

    def _handle(self, event: Any) -> None:
        """Handle an event, on the supervisor's thread."""
        if isinstance(event, InputRequest):
            with self._lock:
                self._waiting[event.engine] = event
                self._prompting.add(event.engine)
                first = len(self._prompting) == 1
            if first:
                self._supervisor.send_to_all(Prompting(True))
            os.eventfd_write(self.fd, 1)
        elif isinstance(event, InputFinished | ProgramEnded | Died | GiveUpOn):
            with self._lock:
                if isinstance(event, ProgramEnded) and event.status != "ok":
                    self._over = {event.program}
                elif isinstance(event, Died):  # there is one program at a time
                    self._over = {asks.program for asks in self._waiting.values()}
                last = self._prompting == {event.engine}
                self._prompting.discard(event.engine)
                asked = self._waiting.pop(event.engine, None) is not None and self._current == event.engine
            if last:
                self._supervisor.send_to_all(Prompting(False))
            if asked:
                self._interrupts.withdraw()
            os.eventfd_write(self.fd, 1)  # it may be another replica's turn

    def next(self) -> InputRequest | None:
        """Return the question to ask now, or None. There is none while a debugger executes the user's last command."""
        if not self._waiting:
            return None
        with self._lock:
            if self._current is not None and self._current in self._prompting:
                asks = self._waiting.get(self._current)
            else:
                asks = next(iter(self._waiting.values()), None)
            return None if asks is None or asks.program in self._over else asks

    def end(self, programs: Collection[int]) -> None:
        """Stop asking the questions of programs that the user has ended."""
        with self._lock:
            self._over = set(programs)

    def ask(self, asks: InputRequest) -> None:
        """Ask the user, and send the answer. An interrupt is noted, and `Dispatch.wait` then ends the program."""
        with self._lock:
            self._current = asks.engine
        self.latest = asks
        answer = self._answer(asks)
        with self._lock:
            if answer is None or self._waiting.get(asks.engine) is not asks:
                return
            del self._waiting[asks.engine]
        self._supervisor.send(asks.engine, answer)

    def _answer(self, asks: InputRequest) -> Answer | None:
        if threading.current_thread() is not threading.main_thread():
            return Answer(asks.program, refusal=_ELSEWHERE)
        try:
            return self._interrupts.raised_in(partial(self._ask_user, asks))
        except KeyboardInterrupt:
            with self._lock:
                self._waiting.pop(asks.engine, None)
            self._interrupts.note()
            return None
        except EOFError:
            return Answer(asks.program)
        except Exception as error:  # noqa: BLE001  # the replica waits for an answer, whatever the front end raises
            return Answer(asks.program, refusal=_CANNOT.format(error=str(error).rstrip(".") or type(error).__name__))

    def _ask_user(self, asks: InputRequest) -> Answer | None:
        with self._lock:
            if self._waiting.get(asks.engine) is not asks:  # from here on a withdrawal ends the question
                return None
        return Answer(asks.program, self.front().ask(asks))

    def close(self) -> None:
        """Free the descriptor."""
        os.close(self.fd)
