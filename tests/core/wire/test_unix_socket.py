"""Messages between processes of one host arrive equal and in order, belong to the receiver, and leave nothing."""

from __future__ import annotations

import errno
import os
import resource
import select
import socket
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distnb.errors import MessageError, StartError
from distnb.wire import shared_memory_buffer, unix_socket
from distnb.wire.codec import Frame
from distnb.wire.unix_socket import Listener, UnixSocket, connect, pack
from tests.support.processes import wait_until

LARGE = 5 << 20
MIDDLE = 300 << 10

Pair = tuple[UnixSocket, UnixSocket]


@pytest.fixture
def listener() -> Iterator[Listener]:
    with tempfile.TemporaryDirectory() as directory:  # pytest's own is too deep for a socket's path
        listener = Listener(directory)
        yield listener
        listener.close()
        assert os.listdir(directory) == []


@contextmanager
def pairs(listener: Listener, *engines: int) -> Iterator[list[Pair]]:
    """Return both ends for each engine: the notebook's and the engine's."""
    theirs = {engine: come(listener, engine) for engine in engines}
    ours = listener.accept()
    yield [(ours[engine], theirs[engine]) for engine in engines]
    for one in (*ours.values(), *theirs.values()):
        one.close()


@pytest.fixture
def pair(listener: Listener) -> Iterator[Pair]:
    with pairs(listener, 3) as (pair,):
        yield pair


def come(listener: Listener, engine: int) -> UnixSocket:
    return connect(listener.path, engine)


def receive(end: UnixSocket) -> list[Frame]:
    """Wait for the next message."""
    poll = select.poll()
    poll.register(end, select.POLLIN)
    while (frames := end.receive_frames()) is None:
        assert poll.poll(60_000)
    return frames


def descriptors() -> Counter[str]:
    """Return the open files. Their numbers do not count, since other tests' leftovers may close meanwhile."""
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            found[os.readlink(f"/proc/self/fd/{name}")] += 1
    return found


def buffers_in_memory() -> int:
    """Return mappings and descriptors of this process that belong to frames."""
    mapped = Path("/proc/self/maps").read_text().count("distnb-buffer")
    return mapped + sum("distnb-buffer" in opened for opened in descriptors().elements())


def message() -> list[Frame]:
    rng = np.random.default_rng(0)
    sizes = (40, LARGE, 7, MIDDLE, shared_memory_buffer.LARGE_NBYTES - 1, 2 * LARGE + 1, 2 * MIDDLE + 3, 0)
    return [b"\x80 header", *(rng.integers(0, 256, size, np.uint8).data for size in sizes)]


def same(frames: list[Frame], others: list[Frame]) -> bool:
    return [bytes(frame) for frame in frames] == [bytes(frame) for frame in others]


# -- round trips ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "frames",
    [[b"small"], [b"h" * 70_000], [b"header", bytes(range(256)) * 4], message()],
    ids=["one packet", "a long header", "two frames", "all kinds"],
)
def test_frames_arrive_in_order_both_ways(pair: Pair, frames: list[Frame]) -> None:
    for sender, receiver in (pair, pair[::-1]):
        assert sender.send_packets(pack(frames))
        assert same(receive(receiver), frames)
        assert receiver.receive_frames() is None


def test_messages_keep_their_order_for_all_kinds_of_frames(pair: Pair) -> None:
    sender, receiver = pair
    messages = [[b"header", np.full(size, size % 251, np.uint8).data] for size in (9, 10**5, 2, 10**6, 1, 10**7, 5)]
    for one in messages:
        assert sender.send_packets(pack(one))
    for one in messages:
        assert same(receive(receiver), one)


@pytest.mark.parametrize("nbytes", [2000, MIDDLE, LARGE], ids=["in the packet", "mapped", "large"])
def test_sender_and_receivers_have_separate_memory(listener: Listener, nbytes: int) -> None:
    sent = np.zeros(nbytes, np.uint8)
    with pairs(listener, 0, 1) as ends:
        packets = pack([b"header", sent.data])
        sent[:] = 9  # the sender may go on at once
        assert all(sender.send_packets(packets) for sender, _ in ends)
        first, second = (np.frombuffer(receive(receiver)[1], np.uint8) for _, receiver in ends)
        first += 1
        assert (first.min(), first.max()) == (1, 1)
        assert (second.min(), second.max()) == (0, 0)


def test_the_descriptors_holder_cannot_change_the_memory() -> None:
    memory = shared_memory_buffer.SharedMemoryBuffer(bytes(LARGE))
    with pytest.raises(PermissionError):
        os.pwrite(memory.descriptor, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.descriptor, 0)


def test_a_message_may_have_more_large_frames_than_descriptors(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unix_socket, "_MOST_BUFFERS", 2)
    frames: list[Frame] = [b"header", *(np.full(LARGE, value, np.uint8).data for value in range(5))]
    packets = pack(frames)
    assert sum(memory is not None for _, memory in packets) == 2
    pair[0].send_packets(packets)
    assert same(receive(pair[1]), frames)


def test_memory_that_cannot_be_mapped_is_read(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory_buffer, "_map", lambda descriptor, nbytes: None)
    pair[0].send_packets(pack(frames := message()))
    assert same(receive(pair[1]), frames)


# -- sends do not block --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["small", "large"])
def test_messages_beyond_the_kernels_buffer_are_sent_later(pair: Pair, kind: str) -> None:
    sender, receiver = pair
    fill: Frame = b"-" if kind == "small" else bytes(MIDDLE)
    count = 5000 if kind == "small" else 600  # the buffer of a UNIX socket takes some hundred packets
    for number in range(count):
        assert sender.send_packets(pack([b"%d" % number, fill]))  # while the receiver does not read
    for number in range(count):
        assert bytes(receive(receiver)[0]) == b"%d" % number
    wait_until(lambda: sender._sender is None, 60)
    sender.send_packets(pack([b"after"]))
    assert same(receive(receiver), [b"after"])
    assert buffers_in_memory() == 0


