"""Optimizers of torch, including those whose steps run in another process."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from distnb.checkpoint.states.base import Kind, TensorOutline, copied, described, listed
from distnb.checkpoint.stored_tensors import StoredTensor
from distnb.checkpoint.tensor_slices import is_sharded, read_like
from distnb.collectives.gradients.optimizer_steps import optimized
from distnb.values.structure import map_structure

__all__ = ["Optimizers"]


class Optimizers(Kind):
    """Optimizers. torch accepts any state whose groups have as many parameters, and fails in the next step."""

    def covers(self, value: Any) -> bool:
        return isinstance(value, torch.optim.Optimizer)

    def state(self, value: Any, name: str) -> Any:
        return value.state_dict()

    def misfits(self, value: Any, saved: Any, name: str) -> list[str]:
        if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= set(saved):
            return [f"{name}: the checkpoint has {described(saved)}, but the object is an optimizer."]
        own, groups = value.param_groups, saved["param_groups"]
        here, there = ([len(group["params"]) for group in each] for each in (own, groups))
        if here != there:
            return [f"{name}: the checkpoint has groups of {there} parameters, but the object has groups of {here}."]
        lines = []
        for mine, its in zip(own, groups, strict=True):
            lacking, unknown = [key for key in mine if key not in its], [key for key in its if key not in mine]
            # Another version of torch may have more options, or fewer. Another optimizer has different ones.
            if lacking and unknown:
                lines.append(
                    f"{name}: the checkpoint has the state of another optimizer, with the options {listed(unknown)}; "
                    f"{type(value).__name__} has {listed(lacking)}."
                )
                break
        return lines + list(_of_parameters(own, saved, name))

    def restore(self, value: Any, state: Any, name: str) -> None:
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        targets = dict(zip(numbers, optimized(value), strict=True))
        # The optimizer keeps the tensors it receives, which are in the mapped file.
        tensors = {
            number: map_structure(functools.partial(_copied_like, target=targets.get(number)), kept)
            for number, kept in state["state"].items()
        }
        others = {key: map_structure(copied, each) for key, each in state.items() if key != "state"}
        value.load_state_dict({"state": tensors} | others)

    def holds_shards(self, value: Any) -> bool:
        return any(map(is_sharded, optimized(value)))


def _copied_like(leaf: Any, target: Any) -> Any:
    """Return a copy of a parameter's state, such as its momentum. That of a sharded parameter is sharded, too."""
    if not isinstance(leaf, (torch.Tensor, StoredTensor)):
        return leaf
    read = read_like(leaf, target)
    return read if isinstance(leaf, StoredTensor) and is_sharded(read) else read.clone()


def _of_parameters(own: list[dict[str, Any]], saved: Mapping[str, Any], name: str) -> Iterator[str]:
    """Yield a line for each parameter whose shape differs from that in the saved state."""
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = [parameter for group in own for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for key, kept in saved["state"].get(number, {}).items():
            # State per row or column (Adafactor) broadcasts to the parameter.
            comparable = isinstance(kept, TensorOutline) and 0 < len(kept.shape) == parameter.ndim
            if comparable and any(
                size not in (1, whole) for size, whole in zip(kept.shape, parameter.shape, strict=True)
            ):
                yield (
                    f"{name}: {key} of parameter {number} has shape {list(kept.shape)} in the checkpoint, but the "
                    f"parameter has {list(parameter.shape)} here."
                )
