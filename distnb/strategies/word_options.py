"""The options that follow a strategy's word in `%%distribute`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from distnb.errors import OptionError

__all__ = ["WordOptions"]


@dataclass(frozen=True)
class WordOptions:
    """A strategy's word and its options, as the user wrote them.

    Attributes:
        word: The word.
        num_replicas: The number after `-n`; None without it.
        devices: The devices after `--devices`.
        gradients: "sum" or "mean"; None if it is not given.
        oversubscribe: Whether several replicas may share a device.
    """

    word: str
    num_replicas: int | None = None
    devices: tuple[str, ...] = ()
    gradients: str | None = None
    oversubscribe: bool = False

    def refuse_others(self, honoured: Iterable[str], reason: str) -> None:
        """Raise OptionError if an option is given that is not honoured."""
        given = {
            "-n": self.num_replicas,
            "--devices": self.devices,
            "--gradients": self.gradients,
            "--oversubscribe": self.oversubscribe,
        }
        for option, value in given.items():
            if value and option not in honoured:
                raise OptionError(f"%%distribute {self.word} cannot honour {option}: {reason}. Leave it out.")
