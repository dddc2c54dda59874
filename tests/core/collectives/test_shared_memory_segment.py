"""Shared memory: what one replica writes and the others see, and what remains private."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from distnb.collectives.shared_memory import segment
from distnb.collectives.shared_memory.segment import SharedMemory
from distnb.errors import CollectiveError

PAGE = 4096


class Pair:
    """Two replicas as threads, each with its own view as its group."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=30)
        self._values: list[Any] = [None, None]

    def replica(self, rank: int) -> Any:
        pair = self

        class Group:
            def __init__(self) -> None:
                self.rank = rank

            def all_gather_object(self, value: object) -> list[object]:
                pair._barrier.wait()
                pair._values[rank] = value
                pair._barrier.wait()
                return list(pair._values)

        return Group()


def segments(nbytes: int) -> list[Any]:
    """Return one segment per replica, or its exception."""
    pair = Pair()

    def made(rank: int) -> Any:
        try:
            return SharedMemory(pair.replica(rank), nbytes)
        except CollectiveError as error:
            return error

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(made, range(2)))


def test_writes_to_a_private_view_remain_until_it_is_forgotten() -> None:
    first, second = segments(3 * PAGE + 1)
    assert first.nbytes == 4 * PAGE
    common = first.common(0, 4 * PAGE)
    common.fill_(7)
    views = [each.own(0, 4 * PAGE) for each in (first, second)]
    assert all(bool((view == 7).all()) for view in views)
    assert (first.changed(), second.changed()) == ([], [])

    views[0][PAGE] = 1
    views[0][3 * PAGE] = 1
    assert first.changed() == [1, 3]
    assert second.changed() == []
    assert (views[1][PAGE].item(), common[PAGE].item()) == (7, 7)

    common.fill_(9)  # visible to every view without a copy
    assert views[1][PAGE].item() == 9
    assert (views[0][0].item(), views[0][PAGE].item(), views[0][PAGE + 1].item()) == (9, 1, 7)
    first.forget([1, 3])
    assert bool((views[0] == 9).all())
    assert first.changed() == []
    assert [list(SharedMemory.pages(begin, n)) for begin, n in ((0, 1), (0, PAGE), (PAGE - 1, 2))] == [[0], [0], [0, 1]]


def test_a_tensor_keeps_the_memory_alive() -> None:
    first, second = segments(PAGE)
    view, other = first.own(0, PAGE), second.common(0, PAGE)
    del first, second
    other.fill_(3)
    assert torch.equal(view, other)


def test_replicas_without_shared_memory_get_the_same_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(segment.host, "identity", lambda: threading.current_thread().name)
        for error in segments(PAGE):
            assert isinstance(error, CollectiveError)
            assert "different machines" in str(error)
            assert "MirroredStrategy" in str(error)
    for error in segments(2**60):
        assert isinstance(error, CollectiveError)
        assert "not available" in str(error)
