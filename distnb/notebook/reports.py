"""Reports on a running cluster as text, for `%distnb stacks`, a second terminal, and the side panel."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distnb.notebook.session import Session

__all__ = ["process_text", "stacks_text"]

_NO_ANSWER = "It does not answer: it has ended, or native code holds Python's lock.\n"


def stacks_text(session: Session) -> str:
    """Return the stack of each engine, from any thread, and while programs run."""
    stacks = session.stacks()
    lines = []
    for row in session.status():
        task = f"{row.task}, " if row.task else ""
        stack = stacks.get(row.engine, _NO_ANSWER) or row.state
        lines.append(f"── {task}engine {row.engine} ({row.device}) ──\n{stack}".rstrip())
    return "\n".join(lines) + "\n"


def process_text(session: Session) -> str:
    """Return one line that identifies this notebook."""
    devices = ", ".join(row.device for row in session.status())
    try:
        folder = os.getcwd()
    except OSError:
        folder = "a folder that was removed"
    return f"process {os.getpid()} in {folder}: engines on {devices}\n"
