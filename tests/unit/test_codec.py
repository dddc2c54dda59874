"""Objects and messages survive the wire, and their buffers are not copied into the header."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch

from distnb.errors import MessageError
from distnb.options import StrategySpec
from distnb.topology import Device, Team
from distnb.wire.bindings import Delivery, Repeat
from distnb.wire.codec import Parcel, decode, encode, pack, unpack
from distnb.wire.graph import GraphPickler, GraphUnpickler, Side, pack_all
from distnb.wire.messages import CallFunction, Reply
from distnb.wire.shorthand import CallReader, CallWriter


def travel(value: Any) -> Any:
    """Through a parcel, a message and bytes of another process."""
    message = decode([bytearray(frame) for frame in encode(Reply(1, "ok", value=pack(value)))])
    return unpack(message.value)


def test_a_message_keeps_its_fields() -> None:
    team = Team((0, 2), (Device("cpu"), Device("cuda", 1)), 3, "127.0.0.1", 4)
    message = CallFunction(9, team, StrategySpec("mirrored"), "run", Parcel([b"abc"]))
    assert decode(encode(message)).team == team
    assert bytes(decode(encode(message)).delivery.frames[0]) == b"abc"


def test_large_buffers_travel_beside_the_header() -> None:
    array, tensor = np.arange(100_000), torch.arange(50_000.0)
    frames = encode(pack({"a": array, "t": tensor}))
    assert memoryview(frames[0]).nbytes < 1000
    assert sorted(memoryview(frame).nbytes for frame in frames)[-2:] == [200_000, 800_000]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.zeros(0, 5, dtype=torch.int32),
        torch.tensor(True),
        torch.tensor([1 + 2j]),
        torch.ones(2000, dtype=torch.bfloat16),
        torch.eye(3).to_sparse(),
        torch.nn.Parameter(torch.ones(3)),
    ],
    ids=["strided", "empty", "scalar", "complex", "bfloat16", "sparse", "parameter"],
)
def test_tensors_of_every_kind(tensor: torch.Tensor) -> None:
    back = travel(tensor)
    assert type(back) is type(tensor)
    assert back.dtype == tensor.dtype
    assert back.requires_grad == tensor.requires_grad
    assert back.shape == tensor.shape
    assert torch.equal(back.to_dense() if back.is_sparse else back, tensor.to_dense() if tensor.is_sparse else tensor)


def test_views_share_their_storage_on_the_other_side_and_can_be_written() -> None:
    base = torch.arange(10_000.0)
    back = travel({"base": base, "view": base[100:200]})
    back["base"][100] = -1
    assert back["view"][0] == -1
    array = travel(np.zeros(1000))
    array[0] = 1
    assert array[0] == 1


@pytest.mark.parametrize("writeable", [True, False])
def test_arrays_are_built_on_the_very_buffers_that_arrived(writeable: bool) -> None:
    array = np.arange(100_000)
    array.flags.writeable = writeable
    side = Side({})
    pickler = GraphPickler(file := io.BytesIO(), side, {})
    arrived = [bytearray(frame) for frame in encode(Reply(1, "ok", value=pack_all(pickler, file, [array])))]
    back = GraphUnpickler(decode(arrived).value, side, lambda pid: None).load()
    assert np.array_equal(back, array)
    assert back.flags.writeable == writeable
    assert any(np.shares_memory(back, np.frombuffer(frame, np.uint8)) for frame in arrived)


def test_modules_and_notebook_functions() -> None:
    module = torch.nn.Linear(30, 20)
    factor = 3
    back = travel((module, lambda x: x * factor))
    assert torch.equal(back[0].weight, module.weight)
    assert back[1](2) == 6


def test_bytes_that_are_no_message_are_refused_with_a_word() -> None:
    with pytest.raises(MessageError, match="no message of distnb"):
        decode([b"GET / HTTP/1.1"])


def test_a_repeated_call_is_a_short_message_that_says_it_all() -> None:
    team = Team((0, 1), (Device("cpu"),) * 2, 1, "127.0.0.1", 1)
    spec, space = StrategySpec("mirrored"), ((0, 1), 1)
    writer, reader = CallWriter(), CallReader()

    def sent(message: CallFunction) -> CallFunction:
        frames = encode(writer.write(message))
        lengths.append(len(frames[0]))
        return reader.read(decode(frames))

    lengths: list[int] = []
    first = CallFunction(1, team, spec, "run", Delivery(space, 1, Parcel([b"x" * 100]), keep=3))
    assert sent(first).delivery.keep == 3
    for number in (2, 3):
        got = sent(CallFunction(number, team, spec, "run", Repeat(space, number, 3, 1)))
        assert (got.program, got.team, got.strategy, got.method) == (number, team, spec, "run")
        assert got.delivery == Repeat(space, number, 3, 1)
    assert max(lengths[1:]) < 40
    # A call of another kind, whose first message is a repeated one: the other side's reader began anew.
    writer, reader = CallWriter(), CallReader()
    for number in (4, 5):
        assert sent(CallFunction(number, team, spec, "reduce", Repeat(space, number, 0, 1))).delivery.serial == number
    got = sent(CallFunction(6, team, spec, "reduce", Delivery(space, 6, Parcel([b"abc"]), delete=("x",))))
    assert got.delivery.delete == ("x",)
