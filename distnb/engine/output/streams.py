"""The output and displays of a replica, captured and sent as events.

Streams of ours replace `sys.stdout` and `sys.stderr`. File descriptors 1 and 2 are pipes, which also capture the output
of C code, subprocesses and forked DataLoader workers. Outside a program all output goes to the engine's log, and to
ipyparallel's clients, since one of their cells (`%px`) may be running.
"""

from __future__ import annotations

import codecs
import io
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from IPython.core.displaypub import DisplayPublisher

from distnb.collectives.verify import callsite
from distnb.wire.messages import Display, Output
from distnb.wire.value_facts import PLACEMENT, VALUE

if TYPE_CHECKING:
    from distnb.engine.control import Control

__all__ = ["ReplicaDisplayPublisher", "ReplicaStream", "pipe_descriptor"]

Running = Callable[[], tuple[int, int] | None]


class ReplicaStream(io.TextIOBase):
    """A text stream whose text becomes `Output` events of the running program.

    Outside a program the text goes to the log and to the stream that this one replaced.
    """

    encoding = "utf-8"  # libraries read this attribute
    errors = "replace"

    def __init__(
        self,
        engine: int,
        name: Literal["stdout", "stderr"],
        control: Control,
        log_fd: int,
        descriptor: int,
        before: Any,
    ) -> None:
        self._engine = engine
        self._stream = name
        self._control = control
        self._log_fd = log_fd
        self._descriptor = descriptor
        self._before = before
        self._owner = os.getpid()

    @property
    def name(self) -> str:
        """The name in angle brackets, as `sys.stdout.name` is."""
        return f"<{self._stream}>"

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return False

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if os.getpid() != self._owner:
            # A forked child has no control thread. The pipe leads to its parent's control thread.
            os.write(self._descriptor, text.encode(errors="replace"))
            return len(text)
        running = self._control.running
        if running is None:
            os.write(self._log_fd, text.encode(errors="replace"))
            self._before.write(text)
        elif text:
            self._control.emit(
                Output(engine=self._engine, program=running[0], replica=running[1], stream=self._stream, text=text)
            )
        return len(text)

    def flush(self) -> None:
        """Flush the replaced stream outside a program. A program's output has no buffer here."""
        if self._control.running is None and os.getpid() == self._owner:
            self._before.flush()

    def set_parent(self, parent: Any) -> None:
        """Set the request to which output belongs, for ipyparallel's clients. The kernel calls this."""
        if hasattr(self._before, "set_parent"):
            self._before.set_parent(parent)


def pipe_descriptor(
    engine: int, descriptor: int, name: Literal["stdout", "stderr"], running: Running, emit: Callable[[Output], None]
) -> tuple[int, int, Callable[[bytes], None]]:
    """Replace file descriptor 1 or 2 by a pipe. `running` returns the current (program, replica).

    Returns:
        The pipe's reading end, a duplicate of the former descriptor (the engine's log), and the function that handles
        the data read from the pipe.
    """
    log_fd = os.dup(descriptor)
    reading, writing = os.pipe()
    os.dup2(writing, descriptor)
    os.close(writing)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def forward(data: bytes) -> None:
        program = running()
        if program is None:
            os.write(log_fd, data)
        else:
            emit(Output(engine=engine, program=program[0], replica=program[1], stream=name, text=decoder.decode(data)))

    return reading, log_fd, forward


class ReplicaDisplayPublisher(DisplayPublisher):
    """The display publisher of an engine's shell, which turns rich displays into `Display` events.

    Outside a program they go to the publisher that this one replaced.
    """

    def __init__(self, engine: int, control: Control, before: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]
        self._before = before
        self._engine = engine
        self._control = control

    def publish(
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        source: Any = None,
        *,
        transient: dict[str, Any] | None = None,
        update: bool = False,
        **kwargs: Any,
    ) -> None:
        """Send one display to the notebook. The arguments are those of IPython's method."""
        running = self._control.running
        if running is not None:
            program, replica = running
            self._control.emit(
                Display(
                    engine=self._engine,
                    program=program,
                    replica=replica,
                    data=data,
                    metadata=metadata or {},
                    transient=transient or {},
                    update=update,
                    site=callsite.current(2).identity,
                )
            )
        else:
            data = {kind: value for kind, value in data.items() if kind not in (VALUE, PLACEMENT)}
            self._before.publish(data, metadata, transient=transient, update=update)

    def clear_output(self, wait: bool = False) -> None:
        """Clear this replica's displays in the cell."""
        running = self._control.running
        if running is not None:
            program, replica = running
            self._control.emit(
                Display(engine=self._engine, program=program, replica=replica, data={}, clear="wait" if wait else "now")
            )
        else:
            self._before.clear_output(wait)

    def set_parent(self, parent: Any) -> None:
        """Set the request to which displays belong, for ipyparallel's clients. The kernel calls this."""
        if hasattr(self._before, "set_parent"):
            self._before.set_parent(parent)
