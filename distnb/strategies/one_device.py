"""Everything on one named device, in the calling process."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

from distnb.errors import OptionError
from distnb.options import StrategySpec
from distnb.runtime import choice
from distnb.runtime.base import Runtime
from distnb.runtime.variable_homes import AloneHome
from distnb.strategies.base import Strategy
from distnb.strategies.word_options import WordOptions
from distnb.topology import Device, parse_device
from distnb.variables.homes import Home

__all__ = ["OneDeviceStrategy"]


class OneDeviceStrategy(Strategy):
    """A strategy for one device, on which new tensors and modules of its scope and of `run` are placed.

    It takes the same steps as a strategy with many replicas, so it suits the first try of a program.

    Args:
        device: The device, in torch's spelling (`cuda:1`) or TensorFlow's (`/gpu:1`).

    Raises:
        OptionError: The text is no device.
    """

    kind = "one_device"
    about = "in the notebook's own process, on one device"
    is_local = True
    needs_engines = False
    word_options = ("--devices",)
    refusal = "it runs in the notebook's own process"

    def __new__(cls, device: str | Device) -> Self:
        return cls._of(StrategySpec(kind=cls.kind, devices=(str(parse_device(device)),)))

    def __repr__(self) -> str:
        return f"OneDeviceStrategy({self.spec.devices[0]!r})"

    @property
    def runtime(self) -> Runtime:
        """The device, in this process."""
        return choice.in_process(self, self.spec.devices[0])

    @property
    def home(self) -> Home:
        """The device, in this process."""
        return AloneHome(self)

    @classmethod
    def spec_of_word(cls, given: WordOptions) -> StrategySpec:
        """Return the spec for a word and its options; without devices, of the first GPU, else of the CPU."""
        if len(given.devices) > 1:
            raise OptionError(
                f"%%distribute {given.word} takes one device and got {len(given.devices)}: {', '.join(given.devices)}. "
                "Use mirrored for several."
            )
        if not given.devices:
            import torch

            given = replace(given, devices=("cuda:0" if torch.cuda.is_available() else "cpu:0",))
        return super().spec_of_word(given)