def test_a_closed_receiver_ends_the_sending(pair: Pair) -> None:
    sender, receiver = pair
    for _ in range(5000):
        assert sender.send_packets(pack([b"x" * 1000]))
    receiver.close()
    wait_until(lambda: sender._sender is None, 60)
    assert not sender.send_packets(pack([b"x"]))
    assert sender.ended


def test_sent_messages_are_received_after_the_sender_has_ended(pair: Pair) -> None:
    sender, receiver = pair
    sender.send_packets(pack([b"last words"]))
    receiver.send_packets(pack([b"never read"]))
    sender.close()
    assert same(receive(receiver), [b"last words"])
    assert receiver.receive_frames() is None
    assert receiver.ended


def test_closing_drops_messages_to_be_sent_later(pair: Pair) -> None:
    sender = pair[0]
    for _ in range(5000):
        sender.send_packets(pack([b"x" * 1000]))
    thread = sender._sender
    assert thread is not None
    sender.close()
    thread.join()


def test_a_closed_socket_keeps_its_descriptor_while_a_thread_waits_for_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = threading.Event()

    class LatePoll:
        """A thread that was stopped before it waits."""

        def __init__(self) -> None:
            self._poll = poll()
            self.register = self._poll.register

        def poll(self) -> Any:
            closed.wait()
            return self._poll.poll()

    poll = select.poll
    monkeypatch.setattr(select, "poll", LatePoll)
    sender = pair[0]
    for _ in range(5000):
        sender.send_packets(pack([b"x" * 1000]))
    thread = sender._sender
    assert thread is not None
    sender.close()
    never_writable, writing = os.pipe()
    others = [os.dup(never_writable) for _ in range(5)]
    closed.set()
    thread.join(60)
    assert not thread.is_alive()
    assert sender.fileno() == -1
    for descriptor in (never_writable, writing, *others):
        os.close(descriptor)


# -- memory -------------------------------------------------------------------------------------------------------------


def test_memory_is_released_with_the_objects_that_use_it(pair: Pair) -> None:
    before = descriptors()
    pair[0].send_packets(pack(message()))
    assert buffers_in_memory() == 0  # it is on its way
    kept = [np.frombuffer(frame, np.uint8) for frame in receive(pair[1]) if memoryview(frame).nbytes == LARGE]
    assert not descriptors() - before
    assert buffers_in_memory() == 1  # one of several frames is kept
    part = kept.pop()[5:10]
    assert buffers_in_memory() == 1
    del part
    assert buffers_in_memory() == 0


def test_unread_messages_cost_the_sender_nothing_and_end_with_the_socket(listener: Listener) -> None:
    before = descriptors()
    with pairs(listener, 0, 1) as ends:
        connected = descriptors()
        packets = pack(message())
        for sender, _ in ends:
            sender.send_packets(packets)
        del packets
        assert not descriptors() - connected
    assert not descriptors() - before
    assert buffers_in_memory() == 0


def test_a_lost_descriptor_is_reported_with_the_cure_and_the_next_message_arrives(pair: Pair) -> None:
    sender, receiver = pair
    sender.send_packets(pack(message()))
    sender.send_packets(pack([b"next", b"one"]))
    with no_more_descriptors(), pytest.raises(MessageError, match="its limit of open files"):
        receive(receiver)
    assert same(receive(receiver), [b"next", b"one"])


@contextmanager
def no_more_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)  # the lowest free number; higher ones are forbidden
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_message_without_memory_is_sent_in_packets(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, "no room")

    before = descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refuse)
        packets = pack(frames := message())
    assert not any(memory for _, memory in packets)
    pair[0].send_packets(packets)
    assert same(receive(pair[1]), frames)
    assert not descriptors() - before


# -- access -------------------------------------------------------------------------------------------------------------


def test_a_client_without_a_number_is_refused(listener: Listener) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(listener.path)
        stranger.send(b"let me in")
        assert listener.accept() == {}
        assert stranger.recv(1) == b""


def test_an_address_without_a_listener_is_unreachable(listener: Listener) -> None:
    with pytest.raises(FileNotFoundError):
        connect(listener.path + "x", 0)
    other = Listener(os.path.dirname(listener.path))
    os.link(other.path, other.path + "x")
    other.close()
    with pytest.raises(ConnectionRefusedError):
        connect(other.path + "x", 0)
    os.unlink(other.path + "x")


def test_a_directory_that_cannot_hold_sockets_is_an_error() -> None:
    with pytest.raises(StartError, match="TMPDIR"):
        Listener("/proc/self")


def test_a_silent_client_does_not_block_others(listener: Listener) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect(listener.path)
        with pairs(listener, 1) as (pair,):
            pair[0].send_packets(pack([b"hello"]))
            assert same(receive(pair[1]), [b"hello"])
    assert listener.accept() == {}


def test_the_later_of_two_connections_of_an_engine_remains(listener: Listener) -> None:
    old, new = come(listener, 0), come(listener, 0)
    ours = listener.accept()
    ours[0].send_packets(pack([b"hello"]))
    assert same(receive(new), [b"hello"])
    assert old.receive_frames() is None
    assert old.ended
    for one in (old, new, *ours.values()):
        one.close()


def test_packets_fit_one_receive() -> None:
    assert max(len(data) for data, _ in pack([b"x" * 500_000, b"y" * 3000])) <= 1 + unix_socket._PACKET_NBYTES
