from __future__ import annotations

import re

import pytest

from distnb.cluster import devices
from distnb.cluster.devices import plan_devices
from distnb.errors import OptionError, StartError
from distnb.topology import Device


def names(planned: tuple[Device, ...]) -> list[str]:
    return [str(device) for device in planned]


def test_the_default_is_one_engine_per_gpu_or_two_on_the_cpu() -> None:
    assert names(plan_devices(gpus=3)) == ["cuda:0", "cuda:1", "cuda:2"]
    assert names(plan_devices(gpus=0)) == ["cpu:0", "cpu:1"]


def test_a_number_takes_the_first_gpus_or_that_many_cpu_engines() -> None:
    assert names(plan_devices(2, gpus=4)) == ["cuda:0", "cuda:1"]
    assert names(plan_devices(4, gpus=0)) == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]


@pytest.mark.parametrize(
    "given",
    ["cuda:1,cuda:0", ["/gpu:1", "GPU:0"], "/job:worker/task:0/device:GPU:1, cuda", (Device("cuda", 1), "cuda:0")],
)
def test_names_are_read_in_every_spelling_and_keep_their_order(given: object) -> None:
    assert names(plan_devices(None, given, gpus=2)) == ["cuda:1", "cuda:0"]  # type: ignore[arg-type]


def test_devices_of_both_kinds_can_be_combined() -> None:
    assert names(plan_devices(2, "cuda:0,cpu:0", gpus=1)) == ["cuda:0", "cpu:0"]


def test_oversubscription_needs_an_option() -> None:
    with pytest.raises(OptionError, match=r"cuda:0 appears more than once.*oversubscribe=True"):
        plan_devices(None, "cuda:0,cuda:0", gpus=1)
    with pytest.raises(StartError, match=r"2 engines .* 1 GPU \(cuda:0\).*oversubscribe=True"):
        plan_devices(2, gpus=1)
    assert names(plan_devices(None, "cuda:0,cuda:0", gpus=1, oversubscribe=True)) == ["cuda:0", "cuda:0"]
    assert names(plan_devices(3, gpus=2, oversubscribe=True)) == ["cuda:0", "cuda:1", "cuda:0"]
    assert names(plan_devices(3, "cuda:0", gpus=1, oversubscribe=True)) == ["cuda:0"] * 3


@pytest.mark.parametrize(
    ("n", "given", "gpus", "error", "text"),
    [
        (0, None, 0, OptionError, "n=0: give a whole number, 1 or more"),
        (-2, None, 0, OptionError, "n=-2"),
        (True, None, 0, OptionError, "n=True"),
        (2.0, None, 0, OptionError, "n=2.0"),
        ("2", None, 0, OptionError, "n='2'"),
        (100_000, None, 0, OptionError, "at most 256"),
        (None, "cuda:2", 2, StartError, "no cuda:2 on this machine. It has 2 GPUs (cuda:0, cuda:1)"),
        (None, "cuda", 0, StartError, "no cuda:0 on this machine. It has the CPU only"),
        (None, "tpu:0", 1, StartError, "tpu:0: engines on other machines run on CPU and CUDA devices"),
        (None, "cuda:x", 1, OptionError, "'cuda:x' is not a device"),
        (None, "", 1, OptionError, "devices is empty"),
        (None, [], 1, OptionError, "devices is empty"),
        (None, 3, 1, OptionError, "devices=3: give a list of device names"),
        (None, [3], 1, OptionError, "3 is not a device"),
        (3, "cuda:0,cuda:1", 2, OptionError, "n=3 engines were asked for with 2 device(s) (cuda:0, cuda:1)"),
        (None, "cpu:0,cpu", 0, OptionError, "cpu:0 appears more than once"),
        (None, "cpu:9999", 0, OptionError, "numbered cpu:0 to cpu:255"),
    ],
)
def test_invalid_devices_get_an_error_with_the_received_value(
    n: object, given: object, gpus: int, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=re.escape(text)):
        plan_devices(n, given, gpus=gpus)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("setting", "count"),
    [
        (None, 4),
        ("", 0),
        ("0,2", 2),
        ("3", 1),
        ("0,9,1", 1),
        ("-1,0", 0),
        ("1,1", 0),
        ("GPU-8b3f,GPU-91aa", 2),
        ("0, 1", 2),
        ("x", 0),
    ],
)
def test_cuda_visible_devices_is_interpreted_like_cuda_does(setting: str | None, count: int) -> None:
    assert len(devices._visible_gpus(setting, 4)) == count


def test_gpus_do_not_count_when_torch_cannot_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_physical_gpus", lambda: ("GPU-1", "GPU-2"))
    monkeypatch.setattr(devices, "_torch_has_cuda", lambda: False)
    assert devices.available_gpus() == 0
    with pytest.raises(StartError, match="PyTorch is a build without CUDA"):
        plan_devices(devices="cuda:0")
    monkeypatch.setattr(devices, "_torch_has_cuda", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert devices.available_gpus() == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(StartError, match="CUDA_VISIBLE_DEVICES is ''"):
        plan_devices(devices="cuda:0")
