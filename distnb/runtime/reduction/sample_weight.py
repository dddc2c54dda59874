"""Weights of examples, as Keras takes them: of a shape that the weighted values have, or that grows to it."""

from __future__ import annotations

from typing import Any

import torch

from distnb.errors import OptionError

__all__ = ["fitting_weight"]


def fitting_weight(sample_weight: Any, values: torch.Tensor, method: str, what: str) -> torch.Tensor:
    """Weights in a shape that broadcasts to the values', and never makes more of them.

    Args:
        sample_weight: A number, or a tensor that broadcasts from the left; a last axis of 1 that the values do not have
            is dropped.
        values: What is weighted, of floating-point numbers.
        method: The user's call, for errors.
        what: What the values are, for errors: "losses".

    Raises:
        OptionError: They do not fit.
    """
    weight = torch.as_tensor(sample_weight, dtype=values.dtype, device=values.device)
    given = weight.shape
    if weight.ndim == values.ndim + 1 and given[-1] == 1:
        weight = weight.squeeze(-1)
    elif 0 < weight.ndim < values.ndim:
        weight = weight.reshape(*given, *[1] * (values.ndim - weight.ndim))
    sizes = [1] * (values.ndim - weight.ndim) + list(weight.shape)
    if len(sizes) > values.ndim or any(one not in (1, size) for one, size in zip(sizes, values.shape, strict=True)):
        raise OptionError(
            f"{method} got sample_weight of shape {list(given)} for {what} of shape {list(values.shape)}. Give one "
            "weight for each of them, one for each example, or a number: what is weighted may not become more."
        )
    return weight
