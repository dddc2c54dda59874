"""What a `%%distribute` line asks for."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from distnb.errors import OptionError, closest
from distnb.magics.commands import DISTRIBUTE
from distnb.options import StrategySpec
from distnb.runtime.base import PARAMETER_SERVER
from distnb.runtime.central import setup
from distnb.runtime.scripts import script_worker
from distnb.runtime.this_process import this_process
from distnb.topology import parse_device
from distnb.values import DistributedValues

__all__ = ["WORDS", "CellRequest", "is_strategy", "read_request"]

WORDS = ("default", "one_device", "mirrored", "multi_worker", "central_storage", "tpu", PARAMETER_SERVER)
_LOCAL = ("default", "one_device", PARAMETER_SERVER)  # the notebook is their only replica, or the coordinator


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
        return self.spec.kind in _LOCAL


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
    found.devices = tuple(str(parse_device(name)) for name in (found.devices or "").split(",") if name.strip())
    if word in WORDS:
        spec = _local_spec(found) if word in _LOCAL else _spec(found)
    else:
        spec = _spec_of_object(word, user_ns)
        _refuse(found, (), "it is an object that has its options already; give them where it is made")
    request = CellRequest(
        word, spec, found.only, found.time, found.timeline, found.profile or "", found.name, found.quiet
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


def _refuse(found: Namespace, allowed: Iterable[str], reason: str) -> None:
    options = {
        "-n": found.replicas,
        "--devices": found.devices,
        "--gradients": found.gradients,
        "--oversubscribe": found.oversubscribe,
    }
    for option, value in options.items():
        if value and option not in allowed:
            raise OptionError(f"%%distribute {found.word} cannot honour {option}: {reason}. Leave it out.")


def _local_spec(found: Namespace) -> StrategySpec:
    allowed = ("--devices",) if found.word == "one_device" else ()
    _refuse(found, allowed, "it runs in the notebook's own process")
    if len(found.devices) > 1:
        raise OptionError(
            f"%%distribute one_device takes one device and got {len(found.devices)}: {', '.join(found.devices)}. "
            "Use mirrored for several."
        )
    if found.word == "one_device" and not found.devices:
        import torch

        found.devices = ("cuda:0" if torch.cuda.is_available() else "cpu:0",)
    return StrategySpec(found.word, found.devices)


def _spec(found: Namespace) -> StrategySpec:
    word, devices = found.word, found.devices
    central = word == setup.KIND
    if central:
        _refuse(found, ("-n", "--devices", "--gradients"), "a device has one replica there")
    if found.replicas is not None and devices and found.replicas != len(devices):
        raise OptionError(
            f"%%distribute {word}: -n {found.replicas} and {len(devices)} devices ({', '.join(devices)}) contradict "
            "each other. Give one of the two."
        )
    if len(set(devices)) < len(devices) and not found.oversubscribe:
        cure = "Name each once" if central else "If replicas are to share it, add --oversubscribe"
        raise OptionError(f"%%distribute {word}: a device is named twice in {', '.join(devices)}. {cure}.")
    options = {"gradient_reduction": found.gradients, "oversubscribe": found.oversubscribe}
    kept = tuple(sorted((name, value) for name, value in options.items() if value and value != "sum"))
    # Spelt as the strategy's own class does it: equal arguments name the same strategy object.
    spec = StrategySpec(word, devices, 0 if devices else found.replicas or 0, kept)
    if word == script_worker.KIND:
        script_worker.check_notebook(spec, this_process.machines())
    if central:
        setup.check_places(spec, devices, ())
    if spec.device_type:
        _check_chips(found, spec)
    return spec


def _check_chips(found: Namespace, spec: StrategySpec) -> None:
    from distnb.strategies.tpu import check_available

    word = found.word
    wrong = [name for name in spec.devices if not name.startswith(f"{spec.device_type}:")]
    if wrong:
        raise OptionError(f"%%distribute {word}: {wrong[0]} is no {spec.device_type} device. Use mirrored for others.")
    _refuse(found, ("-n", "--devices", "--gradients"), "a chip belongs to one process")
    check_available(f"%%distribute {word}")


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
    """Whether it is a strategy object. It can only be one if the module of its class is loaded."""
    base = sys.modules.get("distnb.strategies.base")
    # A handle's attributes may be on an engine, its class among them.
    return base is not None and not isinstance(value, DistributedValues) and isinstance(value, base.Strategy)
