"""Objects and messages survive the wire, and their buffers are not copied into the header."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from distnb.errors import MessageError
from distnb.objects.digesting import Side
from distnb.objects.packing import Packed
from distnb.objects.tracking import Tracker
from distnb.options import StrategySpec
from distnb.topology import Device, Team
from distnb.wire.codec import decode, encode
from distnb.wire.described_values import PlainValue
from distnb.wire.messages import CallFunction, Reply
from distnb.wire.planned import OwnTensors, PlannedCall, PlannedReply
from distnb.wire.tensors import encode_tensors


class ByValue:
    """A codec that sends nothing by reference."""

    def digest_token(self, obj: Any) -> Any:
        return None

    def referred(self, keys: Iterable[int]) -> set[int]:
        return set()

    def token(self, obj: Any) -> Any:
        return None

    def send_by_value(self, parts: Any) -> None:
        pass

    def resolve(self, token: Any) -> Any:
        raise KeyError(token)


def end() -> Tracker:
    return Tracker(Side(user_ns={}, references=ByValue()))


def frames_of(value: Any) -> list[Any]:
    return encode(Reply(program=1, status="ok", value=end().pack_loose({"": value})))


def travel(value: Any) -> Any:
    """Send an object packed in a message, as bytes of another process."""
    return end().open_loose(decode([bytearray(frame) for frame in frames_of(value)]).value)[""]


def test_a_message_keeps_its_fields() -> None:
    team = Team(
        engines=(0, 2), devices=(Device("cpu"), Device("cuda", 1)), generation=3, store_host="127.0.0.1", store_port=4
    )
    message = CallFunction(
        program=9,
        team=team,
        strategy=StrategySpec(kind="mirrored"),
        method="run",
        snapshot=Packed(serial=1, names=("x",), data=b"abc", buffers=(b"d",)),
    )
    assert decode(encode(message)).team == team
    arrived = decode(encode(message)).snapshot
    assert (bytes(arrived.data), bytes(arrived.buffers[0])) == (b"abc", b"d")


@pytest.mark.parametrize(
    "message",
    [
        PlannedCall(
            1, 2, 3, ((4, "x"),), ((1.5, [(3, "a"), "Mirrored"], [None, "b"]), {"c": (True,)}), {"n": -(1 << 70)}
        ),
        PlannedReply(1, 2, 3, None),
        PlannedReply(1, 2, 3, "text"),
        PlannedReply(1, 2, 3, OwnTensors({"a": [..., 1]}, (("()", "complex64", "cpu", 1 + 2j, True),))),
        PlannedReply(1, 2, 3, (PlainValue(4), [PlainValue("b")])),
    ],
)
def test_a_planned_message_keeps_its_fields(message: Any) -> None:
    arrived = decode([bytearray(frame) for frame in encode(message)])
    assert arrived == message
    assert type(arrived) is type(message)
    assert type(arrived[-1]) is type(message[-1])


def test_large_buffers_travel_separately_from_the_header() -> None:
    frames = frames_of({"a": np.arange(100_000), "t": torch.arange(50_000.0)})
    assert memoryview(frames[0]).nbytes < 2000
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
def test_tensors_of_every_kind_are_encoded(tensor: torch.Tensor) -> None:
    back = travel(tensor)
    assert type(back) is type(tensor)
    assert back.dtype == tensor.dtype
    assert back.requires_grad == tensor.requires_grad
    assert back.shape == tensor.shape
    assert torch.equal(back.to_dense() if back.is_sparse else back, tensor.to_dense() if tensor.is_sparse else tensor)


def test_decoded_views_share_their_storage_and_are_writable() -> None:
    base = torch.arange(10_000.0)
    back = travel({"base": base, "view": base[100:200]})
    back["base"][100] = -1
    assert back["view"][0] == -1
    array = travel(np.zeros(1000))
    array[0] = 1
    assert array[0] == 1


def test_small_tensors_of_a_value_are_sent_in_one_buffer() -> None:
    sender = end()
    values = {"many": [torch.full((500,), float(number)) for number in range(20)]}
    digests = sender.digest(values)
    packed = sender.pack(1, values, digests, ["many"])
    assert [memoryview(each).nbytes for each in packed.buffers] == [20 * 500 * 4]


@pytest.mark.parametrize("writeable", [True, False])
def test_large_arrays_use_the_received_buffers(writeable: bool) -> None:
    array = np.arange(200_000)
    array.flags.writeable = writeable
    arrived = [bytearray(frame) for frame in frames_of([array])]
    [back] = end().open_loose(decode(arrived).value)[""]
    assert np.array_equal(back, array)
    assert back.flags.writeable == writeable
    assert not writeable or any(np.shares_memory(back, np.frombuffer(frame, np.uint8)) for frame in arrived)


def test_decoded_memory_is_freed_with_its_last_reference() -> None:
    gc.disable()
    try:
        opened = weakref.ref(travel(np.zeros(1000)))
        assert opened() is None
    finally:
        gc.enable()


def test_modules_and_notebook_functions_are_encoded() -> None:
    module = torch.nn.Linear(30, 20)
    factor = 3
    back = travel((module, lambda x: x * factor))
    assert torch.equal(back[0].weight, module.weight)
    assert back[1](2) == 6


def test_invalid_bytes_are_refused_with_a_reason() -> None:
    with pytest.raises(MessageError, match="no message of distnb"):
        decode([b"GET / HTTP/1.1"])


def test_an_unchanged_figure_of_matplotlib_is_not_sent_again() -> None:
    """Check that neither its pickles nor garbage change its digest."""
    figure = Figure()
    (line,) = figure.add_subplot().plot([1, 2, 3])
    tracker = end()
    for _ in range(2):
        digests = tracker.digest({"figure": figure})
        tracker.pack(1, {"figure": figure}, digests, ["figure"])
        garbage = [line.get_transform() + line.get_transform() for _ in range(10)]
        assert not tracker.lacking({"figure": figure}, tracker.digest({"figure": figure}))
        del garbage
        gc.collect()
        assert not tracker.lacking({"figure": figure}, tracker.digest({"figure": figure}))
    figure.axes[0].set_title("changed")
    assert tracker.lacking({"figure": figure}, tracker.digest({"figure": figure})) == ["figure"]


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_packed_objects_in_a_cycle_are_collected_without_a_warning() -> None:
    # A view of a BytesIO that becomes garbage prints an error; Python 3.12.0 and 3.12.1 crash.
    for made in (end().pack_loose({"a": 1}), encode_tensors({"a": 1})):
        cycle: list[Any] = [made]
        cycle.append(cycle)
    del made, cycle
    gc.collect()
