"""The check of the results of users' functions."""

from __future__ import annotations

import torch

from distnb.errors import OptionError

__all__ = ["require_like"]


def require_like(total: object, like: torch.Tensor, what: str, expected: str) -> None:
    """Raise an error unless the result of a user's function is a dense tensor of the expected shape and dtype.

    Args:
        what: The function and its argument, for the error.
        expected: The expected result up to "the same shape and dtype", for the error.
    """
    got = repr(total)
    if isinstance(total, torch.Tensor):
        dense = total.layout == torch.strided
        if dense and not total.is_meta and (total.shape, total.dtype) == (like.shape, like.dtype):
            return
        layout = "" if dense else f" {str(total.layout).removeprefix('torch.')}"
        got = f"{total.dtype}{list(total.shape)}{layout}{' without data' if total.is_meta else ''}"
    raise OptionError(
        f"{what} and returned {got}. It must return {expected} the same shape and dtype, dense and with data."
    )
