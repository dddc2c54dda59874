"""Thumbnails of values that are images: tensors, PIL images and matplotlib figures."""

from __future__ import annotations

import base64
import io
import sys
from typing import Any

import torch

__all__ = ["picture_of", "tensor_picture"]

_MOST_PIXELS = 192  # of each side of a thumbnail
_LEAST_PIXELS = 8  # of each side; a smaller tensor is shown as numbers
_MOST_NBYTES = 2 << 20  # of a PNG; a figure with a million points may exceed it


def picture_of(value: Any) -> str:
    """Return a thumbnail of an image or a figure as a data URL, or "" for other values."""
    figures, images = sys.modules.get("matplotlib.figure"), sys.modules.get("PIL.Image")
    if figures is not None and isinstance(value, figures.Figure):
        drawn = io.BytesIO()
        value.savefig(drawn, format="png", dpi=64, bbox_inches="tight")
        return _url(drawn.getvalue())
    if images is not None and isinstance(value, images.Image):
        small = value.copy()
        small.thumbnail((_MOST_PIXELS, _MOST_PIXELS))
        return _png(small)
    return ""


def tensor_picture(tensor: torch.Tensor) -> str:
    """Return a thumbnail of a tensor that can be an image as a data URL, or "" for other tensors.

    Images are `[height, width]`, `[1 or 3, height, width]` or `[height, width, 1 or 3]`. Values from 0 to 1, and bytes
    (uint8), are shown unchanged. If there are others, the range of the values is scaled to the range of shades.
    """
    planes = _planes(tensor)
    if planes is None:
        return ""
    try:
        from PIL import Image
    except ImportError:
        return ""
    steps = [-(-size // _MOST_PIXELS) for size in planes.shape[1:]]
    some = planes[:, :: steps[0], :: steps[1]].to("cpu", torch.float64)
    some = torch.nan_to_num(some, nan=0.0, posinf=0.0, neginf=0.0)
    low, high = 0.0, 255.0 if tensor.dtype is torch.uint8 else 1.0
    if some.min() < low or some.max() > high:
        low, high = float(some.min()), float(some.max())
    shades = ((some - low) * (255 / (high - low or 1.0))).to(torch.uint8)
    array = shades.permute(1, 2, 0).contiguous().numpy()
    return _png(Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array))


def _planes(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor that can be an image as `[channels, height, width]`, or None for other tensors."""
    if tensor.is_meta or not tensor.numel():
        return None
    planes = tensor[None] if tensor.dim() == 2 else tensor
    if planes.dim() == 3 and planes.shape[0] not in (1, 3) and planes.shape[2] in (1, 3):
        planes = planes.permute(2, 0, 1)
    if planes.dim() != 3 or planes.shape[0] not in (1, 3) or min(planes.shape[1:]) < _LEAST_PIXELS:
        return None
    return planes


def _png(image: Any) -> str:
    written = io.BytesIO()
    image = image if image.mode in ("1", "L", "LA", "P", "RGB", "RGBA") else image.convert("RGB")
    image.save(written, format="PNG")
    return _url(written.getvalue())


def _url(png: bytes) -> str:
    return "" if len(png) > _MOST_NBYTES else f"data:image/png;base64,{base64.b64encode(png).decode()}"
