"""TensorBoard's event files, written by torch."""

from __future__ import annotations

from typing import Any

from distnb.errors import OptionError

__all__ = ["event_writer"]


def event_writer(folder: str | None = None) -> Any:
    """A `SummaryWriter` of torch's for a folder; for none, its class. OptionError without the package tensorboard."""
    try:
        from torch.utils.tensorboard import SummaryWriter  # loads much
    except ImportError as error:
        raise OptionError(
            f"TensorBoard's files are written by the package tensorboard: pip install tensorboard ({error})."
        ) from None
    return SummaryWriter if folder is None else SummaryWriter(folder)
