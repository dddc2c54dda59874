"""Synchronous training on several replicas of one machine, with one copy of every variable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

from distnb.errors import OptionError
from distnb.options import StrategySpec
from distnb.runtime import choice
from distnb.runtime.central import setup
from distnb.strategies.base import Strategy, kept_options
from distnb.topology import Device, device_names, parse_device

__all__ = ["CentralStorageStrategy"]


class CentralStorageStrategy(Strategy):
    """Variables made in its scope live once, in host memory that all replicas use; each update is applied once.

    Programs are those of MirroredStrategy, and so are their results. Gradients are aggregated over the replicas in the
    backward pass. An optimizer's step is taken together: torch's own optimizers divide the variables among the
    replicas, each of which updates its part; any other optimizer is run by replica 0. What an optimizer keeps for a
    variable lives once too. Gradients, activations and buffers of modules are each
    replica's own.

    A variable that a program changes in place (`load_state_dict`, `torch.nn.init`, `p.data.mul_(0.5)`) takes memory on
    each replica that changed it, until the next optimizer step or the end of the next scope: then what all replicas
    changed alike becomes the one value, and what they changed to different values is an OutOfSyncError.
    (After an error that the program caught, the next backward pass compares first, and tells it as a GradientError.)

    With one replica, such as one GPU, everything is on its device. Several replicas are the CPU devices of one machine,
    or its accelerators. An accelerator computes with its own memory only, so each then holds a copy of every parameter,
    which is renewed from the host after an update; the parameters themselves, and all that optimizers keep for them,
    are in host memory, once, and an update is computed there, by torch.optim's own optimizers only. Each step costs
    one copy of the parameters to the host (a change in place is found by comparing) and one back.

    Args:
        compute_devices: One per replica; None for all that the cluster (or the script's processes) have.
        parameter_device: Where variables live; None for the replica's device if it is the only one, else the host's
            memory.
        gradient_reduction: "sum", as tf.distribute does, or "mean": weighted by the sizes of the replicas' slices.
        check_mean_loss: With "sum", raise on a loss that is a mean over the replica's slice only.

    Raises:
        OptionError: An argument that is malformed, or that cannot be honoured: several machines, CPUs and accelerators
            together.

    Example:
        >>> import distnb
        >>> strategy = distnb.CentralStorageStrategy()  # doctest: +SKIP
    """

    kind: ClassVar[str] = setup.KIND

    def __new__(
        cls,
        compute_devices: Sequence[str | Device] | str | None = None,
        parameter_device: str | Device | None = None,
        *,
        gradient_reduction: str = "sum",
        check_mean_loss: bool = True,
    ) -> Self:
        names = device_names(compute_devices, "compute_devices")
        doubles = sorted({name for name in names if names.count(name) > 1})
        if doubles:
            raise OptionError(f"{doubles[0]} was named for several replicas. Name each device of compute_devices once.")
        place = None if parameter_device is None else str(parse_device(parameter_device))
        options = kept_options(gradient_reduction, check_mean_loss, parameter_device=place)
        spec = StrategySpec(cls.kind, names, 0, options)
        setup.check_places(spec, names, ())
        strategy = cls._of(spec)
        if choice.started_by_launcher() or choice.has_remote():
            # In a notebook the engines start now, if there are none; in a script the replicas meet.
            setup.check_places(spec, strategy.worker_devices, ())
        return strategy

    def __repr__(self) -> str:
        given = [f"compute_devices={list(self.spec.devices)}"] if self.spec.devices else []
        given += [f"{name}={value!r}" for name, value in self.spec.options]
        return f"CentralStorageStrategy({', '.join(given)})"
