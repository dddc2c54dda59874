"""A warning for batches of DataLoaders that are passed to `run` without being distributed.

Every replica then computes the whole batch instead of a slice. The latest batches of torch's loaders are recorded by
weak references. If `run` is given one of them, the replicas include its digest in the message that they exchange anyway
at a function's first call. Equal digests cause the warning. A loader that reads by rank gives each replica a different
batch, so it causes none.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from distnb import activity
from distnb.collectives.digests import digest, digest_of_text
from distnb.collectives.verify import callsite
from distnb.compat import loader_internals, patches
from distnb.values.structure import flatten, has_distributed

__all__ = ["digest_of_batch", "install", "warn_of_equal_batches"]

_LATEST = 64
_SAMPLE = 4096  # elements that are compared
_latest: deque[weakref.ref[torch.Tensor]] = deque(maxlen=_LATEST)


def install() -> None:
    """Record the batches of torch's loaders from now on. Idempotent."""
    patches.wrap("torch.utils.data.dataloader:_BaseDataLoaderIter.__next__", _next)


def _next(plain: Callable[[Any], Any], iterator: Any) -> Any:
    try:
        batch = plain(iterator)
    except StopIteration:
        activity.data_ended(loader_internals.batches_returned(iterator))
        raise
    activity.data_goes_on()
    for leaf in flatten(batch)[0]:
        if isinstance(leaf, torch.Tensor) and leaf.ndim:
            _latest.append(weakref.ref(leaf))
    return batch


def digest_of_batch(args: Any) -> int:
    """Return a digest of the loader's batch among the arguments of `run`, or 0 if there is none."""
    if not _latest or has_distributed(args):
        return 0
    known = [reference() for reference in _latest]
    for leaf in flatten(args)[0]:
        if isinstance(leaf, torch.Tensor) and any(leaf is each for each in known):
            return digest_of_text(f"{tuple(leaf.shape)} {digest(leaf.reshape(-1)[:_SAMPLE])}")
    return 0


def warn_of_equal_batches(num_replicas: int) -> None:
    """Warn that all replicas compute the same batch."""
    callsite.current().warn(
        f"strategy.run was given a batch of a DataLoader, the same one on all {num_replicas} replicas: every replica "
        "computes the whole batch, and their gradients are summed. To have it cut into a slice for each replica, "
        "iterate over strategy.distribute_dataset(loader)."
    )
