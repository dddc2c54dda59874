"""What a program that failed leaves for a debugger: its frames with their variables, until the next program."""

from __future__ import annotations

import inspect
import os
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

import torch

from distnb.accelerators import free_share
from distnb.cluster.local.capacity import available_nbytes
from distnb.engine.debugging.error_reports import users_part
from distnb.errors import ProgramAborted
from distnb.frames import OWN, chain, frames_of, traceback_of

__all__ = ["KeptFailure"]

_FREE_NBYTES = 512 * 2**20
_FREE_SHARE = 0.1
_TORCH = os.path.dirname(torch.__file__) + os.sep  # where a replica waits for others


@dataclass
class KeptFailure:
    """An exception that ended a program, with the user's frames.

    Attributes:
        who: The replica, "replica 1 (cpu:1)".
        replica: Its number.
        error: The exception.
        stopped_in: The user's frames where it ended the program at a prompt.
        text: What is kept of it, in words.
    """

    who: str
    replica: int
    error: BaseException
    stopped_in: TracebackType | None = None
    text: str = ""

    @property
    def traceback(self) -> TracebackType | None:
        """The user's part of its traceback; of a replica that was ended from without, down to the user's own line.

        None where there is no line of the user's.
        """
        if self.stopped_in is not None:
            return self.stopped_in
        frames = users_part(self.error)
        if isinstance(self.error, (ProgramAborted, KeyboardInterrupt)):
            frames = [each for each in frames if not each.tb_frame.f_code.co_filename.startswith(OWN)]
            while len(frames) > 1 and frames[-1].tb_frame.f_code.co_filename.startswith(_TORCH):
                del frames[-1]
        return traceback_of(frames)

    def limit(self) -> None:
        """Let go of what need not, or must not, be kept.

        What our frames hold goes at once: process groups, what is under way. The variables of the user's stay, unless
        memory is short with them. They take no more than the program did, and whatever needs that memory next on this
        replica comes after they are gone.
        """
        nbytes = available_nbytes()
        scarce = nbytes < _FREE_NBYTES or free_share() < _FREE_SHARE
        for error in chain(self.error):
            for each in frames_of(error.__traceback__):
                frame = each.tb_frame
                if frame.f_code.co_filename.startswith(OWN) or (
                    scarce and frame.f_code.co_flags & inspect.CO_OPTIMIZED
                ):
                    with suppress(RuntimeError):  # it still runs
                        frame.clear()
                        _ = frame.f_locals  # where that is a dict that was made before, it is brought up to date
        self.text = "Its variables are kept until the next program."
        if scarce:
            self.text = (
                "The variables of its functions were let go: with them, less than "
                f"{_FREE_NBYTES >> 20} MiB of memory, or {_FREE_SHARE:.0%} of the device's, were free."
            )
