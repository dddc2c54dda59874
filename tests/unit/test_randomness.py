"""The two streams of random numbers, in one process that plays a replica."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from distnb.runtime import generators, randomness
from distnb.runtime.generators import NumpyStream, PythonStream, TorchStream
from distnb.runtime.randomness import Streams
from distnb.wire import twisters


@pytest.fixture(autouse=True)
def _untouched() -> Iterator[None]:
    before = randomness.capture()
    yield
    randomness.restore(before)


def draw() -> list[float]:
    return [
        torch.rand(1).item(),
        torch.randn(3)[0].item(),
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
    ]


def inside(streams: Streams, replica_id: int) -> list[float]:
    streams.enter(replica_id)
    try:
        return draw()
    finally:
        streams.leave()


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def test_the_shared_stream_is_that_of_a_program_without_replicas() -> None:
    seed(1)
    plain = [draw() for _ in range(4)]
    streams = Streams()
    seed(1)
    mixed = []
    for _ in range(4):
        mixed.append(draw())  # leaves cached normals behind: they must survive
        inside(streams, 1)
        inside(streams, 1)
    assert mixed == plain


def test_replicas_draw_their_own_numbers_and_repeat_them() -> None:
    streams = Streams()
    seed(1)
    first = [inside(streams, 0) for _ in range(3)]
    assert len({tuple(numbers) for numbers in first}) == 3
    seed(1)
    assert [inside(streams, 0) for _ in range(3)] == first  # seeded to the very state it had before
    seed(1)
    other = [inside(Streams(), 1) for _ in range(1)]
    assert all(a != b for a, b in zip(first[0], other[0], strict=True))
    seed(2)
    assert inside(streams, 0) not in first


def test_a_draw_outside_renews_every_stream_inside() -> None:
    streams = Streams()
    seed(1)
    first = inside(streams, 0)
    torch.rand(1)  # a shuffle
    second = inside(streams, 0)
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_borrowing_the_shared_stream() -> None:
    seed(3)
    expected = [torch.rand(1).item() for _ in range(2)]
    streams = Streams()
    seed(3)
    streams.enter(1)
    own = torch.rand(1).item()
    with streams.shared():
        borrowed = torch.rand(1).item()
        streams.enter(1)  # run within merge_call
        nested = torch.rand(1).item()
        streams.leave()
        assert torch.rand(1).item() == expected[1]
    streams.leave()
    assert borrowed == expected[0]
    assert len({own, borrowed, nested}) == 3
    with streams.shared():
        pass


@pytest.mark.parametrize("borrows", [False, True], ids=["", "borrows the shared stream"])
@pytest.mark.parametrize("replica_ids", [(1, 1, 1), (1, 0, 1)])
def test_streams_that_linger_give_the_same_numbers(borrows: bool, replica_ids: tuple[int, ...]) -> None:
    def numbers(lingers: bool) -> list[list[float]]:
        seed(4)
        streams = Streams()
        drawn = [inside(streams, 1)]
        streams.lingers = lingers
        for replica_id in replica_ids:
            streams.enter(replica_id)
            drawn.append(draw())
            if borrows:
                with streams.shared():
                    drawn.append(draw())
            streams.leave()
            assert streams.lingering == lingers
        with streams.shared():
            drawn.append(draw())
        return [*drawn, draw()]

    assert numbers(lingers=True) == numbers(lingers=False)


def test_reset_after_a_program_that_was_ended_inside() -> None:
    seed(3)
    expected = torch.rand(1).item()
    streams = Streams()
    seed(3)
    streams.enter(1)
    torch.rand(1)
    streams.reset()
    assert torch.rand(1).item() == expected


@pytest.mark.parametrize("kind", [PythonStream, NumpyStream])
def test_without_the_shortcut_through_memory(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def numbers(stream: Any) -> list[list[float]]:
        seed(5)
        drawn = [draw()]
        for _ in range(2):
            stream.enter(1, 7, False)
            drawn.append(draw()[2:])
            stream.leave()
            drawn.append(draw()[2:])
        return drawn

    quick = numbers(kind())
    monkeypatch.setattr(twisters, "memory_of", lambda generator: None)
    monkeypatch.setattr(twisters, "cached_normal_at", lambda module: None)
    slow = numbers(kind())
    assert [quick[0], quick[2], quick[4]] == [slow[0], slow[2], slow[4]]  # the shared ones
    assert quick[1] != quick[3]
    assert slow[1] != slow[3]


def test_another_bit_generator_of_numpy() -> None:
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        expected = float(np.random.rand())
        np.random.set_bit_generator(np.random.PCG64(1))
        streams = Streams()
        inside(streams, 1)
        assert float(np.random.rand()) == expected
    finally:
        np.random.set_bit_generator(before)


def test_the_mark_can_be_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generators, "_mark_is_safe", lambda: False)
    stream = TorchStream()
    torch.manual_seed(1)
    expected = torch.get_rng_state()
    assert stream.switch(0)
    stream.leave()
    assert torch.equal(torch.get_rng_state(), expected)
    assert not stream.switch(0)
    stream.leave()


def test_capture_and_restore() -> None:
    states = randomness.capture()
    first = draw()
    randomness.restore(states)
    assert draw() == first
