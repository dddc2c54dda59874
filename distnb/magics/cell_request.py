"""What a `%%distribute` line asks for."""

from __future__ import annotations

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
    """A strategy, and the word for it that the user wrote.

    Attributes:
        only: The replicas that are to run the cell; None for all.
        time: Whether it is to be told where the time went.
        timeline: Each wait of the replicas is to be drawn.
        profile: The folder for traces of torch.profiler; "" for none.
        name: Of the run that its curves are; "" for the cell's.
        quiet: Its live view is not to be drawn.
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
        """Whether the cell runs in the notebook's own process."""
        return class_of(self.spec.kind).is_local


def read_request(line: str, user_ns: Mapping[str, Any]) -> CellRequest:
    """Read what follows `%%distribute`; names of strategy objects are looked up among the notebook's variables.

    Raises:
        OptionError: It makes no sense, or names an option that the strategy cannot honour.
    """
    found = DISTRIBUTE.read(line)
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
        given.refuse_others((), "it is an object that has its options already; give them where it is made")
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


def _spec_of_object(word: str, user_ns: Mapping[str, Any]) -> StrategySpec:
    if word not in user_ns:
        known = [*WORDS, *(name for name in user_ns if not name.startswith("_"))]
        raise OptionError(
            f"%%distribute {word}: {word!r} is neither a strategy ({', '.join(WORDS)}) nor the name of a strategy "
            f"object in this notebook{closest(word, known)}."
        )
    value = user_ns[word]
    if not is_strategy(value):
        kind = getattr(type(value), "_word", type(value).__name__)  # a handle is named after what it stands for
        raise OptionError(
            f"%%distribute {word}: {word!r} is a {kind}, and a strategy is needed. Give one of "
            f"{', '.join(WORDS)}, or the name of a strategy object such as distnb.MirroredStrategy()."
        )
    spec: StrategySpec = value.spec
    return spec


def is_strategy(value: Any) -> bool:
    """Return whether a value is a strategy object."""
    # A handle's attributes may be on an engine, its class among them.
    return not isinstance(value, DistributedValues) and isinstance(value, Strategy)
