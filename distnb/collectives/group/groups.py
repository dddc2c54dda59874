"""The process group of this replica: joined, shared by everyone in the process, aborted from any thread.

A team of engines forms one group per generation. Everything that communicates uses it: our own collectives, raw
torch.distributed calls, DistributedDataParallel, and libraries. See `process_group.py` for what guards it.

This module runs on the replicas.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
import time

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from distnb.accelerators import device_of_rank
from distnb.collectives.group import exits, membership, rendezvous, world
from distnb.collectives.group.gloo_sockets import give_up_on_silence
from distnb.collectives.group.interface import Group
from distnb.collectives.group.membership import Member
from distnb.collectives.group.rendezvous import StoreClient
from distnb.errors import CollectiveError, CollectiveMismatchError, ProgramAborted
from distnb.topology import Device, Team, parse_device

__all__ = [
    "Group",
    "abort",
    "current",
    "failure",
    "join",
    "join_from_env",
    "leave",
    "program_began",
    "program_ended",
]

_members: dict[tuple[int, ...], Member] = {}
_active: Member | None = None
_group: Group | None = None
_joining: membership.Attempt | None = None
_lock = threading.RLock()
_pid = os.getpid()
_EXIT_GRACE_S = 3.0
_script_joins = 0
_SCRIPT = -1  # the key of the group that was joined from the environment


def join(team: Team, rank: int, device: Device, *, timeout_s: float | None = None) -> Group:
    """Make the group of this team and generation the default process group, forming it if it is new.

    Waits for the other replicas of the team. Groups of other teams stay connected beside it, as long as they are of
    the newest generation.

    Args:
        team: Who runs together, and where their store is.
        rank: Which replica this process is.
        device: This replica's device.
        timeout_s: How long to wait for the others; None for as long as nobody aborts.

    Returns:
        The group. RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set accordingly.

    Raises:
        CollectiveError: The others did not come in time, or could not be connected to.
        ProgramAborted: `abort` was called meanwhile.
    """
    member = _members.get(team.engines)
    if member is not None and member is _active and member.generation == team.generation and _group is not None:
        return _group
    return _join(team.engines, team, rank, device, StoreClient.of(team), timeout_s, apart=team.apart)


def _join(
    key: tuple[int, ...],
    team: Team,
    rank: int,
    device: Device,
    client: StoreClient,
    timeout_s: float | None,
    apart: bool,
) -> Group:
    global _active, _group, _joining
    world.install()
    attempt = membership.Attempt()
    with _lock:
        _joining = attempt
    try:
        for other in list(_members.values()):
            if other.generation < team.generation and other.key != key:
                other.suspend()
        member = _members.get(key)
        if member is not None and (member.rank != rank or member.devices != team.devices):
            member.suspend()
            member = None
        if member is None:
            member = Member(key, rank, device, team.devices, apart)
        member.advance(team, client, attempt, timeout_s)
        with _lock:
            _members[key] = member
            member.world.enter()
            member.set_environment(team)
            if _group is None or _active is not member or _group.generation != team.generation:
                _group = Group(member.group, device, team.generation, team.devices)
            _active = member
        attempt.check()
    finally:
        with _lock:
            _joining = None
    membership.tend_all(_members)
    return _group


def join_from_env(*, sockets_only: bool = False, timeout_s: float | None = None) -> Group:
    """Join the group that torchrun or `distnb run` describes by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    A default group that the program initialised before is taken over: it gives the rank, the size and the store.

    Args:
        sockets_only: Use Gloo also where each replica has a GPU of its own.
        timeout_s: How long to wait for the others; None for as long as it takes.

    Raises:
        CollectiveError: The variables are not set, or the others cannot be reached.
    """
    global _script_joins
    if _group is not None:
        return _group
    found = world.foreign_default()
    if found is not None:
        rank, size, store = found.rank, found.size, found.store
    else:
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise CollectiveError(
                f"{', '.join(missing)} is not set: this process was not started as one of several replicas. "
                "Start the program by `distnb run script.py -n 2` or by torchrun."
            )
        store, rank, size = next(iter(dist.rendezvous("env://")))  # type: ignore[attr-defined]
    local = int(os.environ.get("LOCAL_RANK", rank))
    named = os.environ.get("DISTNB_DEVICE")  # `distnb run --devices …`: several replicas may share one
    device = parse_device(named) if named else device_of_rank(local)
    _script_joins += 1  # after `leave` the keys of the last time are still in the store
    prefixed = PrefixStore(f"distnb/{_script_joins}", store)
    card = rendezvous.Card(rendezvous.host(), os.getpid(), device=str(device))
    where = PrefixStore("devices", prefixed)
    cards = rendezvous.meet(where, rank, size, card, lambda absent: None, timeout_s=timeout_s)
    devices = tuple(parse_device(other.device) for other in cards)
    apart = not sockets_only and len({(other.host, other.device) for other in cards}) == size
    address, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", 0))
    if len({other.host for other in cards}) > 1:
        give_up_on_silence(port)
    team = Team(tuple(range(size)), devices, 0, address, port)
    group = _join((_SCRIPT, *team.engines), team, rank, device, StoreClient(lambda: prefixed), timeout_s, apart)
    if found is not None:
        group.process_group.set_timeout(found.timeout)
    program_began(1)
    return group


def current() -> Group | None:
    """The group that was joined last, or None."""
    return _group


def failure() -> BaseException | None:
    """What ended the current group, or None while it is whole. Waits in C++ raise a RuntimeError in its place."""
    return _active.group.failure if _active is not None else None


def abort(reason: str) -> None:
    """End every collective of this process, now: it raises ProgramAborted, and so does every later one.

    Safe from any thread and more than once. Waits in C++ (DistributedDataParallel's) end with a RuntimeError. The
    next generation of the group is formed by `join`.

    Args:
        reason: Text of the ProgramAborted that is raised.
    """
    with _lock:
        if _joining is not None:
            _joining.abort(reason)
        member = _active
    if member is not None:
        member.fail(ProgramAborted(reason))


def leave() -> None:
    """Drop all groups, and give torch.distributed back as it was. Never blocks."""
    global _active, _group
    with _lock:
        world.leave()
        members = list(_members.values())
        _members.clear()
        _active = _group = None
    for member in members:
        member.suspend()


def program_began(program: int) -> None:
    """A program began on this replica: from now on others can tell whether it is still in it.

    Args:
        program: Its serial number, equal on all replicas and growing.
    """
    if _active is not None:
        world.program_began()
        _active.begin(program)


def program_ended(failed: bool | None = None) -> bool:
    """The program ended on this replica: it will call no further collectives.

    Args:
        failed: Whether by an error, which others will be told of in another way. None: an exception is being handled.

    Returns:
        Whether it caught errors that left the group less than whole: the next program is to have a new generation.

    Raises:
        CollectiveMismatchError: It ended well, as did another replica's part, but with more or fewer collectives.
    """
    if _active is None:
        return False
    disturbed = _active.was_disturbed
    _active.end(sys.exc_info()[1] is not None if failed is None else failed)
    return disturbed


def _at_exit() -> None:
    member = _active
    if member is not None and member.key[0] == _SCRIPT:
        try:
            member.end(failed=getattr(sys, "last_value", None) is not None or member.group.failure is not None)
        except CollectiveMismatchError as error:
            print(f"distnb: {error}", file=sys.stderr)
    if os.getpid() != _pid:
        return
    exits.ending.set()
    until = time.monotonic() + _EXIT_GRACE_S
    for each in list(_members.values()):
        each.end_process(until)
    exits.join_all(until)


def _in_forked_child() -> None:
    """A forked child, such as a DataLoader's worker, is no replica.

    It takes no lock, which the parent's threads may hold, and destroys nothing, which would wait for those threads.
    """
    global _active, _group, _pid
    members = list(_members.values())
    if members:
        # Garbage of the parent can be the last to hold what Gloo's threads served.
        gc.freeze()
    else:
        _pid = os.getpid()  # what it joins from now on is its own
    for member in members:
        member.forget_in_child()
    _active = _group = None


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_in_forked_child)
