"""The role of this process: an object in which an engine or a notebook registers its functions.

A plain script has no such host, so the attributes keep their defaults. Importing this module does not load torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from distnb.runtime.base import Owner, Runtime
    from distnb.runtime.spmd import SpmdProcess
    from distnb.wire.value_facts import Holding

__all__ = ["Store", "this_process"]


class Store(Protocol):
    """Access to values that live in other processes. Tensors of this process may be copies of them.

    Attributes:
        is_worker: Whether another process, whose program this one computes a part of, adds up the counts made here.
    """

    is_worker: bool

    def holdings(self, tensor: torch.Tensor) -> Sequence[Holding] | None:
        """Return the parts of the value that a tensor copies or represents, or None for other tensors."""

    def refresh_copies(self, copies: Iterable[torch.Tensor]) -> None:
        """Send the changes of some copies, and update these copies. Other tensors are ignored."""


class _ThisProcess:
    """The type of `this_process`, its only instance.

    Attributes:
        replica: This process as one of several replicas, or None. An engine is a replica of the program that it runs. A
            script under torchrun or `distnb run` is a replica until it ends. Set by `spmd.enter`.
        remote: Returns the runtime of a strategy whose replicas are engines, and starts a cluster if there is none. Set
            by the session in a notebook.
        machines: Returns the names of the engines' machines other than the notebook's, or an empty tuple. Set with
            `remote`.
        before_program: Called before a program is sent to engines, with the modules that its code imports, and when
            engines have started. Set by a part of the session that prepares engines for programs.
        cure_for: Returns the cure for an error of a program, or "". Set by the same part.
        live_sink: Receives the arguments of `distnb.live`: the values, (training step, call of `run`), and the run's
            name. Set by an engine, which sends them, and by a notebook, which draws them. None: they are printed.
        publish: Sends a display's data, by MIME type, to the notebook, which draws it. Set by an engine.
        store: The values that live in other processes, if the program has any; None otherwise. Set by their feature.
        note_names: Called when a scope opens. The function that it returns is called if the scope ends with an error,
            and unbinds the names assigned in the scope. Set by an engine. In a script both do nothing.
    """

    def __init__(self) -> None:
        self.replica: SpmdProcess | None = None
        self.remote: Callable[[Owner], Runtime] | None = None
        self.machines: Callable[[], tuple[str, ...]] = tuple
        self.before_program: Callable[[Collection[str]], None] | None = None
        self.cure_for: Callable[[BaseException], str] = lambda error: ""
        self.live_sink: Callable[[dict[str, Any], tuple[int, int], str], None] | None = None
        self.publish: Callable[[dict[str, Any]], None] | None = None
        self.store: Store | None = None
        self.note_names: Callable[[], Callable[[], None]] = lambda: lambda: None

    @property
    def is_one_of_several(self) -> bool:
        """True if this process is one of several replicas."""
        return self.replica is not None and self.replica.size > 1


this_process = _ThisProcess()
