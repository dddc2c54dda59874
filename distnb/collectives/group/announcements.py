"""Texts that one replica leaves in the store for other replicas, which may or may not wait for them.

A collective needs all replicas; an announcement does not. For example, replica 0 saves a file, and the others wait for
it or never ask. Both sides derive the announcement's name from the number of collectives that they have called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from distnb.errors import CollectiveMismatchError

if TYPE_CHECKING:
    from distnb.collectives.group.process_group import GuardedProcessGroup

__all__ = ["announce", "await_announcement", "place"]


def place(group: GuardedProcessGroup) -> str:
    """Return a name of the place in the program, which is equal on all replicas that have called the same
    collectives."""
    communicator, _ = group.ready()
    number = communicator.verifier.number if communicator.verifier is not None else 0
    return f"{communicator.name}/announced/{number}"


def announce(group: GuardedProcessGroup, name: str, text: str) -> None:
    """Leave a text under a new name, which begins with a `place`. Return when the others can read it."""
    store = group.membership.client.store()
    store.set(name, text)
    # The store does not answer `set`. Without a request that it answers, this replica could reach its next collective,
    # which the others see in shared memory, before the store has the text: they would take it for missing.
    store.check([name])


def await_announcement(group: GuardedProcessGroup, name: str, source: int, what: str) -> str:
    """Wait for a text that another replica leaves. An abort ends the wait.

    Args:
        group: The replicas.
        name: Its name, which begins with a `place`.
        source: The replica that leaves it.
        what: The work of that replica, for errors.

    Raises:
        CollectiveMismatchError: The source has ended its program, or waits for this replica elsewhere.
    """
    store, (communicator, _) = group.membership.client.store(), group.ready()
    verifier = communicator.verifier

    def arrived() -> bool:
        # Read the source's phase before the text, because it leaves the text before it goes on.
        ahead = finished = False
        if verifier is not None:
            program, _, last = verifier.log.phase(source)
            ahead = last > verifier.number and program == verifier.program
            finished = verifier.phase(source) == "ended"
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
        f"Replica {group.membership.rank} waits until replica {source} has done {what}, and replica {source} {there}. "
        "Replica 0 must call it, too: it does the work, and the others wait."
    )
