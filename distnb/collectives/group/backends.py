"""What carries a process group's data: Gloo, and what the replicas' devices have, formed and ended as one."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, PrefixStore, Store, _DistributedBackendOptions

from distnb.collectives.group import exits
from distnb.collectives.group.gloo_sockets import Connections, event_loops
from distnb.errors import CollectiveError

__all__ = ["FOREVER", "Carrier", "Backends", "abort_all", "form"]

FOREVER = timedelta(days=3650)
"""The time limit that the inner backends get. A replica that computes for an hour is slow, not lost."""

_DRAIN_S = 5.0
_END_S = 1.0
_HOPELESS_S = 60.0
_THREADS = 2  # of Gloo's, as in torch: so many collectives are under way at once
_THREADS_ACROSS = 8  # between machines a model's buckets wait for the network, not for a core, and not for each other

_device_making = threading.Lock()


@dataclass(frozen=True)
class Carrier:
    """A c10d backend for the tensors of the replicas' own devices.

    Attributes:
        name: torch's name for it, "nccl".
        device: This replica's device.
        group: The label of the group.
        replicas: The group's members, as numbers in the default group.
    """

    name: str
    device: torch.device
    group: str
    replicas: tuple[int, ...]


@dataclass
class Backends:
    """The inner backends of one process group, by the type of device whose tensors they carry.

    Attributes:
        backends: "cpu" (Gloo), and the type of the replicas' devices if these have a backend of their own (NCCL).
        staged: Device types whose tensors go through host memory, by the "cpu" backend.
        plain: A C++ process group over the same backends, for the few operations that backends themselves don't offer
            to Python.
        connections: The connected sockets of the Gloo backend.
    """

    backends: dict[str, Any]
    staged: frozenset[str]
    plain: dist.ProcessGroup
    connections: Connections = field(default_factory=Connections)

    @property
    def of_device(self) -> Any:
        """The devices' own backend; None where there is only Gloo."""
        return next((backend for kind, backend in self.backends.items() if kind != "cpu"), None)

    def abort(self) -> None:
        """End everything that is under way on this replica. Safe from any thread."""
        abort_all([self])

    def keep_for_ever(self) -> None:
        """See to it that no destructor ever runs."""
        leak(self.plain, *self.backends.values())

    def end(self, idle: bool, until: float) -> None:
        """Before the interpreter ends: have the backends' threads end, or keep those that could wait for others.

        Args:
            idle: Whether no operation of Gloo's is under way.
            until: When to stop waiting, as `time.monotonic` tells it; but not before a second has passed.
        """
        if not idle:
            self.keep_for_ever()
            return
        of_device, nccl = self.of_device, hasattr(self.of_device, "_group_start")
        if nccl:  # its destructor may take its time, and its threads know nothing of Python
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
        """Give the backends back, on a thread: their destructors may take their time.

        Args:
            idle: Tells whether no operation is under way any more. A Gloo operation that was aborted can stay under
                way for ever, and the destructor would wait for it: such a backend is leaked, with its threads.
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
    nccl = [backend for backend in found if hasattr(backend, "_group_start")]
    if nccl:
        # Inside one NCCL group, so that the aborts of several communicators cannot wait for each other.
        nccl[0]._group_start()
        for backend in nccl:
            backend.abort()
        nccl[0]._group_end()
    for backend in found:
        if backend not in nccl:
            with suppress(Exception):  # torch's base class raises where a backend cannot be aborted
                backend.abort()


def leak(*objects: Any) -> None:
    """Keep objects for ever, also through the interpreter's end, so that their destructors never run."""
    for each in objects:
        if each is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


