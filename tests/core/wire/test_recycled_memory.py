"""Memory that is sent again: nothing in use is overwritten, and nothing is left."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from distnb.errors import MessageError
from distnb.wire import recycled_memory
from distnb.wire.codec import Frame
from distnb.wire.recycled_memory import RecycledReceiver, RecycledSender
from distnb.wire.unix_socket import Listener, UnixSocket, connect

LARGE = 1 << 20


@pytest.fixture
def pair() -> Iterator[tuple[UnixSocket, UnixSocket]]:
    with tempfile.TemporaryDirectory() as directory:
        listener = Listener(directory)
        one = connect(listener.path, 1)
        other = listener.accept()[1]
        one.recycles = other.recycles = True
        yield one, other
        for each in (one, other, listener):
            each.close()


def message(fill: int, nbytes: int = LARGE) -> list[Frame]:
    return [b"header", b"", bytes([fill]) * nbytes, bytes([fill]) * 100]


def there(pair: tuple[UnixSocket, UnixSocket], frames: list[Frame]) -> list[Frame]:
    """Return the received message."""
    assert pair[0].send_frames(frames)
    arrived = pair[1].receive_frames()
    assert arrived is not None
    assert [bytes(frame) for frame in arrived] == [bytes(frame) for frame in frames]
    return arrived


def mapped() -> int:
    """Return mappings and descriptors of such memory in this process."""
    gc.collect()
    names = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.lexists(entry.path)]
    return (Path("/proc/self/maps").read_text() + " ".join(names)).count("distnb-recycled")


def test_consecutive_messages_reuse_the_same_memory(pair: tuple[UnixSocket, UnixSocket]) -> None:
    there(pair, message(1))
    before = mapped()
    for fill in range(20):
        there(pair, message(fill))
        there((pair[1], pair[0]), [b"small"])
    assert mapped() == before > 0


def test_memory_in_use_is_not_overwritten(pair: tuple[UnixSocket, UnixSocket]) -> None:
    kept = [there(pair, message(fill)) for fill in range(5)]
    for fill, frames in enumerate(kept):
        assert [bytes(frame) for frame in frames] == [bytes(frame) for frame in message(fill)]
        memoryview(frames[2])[:3] = b"own"  # it is writable, and private
    assert bytes(kept[0][2][:4]) == b"own\0"
    part = kept[0][3]  # a reference to a part counts, too
    del kept
    for fill in range(5, 8):
        there(pair, message(fill))
    assert bytes(part) == bytes(100)


def test_memory_grows_with_messages(pair: tuple[UnixSocket, UnixSocket], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recycled_memory, "_MOST_NBYTES", 5 * LARGE)
    before = mapped()
    for factor in (1, 3, 2, 4, 6, 1):
        there(pair, message(factor, factor * LARGE))
    assert mapped() <= before + 3 * 2  # the mappings of both ends, and the descriptors


def test_memory_is_released_when_both_ends_are_gone() -> None:
    before = mapped()
    with tempfile.TemporaryDirectory() as directory:
        listener = Listener(directory)
        one = connect(listener.path, 1)
        one.recycles = True
        pair = one, listener.accept()[1]
        frames = there(pair, message(3))
        for each in (*pair, listener):
            each.close()
    del pair, one, each
    assert bytes(frames[2][:3]) == b"\3\3\3"  # received messages remain valid
    del frames
    assert mapped() == before


def test_a_forked_child_releases_no_memory() -> None:
    sender, receiver = RecycledSender(), RecycledReceiver()
    written = sender.write(message(1))
    assert written is not None
    assert written[1] is not None
    frames = receiver.read(written[0], written[1].descriptor)
    child = os.fork()
    if child == 0:
        del frames
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert written[1].in_use
    del frames
    assert not written[1].in_use


def test_missing_memory_is_an_error() -> None:
    written = RecycledSender().write(message(1))
    assert written is not None
    with pytest.raises(MessageError, match="too many files are open"):
        RecycledReceiver().read(written[0], None)
