"""A check that the replicas hold the same bits, which reports the values that differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from distnb.collectives.digests import digest
from distnb.compat import torch_internals
from distnb.errors import OutOfSyncError
from distnb.runtime.scopes.registration import is_scope_buffer, same_everywhere
from distnb.values.structure import flatten, paths
from distnb.variables.variable import SyncOnReadVariable

if TYPE_CHECKING:
    from distnb.collectives.group.interface import Group

__all__ = ["assert_in_sync", "contents", "drift_report"]

_SHOWN = 5
_SHARD = "<shard>"
_CURE = (
    "To give every replica the value of replica 0, call value = strategy.broadcast(value). For a module or an "
    "optimizer, call model.load_state_dict(strategy.broadcast(model.state_dict()))."
)


def assert_in_sync(group: Group, value: Any) -> None:
    """Compare all replicas' modules, optimizers, tensors and plain values, in any nesting, bit by bit.

    Values that replicas hold in parts (sync-on-read variables, buffers of models made in a scope) are skipped. So are
    objects whose repr shows only their address. Of shards, only copies of the same shard are compared.

    Raises:
        OutOfSyncError: Values differ. The error names the values, the replicas and the size of the differences.
    """
    total, unlike = _compare(group, value)
    if unlike:
        raise OutOfSyncError(
            f"The replicas are out of sync: {len(unlike)} of {total} differ.\n" + "\n".join([*_shown(unlike), _CURE])
        )


def drift_report(group: Group, value: Any) -> str:
    """Compare values like `assert_in_sync`, and return the result as text that is the same on every replica.

    All replicas must call this function.
    """
    if group.size == 1:
        return "there is one replica, which is in sync with itself."
    total, unlike = _compare(group, value)
    if not total:
        return (
            "nothing to compare. Either each replica holds its own part of the value, and reading combines them, or "
            "the object does not show its content."
        )
    if not unlike:
        return f"in sync. {group.size} replicas hold the same bits ({total} {'value' if total == 1 else 'values'})."
    return f"OUT OF SYNC. {len(unlike)} of {total} values differ:\n" + "\n".join([*_shown(unlike), _CURE])


def contents(value: Any) -> dict[str, str]:
    """Return a text for each value in modules, optimizers, tensors and plain values, by name. Equal bits: same text."""
    return {name: _described(leaf) for name, leaf in _named_leaves(value).items()}


def _compare(group: Group, value: Any) -> tuple[int, dict[str, str]]:
    """Return the number of values, and for each value that differs a description of the difference, by name."""
    mine = _named_leaves(value)
    gathered: list[dict[str, str]] = group.all_gather_object(contents(value))
    names = list(dict.fromkeys(name for one in gathered for name in one))
    texts = {name: [one.get(name, "") for one in gathered] for name in names}
    shards = {name for name in names if any(text.startswith(_SHARD) for text in texts[name])}
    single = {name for name in shards if len(set(map(_place, texts[name]))) == group.size}
    names = [name for name in names if name not in single]
    unlike = [name for name in names if len(set(texts[name])) > len(set(map(_place, texts[name])))]
    found = dict.fromkeys(unlike, "the replicas hold different copies of the same shard")
    for name in [name for name in unlike[:_SHOWN] if name not in shards]:
        # Only replica 0, and replicas that differ from it, send the value, because a tensor may be large.
        leaf = None
        if gathered[group.rank].get(name) != gathered[0].get(name) or group.rank == 0:
            tensor = _as_tensor(mine.get(name))
            leaf = (repr(mine.get(name)) if tensor is None else tensor.detach().cpu(),)
        leaves = group.all_gather_object(leaf)
        found[name] = _difference({replica: leaf[0] for replica, leaf in enumerate(leaves) if leaf is not None})
    return len(names), found


def _shown(unlike: dict[str, str]) -> list[str]:
    lines = [f"  {name or 'the value'}: {text}" for name, text in list(unlike.items())[:_SHOWN]]
    return [*lines, f"  … and {len(unlike) - _SHOWN} more"] if len(unlike) > _SHOWN else lines


def _named_leaves(value: Any) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for path, leaf in _by_path(value).items():
        if isinstance(leaf, torch.nn.Module):
            state = leaf.state_dict(keep_vars=True)  # this replica's components, not the aggregated values
            inner = dict(same_everywhere(leaf, _by_path(state).items()))
        elif isinstance(leaf, torch.optim.Optimizer):
            inner = _by_path(leaf.state_dict())
        else:
            named[path] = leaf
            continue
        named.update({f"{path} {type(leaf).__name__}{key}".strip(): part for key, part in inner.items()})
    return {name: leaf for name, leaf in named.items() if not _is_left_out(leaf)}


def _by_path(tree: Any) -> dict[str, Any]:
    return dict(zip(paths(tree), flatten(tree)[0], strict=True))


def _is_left_out(leaf: Any) -> bool:
    """Return whether a value is skipped: replicas hold parts of it, or its text has its address in this process."""
    if isinstance(leaf, SyncOnReadVariable) or (isinstance(leaf, torch.Tensor) and is_scope_buffer(leaf)):
        return True
    return _as_tensor(leaf) is None and f" at {id(leaf):#x}" in repr(leaf)


def _place(text: str) -> str:
    """Return the part of a value's text that may differ between replicas: the place of a shard."""
    return text.partition(" = ")[0] if text.startswith(_SHARD) else ""


