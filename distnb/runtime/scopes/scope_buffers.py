"""Buffers of modules made in a scope: each replica updates its own; what is saved outside replicas is the aggregate.

What a forward pass writes into a buffer differs between replicas, as each sees its own slices. Buffers are brought
together when they are saved, never while training (but see `running_statistics`): floating-point ones by their mean,
whole numbers and booleans by their maximum (counters of batches are equal anyway). Torch does not say which buffers a
forward pass has changed, so all of them are compared, on all replicas together.
"""

from __future__ import annotations

import functools
import hashlib
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from distnb.accelerators import torch_device
from distnb.collectives.algorithms.aggregation import Aggregation
from distnb.collectives.algorithms.sums import combine
from distnb.options import ReduceOp
from distnb.runtime import contexts

if TYPE_CHECKING:
    from distnb.collectives.group.groups import Group

__all__ = ["ScopeBuffers", "is_scope_buffer"]


class ScopeBuffers:
    """The buffers of the models that one strategy's scopes made, on this replica.

    Args:
        group: Gives the process group of the present generation.
    """

    def __init__(self, group: Callable[[], Group]) -> None:
        self._group = group
        self._known: dict[int, weakref.ref[torch.Tensor]] = {}
        self._modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        _install(self)

    def take(self, root: torch.nn.Module) -> None:
        """Remember which modules of a model have buffers."""
        for part in root.modules():
            if any(buffer is not None for buffer in part.buffers(recurse=False)):
                self._modules.add(part)

    def is_new(self, buffer: torch.Tensor) -> bool:
        """Whether a buffer is seen for the first time."""
        identity, known = id(buffer), self._known
        if identity in known:
            return False
        known[identity] = weakref.ref(buffer, lambda _: known.pop(identity, None))
        return True

    def owns(self, value: object) -> bool:
        """Whether a tensor is a buffer of a model that was made in a scope."""
        return id(value) in self._known

    def has(self, module: torch.nn.Module) -> bool:
        """Whether a module with buffers was made in a scope."""
        return module in self._modules

    def read(self, buffers: Sequence[torch.Tensor], reading: str) -> list[torch.Tensor]:
        """The buffers as they are in cross-replica context. All replicas call this; nothing is changed.

        Args:
            buffers: The same on every replica.
            reading: What reads them, for errors: a replica that does something else meanwhile is told of it.
        """
        seen = [buffer.detach() for buffer in buffers]
        group = self._group()
        if not seen or group.size == 1:
            return seen
        group.note(reading, seen)
        digests = torch.tensor(list(map(_digest, seen)), dtype=torch.int64, device=torch_device(group.device))
        others = torch.stack(group.all_gather(digests)).cpu()
        # Equal ones stay as they are, to the last bit: a mean of three equal numbers may not be that number.
        unequal = [place for place, same in enumerate((others == others[0]).all(0).tolist()) if not same]
        for place, value in zip(unequal, _aggregated(group, [seen[place] for place in unequal]), strict=True):
            seen[place] = value
        return seen

    @property
    def applies(self) -> bool:
        """Whether what is read here is the aggregate: there are several replicas, and this is outside them."""
        innermost = contexts.innermost()
        return (innermost is None or innermost[1] is None) and self._group().size > 1


def _digest(tensor: torch.Tensor) -> int:
    data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return int.from_bytes(hashlib.blake2b(data.data, digest_size=7).digest(), "little")


def _aggregated(group: Group, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    floats = [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    means = iter(combine(Aggregation(group), ReduceOp.MEAN, floats))
    return [
        next(means) if tensor.is_floating_point() or tensor.is_complex() else _largest(group, tensor)
        for tensor in tensors
    ]


def _largest(group: Group, tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.to(device=torch_device(group.device), dtype=torch.int64).contiguous()
    return torch.stack(group.all_gather(whole)).amax(0).to(tensor)


# -- what state_dict() takes -------------------------------------------------------------------------------------------

_Saved = tuple[ScopeBuffers, torch.Tensor, torch.Tensor]
"""Whose buffer was saved, what stands for it in the dictionary, and the buffer."""


class _Saving(threading.local):
    """The `state_dict()` that is under way in this thread, by what it has saved so far."""

    saved: list[_Saved] | None = None


_books: weakref.WeakSet[ScopeBuffers] = weakref.WeakSet()
_plain_save: Any = None
_plain_state_dict: Any = None
_saving = _Saving()


def is_scope_buffer(value: torch.Tensor) -> bool:
    """Whether a tensor is a buffer of a model that a scope of some strategy made."""
    return any(book.owns(value) for book in _books)


def _install(book: ScopeBuffers) -> None:
    """From now on `state_dict()` asks. A hook of each module would be pickled and copied with it."""
    global _plain_save, _plain_state_dict
    _books.add(book)
    if _plain_save is None:
        _plain_save, _plain_state_dict = torch.nn.Module._save_to_state_dict, torch.nn.Module.state_dict
        torch.nn.Module._save_to_state_dict = _save_to_state_dict  # type: ignore[assignment,method-assign]
        torch.nn.Module.state_dict = functools.update_wrapper(_state_dict, _plain_state_dict)  # type: ignore[assignment,method-assign]


def _save_to_state_dict(module: torch.nn.Module, destination: Any, prefix: str, keep_vars: bool) -> None:
    _plain_save(module, destination, prefix, keep_vars)
    if keep_vars or not module._buffers:
        return
    book = next((book for book in _books if book.has(module)), None)
    if book is None or not book.applies:
        return
    named = {
        prefix + name: buffer
        for name, buffer in module._buffers.items()
        if buffer is not None and prefix + name in destination and not is_lazy(buffer)
    }
    saved = [(book, destination[key], buffer) for key, buffer in named.items() if buffer.layout is torch.strided]
    if _saving.saved is not None:
        _saving.saved += saved
    else:
        _bring_together(module, destination, saved)


def _state_dict(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A module's parts save themselves in calls of their own; the buffers of all are brought together at the end."""
    if _saving.saved is not None:
        return _plain_state_dict(module, *args, **kwargs)
    saved = _saving.saved = []
    try:
        destination = _plain_state_dict(module, *args, **kwargs)
    finally:
        _saving.saved = None
    _bring_together(module, destination, saved)
    return destination


def _bring_together(module: torch.nn.Module, destination: Any, saved: Sequence[_Saved]) -> None:
    whole: dict[int, torch.Tensor] = {}
    for book in dict.fromkeys(book for book, _, _ in saved):
        own = [(stand_in, buffer) for of, stand_in, buffer in saved if of is book]
        values = book.read([buffer for _, buffer in own], f"{type(module).__name__}.state_dict")
        whole.update((id(stand_in), value) for (stand_in, _), value in zip(own, values, strict=True))
    # Not by their names: hooks may have given them others.
    for key, value in destination.items() if whole else ():
        destination[key] = whole.get(id(value), value)
