"""The backends that carry a process group's data: Gloo and the devices' own, formed and ended as one."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist

from distnb.accelerators import torch_device
from distnb.collectives.group import exits
from distnb.collectives.group.gloo_sockets import Connections, event_loops
from distnb.compat.c10d_internals import (
    PrefixStore,
    Store,
    abort_nccl,
    backend_from_plugin,
    gloo_options,
    is_nccl,
    nccl_options,
    register_backends,
)
from distnb.errors import CollectiveError

if TYPE_CHECKING:
    from distnb.collectives.group.process_group import GuardedProcessGroup

__all__ = ["Backends", "abort_all"]

_FOREVER = timedelta(days=3650)  # a replica that computes for an hour is slow and not lost
_DRAIN_S = 5.0
_END_S = 1.0
_THREADS = 2  # Gloo's, as in torch: the number of collectives under way at once
_THREADS_ACROSS = 8  # between machines a model's buckets wait for the network, not for a core, and not for each other

_device_making = threading.Lock()


@dataclass
class Backends:
    """The inner backends of one process group, by device type.

    Attributes:
        backends: "cpu" (Gloo), and the type of the replicas' devices if these have a backend of their own (NCCL).
        plain: A C++ process group over the same backends, for the few operations that backends do not offer to Python.
        connections: The connected sockets of the Gloo backend.
    """

    backends: dict[str, Any]
    plain: dist.ProcessGroup
    connections: Connections = field(default_factory=Connections)

    @classmethod
    def connect(cls, store: Store, group: GuardedProcessGroup, local: bool) -> Backends:
        """Connect with the other ranks of a group. Cannot be interrupted.

        Addresses are exchanged in the store, under a new prefix. If all ranks are `local` to this machine, they listen
        on loopback only.
        """
        with _device_making:  # its event loop is the new one; calls below may block, and must not hold the lock
            before = event_loops()
            device = _gloo_device(local)
            made = [poller for pipe, poller in event_loops().items() if pipe not in before]
        gloo = _gloo(PrefixStore("gloo", store), group, device, _THREADS if local else _THREADS_ACROSS)
        connections = Connections.of_device(made)
        connections.stop_listening()
        if local:
            try:
                connections.check_peers()
            except CollectiveError:
                connections.shut_down()
                connections.close()
                raise
        else:
            connections.expect_silence()
        backends: dict[str, Any] = {"cpu": gloo}
        name, kind = group.membership.backend_name, group.membership.device.type
        if name != "gloo":
            make = _nccl if name == "nccl" else _from_outside
            backends[kind] = make(PrefixStore(name, store), group)
        return cls(backends, _plain(group, backends), connections)

    @property
    def of_device(self) -> Any:
        """The devices' own backend, or None if there is only Gloo."""
        return next((backend for kind, backend in self.backends.items() if kind != "cpu"), None)

    def abort(self) -> None:
        """End everything that is under way on this replica. Safe from any thread."""
        abort_all([self])

    def keep_for_ever(self) -> None:
        """Leak the backends, so that their destructors never run."""
        leak(self.plain, *self.backends.values())

    def end(self, idle: bool, until: float) -> None:
        """End the backends' threads before the interpreter ends, or keep those that could wait for others.

        If no operation of Gloo's is under way, wait for the threads until a deadline, and for at least a second.
        """
        if not idle:
            self.keep_for_ever()
            return
        of_device, nccl = self.of_device, is_nccl(self.of_device)
        if nccl:  # its destructor may take long, and its threads do not use Python
            leak(of_device)
        self.connections.close()
        # Their destructors wait for the threads, without Python's lock.
        self.backends, self.plain = {}, None  # type: ignore[assignment]
        if of_device is None or nccl:
            return
        ending = [of_device]
        del of_device
        # A backend from outside may wait for the others in its destructor.
        thread = threading.Thread(target=ending.clear, name="distnb-end", daemon=True)
        thread.start()
        thread.join(max(_END_S, until - time.monotonic()))

    def release(self, idle: Callable[[], bool]) -> None:
        """Destroy the backends on a thread, because their destructors may take long.

        An aborted Gloo operation can stay under way for ever, and the destructor would wait for it. So a backend that
        does not become idle is leaked, with its threads.
        """
        keep = [self.plain, *self.backends.values()]

        def drain() -> None:
            nonlocal keep
            until = time.monotonic() + _DRAIN_S
            while not idle() and time.monotonic() < until:
                time.sleep(0.05)
            if not idle():
                leak(*keep)
            self.connections.close()
            keep = []

        self.backends, self.plain = {}, None  # type: ignore[assignment]
        thread = threading.Thread(target=drain, name="distnb-release", daemon=True)
        exits.note(thread)
        thread.start()


def abort_all(transports: Sequence[Backends]) -> None:
    """End everything that is under way on this replica in several groups. Safe from any thread."""
    for transport in transports:
        transport.connections.shut_down()
    found = [transport.of_device for transport in transports if transport.of_device is not None]
    abort_nccl([backend for backend in found if is_nccl(backend)])
    for backend in found:
        if not is_nccl(backend):
            with suppress(Exception):  # torch's base class raises where a backend cannot be aborted
                backend.abort()


def leak(*objects: Any) -> None:
    """Keep objects beyond the interpreter's end, so that their destructors never run."""
    for each in objects:
        if each is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


def _plain(group: GuardedProcessGroup, backends: Mapping[str, Any]) -> dist.ProcessGroup:
    plain: dist.ProcessGroup = cast(Any, dist.ProcessGroup)(group.rank(), group.size())
    register_backends(plain, backends)
    return plain


def _gloo_device(local: bool) -> Any:
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or ("lo" if local else "")
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface.split(",")[0], lazy_init=False)
    return dist.ProcessGroupGloo.create_default_device(lazy_init=False)


def _gloo(store: Store, group: GuardedProcessGroup, device: Any, threads: int) -> Any:
    return dist.ProcessGroupGloo(store, group.rank(), group.size(), gloo_options(device, threads, _FOREVER))


def _nccl(store: Store, group: GuardedProcessGroup) -> Any:
    # Only distnb aborts: torch's watchdog would end the process because of a communicator that we aborted.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    backend = dist.ProcessGroupNCCL(store, group.rank(), group.size(), nccl_options(_FOREVER))
    # Connect now: in the first operation it would block uninterruptibly.
    backend.eager_connect_single_device(torch_device(group.membership.device))
    return backend


def _from_outside(store: Store, group: GuardedProcessGroup) -> Any:
    name = group.membership.backend_name
    return backend_from_plugin(name, store, group.rank(), group.replicas, group.label, _FOREVER)
