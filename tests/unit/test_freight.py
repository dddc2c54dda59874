"""Frames that go through shared memory arrive equal, belong to the receiver, and leave nothing behind."""

from __future__ import annotations

import errno
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distnb.errors import MessageError
from distnb.wire import freight
from distnb.wire.codec import Frame
from distnb.wire.freight import Harbour, Passage, connect, is_large, is_manifest, ship, unload

LARGE = 5 << 20
MIDDLE = 300 << 10


@pytest.fixture
def harbour() -> Iterator[Harbour]:
    harbour = Harbour()
    yield harbour
    harbour.close()


@contextmanager
def engines(harbour: Harbour, *numbers: int) -> Iterator[list[Passage]]:
    passages = []
    for number in numbers:
        passage = connect(harbour.name, harbour.token, number)
        assert passage is not None
        passages.append(passage)
    harbour.let_in()
    yield passages
    for passage in passages:
        passage.close()


def descriptors() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


def freight_in_memory() -> int:
    """Mappings and descriptors of this process that belong to shipped frames."""
    mapped = Path("/proc/self/maps").read_text().count("distnb-freight")
    held = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            held += "distnb-freight" in os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the listing's own
            continue
    return mapped + held


def message() -> list[Frame]:
    rng = np.random.default_rng(0)
    sizes = (40, LARGE, 7, MIDDLE, freight.FREIGHT_NBYTES - 1, 2 * LARGE + 1, 2 * MIDDLE + 3, 0)
    return [b"\x80 header", *(rng.integers(0, 256, size, np.uint8).data for size in sizes)]


def same(frames: list[Frame], others: list[Frame]) -> bool:
    return [bytes(frame) for frame in frames] == [bytes(frame) for frame in others]


# -- round trips ------------------------------------------------------------------------------------------------------


def test_every_frame_arrives_in_its_place(harbour: Harbour) -> None:
    with engines(harbour, 3) as (engine,):
        frames = message()
        rest, reached = ship(frames, harbour.passages([3]))
        assert reached == {3}
        assert is_manifest(rest[0])
        assert not is_large(rest)
        assert same(unload(rest, engine), frames)


def test_the_way_back(harbour: Harbour) -> None:
    with engines(harbour, 3) as (engine,):
        frames = message()
        rest, reached = ship(frames, {0: engine})
        assert reached == {0}
        assert same(unload(rest, harbour.passages([3])[3]), frames)


def test_small_messages_are_left_alone(harbour: Harbour) -> None:
    with engines(harbour, 1):
        frames: list[Frame] = [b"header", bytes(freight.FREIGHT_NBYTES - 1)]
        assert not is_large(frames)
        assert ship(frames, harbour.passages([1])) == (frames, set())
        assert is_large([bytes(freight.FREIGHT_NBYTES)])


@pytest.mark.parametrize("nbytes", [MIDDLE, LARGE], ids=["copied", "mapped"])
def test_each_receiver_has_its_own_and_the_sender_too(harbour: Harbour, nbytes: int) -> None:
    sent = np.zeros(nbytes, np.uint8)
    with engines(harbour, 0, 1) as passages:
        rest, reached = ship([b"header", sent.data], harbour.passages([0, 1]))
        assert reached == {0, 1}
        sent[:] = 9  # the sender may go on at once
        first, second = (np.frombuffer(unload(rest, passage)[1], np.uint8) for passage in passages)
        first += 1
        assert (first.min(), first.max()) == (1, 1)
        assert (second.min(), second.max()) == (0, 0)


