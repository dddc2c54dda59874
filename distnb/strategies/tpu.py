"""Synchronous training on the TPU chips of one machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from distnb.cluster import tpu_chips
from distnb.errors import OptionError, StartError
from distnb.options import StrategySpec
from distnb.runtime import choice
from distnb.strategies.base import Strategy, kept_options
from distnb.topology import Device, device_names, parse_device

__all__ = ["TPUStrategy"]


class TPUStrategy(Strategy):
    """A strategy with mirrored variables, as under MirroredStrategy, for replicas on the TPU chips of this machine.

    PyTorch reaches the chips through the package torch_tpu (`pip install 'distnb[tpu]'`). In a notebook the replicas
    are engines, which start now if none run. Start a script with `distnb run --devices tpu`.

    Args:
        tpu_cluster_resolver: None. torch_tpu finds the chips itself.
        experimental_device_assignment: None. Replica *r* has the chip tpu:*r*.
        experimental_spmd_xla_partitioning: False. A model is copied to each chip, and not cut.
        devices: The chips "tpu:0", "tpu:1", …, one per replica; None for all chips of the cluster (or of the script's
            processes).
        gradient_reduction: "sum", as tf.distribute does, or "mean", weighted by the sizes of the replicas' slices.
        check_mean_loss: Whether, with "sum", a loss that is a mean over only the replica's slice is an error.

    Raises:
        OptionError: An argument is malformed or cannot be honoured, or the cluster has no engines on chips.
        StartError: torch_tpu is not installed, or finds no chip.
    """

    kind = "tpu"
    about = "on the TPU chips of this machine, as mirrored"
    device_type = "tpu"
    word_options = ("-n", "--devices", "--gradients")
    refusal = "a chip belongs to one process"

    def __new__(
        cls,
        tpu_cluster_resolver: None = None,
        experimental_device_assignment: None = None,
        experimental_spmd_xla_partitioning: bool = False,
        *,
        devices: Sequence[str | Device] | str | None = None,
        gradient_reduction: str = "sum",
        check_mean_loss: bool = True,
    ) -> Self:
        _refuse("tpu_cluster_resolver", tpu_cluster_resolver, "the chips are those of this machine, as torch_tpu finds")
        _refuse("experimental_device_assignment", experimental_device_assignment, "replica r has the chip tpu:r")
        if experimental_spmd_xla_partitioning:
            _refuse("experimental_spmd_xla_partitioning", True, "a model is copied to each chip, and not cut")
        names = _chip_names(devices)
        options = kept_options(gradient_reduction, check_mean_loss)
        strategy = cls._of(StrategySpec(kind=cls.kind, devices=names, num_replicas=0, options=options))
        if not choice.started_by_launcher():
            cls.check_here(strategy.spec, cls.__name__)
        strategy._meet()
        return strategy

    @classmethod
    def check_here(cls, spec: StrategySpec, who: str) -> None:
        """Raise if a device is no TPU chip, or if there are no chips."""
        wrong = [name for name in spec.devices if not name.startswith("tpu:")]
        if wrong:
            raise OptionError(f"{who}: {wrong[0]} is no tpu device. Use mirrored for others.")
        why = tpu_chips.why_none()
        if why:
            raise StartError(f"{who}: there is no TPU here. {why}")


def _refuse(name: str, value: Any, reason: str) -> None:
    if value is not None:
        raise OptionError(f"{name}={value!r} cannot be honoured: {reason}. Leave it out.")


def _chip_names(devices: Sequence[str | Device] | str | None) -> tuple[str, ...]:
    given = [parse_device(name) for name in device_names(devices, "devices")]
    if any(device.type != "tpu" for device in given):
        raise OptionError(f"devices={devices!r}: name TPU chips, such as ['tpu:0', 'tpu:1'], or leave it out for all.")
    tpu_chips.check_named(given)
    return tuple(map(str, given))
