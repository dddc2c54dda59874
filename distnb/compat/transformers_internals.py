"""Private names of Transformers: the process information that its arguments cache. Importing this loads no
Transformers.
"""

from __future__ import annotations

import sys
from typing import Any, Final

from distnb.compat import patches
from distnb.compat.versions import private_names

__all__ = ["ARGUMENTS", "BOUND", "open_arguments", "reduce_arguments"]

BOUND: Final = {("transformers.trainer", "Trainer")}
"""Classes whose instances store the number of processes at their creation: (module, name)."""

ARGUMENTS: Final = {("transformers.training_args", "TrainingArguments")}
"""Classes whose instances cache the number of processes, and can determine it again: (module, name)."""

_CACHED = ("_setup_devices", "__cached__setup_devices", "distributed_state", "_n_gpu")  # the second: before 5
# A trainer reads this attribute before it makes its `Accelerator`. If the arguments determined the processes later,
# they would reset the Accelerator's state.
_CONFIGURATION = "accelerator_config"
_WITHHELD = "_distnb_accelerator_config"


class _FoundWithDevices:
    """An attribute of `TrainingArguments` that exists once they have determined the process's device.

    They determine it when they are made. Instances received from another process do so when one of these attributes is
    read.
    """

    def __init__(self, name: str, default: Any) -> None:
        self._name = name
        self._default = default

    def __get__(self, arguments: Any, cls: type) -> Any:
        if arguments is None:
            return self._default
        found = vars(arguments)
        if _WITHHELD in found:
            found[_CONFIGURATION] = found.pop(_WITHHELD)
            arguments._setup_devices  # noqa: B018  (it sets the others)
        return found.get(self._name, self._default)


def reduce_arguments(arguments: Any) -> Any:
    """Reduce `TrainingArguments` to their fields, without the devices and processes that they found in this process."""
    fields = {name: value for name, value in vars(arguments).items() if name not in _CACHED}
    if _CONFIGURATION in fields:
        fields[_WITHHELD] = fields.pop(_CONFIGURATION)
    return open_arguments, (type(arguments),), dict(sorted(fields.items()))


def open_arguments(cls: Any) -> Any:
    """Return `TrainingArguments` that determine the devices and the processes at their first use."""
    with private_names("transformers"):
        base: Any = sys.modules["transformers.training_args"].TrainingArguments
        base._setup_devices  # noqa: B018  (it is there)
    for name in ("distributed_state", "_n_gpu", _CONFIGURATION):
        if not isinstance(vars(base).get(name), _FoundWithDevices):
            replacement = _FoundWithDevices(name, vars(base).get(name))
            patches.replace(f"transformers.training_args:TrainingArguments.{name}", replacement)
    return cls.__new__(cls)
