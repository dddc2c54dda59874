"""The comms of widgets that a replica creates, which lead to the notebook. The notebook shows copies of the widgets.

A widget sends its whole state when it is created, and its changes afterwards. The notebook sends nothing back: a user's
changes to a copy stay in the page.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ipykernel.jsonutil import json_clean

from distnb.compat import patches
from distnb.compat.ipython_internals import HAS_COMM, BaseComm
from distnb.wire.messages import WidgetChange

if TYPE_CHECKING:
    from distnb.engine.control import Control

__all__ = ["WidgetComm", "install"]

_TARGET = "jupyter.widget"


class WidgetComm(BaseComm):  # type: ignore[misc]
    """A comm whose messages become `WidgetChange` events.

    Args:
        engine: The number of this engine.
        control: Sends the events.
        keywords: The arguments of `comm.create_comm`.
    """

    def __init__(self, engine: int, control: Control, **keywords: Any) -> None:
        self._engine = engine
        self._control = control
        super().__init__(**keywords)

    def __reduce__(self) -> Any:
        raise TypeError("a widget stays on its replica")

    def publish_msg(
        self, msg_type: str, data: Any = None, metadata: Any = None, buffers: Any = None, **keys: Any
    ) -> None:
        """Send a message of the widget. The arguments are those of `comm`'s method."""
        data = data or {}
        if msg_type == "comm_open" or data.get("method") == "update":
            state = _with_buffers(json_clean(data["state"]), data.get("buffer_paths", ()), buffers or ())
            self._emit("open" if msg_type == "comm_open" else "update", state)
        elif data.get("method") == "custom":
            self._emit("custom", json_clean(data["content"]), tuple(bytes(each) for each in buffers or ()))
        elif msg_type == "comm_close":
            self._emit("close")

    def _emit(self, method: Any, content: Any = None, buffers: tuple[bytes, ...] = ()) -> None:
        program, replica = self._control.running or (0, 0)
        self._control.emit(
            WidgetChange(
                engine=self._engine,
                program=program,
                replica=replica,
                widget=self.comm_id,
                method=method,
                content=content,
                buffers=buffers,
            )
        )


def install(engine: int, control: Control, shell: Any) -> None:
    """Connect the comms of widgets that programs create to the notebook, if the kernel has the package `comm`.

    Other comms remain the kernel's.

    An `ipywidgets.Output` captures the output of the kernel's latest request, so this sets one.
    """

    def create_comm(of_kernel: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        if control.running is None or keywords.get("target_name") != _TARGET:
            return of_kernel(*args, **keywords)
        return WidgetComm(engine, control, **keywords)

    if HAS_COMM:
        patches.wrap("comm:create_comm", create_comm)
    shell.set_parent(shell.kernel.session.msg("execute_request"))


def _with_buffers(state: dict[str, Any], paths: Any, buffers: Any) -> dict[str, Any]:
    """Put the binary values of a state back into their places."""
    for path, buffer in zip(paths, buffers, strict=True):
        place: Any = state
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = bytes(buffer)
    return state
