"""TensorBoard's event files, written by torch."""

from __future__ import annotations

from typing import Any

from distnb.errors import OptionError

__all__ = ["event_writer"]


def event_writer(folder: str | None = None) -> Any:
    """Return torch's `SummaryWriter` for a folder, or the class if no folder is given.

    Raises:
        OptionError: The package tensorboard is missing.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter  # a slow import
    except ImportError as error:
        raise OptionError(
            f"Writing TensorBoard's files needs the package tensorboard. Install it: pip install tensorboard ({error})."
        ) from None
    return SummaryWriter if folder is None else SummaryWriter(folder)
