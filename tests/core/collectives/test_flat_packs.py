"""Flat buffers of gradients: layout, unused slots, and when they may be written again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from distnb.collectives.algorithms.flat_packs import Pack, Packs, Slot
from distnb.collectives.gradients.buckets import Bucket
from distnb.collectives.gradients.parameter_groups import AGGREGATED


@pytest.fixture
def gradients() -> list[torch.Tensor]:
    return [torch.randn(3, 5), torch.randn(7), torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)]


def pack_of(tensors: list[torch.Tensor]) -> Pack:
    return Pack([Slot.like(tensor) for tensor in tensors], extra=4)


def test_views_have_the_tensors_shapes_and_are_aligned(gradients: list[torch.Tensor]) -> None:
    pack = pack_of(gradients)
    assert pack.fill(gradients)
    for view, gradient in zip(pack.views, gradients, strict=True):
        assert torch.equal(view, gradient)
        assert view.stride() == gradient.stride()
        assert view.data_ptr() % 16 == 0
    assert pack.extra.tolist() == [1, 1, 1, 1]


def test_a_missing_tensor_is_zero(gradients: list[torch.Tensor]) -> None:
    pack = pack_of(gradients)
    pack.fill(gradients)
    assert not pack.fill([gradients[0], None, gradients[2]])
    assert pack.views[1].count_nonzero() == 0
    assert torch.equal(pack.views[2], gradients[2])
    assert pack.extra[:3].tolist() == [1, 0, 1]


def test_tensors_are_written_to_other_memory(gradients: list[torch.Tensor]) -> None:
    pack, memory = pack_of(gradients), torch.full((1024,), 7.0)
    for begin in (0, 64, 0):
        place = memory[begin : begin + pack.wire.numel()]
        assert not pack.fill([gradients[0], None, gradients[2]], 2.0, place)
        assert not pack.wire.any()
        pack.wire.copy_(place)
        assert torch.equal(pack.views[0], 2 * gradients[0])
        assert not pack.views[1].any()
        assert torch.equal(pack.views[2], 2 * gradients[2])
        assert pack.extra[:3].tolist() == [1, 0, 1]
        pack.wire.zero_()
    assert memory[64 + pack.wire.numel() :].eq(7).all()


@pytest.mark.parametrize(("scale", "expected"), [(0.0, [0.0, 0.0]), (2.0, [2.0, 4.0])])
def test_a_scale_of_zero_writes_zeros_over_nan(scale: float, expected: list[float]) -> None:
    tensor = torch.tensor([1.0, 2.0]) if scale else torch.full((2,), float("nan"))
    pack = pack_of([tensor])
    pack.fill([tensor], scale)
    assert pack.views[0].tolist() == expected


def test_complex_tensors_are_packed_as_real_numbers() -> None:
    tensor = torch.randn(3, dtype=torch.complex64)
    pack = pack_of([tensor])
    pack.fill([tensor])
    assert pack.wire.dtype is torch.float32
    pack.wire.mul_(2)
    assert torch.equal(pack.views[0], 2 * tensor)


@pytest.mark.parametrize(
    ("packs", "sizes", "expected"),
    [
        (Packs(), [4, 4, 4], [[0, 1, 2]]),
        (Packs(), [], []),
        (Packs.larger_than(0), [4, 4, 4], [[0, 1, 2]]),
        (Packs.larger_than(7), [4, 4, 4, 4], [[0, 1], [2, 3]]),
        (Packs.larger_than(8), [4, 4, 4, 4], [[0, 1, 2], [3]]),  # 8 bytes are not larger than 8
        (Packs.larger_than(1), [4, 400, 4], [[0], [1], [2]]),
        (Packs(count=0), [4, 0, 4], [[0], [1], [2]]),
        (Packs(count=1), [4, 4, 4], [[0, 1, 2]]),
        (Packs(count=2), [4, 4, 4, 4], [[0, 1], [2, 3]]),
        (Packs(count=2), [1, 1, 100], [[0, 1, 2]]),
        (Packs(count=3), [100, 1, 1], [[0], [1, 2]]),
        (Packs(count=9), [4, 4], [[0], [1]]),
    ],
)
def test_packs_end_at_the_right_tensors(packs: Packs, sizes: list[int], expected: list[list[int]]) -> None:
    assert packs.cut(sizes) == expected


class Alone:
    """The aggregation of one replica."""

    def all_reduce_start(self, tensor: torch.Tensor, write: Callable[[torch.Tensor], object]) -> Any:
        write(tensor)
        return self

    def wait(self) -> None:
        pass


class OneParameter:
    """The parameter group of one parameter, during a pass."""

    def __init__(self) -> None:
        self.params = [torch.nn.Parameter(torch.zeros(3))]
        self.aside: dict[int, torch.Tensor] = {}
        self.local: set[int] = set()


def keep_as_grad(view: torch.Tensor) -> Any:
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = view
    return parameter


@pytest.mark.parametrize(
    ("keep", "used_again"),
    [
        (lambda view: None, True),
        (keep_as_grad, False),
        (lambda view: view, False),
        (lambda view: view[1:].detach(), False),
        (lambda view: view.numpy(), False),
    ],
    ids=["nothing", "grad", "view", "part", "array"],
)
def test_a_bucket_is_reused_if_its_memory_has_no_other_user(keep: Any, used_again: bool) -> None:
    group: Any = OneParameter()
    bucket = Bucket([(group, 0)], [Slot.like(torch.zeros(3))], salt=0)

    def summed() -> torch.Tensor:
        group.params[0].grad = torch.ones(3)
        bucket.start(Alone(), 1.0)  # type: ignore[arg-type]
        (view,), used = bucket.finish()
        assert used is None
        assert view in AGGREGATED
        return view

    memory = summed().data_ptr()
    kept = keep(summed())
    assert (summed().data_ptr() == memory) is used_again
    del kept


def test_a_bucket_lists_gradients_that_no_replica_had() -> None:
    groups: Any = [OneParameter(), OneParameter()]
    groups[0].params[0].grad = torch.ones(3)
    bucket = Bucket([(group, 0) for group in groups], [Slot.like(torch.zeros(3))] * 2, salt=5)
    bucket.start(Alone(), 1.0)  # type: ignore[arg-type]
    views, used = bucket.finish()
    assert used == [True, False]
    assert [view.tolist() for view in views] == [[1.0] * 3, [0.0] * 3]


def test_marks_end_with_their_tensors() -> None:
    tensor = torch.zeros(1)
    AGGREGATED.add(tensor)
    identity = id(tensor)
    assert tensor in AGGREGATED
    assert tensor.clone() not in AGGREGATED
    del tensor
    assert identity not in AGGREGATED.identities
