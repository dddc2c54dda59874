"""TPU chips: how many this machine has, and what their processes must be told. `torch_tpu` knows both.

A process gets one chip. Which one, and how the chips are connected, it learns from its environment, which must be
decided once for all of them. `torch_tpu` decides it in a short-lived process of its own: this one, the notebook or a
launcher, is never to hold a chip, and need not load torch.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache

from distnb.errors import OptionError, StartError
from distnb.topology import Device

__all__ = ["check_named", "chip_environment", "chips", "launch_environment", "why_none"]

_ADDRESSES = "TORCH_TPU_SLICEBUILDER_ADDRESSES"
_ASK = """
import json, os, sys
before = dict(os.environ)
import torch, torch_tpu
from torch.tpu import distributed
count = int(sys.argv[1])
distributed.set_tpu_launch_env(**({"nproc_per_node": count} if count else {}))
print("\\n" + json.dumps({k: v for k, v in os.environ.items() if k.startswith("TORCH_TPU_") and before.get(k) != v}))
"""
_PATIENCE_S = 300.0
_NEEDED = (
    "TPUs need the package torch_tpu (pip install 'distnb[tpu]') and a machine with TPU chips, such as a Cloud TPU VM."
)


def chips() -> int:
    """How many chips this machine has; 0 where there are none, or no torch_tpu."""
    answer, why = _found()
    return 0 if why else len(answer[_ADDRESSES].split(","))


def why_none() -> str:
    """Why there is no TPU to be had here, and what would help; "" where there is one.

    The answer is kept for as long as the process lives: engines that hold the chips would make a second one wrong.
    """
    return _found()[1]


def launch_environment(devices: Sequence[Device]) -> dict[str, str]:
    """What all processes on the TPU chips among `devices` must be told alike; {} where there are none."""
    count = sum(device.type == "tpu" for device in devices)
    return _ask(count) if count else {}


def chip_environment(device: Device, devices: Sequence[Device], launch: Mapping[str, str]) -> dict[str, str]:
    """What the process on one of this machine's chips is told; {} where it is on none.

    `devices` are those of all processes, and `launch` is what `launch_environment` gives for them.
    """
    if device.type != "tpu":
        return {}
    count = sum(device.type == "tpu" for device in devices)
    place = {"RANK": str(device.index), "LOCAL_RANK": str(device.index), "GROUP_RANK": "0"}
    return dict(launch) | place | {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}


def check_named(devices: Sequence[Device]) -> None:
    """Refuse chips that torch_tpu could not give: it numbers them itself, from 0, one to a process."""
    named = [device for device in devices if device.type == "tpu"]
    if named != [Device("tpu", index) for index in range(len(named))]:
        raise OptionError(
            f"{', '.join(map(str, named))}: TPU chips are taken from tpu:0 on, each once and in order, since torch_tpu "
            "itself gives them to the processes. Name tpu:0, tpu:1, …, or say how many (-n)."
        )


@cache
def _found() -> tuple[dict[str, str], str]:
    """What torch_tpu says of all chips, and why there are none."""
    if importlib.util.find_spec("torch_tpu") is None:
        return {}, f"The package torch_tpu is not installed in this environment. {_NEEDED}"
    try:
        answer = _ask(0)
    except StartError as error:
        return {}, f"{error} {_NEEDED}"
    addresses = answer.get(_ADDRESSES, "")
    if any(not each.startswith("localhost:") for each in addresses.split(",")):
        return {}, (
            f"This machine's chips are part of a slice of several machines ({addresses}), and distnb uses the chips of "
            "one machine. Use a TPU VM of one machine."
        )
    return answer, ""


def _ask(count: int) -> dict[str, str]:
    """Have torch_tpu decide for so many processes; 0 for as many as there are chips."""
    command = [sys.executable, "-P", "-c", _ASK, str(count)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_TPU_")}
    try:
        asked = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PATIENCE_S
        )
    except subprocess.TimeoutExpired:
        raise StartError(f"torch_tpu did not say within {_PATIENCE_S:.0f} s which TPU chips there are.") from None
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or [f"exit status {asked.returncode}"])[-1]
        which = f"{count} TPU chips" if count else "a TPU chip"
        raise StartError(f"torch_tpu finds no way to use {which} of this machine: {last}.")
    found: dict[str, str] = json.loads(asked.stdout.strip().splitlines()[-1])
    return found
