"""Publishers, which carry out output instructions in a notebook's cell or in a terminal."""

from __future__ import annotations

import re
import shutil
import sys
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from distnb.compat.ipython_internals import has_parent_by_thread
from distnb.notebook.output.displays import Area, Clear, Instruction, Show, WriteText
from distnb.widgets.value_views.showing import drawn

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["NotebookPublisher", "Publisher", "TerminalPublisher", "publisher_for"]

_LATEST_CHARACTERS = 10_000
_COLOURS = re.compile(r"\x1b\[[\d;]*m")


class Publisher(ABC):
    """The destination of a cell's text and displays. Any thread may call it, but only one at a time."""

    on_clear: Callable[[], None] | None = None
    """A function that is called after the cell's output was cleared, so that a view can appear again."""

    cell_id = ""
    """The notebook's id of the cell, or "" if the front end does not send it."""

    latest = ""
    """The end of the written text, for a page that was reloaded while the cell ran and missed the text."""

    def apply(self, instructions: list[Instruction]) -> None:
        """Carry out instructions in order."""
        for each in instructions:
            if isinstance(each, WriteText):
                self.latest = (self.latest + each.text)[-_LATEST_CHARACTERS:]
                self.write(each.stream, each.text)
            elif isinstance(each, Show):
                self.display(each.name, drawn(each.bundle.data), each.bundle.metadata, update=each.update)
            elif isinstance(each, Area):
                self.area(each.lines)
            elif isinstance(each, Clear):
                self.latest = ""
                self.clear(each.wait)
                if self.on_clear is not None:
                    self.on_clear()

    @abstractmethod
    def write(self, stream: str, text: str) -> None:
        """Print on stdout or stderr."""

    @abstractmethod
    def display(self, name: str, data: Mapping[str, Any], metadata: Mapping[str, Any], *, update: bool = False) -> None:
        """Show a rich display under a name, or change the display of that name."""

    @abstractmethod
    def area(self, lines: tuple[str, ...]) -> None:
        """Draw the unfinished lines."""

    @abstractmethod
    def clear(self, wait: bool) -> None:
        """Remove the cell's output."""


def publisher_for(shell: InteractiveShell) -> Publisher:
    """Return the publisher for a shell's front end."""
    return NotebookPublisher(shell) if hasattr(shell, "kernel") else TerminalPublisher()


class NotebookPublisher(Publisher):
    """A publisher for the cell that runs when the publisher is created. It also works after that cell has ended.

    Attributes:
        current: True while that cell is the latest. Output then takes the shell's usual path, so `%%capture` can
            capture it. Later output is sent in messages whose parent is the cell.
    """

    def __init__(self, shell: Any) -> None:
        self.current = True
        self._shell = shell
        self._parent: dict[str, Any] = shell.get_parent()
        self.cell_id = str(self._parent.get("metadata", {}).get("cellId", ""))
        self._area = ""  # the display id of the area, while it is shown

    def adopt_thread(self) -> None:
        """Route output that the calling thread prints to this cell."""
        if not self.current or not has_parent_by_thread(self._shell):
            return  # an old kernel has one parent for all threads, and the next cell may have begun
        self._shell.parent_header = self._parent
        # The shell's own method sets them one by one, too: the objects that %%capture substitutes have no set_parent.
        for output in (self._shell.displayhook, self._shell.display_pub, sys.stdout, sys.stderr):
            if hasattr(output, "set_parent"):
                output.set_parent(self._parent)

    def write(self, stream: str, text: str) -> None:
        if self.current:
            target = sys.stderr if stream == "stderr" else sys.stdout
            target.write(text)
            target.flush()
        else:
            self._send("stream", {"name": stream, "text": text}, f"stream.{stream}".encode())

    def display(self, name: str, data: Mapping[str, Any], metadata: Mapping[str, Any], *, update: bool = False) -> None:
        transient = {"display_id": name}
        if self.current:
            sys.stdout.flush()
            self._shell.display_pub.publish(dict(data), dict(metadata), transient=transient, update=update)
        else:
            content = {"data": dict(data), "metadata": dict(metadata), "transient": transient}
            self._send("update_display_data" if update else "display_data", content, b"display_data")

    def area(self, lines: tuple[str, ...]) -> None:
        update = bool(self._area)
        if lines or update:
            self._area = self._area or f"distnb-{uuid.uuid4().hex[:12]}-area"
            self.display(self._area, {"text/plain": "\n".join(lines)}, {}, update=update)

    def clear(self, wait: bool) -> None:
        self._area = ""
        if self.current:
            self._shell.display_pub.clear_output(wait=wait)
        else:
            self._send("clear_output", {"wait": wait}, b"display_data")

    def _send(self, kind: str, content: dict[str, Any], topic: bytes) -> None:
        kernel = self._shell.kernel
        kernel.session.send(kernel.iopub_socket, kind, content, parent=self._parent, ident=topic)


class TerminalPublisher(Publisher):
    """A publisher for a terminal. Displays become plain text; unfinished lines become one line that is rewritten."""

    def __init__(self) -> None:
        self._width = 0

    def write(self, stream: str, text: str) -> None:
        self._wipe()
        target = sys.stderr if stream == "stderr" else sys.stdout
        target.write(text)
        target.flush()

    def display(self, name: str, data: Mapping[str, Any], metadata: Mapping[str, Any], *, update: bool = False) -> None:
        text = str(data.get("text/plain", ""))
        if text:
            self.write("stdout", text + "\n")

    def area(self, lines: tuple[str, ...]) -> None:
        if not sys.stderr.isatty():
            return
        self._wipe()
        room = shutil.get_terminal_size().columns - 1
        line = _COLOURS.sub("", "  ".join(lines))[:room]  # a colour code that is cut off would colour later text
        sys.stderr.write(line)
        sys.stderr.flush()
        self._width = len(line)

    def clear(self, wait: bool) -> None:
        self._wipe()

    def _wipe(self) -> None:
        if self._width:
            sys.stderr.write("\r" + " " * self._width + "\r")
            sys.stderr.flush()  # stdout's text must come after
            self._width = 0
