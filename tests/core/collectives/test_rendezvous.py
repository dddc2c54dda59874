"""The starts of replicas in a store that their launcher keeps, as torchrun does."""

from __future__ import annotations

import threading

import pytest

from distnb.collectives.group.rendezvous import attempt
from distnb.compat.c10d_internals import HashStore
from distnb.errors import CollectiveError


def test_a_start_is_not_mistaken_for_one_of_dead_processes() -> None:
    store = HashStore()
    names: list[list[str]] = []
    for size in (3, 2, 3, 1, 3):
        found = [""] * size

        def arrive(rank: int, found: list[str] = found, size: int = size) -> None:
            found[rank] = attempt(store, rank, size, timeout_s=20.0)

        threads = [threading.Thread(target=arrive, args=(rank,)) for rank in reversed(range(size))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        names.append(found)
    assert all(len(set(found)) == 1 and found[0] for found in names)
    assert len({found[0] for found in names}) == len(names)


def test_a_start_without_all_ranks_ends_in_time() -> None:
    with pytest.raises(CollectiveError, match=r"of 2 ranks did not come: 1\."):
        attempt(HashStore(), 0, 2, timeout_s=0.1)
