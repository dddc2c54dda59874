"""Sharded models of Hugging Face's Transformers: `save_pretrained` writes the whole model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import DTensor

from distnb.compat import patches
from distnb.errors import ProgramError
from distnb.runtime import contexts
from distnb.runtime.reduction.gathering import broadcast_tree
from distnb.runtime.this_process import this_process
from distnb.sharded.whole_copies import holds_shards, whole_copies

__all__ = ["install"]


def install() -> None:
    """Install the support of Transformers if the library is loaded. Idempotent."""
    if "transformers.modeling_utils" in sys.modules:
        patches.wrap("transformers.modeling_utils:PreTrainedModel.save_pretrained", _save_pretrained)


def _save_pretrained(original: Callable[..., Any], model: Any, folder: Any, *args: Any, **kwargs: Any) -> None:
    """Write a whole copy of a sharded model on replica 0, in whose host memory it is gathered. All replicas call this.

    Transformers would write shards, and fail.
    """
    if not holds_shards(model):
        original(model, folder, *args, **kwargs)
        return
    contexts.require_all_replicas()
    if kwargs.get("state_dict") is not None:
        state = kwargs["state_dict"].items()
        kwargs["state_dict"] = {key: each.full_tensor() if isinstance(each, DTensor) else each for key, each in state}
    [whole] = whole_copies(model, gradients=False)
    process = this_process.replica
    if process is None or process.size == 1:
        original(whole, folder, *args, **kwargs)
        return
    error: Exception | None = None
    if process.rank == 0:
        try:
            original(whole, folder, *args, **kwargs)
        except Exception as raised:  # noqa: BLE001  # raised below, when the other replicas know it
            error = raised
    failure = broadcast_tree(process.group, error and f"{type(error).__name__}: {error}", 0)
    if failure is not None:
        raise error or ProgramError(f"Replica 0 could not save the model. {failure}")