def _described(leaf: Any) -> str:
    if torch_internals.local_tensor(leaf) is not None:
        shape, offset = torch_internals.shape_and_offset_of_shard(leaf)
        return f"{_SHARD} of {_kind(leaf)} {shape} from {offset} = {digest(leaf)}"
    tensor = _as_tensor(leaf)
    if tensor is None:
        return f"{type(leaf).__qualname__} {leaf!r}"
    return f"{tensor.dtype} {tuple(tensor.shape)} {digest(tensor)}"


def _as_tensor(leaf: Any) -> torch.Tensor | None:
    if isinstance(leaf, torch.Tensor):
        return leaf.to_dense() if leaf.layout is not torch.strided else leaf
    if hasattr(leaf, "__array__"):
        try:
            return torch.as_tensor(leaf)
        except (TypeError, ValueError):
            return None
    return None


def _difference(leaves: dict[int, Any]) -> str:
    """Return a description of the differences between the other replicas' values and replica 0's."""
    texts: dict[str, list[int]] = {}
    for replica, other in leaves.items():
        if replica:
            texts.setdefault(_difference_of(leaves[0], other), []).append(replica)
    return "; ".join(
        f"replica{'s' * (len(replicas) > 1)} {', '.join(map(str, replicas))}: {text}"
        for text, replicas in texts.items()
    )


def _difference_of(first: Any, other: Any) -> str:
    if not (isinstance(first, torch.Tensor) and isinstance(other, torch.Tensor)):
        return f"{_short(other)}, where replica 0 has {_short(first)}"
    if first.shape != other.shape or first.dtype != other.dtype:
        return f"{_kind(other)}, where replica 0 has {_kind(first)}"
    unequal = (first != other) & ~((first != first) & (other != other))
    if not bool(unequal.any()):
        return "the bits differ, the values do not"
    where = tuple(int(index) for index in unequal.nonzero()[0])
    text = f"{other[where].item()!r}, where replica 0 has {first[where].item()!r}"
    if first.ndim:
        text = f"{int(unequal.sum())} of {first.numel()} elements, the first at {list(where)}: {text}"
    if first.dtype is not torch.bool:
        gap = (first - other).abs()
        text += f" (at most {gap[unequal].max().item():.3g} apart)"
    return text


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _short(value: Any) -> str:
    text = _kind(value) if isinstance(value, torch.Tensor) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
