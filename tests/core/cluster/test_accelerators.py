"""Names of accelerators."""

from __future__ import annotations

import pytest

from distnb.accelerators import name_on_machine
from distnb.topology import Device


@pytest.mark.parametrize(
    ("visible", "device", "name"),
    [
        (None, Device("cuda", 1), "cuda:1"),
        ("", Device("cuda", 0), "cuda:0"),
        ("3", Device("cuda", 0), "cuda:3"),
        ("4, 2", Device("cuda", 1), "cuda:2"),
        ("GPU-8f2,GPU-1c4", Device("cuda", 1), "cuda:GPU-1c4"),
        ("3", Device("cuda", 1), "cuda:1"),
        ("3", Device("cpu", 0), "cpu:0"),
    ],
)
def test_a_gpu_is_named_by_the_list_of_visible_gpus(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, device: Device, name: str
) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert name_on_machine(device) == name
