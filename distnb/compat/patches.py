"""The table of the functions of other libraries that distnb replaces for as long as a process lives.

A room passes its replacement to `replace`. The table names the target and the reason, and `versions.TESTED` the
versions of each library. A replacement that ends with a `with` block is not in the table, and neither are the methods
that one file replaces in a class and in its subclasses together. `tests/unit/test_patches.py` lists both kinds.
"""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from typing import Any, Final, NamedTuple

from distnb.compat.versions import TESTED, private_names

__all__ = ["PATCHES", "installed", "remove", "replace"]

_GROUPS = "Our group stands for torch's default group: a program finds it, and gives it back instead of ending it."

PATCHES: Final = {
    "torch.autograd:_engine_run_backward": "A backward pass aggregates the gradients of mirrored parameters.",
    "torch.nn:SyncBatchNorm.forward": "torch synchronises on GPUs only; replicas on the CPU need it, too.",
    "torch.nn.parallel:DistributedDataParallel.__init__": "It would aggregate gradients a second time.",
    "torch.utils.data.dataloader:_BaseDataLoaderIter.__next__": "The number of batches read is compared and measured.",
    "torch.distributed:init_process_group": _GROUPS,
    "torch.distributed:destroy_process_group": _GROUPS,
    "torch.distributed.distributed_c10d:init_process_group": _GROUPS,
    "torch.distributed.distributed_c10d:destroy_process_group": _GROUPS,
    "torch.distributed.distributed_c10d:_set_pg_timeout": "torch's own limits break the backends' connections.",
    "torch.distributed.distributed_c10d:_new_process_group_helper": "Before torch 2.13, subgroups would not be ours.",
    "multiprocessing.process:BaseProcess.start": "A launcher in a cell would start ranks of another group.",
    "multiprocessing.reduction:ForkingPickler.reducer_override": "Spawned processes lack the notebook's definitions.",
}
"""The reason for each replacement, by its target: `module:attribute` or `module:class.attribute`."""

_ADDED = {"multiprocessing.reduction:ForkingPickler.reducer_override"}  # the library calls it if somebody defines it


class _Replaced(NamedTuple):
    owner: Any
    attribute: str
    was_own: bool  # False: the owner inherited the attribute, or had none
    original: Any


_replaced: dict[str, _Replaced] = {}


def replace(target: str, replacement: Any) -> None:
    """Put a replacement in the place of a target of the table. If it is replaced already, the new one takes over.

    Raises:
        LibraryVersionError: The library is too old, or has no such attribute.
    """
    assert target in PATCHES, f"{target} is missing from the table of patches"
    module, _, path = target.partition(":")
    *names, attribute = path.split(".")
    library = module.partition(".")[0]
    with private_names(library) if library in TESTED else nullcontext():
        owner: Any = importlib.import_module(module)
        for name in names:
            owner = getattr(owner, name)
        if target not in _ADDED:
            getattr(owner, attribute)
    was_own = attribute in vars(owner)
    _replaced.setdefault(target, _Replaced(owner, attribute, was_own, vars(owner).get(attribute)))
    setattr(owner, attribute, replacement)


def installed() -> tuple[str, ...]:
    """Return the targets that are replaced in this process."""
    return tuple(_replaced)


def remove() -> None:
    """Put every original back."""
    while _replaced:
        _, found = _replaced.popitem()
        if found.was_own:
            setattr(found.owner, found.attribute, found.original)
        else:
            delattr(found.owner, found.attribute)
