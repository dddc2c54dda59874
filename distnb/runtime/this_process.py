"""The process's role and host: one object, in which the engine or the notebook registers its functions.

A plain script that nobody hosts has nothing of it. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distnb.runtime.base import Owner, Runtime
    from distnb.runtime.spmd import SpmdProcess

__all__ = ["this_process"]


class _ThisProcess:
    """The slots of this process. There is one instance, `this_process`.

    Attributes:
        replica: Which of several replicas it is, if it is one: an engine is the replica of the program that it runs; a
            script under torchrun or `distnb run` is one for as long as it lives. Set by `spmd.enter`.
        remote: Gives the runtime of a strategy whose replicas are engines, and starts a cluster when there is none.
            Set by the session in a notebook.
        machines: Names the other machines of these engines; empty where there are none. Set with `remote`.
        live_sink: Takes what `distnb.live` is given: the values, (training step, call of `run`), and the run's name.
            Set by an engine, which sends them, and by a notebook, which draws them; None: to the terminal.
        publish: Sends a display's data, by MIME type, to where it is drawn. Set by an engine, whose notebook draws.
        note_names: Called when a scope opens; what it returns, when one ends by an error: names assigned in it are not
            to stay bound. Set by an engine. In a script that is the program's affair.
    """

    def __init__(self) -> None:
        self.replica: SpmdProcess | None = None
        self.remote: Callable[[Owner], Runtime] | None = None
        self.machines: Callable[[], tuple[str, ...]] = tuple
        self.live_sink: Callable[[dict[str, Any], tuple[int, int], str], None] | None = None
        self.publish: Callable[[dict[str, Any]], None] | None = None
        self.note_names: Callable[[], Callable[[], None]] = lambda: lambda: None


this_process = _ThisProcess()
