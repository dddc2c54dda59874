"""Which engines of the cluster a strategy runs on."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from distnb.errors import ClusterError, OptionError
from distnb.options import StrategySpec
from distnb.topology import Device

__all__ = ["choose_engines", "note_of_missing"]


def choose_engines(spec: StrategySpec, alive: Mapping[int, Device]) -> list[int]:
    """All that are there, or as many, or those devices, as a strategy names; in replica order.

    Args:
        spec: The strategy.
        alive: The device of each engine that is there, in the order of their ids.

    Raises:
        OptionError: The strategy asks for what the cluster does not have.
        ClusterError: No engine is left.
    """
    if not alive:
        raise ClusterError("Every engine of the cluster has ended. %distnb restart starts them anew.")
    there = ", ".join(map(str, alive.values()))
    if spec.device_type:
        alive = {engine: device for engine, device in alive.items() if device.type == spec.device_type}
        if not alive:
            raise OptionError(
                f"The strategy {spec.kind} needs engines on {spec.device_type} devices, and the cluster's engines have "
                f"{there}. Start one that has them: %distnb stop, then %distnb start --devices {spec.device_type}."
            )
    if not spec.devices:
        wanted = spec.num_replicas or len(alive)
        if wanted > len(alive):
            raise OptionError(
                f"The strategy asks for {wanted} replicas and the cluster has {len(alive)} engine(s) ({there}). "
                f"Start a larger one: %distnb stop, then %distnb start -n {wanted}."
            )
        return list(alive)[:wanted]
    free = dict(alive)
    chosen = []
    for device in spec.devices:
        match = next((engine for engine, own in free.items() if str(own) == device), None)
        if match is None:
            raise OptionError(
                f"No engine of the cluster has {device}; its engines have {there}. "
                "Name those, or start a cluster on other devices."
            )
        del free[match]
        chosen.append(match)
    return chosen


def note_of_missing(spec: StrategySpec, alive: Mapping[int, Device], ended: Collection[int]) -> str:
    """What a program's user must know if it runs on fewer replicas than there were: its numbers may be others.

    Args:
        spec: The strategy; one that names its replicas has them all.
        alive: The device of each engine that is there.
        ended: Engines that have ended since the user was last told.
    """
    if not ended or spec.devices or spec.num_replicas:
        return ""
    gone = ", ".join(map(str, sorted(ended)))
    return (
        f"distnb: engine{'s' * (len(ended) > 1)} {gone} ended; this runs on {len(alive)} "
        f"replica{'s' * (len(alive) > 1)}. %distnb restart --missing starts a replacement."
    )
