"""The equalisation of tensors: every replica gets replica 0's values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import increment_version

from distnb.accelerators import torch_device
from distnb.collectives.algorithms.flat_packs import Pack, Packs, Slot
from distnb.collectives.digests import digest_of_text
from distnb.compat import torch_internals
from distnb.errors import StructureError

if TYPE_CHECKING:
    from distnb.collectives.group.interface import Group

__all__ = ["make_equal", "refuse_unlike"]

_PACKS = Packs(256 * 2**20)


def make_equal(group: Group, named: Sequence[tuple[str, torch.Tensor]], strategy: str = "") -> None:
    """Set tensors on every replica to replica 0's values, in one flat message per dtype (more for very large models).

    All replicas must call this function.

    Args:
        group: The replicas.
        named: The tensors with their names. Names, shapes and dtypes must be equal on all replicas.
        strategy: A description of the strategy to which the tensors belong, which must be equal on all replicas.

    Raises:
        StructureError: The replicas' tensors or strategies differ.
    """
    if not named:
        return
    device = torch_device(group.device)
    descriptions = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in named]
    head = torch.tensor([digest_of_text(repr((strategy, descriptions)))], device=device)
    if any(not torch.equal(other, head) for other in group.all_gather(head)):
        strategies, gathered = zip(*group.all_gather_object((strategy, descriptions)), strict=True)
        _refuse_other_strategies(strategies)
        refuse_unlike(gathered)
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for _, tensor in named:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    with torch.no_grad():
        for tensors in by_dtype.values():
            for places in _PACKS.cut([tensor.nbytes for tensor in tensors]):
                chosen = [tensors[place] for place in places]
                pack = Pack([Slot(shape=tuple(tensor.shape), dtype=tensor.dtype, device=device) for tensor in chosen])
                if group.rank == 0:
                    pack.fill(chosen)
                if pack.flat.numel():
                    group.broadcast(pack.flat, 0)
                if group.rank != 0:
                    torch_internals.copy_each(chosen, pack.views)
                else:  # so that all replicas count the same writes
                    increment_version([tensor for tensor in chosen if not tensor.is_inference()])


def _refuse_other_strategies(strategies: Sequence[str]) -> None:
    if len(set(strategies)) > 1:
        shown = "\n".join(f"  replica {replica}: {strategy}" for replica, strategy in enumerate(strategies))
        raise StructureError(
            f"The replicas are in the scopes of different strategies:\n{shown}\nMake the strategy with the same "
            "arguments on every replica and on every machine."
        )


def refuse_unlike(descriptions: Sequence[Sequence[tuple[str, tuple[int, ...], str]]]) -> None:
    """Raise StructureError if the replicas' tensors differ in name, shape or dtype.

    Args:
        descriptions: For each replica, the name, shape and dtype of each tensor.
    """
    longest = max(len(one) for one in descriptions)
    for place in range(longest):
        entries = [one[place] if place < len(one) else None for one in descriptions]
        if any(entry != entries[0] for entry in entries):
            shown = "\n".join(
                f"  replica {replica}: "
                + (f"{entry[0]}, {entry[2].removeprefix('torch.')}{list(entry[1])}" if entry else "nothing")
                for replica, entry in enumerate(entries)
            )
            raise StructureError(
                f"The replicas made different variables in the scope. Variable {place} of it is\n{shown}\n"
                "Shapes and options must not depend on the replica: make the same model on all of them."
            )
