"""The extension point of the agent, "programs": kinds of programs that a feature adds when the notebook needs them.

A feature has messages in a module of its own, and registers a function under that module's name. When the first of
these messages arrives, the agent loads the function and calls it with itself. The function adds to the agent's `kinds`
and `notices`, and may open further links (`ProgramLoop.receive_from`). An engine that receives no such message never
loads it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["ProgramKind"]


@dataclass(frozen=True)
class ProgramKind:
    """The way in which the agent runs the programs of one class of messages.

    Attributes:
        run: Runs a program, given the message and this engine's replica number in the program. Returns a `Reply`, or
            another message with the attributes `program`, `status` and `error` if the program succeeded.
        replica: Returns that replica number, given the message.
        measured: Returns, given the message, whether the program's time counts in the timeline and the live view.
        drops_failure: True if the frames of an earlier failure are released before the program.
        keeps_failure: True if `%distnb debug` can show the frames of the program's own failure.
        refusal: The reason why the program cannot ask the user for input, with a place for `{what}`; "" if it can.
    """

    run: Callable[[Any, int], Any]
    replica: Callable[[Any], int]
    measured: Callable[[Any], bool] = lambda message: True
    drops_failure: bool = False
    keeps_failure: bool = True
    refusal: str = ""
