"""torch's two streams of random numbers, in one process that acts as a replica."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from distnb.objects.modes.environment import apply_environment, capture_environment
from distnb.runtime import randomness
from distnb.runtime.randomness import Streams
from distnb.topology import Device


@pytest.fixture(autouse=True)
def _untouched() -> Iterator[None]:
    before = capture_environment()
    yield
    apply_environment(before)


def draw() -> list[float]:
    return [torch.rand(1).item(), torch.randn(3)[0].item(), torch.randn(3, dtype=torch.float64)[0].item()]


def draw_others() -> list[float]:
    return [random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn())]


def inside(streams: Streams, replica_id: int) -> list[float]:
    streams.enter(replica_id)
    try:
        return draw()
    finally:
        streams.leave()


def test_the_shared_stream_equals_that_of_a_program_without_replicas() -> None:
    torch.manual_seed(1)
    plain = [draw() for _ in range(4)]
    streams = Streams()
    torch.manual_seed(1)
    mixed = []
    for _ in range(4):
        mixed.append(draw())  # leaves cached normals behind: they must survive
        inside(streams, 1)
        inside(streams, 1)
    assert mixed == plain


def test_replicas_draw_their_own_numbers_and_repeat_them() -> None:
    streams = Streams()
    torch.manual_seed(1)
    first = [inside(streams, 0) for _ in range(3)]
    assert len({tuple(numbers) for numbers in first}) == 3
    torch.manual_seed(1)
    assert [inside(streams, 0) for _ in range(3)] == first  # seeded to the same state as before
    torch.manual_seed(1)
    other = inside(Streams(), 1)
    assert all(a != b for a, b in zip(first[0], other, strict=True))
    torch.manual_seed(2)
    assert inside(streams, 0) not in first


def test_other_libraries_have_one_stream() -> None:
    def numbers(replica_id: int | None) -> list[list[float]]:
        random.seed(1)
        np.random.seed(1)
        streams, found = Streams(), [draw_others()]
        if replica_id is not None:
            streams.enter(replica_id)
        found.append(draw_others())
        if replica_id is not None:
            streams.leave()
        return [*found, draw_others()]

    assert numbers(0) == numbers(1) == numbers(None)


def test_a_draw_outside_changes_the_stream_inside() -> None:
    streams = Streams()
    torch.manual_seed(1)
    first = inside(streams, 0)
    torch.rand(1)  # a shuffle
    second = inside(streams, 0)
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_the_shared_stream_can_be_borrowed() -> None:
    torch.manual_seed(3)
    expected = [torch.rand(1).item() for _ in range(2)]
    streams = Streams()
    torch.manual_seed(3)
    streams.enter(1)
    own = torch.rand(1).item()
    with streams.shared():
        borrowed = torch.rand(1).item()
        streams.enter(1)  # run within merge_call
        nested = torch.rand(1).item()
        streams.leave(1)
        assert torch.rand(1).item() == expected[1]
    streams.leave()
    assert borrowed == expected[0]
    assert len({own, borrowed, nested}) == 3
    with streams.shared():
        pass


def test_seeding_within_merge_call_affects_the_next_run() -> None:
    torch.manual_seed(3)
    streams = Streams()
    first = inside(streams, 1)
    streams.enter(1)
    with streams.shared():
        torch.manual_seed(3)
    streams.leave()
    assert inside(streams, 1) == first


def test_an_aborted_program_resets_its_streams() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1).item()
    streams = Streams()
    torch.manual_seed(3)
    streams.enter(1)
    torch.rand(1)
    streams.reset()
    assert torch.rand(1).item() == expected


def test_the_devices_generator_is_switched_too(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.Generator().manual_seed(5)
    expected = torch.rand(2, generator=torch.Generator().manual_seed(5)).tolist()
    monkeypatch.setattr(randomness, "generator", lambda _: device)
    streams = Streams()
    torch.manual_seed(1)
    found = []
    for replica_id in (0, 1, 1):
        streams.use_device(Device("cuda", 0))
        streams.enter(replica_id)
        found.append(torch.rand(1, generator=device).item())
        streams.leave()
    assert torch.rand(2, generator=device).tolist() == expected
    assert len({*found, *expected}) == 5


def test_a_new_replica_gets_the_shared_states(monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.Generator()  # of a device
    streams = Streams()
    streams.generators.append(own)
    monkeypatch.setattr(randomness, "streams", streams)
    torch.manual_seed(1)
    own.manual_seed(2)
    states = randomness.captured()
    wanted = draw(), draw_others(), torch.rand(1, generator=own).item()
    torch.manual_seed(3)
    randomness.restore(states)
    assert (draw(), draw_others(), torch.rand(1, generator=own).item()) == wanted
    streams.generators.pop()  # a replica on another type of device
    randomness.restore(states)
    assert draw() != wanted[0]


def test_generators_of_the_user_are_left_unchanged() -> None:
    mine = torch.Generator().manual_seed(1)
    expected = torch.rand(2, generator=torch.Generator().manual_seed(1)).tolist()
    streams = Streams()
    streams.enter(1)
    drawn = torch.rand(1, generator=mine).item()
    streams.leave()
    assert [drawn, torch.rand(1, generator=mine).item()] == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_marking_the_shared_stream_changes_no_number_and_seeding_clears_the_mark(dtype: torch.dtype) -> None:
    for count in (1, 3, 20):
        torch.manual_seed(1)
        plain, seeded = torch.randn(count, dtype=dtype), torch.default_generator.manual_seed(1).get_state()
        inside(Streams(), 1)  # leaves the mark
        marked = torch.get_rng_state()
        assert not torch.equal(marked, seeded)
        assert torch.equal(torch.randn(count, dtype=dtype), plain)
        torch.set_rng_state(marked)
        assert torch.equal(torch.get_rng_state(), marked)
        assert torch.equal(torch.default_generator.manual_seed(1).get_state(), seeded)
