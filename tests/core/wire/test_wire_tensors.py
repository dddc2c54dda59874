"""Tensors in messages arrive equal, as plain tensors of the receiver."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distnb.wire.codec import decode
from distnb.wire.tensors import encode_tensors

TENSORS: dict[str, Any] = {
    "a small one": torch.randn(3, 4),
    "a large one": torch.randn(300, 400),
    "a number": torch.tensor(2.5),
    "an empty one": torch.empty(0, 3),
    "a transposed one": torch.randn(200, 30).T,
    "every second": torch.arange(10_000)[::2],
    "expanded": torch.ones(1).expand(1000),
    "bfloat16": torch.randn(1000).bfloat16(),
    "bools": torch.randn(50) > 0,
    "conjugated": torch.randn(500, dtype=torch.complex64).conj(),
    "negated": torch.randn(500, dtype=torch.complex64).conj().imag,
    "a parameter": torch.nn.Parameter(torch.randn(5000)),
    "with a graph": torch.randn(10, requires_grad=True) * 2,
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_arrive_equal_and_belong_to_the_receiver(name: str) -> None:
    sent = TENSORS[name]
    frames = [bytearray(frame) for frame in encode_tensors({"nested": [sent]})]
    (arrived,) = decode(frames)["nested"]
    assert type(arrived) is torch.Tensor
    assert (arrived.dtype, arrived.shape, arrived.requires_grad) == (sent.dtype, sent.shape, False)
    assert torch.equal(arrived, sent)
    before = sent.detach().clone()
    arrived.zero_()
    assert torch.equal(sent, before)


def test_a_large_tensor_is_a_frame_without_a_copy() -> None:
    tensor = torch.zeros(100_000)
    _, frame = encode_tensors((tensor, 1))
    tensor[0] = 1
    assert bytes(memoryview(frame)[:4]) == b"\0\0\x80\x3f"


def test_sparse_tensors_arrive_too() -> None:
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(decode(encode_tensors(sparse)).to_dense(), torch.eye(3))
