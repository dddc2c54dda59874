"""The frames of a failed program, with their variables, which a debugger can show until the next program."""

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
_TORCH = os.path.dirname(torch.__file__) + os.sep  # the frames in which a replica waits for others


@dataclass
class KeptFailure:
    """An exception that ended a program, with the user's frames.

    Attributes:
        who: The replica's name, such as "replica 1 (cpu:1)".
        replica: Its number.
        error: The exception.
        stopped_in: The user's frames at the debugger's prompt where the program ended.
        text: A sentence for the user that says whether the variables are kept.
    """

    who: str
    replica: int
    error: BaseException
    stopped_in: TracebackType | None = None
    text: str = ""

    @property
    def traceback(self) -> TracebackType | None:
        """The user's part of the traceback, or None if it has no line of user code.

        If another replica or the user ended this one, the traceback ends at the user's own line.
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
        """Release the objects that need not, or must not, be kept.

        The variables of distnb's own frames (process groups, pending operations) are released at once. The user's
        variables stay, unless memory is short. They take no more memory than the program did, and they are released
        before the next program on this replica needs it.
        """
        nbytes = available_nbytes()
        scarce = nbytes < _FREE_NBYTES or free_share() < _FREE_SHARE
        for error in chain(self.error):
            for each in frames_of(error.__traceback__):
                frame = each.tb_frame
                if frame.f_code.co_filename.startswith(OWN) or (
                    scarce and frame.f_code.co_flags & inspect.CO_OPTIMIZED
                ):
                    with suppress(RuntimeError):  # the frame still runs
                        frame.clear()
                        _ = frame.f_locals  # before Python 3.13 this updates the dict that was made earlier
        self.text = "Its variables are kept until the next program."
        if scarce:
            self.text = (
                "The variables of its functions were released, because less than "
                f"{_FREE_NBYTES >> 20} MiB of memory, or {_FREE_SHARE:.0%} of the device's, was free."
            )
