"""Texts that one replica leaves in the store for the replicas that wait for them, if any do.

A collective wants all replicas. An announcement does not: replica 0 may save a file, and the others wait until it has,
or never ask. Both sides find the same name for it, since they have called as many collectives before.
"""

from __future__ import annotations

from typing import NoReturn

from distnb.collectives.group.process_group import GuardedProcessGroup
from distnb.errors import CollectiveMismatchError

__all__ = ["announce", "await_announcement", "place"]


def place(group: GuardedProcessGroup) -> str:
    """Name the place in the program: it is the same on all replicas that have called the same collectives."""
    communicator, _ = group.ready()
    number = communicator.verifier.number if communicator.verifier is not None else 0
    return f"{communicator.name}/announced/{number}"


def announce(group: GuardedProcessGroup, name: str, text: str) -> None:
    """Leave a text under a name that was not used before, beginning with a `place`."""
    group.member.client.store().set(name, text)


def await_announcement(group: GuardedProcessGroup, name: str, source: int, what: str) -> str:
    """Wait for a text that another replica leaves. An abort ends the wait.

    Args:
        group: The replicas.
        name: Its name, which begins with a `place`.
        source: The replica that leaves it.
        what: What that replica does before, for errors.

    Raises:
        CollectiveMismatchError: The source has ended its program, or waits for this replica elsewhere.
    """
    store, (communicator, _) = group.member.client.store(), group.ready()
    verifier = communicator.verifier

    def arrived() -> bool:
        # First where the source is, then the text: it leaves the text before it goes on.
        ahead = finished = False
        if verifier is not None:
            program, phase, last = verifier.log.phase(source)
            ahead = last > verifier.number and program == verifier.program
            finished = (program == verifier.program and phase == "ended") or program > verifier.program
        if store.check([name]):
            return True
        if ahead or finished:
            _raise_elsewhere(group, source, what, verifier.describe(last, source) if ahead and verifier else "")
        return False

    communicator.wait_until(arrived)
    return store.get(name).decode()


def _raise_elsewhere(group: GuardedProcessGroup, source: int, what: str, waits_in: str) -> NoReturn:
    there = f"waits for the others in {waits_in}" if waits_in else "has ended its program"
    raise CollectiveMismatchError(
        f"Replica {group.member.rank} waits until replica {source} has done {what}, and replica {source} {there}. "
        "Replica 0 must call it, too: it does the work, and the others wait."
    )
