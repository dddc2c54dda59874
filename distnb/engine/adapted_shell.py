"""The engine's IPython shell, whose output, displays and prompts go to the notebook."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Literal

from distnb.compat.ipython_internals import redirect_errors
from distnb.engine import launched_processes, unattended
from distnb.engine.control import Control
from distnb.engine.debugging.console import Console
from distnb.engine.output import progress_bars, widget_comms
from distnb.engine.output.streams import ReplicaDisplayPublisher, ReplicaStream
from distnb.objects.code import spawned_processes
from distnb.runtime.inspection import inspecting
from distnb.runtime.this_process import this_process
from distnb.values import DistributedValues

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["adapt"]


def adapt(
    shell: InteractiveShell,
    engine: int,
    control: Control,
    console: Console,
    logs: Mapping[Literal["stdout", "stderr"], int],
    stop: Callable[[FrameType, str | None, Iterable[str]], None],
) -> None:
    """Redirect output, displays and prompts of cells to the notebook.

    Args:
        logs: The descriptors of the files to which output outside programs goes.
        stop: Handles a breakpoint in the user's code.
    """
    progress_bars.install()
    widget_comms.install(engine, control, shell)
    # IPython sets `sys.ps1`, by which libraries recognise an interactive session. Some then start processes of
    # their own.
    vars(sys).pop("ps1", None)
    sys.stdout = ReplicaStream(engine, "stdout", control, logs["stdout"], 1, sys.stdout)
    sys.stderr = ReplicaStream(engine, "stderr", control, logs["stderr"], 2, sys.stderr)
    shell.display_pub = ReplicaDisplayPublisher(engine, control, shell.display_pub, parent=shell)

    def write_error(text: str) -> bool:
        """Write an error that the shell shows during a program (`ipywidgets.Output` does so). Return False outside."""
        if control.running is not None:
            sys.stderr.write(text)
        return control.running is not None

    redirect_errors(shell, write_error)
    formatter = shell.display_formatter
    assert formatter is not None
    formatter.mimebundle_formatter.for_type(DistributedValues, inspecting.displayed)
    formatter.formatters["text/html"].for_type(DistributedValues, lambda value: None)  # the notebook draws them
    this_process.publish = shell.display_pub.publish
    unattended.install(shell, console, stop)
    launched_processes.install()
    spawned_processes.install()
