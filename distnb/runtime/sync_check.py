"""Whether the replicas hold the same bits, and if not, which and where."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch

from distnb.errors import OutOfSyncError
from distnb.values.structure import flatten, paths

if TYPE_CHECKING:
    from distnb.collectives.groups import Group

__all__ = ["assert_in_sync"]

_SHOWN = 5


def assert_in_sync(group: Group, value: Any) -> None:
    """Compare modules, optimizers, tensors and plain values of all replicas bit by bit.

    Args:
        group: The replicas.
        value: This replica's; any nested structure.

    Raises:
        OutOfSyncError: It names what differs, where, and by how much.
    """
    mine = _named_leaves(value)
    digests = {name: _digest(leaf) for name, leaf in mine.items()}
    told: list[dict[str, str]] = group.all_gather_object(digests)
    names = list(dict.fromkeys(name for one in told for name in one))
    unlike = [name for name in names if any(one.get(name) != told[0].get(name) for one in told)]
    if not unlike:
        return
    lines = []
    for name in unlike[:_SHOWN]:
        leaves = group.all_gather_object(_portable(mine.get(name)))
        lines.append(f"  {name or 'the value'}: {_difference(leaves)}")
    if len(unlike) > _SHOWN:
        lines.append(f"  … and {len(unlike) - _SHOWN} more")
    raise OutOfSyncError(
        f"The replicas are out of sync: {len(unlike)} of {len(names)} differ.\n" + "\n".join(lines) + "\n"
        "strategy.broadcast(value) gives every replica what replica 0 holds."
    )


def _named_leaves(value: Any) -> dict[str, Any]:
    leaves = dict(zip(paths(value), flatten(value)[0], strict=True))
    named: dict[str, Any] = {}
    for path, leaf in leaves.items():
        state = leaf.state_dict() if isinstance(leaf, (torch.nn.Module, torch.optim.Optimizer)) else None
        if state is None:
            named[path] = leaf
            continue
        inner = dict(zip(paths(state), flatten(state)[0], strict=True))
        named.update({f"{path} {type(leaf).__name__}{key}".strip(): part for key, part in inner.items()})
    return named


def _digest(leaf: Any) -> str:
    tensor = _as_tensor(leaf)
    if tensor is None:
        return f"{type(leaf).__qualname__} {leaf!r}"
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.blake2b(data.data, digest_size=16).hexdigest()}"


def _as_tensor(leaf: Any) -> torch.Tensor | None:
    if isinstance(leaf, torch.Tensor):
        return leaf.to_dense() if leaf.layout is not torch.strided else leaf
    if hasattr(leaf, "__array__"):
        try:
            return torch.as_tensor(leaf)
        except (TypeError, ValueError):
            return None
    return None


def _portable(leaf: Any) -> Any:
    tensor = _as_tensor(leaf)
    return repr(leaf) if tensor is None else tensor.detach().cpu()


def _difference(leaves: list[Any]) -> str:
    first = leaves[0]
    for replica, other in enumerate(leaves):
        if not (isinstance(first, torch.Tensor) and isinstance(other, torch.Tensor)):
            if first != other or type(first) is not type(other):
                return f"replica 0 has {_short(first)}, replica {replica} has {_short(other)}"
        elif first.shape != other.shape or first.dtype != other.dtype:
            return f"replica 0 has {_kind(first)}, replica {replica} has {_kind(other)}"
        elif (text := _first_unequal(first, other)) is not None:
            return text.format(replica=replica)
    return "the bits differ, the values do not"


def _first_unequal(first: torch.Tensor, other: torch.Tensor) -> str | None:
    unequal = (first != other) & ~((first != first) & (other != other))
    if not bool(unequal.any()):
        return None
    where = tuple(int(index) for index in unequal.nonzero()[0])
    values = f"{first[where].item()!r} on replica 0 and {other[where].item()!r} on replica {{replica}}"
    count = int(unequal.sum())
    text = f"{count} of {first.numel()} elements, the first at {list(where)}: {values}" if first.ndim else values
    if first.dtype is not torch.bool:
        gap = (first - other).abs()
        text += f" (at most {gap[unequal].max().item():.3g} apart)"
    return text


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _short(value: Any) -> str:
    text = _kind(value) if isinstance(value, torch.Tensor) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