def form(
    store: Store,
    rank: int,
    size: int,
    *,
    carrier: Carrier | None,
    staged: frozenset[str],
    local: bool,
    check: Callable[[], None],
    on_abandon: Callable[[], None],
) -> Backends:
    """Connect with the other replicas, all of which are known to be on their way here.

    Args:
        store: Where addresses are exchanged, under a prefix that nobody used before.
        rank, size: Who is who.
        carrier: What carries the devices' own tensors, beside Gloo; None where nothing does.
        staged: See `Backends`.
        local: All replicas are on this machine: listen on loopback only.
        check: Called while waiting; raises when there is no point any more.
        on_abandon: Called when a thread is left behind that may block in the store's connection.

    Raises:
        CollectiveError: The connection failed.
    """
    made: list[Any] = []

    # On a thread, since the constructors cannot be interrupted: when a peer dies in these milliseconds, this replica
    # leaves the thread behind instead of waiting with it.
    def make() -> None:
        try:
            made.append(_make(store, rank, size, carrier, staged, local))
        except BaseException as error:  # noqa: BLE001  (raised on the thread that waits)
            made.append(error)
        finished.set()

    finished = threading.Event()
    thread = threading.Thread(target=make, name="distnb-form", daemon=True)
    exits.note(thread)
    began = time.monotonic()
    try:
        thread.start()
        while not finished.wait(0.05):
            check()
            if time.monotonic() - began > _HOPELESS_S:
                raise CollectiveError(
                    f"Replica {rank} met the other {size - 1} replicas at the store, but could not connect to them "
                    f"within {_HOPELESS_S:.0f} s. Is there a firewall between the machines, or is it the wrong network "
                    "interface (set GLOO_SOCKET_IFNAME)?"
                )
    except BaseException:  # an order to end the program is raised anywhere, not in `check` alone
        on_abandon()
        raise
    if isinstance(made[0], Backends):
        return made[0]
    raise CollectiveError(f"Replica {rank} could not connect to the other {size - 1} replicas: {made[0]}") from made[0]


def _make(store: Store, rank: int, size: int, carrier: Carrier | None, staged: frozenset[str], local: bool) -> Backends:
    with _device_making:  # its event loop is known by being new; whoever is left behind below must not hold the lock
        before = event_loops()
        device = _gloo_device(local)
        made = [poller for pipe, poller in event_loops().items() if pipe not in before]
    gloo = _gloo(PrefixStore("gloo", store), rank, size, device, _THREADS if local else _THREADS_ACROSS)
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
    if carrier is not None:
        make = _nccl if carrier.name == "nccl" else _from_outside
        backends[carrier.device.type] = make(PrefixStore(carrier.name, store), rank, size, carrier)
    return Backends(backends, staged, _plain(rank, size, backends), connections)


def _plain(rank: int, size: int, backends: Mapping[str, Any]) -> dist.ProcessGroup:
    plain: dist.ProcessGroup = cast(Any, dist.ProcessGroup)(rank, size)
    # A backend from outside may be a process group written in Python, which C++ cannot hold.
    kinds = {kind: _type_of(backend) for kind, backend in backends.items() if isinstance(backend, Backend)}
    plain._set_default_backend(list(kinds.values())[-1])
    for kind, backend_type in kinds.items():
        plain._register_backend(torch.device(kind), backend_type, backends[kind])
    return plain


def _type_of(backend: Backend) -> Any:
    types = dist.ProcessGroup.BackendType
    known = {"gloo": types.GLOO, "nccl": types.NCCL}
    return known.get(backend.name(), types.CUSTOM)


def _gloo_device(local: bool) -> Any:
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or ("lo" if local else "")
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface.split(",")[0], lazy_init=False)
    return dist.ProcessGroupGloo.create_default_device(lazy_init=False)


def _gloo(store: Store, rank: int, size: int, device: Any, threads: int) -> Any:
    options = cast(Any, dist.ProcessGroupGloo)._Options()
    options._devices = [device]
    options._threads = threads
    options._timeout = FOREVER
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Store, rank: int, size: int, carrier: Carrier) -> Any:
    # Aborting is ours alone: torch's watchdog would end the process over a communicator that we aborted.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = FOREVER
    backend = dist.ProcessGroupNCCL(store, rank, size, options)
    # Now, and not in the first operation, where the connecting would block uninterruptibly.
    backend.eager_connect_single_device(carrier.device)
    return backend


def _from_outside(store: Store, rank: int, size: int, carrier: Carrier) -> Any:
    """A backend of a package beside torch, made as `init_process_group` makes it."""
    plugin = dist.Backend._plugins[carrier.name.upper()]
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, FOREVER)
    options = _DistributedBackendOptions()
    options.store, options.group_rank, options.group_size = store, rank, size
    options.timeout, options.group_id = FOREVER, carrier.group
    options.global_ranks_in_group = list(carrier.replicas)
    return plugin.creator_fn(options, None)
