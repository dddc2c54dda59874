"""TPU chips: their number on this machine, and the environment of their processes. `torch_tpu` determines both.

Each process gets one chip. Its environment contains the number of the chip and the connections between the chips, so it
must be determined once for all processes. `torch_tpu` does that in a separate, short-lived process, because the calling
process (a notebook or a launcher) must never hold a chip and need not load torch.
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
_QUERY = """
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
    """Return the number of chips of this machine; 0 without chips or without torch_tpu."""
    answer, why = _query_all()
    return 0 if why else len(answer[_ADDRESSES].split(","))


def why_none() -> str:
    """Return the reason why no TPU is available here, and a cure; "" if one is available.

    The result is cached for the lifetime of the process. A query while engines hold the chips would be wrong.
    """
    return _query_all()[1]


def launch_environment(devices: Sequence[Device]) -> dict[str, str]:
    """Return the variables that all processes on the TPU chips among `devices` share; {} if there are none."""
    count = sum(device.type == "tpu" for device in devices)
    return _query(count) if count else {}


def chip_environment(device: Device, devices: Sequence[Device], launch: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the process on one of this machine's chips; {} if its device is not a chip.

    `devices` are the devices of all processes, and `launch` is the result of `launch_environment` for them.
    """
    if device.type != "tpu":
        return {}
    count = sum(device.type == "tpu" for device in devices)
    ranks = {"RANK": str(device.index), "LOCAL_RANK": str(device.index), "GROUP_RANK": "0"}
    return dict(launch) | ranks | {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}


def check_named(devices: Sequence[Device]) -> None:
    """Raise OptionError for chips that torch_tpu cannot assign. It numbers the chips from 0, one per process."""
    named = [device for device in devices if device.type == "tpu"]
    if named != [Device("tpu", index) for index in range(len(named))]:
        raise OptionError(
            f"{', '.join(map(str, named))}: torch_tpu assigns the chips to processes itself, from tpu:0 on, each once "
            "and in order. Name tpu:0, tpu:1, …, or give their number (-n)."
        )


@cache
def _query_all() -> tuple[dict[str, str], str]:
    """Return torch_tpu's variables for all chips, and the reason if no chip is available."""
    if importlib.util.find_spec("torch_tpu") is None:
        return {}, f"The package torch_tpu is not installed in this environment. {_NEEDED}"
    try:
        answer = _query(0)
    except StartError as error:
        return {}, f"{error} {_NEEDED}"
    addresses = answer.get(_ADDRESSES, "")
    if any(not each.startswith("localhost:") for each in addresses.split(",")):
        return {}, (
            f"This machine's chips are part of a slice of several machines ({addresses}), but distnb uses only "
            "the chips of a single machine. Use a TPU VM with one machine."
        )
    return answer, ""


def _query(count: int) -> dict[str, str]:
    """Have torch_tpu determine the environment of `count` processes; 0 means one per chip."""
    command = [sys.executable, "-P", "-c", _QUERY, str(count)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_TPU_")}
    try:
        asked = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PATIENCE_S
        )
    except subprocess.TimeoutExpired:
        raise StartError(
            f"torch_tpu did not report the TPU chips within {_PATIENCE_S:.0f} s. Do other processes hold them?"
        ) from None
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or [f"exit status {asked.returncode}"])[-1]
        which = f"{count} TPU chips" if count else "a TPU chip"
        raise StartError(f"torch_tpu cannot use {which} of this machine: {last}.")
    found: dict[str, str] = json.loads(asked.stdout.strip().splitlines()[-1])
    return found
