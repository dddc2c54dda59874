"""Synchronous training on several replicas, each with a copy of every variable."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from typing import Self

from distnb.cluster.devices import available_gpus
from distnb.collectives.algorithms.base import CrossDeviceOps, checked_ops
from distnb.errors import OptionError
from distnb.options import StrategySpec
from distnb.runtime.this_process import this_process
from distnb.strategies.base import Strategy, kept_options
from distnb.topology import Device, device_names

__all__ = ["MirroredStrategy"]


class MirroredStrategy(Strategy):
    """A strategy with mirrored variables: equal on all replicas, and kept equal by aggregated gradients.

    Args:
        devices: One device per replica; None for all devices of the cluster (or of the script's processes).
        num_gpus: The number of GPUs to use, in place of `devices`.
        cross_device_ops: The algorithm that combines gradients and the arguments of reduce and all_reduce: a
            `distnb.NcclAllReduce`, `HierarchicalCopyAllReduce`, `ReductionToOneDevice`, or your own `CrossDeviceOps`.
            None for NCCL if each replica has its own GPU, and for shared memory and Gloo otherwise.
        gradient_reduction: "sum", as tf.distribute does, or "mean", weighted by the sizes of the replicas' slices.
        oversubscribe: Whether a device may be named more than once.
        check_mean_loss: Whether, with "sum", a loss that is a mean over only the replica's slice is an error.
        cross_tower_ops: The old name of cross_device_ops.

    Raises:
        OptionError: An argument is malformed or cannot be honoured.
    """

    kind = "mirrored"
    about = "on every engine: each replica has a copy of every variable"

    def __new__(
        cls,
        devices: Sequence[str | Device] | str | None = None,
        num_gpus: int | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        gradient_reduction: str = "sum",
        oversubscribe: bool = False,
        *,
        check_mean_loss: bool = True,
        cross_tower_ops: CrossDeviceOps | None = None,
    ) -> Self:
        if cross_tower_ops is not None:
            if cross_device_ops is not None:
                raise OptionError("cross_tower_ops is the old name of cross_device_ops, and both were given. Give one.")
            cross_device_ops = cross_tower_ops
        names = _device_names(devices, num_gpus)
        doubles = sorted({name for name in names if names.count(name) > 1})
        if doubles and not oversubscribe:
            raise OptionError(
                f"{doubles[0]} was named for several replicas, which would share it. If that is what you mean (one "
                "GPU for a classroom), say oversubscribe=True."
            )
        options = kept_options(
            gradient_reduction,
            check_mean_loss,
            cross_device_ops=None if cross_device_ops is None else checked_ops(cross_device_ops),
            oversubscribe=oversubscribe,
        )
        strategy = cls._of(StrategySpec(kind=cls.kind, devices=names, num_replicas=0, options=options))
        if cross_device_ops is not None and this_process.remote is not None:
            pickle.dumps(
                cross_device_ops
            )  # arguments that cannot be sent are refused here, and not in the middle of a cell
        if not strategy._meet() and cross_device_ops is not None:
            names = names or _devices_here()
            nccl = len(set(names)) == len(names) and all(name.startswith("cuda") for name in names)
            cross_device_ops.check(names, nccl=nccl)
        return strategy


def _devices_here() -> tuple[str, ...]:
    """Return the devices of the replicas that a launcher could start on this machine."""
    gpus = tuple(f"cuda:{index}" for index in range(available_gpus()))
    return gpus or tuple(f"cpu:{index}" for index in range(os.cpu_count() or 1))


def _device_names(devices: Sequence[str | Device] | str | None, num_gpus: int | None) -> tuple[str, ...]:
    if num_gpus is not None:
        if devices is not None:
            raise OptionError(f"devices={devices!r} and num_gpus={num_gpus!r} were both given. Give one of them.")
        if isinstance(num_gpus, bool) or not isinstance(num_gpus, int) or num_gpus < 1:
            raise OptionError(f"num_gpus={num_gpus!r}: give a whole number from 1.")
        return tuple(f"cuda:{index}" for index in range(num_gpus))
    return device_names(devices, "devices")
