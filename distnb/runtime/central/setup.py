"""The check of the devices of central storage's variables and replicas. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence

from distnb.errors import OptionError
from distnb.options import StrategySpec

__all__ = ["check_places"]


def check_places(spec: StrategySpec, devices: Sequence[str], workers: Sequence[int]) -> None:
    """Raise OptionError if the replicas cannot share a single copy of each variable.

    Args:
        spec: The strategy's description.
        devices: The replicas' devices. Empty: they are not known yet.
        workers: The number of each replica's machine. Empty: there is one machine.
    """
    if len(set(workers)) > 1:
        raise OptionError(
            f"CentralStorageStrategy keeps its variables in the memory of one machine, and the {len(devices)} replicas "
            f"are on {len(set(workers))}. Use MirroredStrategy or MultiWorkerMirroredStrategy."
        )
    apart = [device for device in devices if not device.startswith("cpu")]
    if apart and len(apart) < len(devices):
        raise OptionError(
            f"CentralStorageStrategy has replicas on {', '.join(devices)}. Some of these compute right in the host's "
            "memory and others with copies in their own; use devices of one kind."
        )
    wanted = spec.option("parameter_device")
    if wanted is None or not devices:
        return
    # All CPU devices of a machine share one memory. A single accelerator holds the variables in its own memory.
    place = devices[0] if apart and len(devices) == 1 else "cpu:0"
    if wanted != place and not (place == "cpu:0" and wanted.startswith("cpu")):
        raise OptionError(
            f"parameter_device={wanted!r} cannot be honoured: with replicas on {', '.join(devices)} the variables are "
            f"on {place}. Leave it out, or name that device."
        )
