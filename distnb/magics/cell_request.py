"""The request in a `%%distribute` line."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distnb.errors import OptionError, closest
from distnb.magics.commands import DISTRIBUTE
from distnb.options import StrategySpec
from distnb.strategies import WORDS, Strategy, class_of
from distnb.strategies.word_options import WordOptions
from distnb.topology import parse_device
from distnb.values import DistributedValues

__all__ = ["CellRequest", "is_strategy", "read_request"]


@dataclass(frozen=True)
class CellRequest:
    """A strategy with the user's word for it, and the options of a cell.

    Attributes:
        only: The replicas that run the cell; None for all.
        time: True if the breakdown of the cell's time is to be printed.
        timeline: True if each wait of the replicas is to be drawn.
        profile: The folder for traces of torch.profiler; "" for none.
        name: The name of the run of its curves; "" for the cell's own.
        quiet: True if no live view is to be drawn.
    """

    word: str
    spec: StrategySpec
    only: tuple[int, ...] | None = None
    time: bool = False
    timeline: bool = False
    profile: str = ""
    name: str = ""
    quiet: bool = False

    @property
    def local(self) -> bool:
        """True if the cell runs in the notebook's own process."""
        return class_of(self.spec.kind).is_local


def read_request(line: str, user_ns: Mapping[str, Any]) -> CellRequest:
    """Parse the text after `%%distribute`. Names of strategy objects are looked up among the notebook's variables.

    Raises:
        OptionError: The line is invalid, or names an option that the strategy cannot honour.
    """
    found = _words(line)
    word: str = found.word
    if not word:
        raise OptionError(
            f"%%distribute needs a strategy: {', '.join(WORDS)}, or the name of a strategy object. "
            f"Usage: {DISTRIBUTE.usage_line}"
        )
    devices = tuple(str(parse_device(name)) for name in (found.devices or "").split(",") if name.strip())
    given = WordOptions(
        word=word,
        num_replicas=found.replicas,
        devices=devices,
        gradients=found.gradients,
        oversubscribe=found.oversubscribe,
    )
    if word in WORDS or ":" in word:
        spec = class_of(word).spec_of_word(given)
    else:
        spec = _spec_of_object(word, user_ns)
        given.refuse_others((), "it is an object, whose options were set when it was created. Set them there")
    request = CellRequest(
        word=word,
        spec=spec,
        only=found.only,
        time=found.time,
        timeline=found.timeline,
        profile=found.profile or "",
        name=found.name,
        quiet=found.quiet,
    )
    here = {
        "--replicas": (found.only, "Leave it out."),
        "--time": (found.time, "Write %%time above it."),
        "--profile": (found.profile, "Use torch.profiler.profile in the cell."),
        "--timeline": (found.timeline, "Use %distnb timeline after the cell, if workers compute for it."),
    }
    for option, (value, cure) in here.items():
        if value and request.local:
            raise OptionError(
                f"%%distribute {word} cannot honour {option}: the cell runs in the notebook's own process. {cure}"
            )
    return request


@functools.lru_cache
def _words(line: str) -> argparse.Namespace:
    """Return the parsed line, which is read twice for each cell, and mostly equal to the line of the cell before."""
    return DISTRIBUTE.read(line)


def _spec_of_object(word: str, user_ns: Mapping[str, Any]) -> StrategySpec:
    if word not in user_ns:
        known = [*WORDS, *(name for name in user_ns if not name.startswith("_"))]
        raise OptionError(
            f"%%distribute {word}: {word!r} is neither a strategy ({', '.join(WORDS)}) nor the name of a strategy "
            f"object in this notebook{closest(word, known)}."
        )
    value = user_ns[word]
    if not is_strategy(value):
        kind = getattr(type(value), "_word", type(value).__name__)  # for a handle, the class that it represents
        raise OptionError(
            f"%%distribute {word}: {word!r} is a {kind}, not a strategy. Give one of "
            f"{', '.join(WORDS)}, or the name of a strategy object such as distnb.MirroredStrategy()."
        )
    spec: StrategySpec = value.spec
    return spec


def is_strategy(value: Any) -> bool:
    """Return whether a value is a strategy object."""
    # A handle's attributes, including its class, may be on an engine.
    return not isinstance(value, DistributedValues) and isinstance(value, Strategy)