def test_the_memory_cannot_be_changed_by_who_has_the_descriptor(harbour: Harbour) -> None:
    with engines(harbour, 0) as (engine,):
        harbour.passages([0])[0].offer(bytes(12), descriptor := freight._fill([bytes(LARGE)]))
        os.close(descriptor)
        taken = engine.take(bytes(12))
        with pytest.raises(PermissionError):
            os.pwrite(taken, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(taken, 0)
        os.close(taken)


def test_more_large_frames_than_a_message_may_have_descriptors(
    harbour: Harbour, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(freight, "_MOST_OWN", 2)
    frames: list[Frame] = [b"header", *(np.full(LARGE, value, np.uint8).data for value in range(5))]
    with engines(harbour, 0) as (engine,):
        rest, reached = ship(frames, harbour.passages([0]))
        assert reached == {0}
        assert same(unload(rest, engine), frames)


def test_where_there_is_no_room_for_a_mapping_it_is_read(harbour: Harbour, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freight, "_map", lambda descriptor, nbytes: None)
    with engines(harbour, 0) as (engine,):
        frames = message()
        rest, _ = ship(frames, harbour.passages([0]))
        assert same(unload(rest, engine), frames)


# -- nothing is left ----------------------------------------------------------------------------------------------------


def test_memory_goes_with_what_is_built_on_it(harbour: Harbour) -> None:
    with engines(harbour, 0) as (engine,):
        passages = harbour.passages([0])
        before = descriptors()
        rest, _ = ship(message(), passages)
        assert freight_in_memory() == 0  # it is on its way
        kept = [np.frombuffer(frame, np.uint8) for frame in unload(rest, engine) if memoryview(frame).nbytes == LARGE]
        assert descriptors() == before
        assert freight_in_memory() == 1  # of two large frames one is kept
        part = kept.pop()[5:10]
        assert freight_in_memory() == 1
        del part
        assert freight_in_memory() == 0


def test_what_a_receiver_never_opens_costs_the_sender_nothing_and_ends_with_the_passage(harbour: Harbour) -> None:
    before = descriptors()
    with engines(harbour, 0, 1) as (engine, other):
        harbour.passages([0, 1])
        connected = descriptors()
        ship(message(), harbour.passages([0, 1]))  # of these the message itself is never sent
        rest, reached = ship(frames := message(), harbour.passages([0, 1]))
        assert descriptors() == connected
        assert reached == {0, 1}
        assert same(unload(rest, engine), frames)
        other.close()
        assert ship(frames, harbour.passages([0, 1]))[1] == {0}
    harbour.close()
    assert len(descriptors()) == len(before) - 1  # the listener
    assert freight_in_memory() == 0


def test_a_full_queue_sends_the_rest_through_the_channel(harbour: Harbour) -> None:
    with engines(harbour, 0) as (engine,):
        frames: list[Frame] = [b"header", bytes(MIDDLE)]
        shipped = []
        while (one := ship(frames, harbour.passages([0])))[1]:
            shipped.append(one[0])
            assert len(shipped) < 10_000
        assert one == (frames, set())
        for rest in shipped:
            assert same(unload(rest, engine), frames)
        assert ship(frames, harbour.passages([0]))[1] == {0}


def test_a_process_with_no_descriptor_to_spare_receives_all_the_same(harbour: Harbour) -> None:
    with engines(harbour, 0) as (engine,):
        frames = message()
        rest, _ = ship(frames, harbour.passages([0]))
        with no_more_descriptors():
            with pytest.raises(OSError, match="Too many open files"):
                os.dup(0)
            assert same(unload(rest, engine), frames)
            assert ship(frames, {0: engine}) == (frames, set())  # it cannot make memory: through the channel, then


def test_a_lost_descriptor_is_told_with_the_cure(harbour: Harbour, monkeypatch: pytest.MonkeyPatch) -> None:
    with engines(harbour, 0) as (engine,):
        rest, _ = ship(message(), harbour.passages([0]))
        monkeypatch.setattr(engine, "_free_spare", lambda: None)
        with no_more_descriptors(), pytest.raises(MessageError, match="as many files open as it may"):
            unload(rest, engine)


@contextmanager
def no_more_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)  # the lowest that is free; all above are forbidden
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_no_memory_for_it_sends_all_through_the_channel(harbour: Harbour, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(os, "write", refuse)
    with engines(harbour, 0):
        passages = harbour.passages([0])
        before = descriptors()
        frames = message()
        assert ship(frames, passages) == (frames, set())
        assert descriptors() == before


# -- who may ------------------------------------------------------------------------------------------------------------


def test_another_token_is_not_let_in(harbour: Harbour) -> None:
    stranger = connect(harbour.name, "0" * 64, 0)
    assert stranger is not None
    frames = message()
    assert ship(frames, {0: stranger}) == (frames, set())  # not before it is let in
    harbour.let_in()
    assert harbour.passages([0]) == {}
    assert ship(frames, {0: stranger}) == (frames, set())
    with pytest.raises(MessageError, match="has ended"):
        stranger.take(bytes(12))
    stranger.close()


def test_another_user_is_not_let_in(harbour: Harbour, monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = connect(harbour.name, harbour.token, 0)
    assert stranger is not None
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    harbour.let_in()
    assert harbour.passages([0]) == {}
    assert connect(harbour.name, harbour.token, 1) is None  # nor does an engine tell another user the token
    stranger.close()


def test_a_silent_stranger_stops_nobody(harbour: Harbour) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect(f"\0{harbour.name}")
        with engines(harbour, 1):
            assert list(harbour.passages([0, 1])) == [1]
            assert silent.recv(16) == b""


def test_an_engine_that_takes_anothers_place(harbour: Harbour) -> None:
    with engines(harbour, 0, 0) as (old, new):
        frames = message()
        rest, _ = ship(frames, harbour.passages([0]))
        assert same(unload(rest, new), frames)
        with pytest.raises(MessageError, match="has ended"):
            unload(rest, old)


def test_nobody_listens_there() -> None:
    assert connect("", "", 0) is None
    assert connect("distnb-of-a-notebook-that-is-gone", "token", 0) is None


def test_a_message_of_which_the_memory_cannot_come(harbour: Harbour) -> None:
    with engines(harbour, 0, 1) as (engine, other):
        rest, _ = ship(message(), {0: harbour.passages([0])[0]})
        with pytest.raises(MessageError, match="no way"):
            unload(rest, None)
        with pytest.raises(MessageError, match="did not arrive"):
            unload(rest, other)
        unload(rest, engine)
