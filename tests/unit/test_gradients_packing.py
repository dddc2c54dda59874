"""Flat tensors of gradients: layout, unused slots, and when they may be written again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distnb.collectives.gradients.aggregated import aggregated
from distnb.collectives.gradients.flat_packing import Pack, PackPool, Slot


def slot(tensor: torch.Tensor) -> Slot:
    return Slot(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


@pytest.fixture
def gradients() -> list[torch.Tensor]:
    return [torch.randn(3, 5), torch.randn(7), torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)]


def test_views_look_like_the_gradients_and_begin_aligned(gradients: list[torch.Tensor]) -> None:
    pack = Pack([slot(g) for g in gradients])
    assert pack.fill(gradients)
    for view, gradient in zip(pack.views, gradients, strict=True):
        assert torch.equal(view, gradient)
        assert view.stride() == gradient.stride()
        assert view.data_ptr() % 16 == 0
        assert view in aggregated


def test_a_missing_gradient_is_zero_and_flagged(gradients: list[torch.Tensor]) -> None:
    pack = Pack([slot(g) for g in gradients])
    pack.fill(gradients)
    assert not pack.fill([gradients[0], None, gradients[2]])
    assert pack.views[1].count_nonzero() == 0
    pack.wire.mul_(3)  # as three replicas would
    assert pack.used() == [True, False, True]


def test_scale_zero_writes_zeros_over_nan() -> None:
    nan = torch.full((4,), float("nan"))
    pack = Pack([slot(nan)])
    pack.fill([nan], scale=0.0, weight=0.0)
    pack.divide_by_weight()
    assert pack.views[0].tolist() == [0.0] * 4


def test_weights_ride_along() -> None:
    gradient = torch.ones(4, dtype=torch.float64)
    pack = Pack([slot(gradient)])
    pack.fill([gradient], scale=3.0, weight=3.0)
    pack.wire.add_(torch.tensor([5.0] * 4 + [1, 5]))  # a replica with weight 5 and the same gradient
    pack.divide_by_weight()
    assert pack.views[0].tolist() == [1.0] * 4


def test_complex_gradients_travel_as_real_numbers() -> None:
    gradient = torch.randn(3, dtype=torch.complex64)
    pack = Pack([slot(gradient)])
    pack.fill([gradient])
    assert pack.wire.dtype is torch.float32
    pack.wire.mul_(2)
    assert torch.equal(pack.views[0], 2 * gradient)


def keep_nothing(pack: Pack) -> Any:
    return None


def keep_as_grad(pack: Pack) -> Any:
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = pack.views[0]
    return parameter


@pytest.mark.parametrize(
    ("keep", "idle"),
    [
        (keep_nothing, True),
        (keep_as_grad, False),
        (lambda pack: pack.views[0], False),
        (lambda pack: pack.views[0][1:].detach(), False),
        (lambda pack: pack.views[0].numpy(), False),
    ],
)
def test_a_pack_is_idle_while_nobody_else_holds_its_memory(keep: Any, idle: bool) -> None:
    pool = PackPool([slot(torch.zeros(3))])
    pack = pool.take()
    kept = keep(pack)
    assert pack.idle() is idle
    assert (pool.take() is pack) is idle
    del kept
    assert pack.idle()


def test_marks_die_with_their_tensors() -> None:
    tensor = torch.zeros(1)
    aggregated.add(tensor)
    identity = id(tensor)
    assert tensor in aggregated
    assert tensor.clone() not in aggregated
    del tensor
    assert identity not in aggregated.identities
