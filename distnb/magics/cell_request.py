"""What a `%%distribute` line asks for."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distnb.errors import OptionError, closest
from distnb.magics.commands import DISTRIBUTE
from distnb.options import StrategySpec
from distnb.runtime import script_worker
from distnb.runtime.central import setup
from distnb.runtime.this_process import this_process
from distnb.topology import parse_device

__all__ = ["LOCAL", "WORDS", "CellRequest", "read_request"]

WORDS = ("default", "one_device", "mirrored", "multi_worker", "central_storage", "tpu")
LOCAL = ("default", "one_device")
"""Strategies whose only replica is the notebook itself."""

_PLANNED = ("parameter_server",)


@dataclass(frozen=True)
class CellRequest:
    """A strategy, and what a cluster must have if one is to be started for it.

    Attributes:
        word: As the user wrote it.
        local: The cell runs in the notebook's own process.
    """

    word: str
    spec: StrategySpec
    local: bool
    oversubscribe: bool = False


def read_request(line: str, user_ns: Mapping[str, Any]) -> CellRequest:
    """Read the line of a `%%distribute` cell.

    Args:
        line: What follows the magic's name.
        user_ns: Where names of strategy objects are looked up.

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
    if found.ops is not None:
        raise OptionError(
            f"%%distribute {word} cannot honour --cross-device-ops: it is an object, and a line of text carries none. "
            f"Make the strategy in an ordinary cell, chosen = distnb.MirroredStrategy(cross_device_ops={found.ops}), "
            "and write %%distribute chosen."
        )
    devices = (
        tuple(str(parse_device(name)) for name in found.devices.split(",") if name.strip()) if found.devices else ()
    )
    given = [
        option
        for option, value in (
            ("-n", found.replicas),
            ("--devices", devices),
            ("--gradients", found.gradients),
            ("--oversubscribe", found.oversubscribe),
        )
        if value
    ]
    if word in WORDS:
        return _from_word(word, found.replicas, devices, found.gradients, found.oversubscribe, given)
    return _from_object(word, user_ns, given)


def _from_word(
    word: str,
    replicas: int | None,
    devices: tuple[str, ...],
    gradients: str | None,
    oversubscribe: bool,
    given: list[str],
) -> CellRequest:
    if word in LOCAL:
        allowed = ["--devices"] if word == "one_device" else []
        _refuse(word, [option for option in given if option not in allowed], "it runs in the notebook's own process")
        if word == "default":
            return CellRequest(word, StrategySpec("default"), local=True)
        if len(devices) > 1:
            raise OptionError(
                f"%%distribute one_device takes one device and got {len(devices)}: {', '.join(devices)}. "
                "Use mirrored for several."
            )
        return CellRequest(word, StrategySpec("one_device", devices or (_best_device(),)), local=True)
    if word == setup.KIND:
        _refuse(word, [option for option in given if option == "--oversubscribe"], "a device has one replica there")
    if replicas is not None and devices and replicas != len(devices):
        raise OptionError(
            f"%%distribute {word}: -n {replicas} and {len(devices)} devices ({', '.join(devices)}) contradict each "
            "other. Give one of the two."
        )
    if len(set(devices)) < len(devices) and not oversubscribe:
        cure = "Name each once" if word == setup.KIND else "If replicas are to share it, add --oversubscribe"
        raise OptionError(f"%%distribute {word}: a device is named twice in {', '.join(devices)}. {cure}.")
    options = {"gradient_reduction": gradients, "oversubscribe": oversubscribe}
    kept = tuple(sorted((name, value) for name, value in options.items() if value and value != "sum"))
    # Spelt as the strategy's own class does it: equal arguments name the same strategy object.
    spec = StrategySpec(word, devices, 0 if devices else replicas or 0, kept)
    if word == script_worker.KIND:
        script_worker.check_notebook(spec, this_process.machines())
    if word == setup.KIND:
        setup.check_places(spec, devices, ())
    if spec.device_type:
        _check_chips(word, spec, oversubscribe)
    return CellRequest(word, spec, local=False, oversubscribe=oversubscribe)


def _check_chips(word: str, spec: StrategySpec, oversubscribe: bool) -> None:
    from distnb.strategies.tpu import check_available

    wrong = [name for name in spec.devices if not name.startswith(f"{spec.device_type}:")]
    if wrong:
        raise OptionError(f"%%distribute {word}: {wrong[0]} is no {spec.device_type} device. Use mirrored for others.")
    _refuse(word, ["--oversubscribe"] if oversubscribe else [], "a chip belongs to one process")
    check_available(f"%%distribute {word}")


def _from_object(word: str, user_ns: Mapping[str, Any], given: list[str]) -> CellRequest:
    if word in _PLANNED:
        raise OptionError(f"%%distribute {word}: this strategy is not in this version. There are {', '.join(WORDS)}.")
    if word not in user_ns:
        known = [*WORDS, *(name for name in user_ns if not name.startswith("_"))]
        raise OptionError(
            f"%%distribute {word}: {word!r} is neither a strategy ({', '.join(WORDS)}) nor the name of a strategy "
            f"object in this notebook{closest(word, known)}."
        )
    # The value can only be a strategy if the module of its class is loaded.
    base = sys.modules.get("distnb.strategies.base")
    value = user_ns[word]
    if base is None or not isinstance(value, base.Strategy):
        raise OptionError(
            f"%%distribute {word}: {word!r} is a {_kind_of(value)}, and a strategy is needed. Give one of "
            f"{', '.join(WORDS)}, or the name of a strategy object such as distnb.MirroredStrategy()."
        )
    _refuse(word, given, "it is an object that has its options already; give them where it is made")
    spec: StrategySpec = value.spec
    return CellRequest(word, spec, local=spec.kind in LOCAL)


def _refuse(word: str, options: list[str], reason: str) -> None:
    if options:
        raise OptionError(f"%%distribute {word} cannot honour {options[0]}: {reason}. Leave it out.")


def _best_device() -> str:
    import torch

    return "cuda:0" if torch.cuda.is_available() else "cpu:0"


def _kind_of(value: Any) -> str:
    """What a user calls it: a handle is named after what it stands for."""
    return getattr(type(value), "_word", type(value).__name__)
