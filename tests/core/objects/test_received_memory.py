"""Digests of received memory. They are computed again if, and only if, a page was written to."""

import ctypes
import os
import threading

import numpy as np
import pytest
import xxhash

from distnb.objects.memory import received_memory
from distnb.objects.memory.received_memory import WATCHED_NBYTES, digest_at
from distnb.wire.shared_memory_buffer import SharedMemoryBuffer, read_frame

NBYTES = WATCHED_NBYTES + 12_345


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list of the sizes of all memory that is read for a digest."""
    sizes: list[int] = []

    class Counting:
        @staticmethod
        def xxh3_128_digest(memory: ctypes.Array[ctypes.c_char]) -> bytes:
            sizes.append(len(memory))
            return xxhash.xxh3_128_digest(memory)

    monkeypatch.setattr(received_memory, "xxhash", Counting)
    return sizes


def received(nbytes: int = NBYTES) -> np.ndarray:
    sent = SharedMemoryBuffer(os.urandom(nbytes))
    return np.frombuffer(read_frame(sent.descriptor, nbytes), np.uint8)


def check(array: np.ndarray) -> None:
    assert digest_at(array.ctypes.data, array.nbytes) == xxhash.xxh3_128_digest(array.tobytes())


def test_memory_that_nobody_wrote_to_is_read_once(read: list[int]) -> None:
    array = received()
    for _ in range(3):
        check(array)
        array.sum()
    assert read == [NBYTES]


@pytest.mark.parametrize("place", [0, 4096, NBYTES // 2, NBYTES - 1])
@pytest.mark.parametrize("before", [False, True], ids=["written later", "written before the first digest"])
def test_memory_is_read_again_once_a_byte_was_written(read: list[int], place: int, before: bool) -> None:
    array = received()
    if not before:
        check(array)
        check(array)
    array[place] ^= 1
    for _ in range(2):
        check(array)
        array[place] ^= 1  # also if the content is the earlier one
    check(array)
    assert len(read) == 3 + (not before)


def test_a_write_while_the_memory_is_read_counts(read: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    array = received()
    kept = received_memory.xxhash.xxh3_128_digest

    def digest_and_write(memory: ctypes.Array[ctypes.c_char]) -> bytes:
        found = kept(memory)
        writer = threading.Thread(target=lambda: array.__setitem__(0, array[0] ^ 1))
        writer.start()
        writer.join()
        return found

    monkeypatch.setattr(received_memory.xxhash, "xxh3_128_digest", staticmethod(digest_and_write))
    digest_at(array.ctypes.data, NBYTES)
    monkeypatch.setattr(received_memory.xxhash, "xxh3_128_digest", staticmethod(kept))
    check(array)
    assert len(read) == 2


def test_a_forked_process_sees_its_own_writes(read: list[int]) -> None:
    array = received()
    check(array)
    child = os.fork()
    if not child:
        try:
            check(array)
            same = len(read) == 1
            array[-1] ^= 1
            check(array)
            os._exit(0 if same and len(read) == 2 else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    check(array)
    assert len(read) == 1


def test_an_address_that_is_used_again_has_no_digest(read: list[int]) -> None:
    array = received()
    check(array)
    assert received_memory._digests
    del array
    assert not received_memory._digests
    for _ in range(3):
        check(received())
    assert len(read) == 4


def test_other_memory_is_read_each_time(read: list[int]) -> None:
    small, part, own = received(WATCHED_NBYTES - 1), received()[1:], np.zeros(NBYTES, np.uint8)
    for array in (small, part, own):
        check(array)
        check(array)
    assert len(read) == 6


def test_memory_is_read_each_time_if_the_kernel_does_not_show_copies(
    read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(received_memory, "_has_copies", lambda address, nbytes: False)
    received_memory._shows_copies.cache_clear()
    try:
        array = received()
        check(array)
        array[7] ^= 1
        check(array)
    finally:
        received_memory._shows_copies.cache_clear()
    assert len(read) == 2
