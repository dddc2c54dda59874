"""The parts that `%load_ext distnb` adds to an IPython shell."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from IPython.core.interactiveshell import InteractiveShell

from distnb.compat.ipython_internals import autoreloaded, number_cells
from distnb.magics import tracebacks
from distnb.magics.cell_history import CellHistory
from distnb.magics.cluster_magic import ClusterMagic
from distnb.magics.completion import complete
from distnb.magics.distribute_magic import DistributeMagic
from distnb.magics.scope_transformer import ScopeDispatch, ScopeTransformer
from distnb.magics.stop_handler import StopHandler
from distnb.magics.tracebacks import presented
from distnb.notebook import compose
from distnb.notebook.front_end import FrontEnd
from distnb.notebook.namespace.module_watch import FileVersion
from distnb.objects.code import spawned_processes
from distnb.objects.memory.freed_memory import return_freed_memory
from distnb.objects.modes.environment import cell_began
from distnb.runtime.program_ends import program_ended
from distnb.widgets.front import Front
from distnb.widgets.panel.side_panel import SidePanel

if TYPE_CHECKING:
    from IPython.core.interactiveshell import ExecutionInfo, ExecutionResult

__all__ = ["Extension"]

_RUN_CELL = InteractiveShell.run_cell_async.__code__


class Extension:
    """The parts of distnb in one shell."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._front = Front(shell)
        self._history = CellHistory(self._front)
        self._cluster = ClusterMagic(shell, self._front, self._history)
        self._distribute = DistributeMagic(shell, self._front, self._cluster.ensure)
        self._scope = ScopeTransformer()
        # Our hooks around a cell run as a whole. A stop in the meantime applies to the cell, or to the next step.
        self._stops = StopHandler((Extension._begin.__code__, Extension._leave.__code__, Front.end_cell.__code__))
        self._dispatch = ScopeDispatch(self._distribute.run_in_scope)
        self._open, self._began = False, time.monotonic()

    def install(self) -> None:
        """Add all parts."""
        shell = self._shell
        register = shell.magics_manager.register_function
        register(self._cluster.distnb, "line", "distnb")
        register(self._distribute.distribute, "cell", "distribute")
        register(self._distribute.refuse_line_magic, "line", "%distribute")
        register(self._distribute.refuse_line_magic, "line", "distribute")
        register(self._distribute.autodistribute, "line", "autodistribute")
        self._distribute.install()
        complete(shell)
        number_cells(shell)
        tracebacks.show_plainly(shell)
        spawned_processes.install()
        tracebacks.debug_on_replicas(shell, compose.current)
        shell.ast_transformers.append(self._scope)
        self._dispatch.install(shell)
        shell.events.register("pre_run_cell", self._before)
        shell.events.register("post_run_cell", self._after)
        front_end = FrontEnd(
            live=self._front.live,
            follow=self._front.attach,
            session_for=lambda strategy: self._cluster.ensure(strategy.spec),
            catch_up=self._front.catch_up,
            callers_lines=partial(tracebacks.callers_lines, shell),
            ask=self._front.ask,
            watch=self._front.watch,
            module_version=partial(_autoreloaded, shell),
            history=self._front.history,
        )
        compose.attach(front_end)
        kernel = getattr(shell, "kernel", None)
        if hasattr(kernel, "control_handlers"):  # the kernel is ipykernel's
            SidePanel(kernel, self._front).install()
        # The cell that loads the extension may use it at once.
        self._stops.install()
        _choose_debugger()
        self._front.begin_cell(_cells_stored(self._shell) - 1)

    def _finish_calls(self, result: ExecutionResult | None, *, stop: bool) -> None:
        """Wait for calls that were sent with `wait=False`. An error of one of them is also this cell's error.

        Args:
            result: The cell's result; None if a stop came between two of IPython's own steps.
            stop: Whether the user stopped the cell, which also ends the calls.
        """
        session = compose.current()
        if session is None:
            return
        try:
            with presented():
                if stop:
                    session.interrupt()
                session.calls.finish()
        except BaseException as error:  # noqa: BLE001  (whatever a replica raised, and the user's interrupt)
            if result is None:
                return  # the cell was stopped, and IPython shows no error for it
            if result.success or not isinstance(error, KeyboardInterrupt):  # an interrupted cell's calls ended with it
                self._shell.showtraceback()
            result.error_in_exec = result.error_in_exec or error

    def _before(self, info: ExecutionInfo) -> None:
        # %%capture and other magics run a cell within a cell. The inner cell's output belongs to the outer cell.
        if _cells_under_way() > 1:
            return
        if self._open:  # IPython did not report the last cell's end: a stop came between two of its own steps
            self._end(None)
        self._begin(info.raw_cell or "")

    def _begin(self, raw_cell: str) -> None:
        self._stops.install()
        self._open, self._began = True, time.monotonic()
        cell_began()
        _choose_debugger()
        self._distribute.cell_begins(raw_cell)
        self._history.begin(raw_cell)
        self._front.begin_cell(_cells_stored(self._shell))  # the number of this cell, which is stored next

    def _after(self, result: ExecutionResult | None) -> None:
        if not _cells_under_way():
            self._end(result)

    def _end(self, result: ExecutionResult | None) -> None:
        self._leave()
        self._finish_calls(result, stop=result is None or isinstance(result.error_in_exec, KeyboardInterrupt))
        program_ended()
        if (session := compose.current()) is not None:
            session.engines.save_names()
        self._history.end(result)
        self._front.end_cell(failed=result is None or not result.success)
        return_freed_memory(self._began)

    def _leave(self) -> None:
        self._open = False
        self._distribute.leave()


def _autoreloaded(shell: InteractiveShell, name: str) -> FileVersion | None:
    """Return the version of a module's file that %autoreload has loaded; None if the extension is not loaded."""
    found = autoreloaded(shell, name, getattr(sys.modules.get(name), "__file__", None))
    return FileVersion(*found) if found is not None else None


def _cells_stored(shell: InteractiveShell) -> int:
    """Return the number of cells in `In`, including the 0th. IPython's own counter may be one ahead."""
    history = shell.history_manager
    return len(history.input_hist_parsed) if history is not None else shell.execution_count


def _cells_under_way() -> int:
    """Return the number of IPython's cells that are running, each within the previous one."""
    count, frame = 0, sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        count += frame.f_code is _RUN_CELL
    return count


_debugpys_hook: Callable[..., Any] | None = None


def _choose_debugger() -> None:
    """Make `breakpoint()` stop in a notebook.

    ipykernel loads debugpy, whose hook stops only while the front end's own debugger is attached, and otherwise ignores
    a user's `breakpoint()` silently. In that case IPython's debugger is used, with a prompt below the cell.
    """
    global _debugpys_hook
    debugpy = sys.modules.get("debugpy")
    usable = debugpy is None or debugpy.is_client_connected()
    if sys.breakpointhook is _prompt and usable and _debugpys_hook is not None:
        sys.breakpointhook = _debugpys_hook
    elif not usable and str(getattr(sys.breakpointhook, "__module__", "")).startswith("debugpy"):
        _debugpys_hook, sys.breakpointhook = sys.breakpointhook, _prompt


def _prompt(*args: Any, **keywords: Any) -> Any:
    if "PYTHONBREAKPOINT" in os.environ:
        return sys.__breakpointhook__(*args, **keywords)  # noqa: T100  (as the variable requests)
    from IPython.core.debugger import set_trace

    set_trace(sys._getframe(1), *args, **keywords)
    return None
