"""The asyncio event loop of the user's code.

The engine's main thread runs an event loop of its own, in whose callbacks the agent serves. A task of the user's would
run there between programs, where no order to end a program reaches it. So the user's code has another loop, which
exists as long as the engine and runs while a cell awaits:

    task = asyncio.create_task(fetch())     # scheduled in this loop, which does not run
    await task                              # runs it, in this cell or in a later one
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from distnb.errors import ProgramAborted

__all__ = ["UsersLoop"]

T = TypeVar("T")


class UsersLoop:
    """The event loop of the user's code. Create and use it in the engine's main thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def enter(self) -> Any:
        """Make this the thread's current loop, in which tasks are created. Return the previous one, for `leave`."""
        outer = asyncio._get_running_loop()
        asyncio._set_running_loop(self._loop)
        return outer

    def leave(self, outer: Any) -> None:
        """Make the previous loop the current one."""
        asyncio._set_running_loop(outer)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run the loop until a coroutine has ended, and return its result.

        An interrupt that arrives elsewhere in the loop cancels the coroutine, whose `finally` runs before this raises.
        """
        asyncio._set_running_loop(None)  # asyncio refuses to run a second loop in one thread
        try:
            task = self._loop.create_task(coroutine)
            try:
                return self._loop.run_until_complete(task)
            except (KeyboardInterrupt, ProgramAborted):
                if not task.done():
                    task.cancel()
                    with suppress(asyncio.CancelledError):
                        self._loop.run_until_complete(task)
                raise
        finally:
            asyncio._set_running_loop(self._loop)

    @contextmanager
    def noting_tasks(self) -> Iterator[None]:
        """Print a notice about the tasks that a successful block has begun and not awaited."""
        before = asyncio.all_tasks(self._loop)
        yield
        count = len(asyncio.all_tasks(self._loop) - before)
        if count:
            print(
                f"distnb: {count} asyncio task{'s' * (count > 1)} of this cell {'have' if count > 1 else 'has'} not "
                "finished. Tasks run only while a cell awaits something: await them here, or in a later cell.",
                file=sys.stderr,
            )
