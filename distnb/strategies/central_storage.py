"""Synchronous training on several replicas of one machine, with one copy of every variable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from distnb.options import StrategySpec
from distnb.runtime.central import setup
from distnb.strategies.base import Strategy, kept_options
from distnb.topology import Device, distinct_names, parse_device

if TYPE_CHECKING:
    from distnb.runtime.replica import Spmd
    from distnb.runtime.spmd import SpmdProcess

__all__ = ["CentralStorageStrategy"]


class CentralStorageStrategy(Strategy):
    """A strategy with one copy of each variable, in host memory that all replicas share. Each update is applied once.

    Programs and results are the same as under MirroredStrategy. With torch's own optimizers, each replica updates its
    part of the variables, and the optimizer's state exists once, too. Every replica runs any other optimizer. Each
    replica has its own gradients, activations and buffers of modules.

    A variable that a program changes in place (`load_state_dict`, `p.data.mul_(0.5)`) takes memory on each replica
    until the next optimizer step or the end of the next scope. Then an equal change on all replicas becomes the one
    value, and different changes raise OutOfSyncError.

    All replicas are on one machine. Replicas on several accelerators compute with copies of the parameters, which are
    updated after each step in the host's memory. With one replica, such as one GPU, everything is on its device.

    Args:
        compute_devices: One device per replica; None for all devices of the cluster (or of the script's processes).
        parameter_device: The device of the variables: the host's memory, or the only accelerator.
        gradient_reduction: "sum", as tf.distribute does, or "mean", weighted by the sizes of the replicas' slices.
        check_mean_loss: Whether, with "sum", a loss that is a mean over only the replica's slice is an error.

    Raises:
        OptionError: An argument is malformed or cannot be honoured (several machines, or several kinds of devices).

    Example:
        >>> import distnb
        >>> strategy = distnb.CentralStorageStrategy()  # doctest: +SKIP
    """

    kind = "central_storage"
    about = "on every engine of one machine: every variable lives once, in host memory"
    word_options = ("-n", "--devices", "--gradients")
    refusal = "a device has one replica there"
    _devices_argument = "compute_devices"

    def __new__(
        cls,
        compute_devices: Sequence[str | Device] | str | None = None,
        parameter_device: str | Device | None = None,
        *,
        gradient_reduction: str = "sum",
        check_mean_loss: bool = True,
    ) -> Self:
        names = distinct_names(compute_devices, "compute_devices")
        place = None if parameter_device is None else str(parse_device(parameter_device))
        options = kept_options(gradient_reduction, check_mean_loss, parameter_device=place)
        spec = StrategySpec(kind=cls.kind, devices=names, num_replicas=0, options=options)
        cls.check_here(spec, cls.__name__)
        strategy = cls._of(spec)
        strategy._meet()
        return strategy

    @classmethod
    def check_here(cls, spec: StrategySpec, who: str) -> None:
        """Raise OptionError for devices that have no memory in common."""
        setup.check_places(spec, spec.devices, ())

    def check_honoured(self, devices: tuple[str, ...], nccl: bool, workers: tuple[int, ...] = ()) -> None:
        """Raise OptionError for devices, or machines, that have no memory in common."""
        setup.check_places(self.spec, devices, workers)

    def make_runtime(self, process: SpmdProcess) -> Spmd:
        """Make the runtime for one replica, with variables in memory that all replicas share."""
        from distnb.runtime.replica import Spmd

        return Spmd(process, self, single_copy=True)
