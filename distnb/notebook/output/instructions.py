"""What whoever shows a cell's output is told to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from distnb.notebook.output.figures import Bundle

__all__ = ["Area", "Change", "Clear", "Instruction", "Show", "Stream", "Write", "joined"]

Stream = Literal["stdout", "stderr"]


@dataclass(frozen=True)
class Write:
    """Print text on a stream."""

    stream: Stream
    text: str


@dataclass(frozen=True)
class Show:
    """Show a rich display that can be changed by its name later."""

    name: str
    bundle: Bundle


@dataclass(frozen=True)
class Change:
    """Change a display that was shown."""

    name: str
    bundle: Bundle


@dataclass(frozen=True)
class Area:
    """Draw the lines that are not finished yet; none of them: remove the area."""

    lines: tuple[str, ...]


@dataclass(frozen=True)
class Clear:
    """Remove everything that the cell has shown; with `wait`, when the next thing is shown."""

    wait: bool


Instruction = Write | Show | Change | Area | Clear


def joined(instructions: list[Instruction]) -> list[Instruction]:
    """Neighbouring pieces of text of one stream become one."""
    pieces: list[Instruction] = []
    for each in instructions:
        last = pieces[-1] if pieces else None
        if isinstance(each, Write) and isinstance(last, Write) and each.stream == last.stream:
            pieces[-1] = Write(each.stream, last.text + each.text)
        else:
            pieces.append(each)
    return pieces
