"""The tensors of a worker's models, which must remain the copies of the variables on the servers.

A function may assign to a buffer (`self.count = self.count + 1`), which puts another tensor in the copy's place. The
copy takes its value, so that the change reaches the servers like a change in place, and returns to its place.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import NamedTuple

import torch

from distnb.errors import ProgramError

__all__ = ["ModelTensors"]

_KINDS = ("_parameters", "_buffers")


class _TensorPlace(NamedTuple):
    """The place of a parameter or buffer in a module, and the tensor that belongs there, or None."""

    module: weakref.ref[torch.nn.Module]
    kind: str
    name: str
    tensor: torch.Tensor | None


class ModelTensors:
    """The parameters and buffers of models that this worker has opened."""

    def __init__(self) -> None:
        self._places: list[_TensorPlace] = []

    def add(self, model: torch.nn.Module) -> None:
        """Add a model that was just opened."""
        for module in model.modules():
            reference = weakref.ref(module)
            for kind in _KINDS:
                named = vars(module)[kind].items()
                self._places += [_TensorPlace(reference, kind, name, tensor=each) for name, each in named]

    def accept_assigned(self) -> None:
        """Give each copy the value of the tensor that was assigned in its place, and put the copy back.

        Raises:
            ProgramError: A parameter was replaced, or a buffer by a value that does not fit.
        """
        refused = None
        for place, tensors in self._replaced():
            found, copy = tensors.get(place.name), place.tensor
            tensors[place.name] = copy
            if found is None or copy is None or place.kind != "_buffers" or not _fits(found, copy):
                refused = refused or (place, found)
                continue
            with torch.no_grad():
                copy.copy_(found)
        if refused is not None:
            raise _refusal(*refused)

    def put_back(self) -> None:
        """Put each copy back in its place, without the values of the tensors assigned there."""
        for place, tensors in self._replaced():
            tensors[place.name] = place.tensor

    def _replaced(self) -> Iterator[tuple[_TensorPlace, dict[str, torch.Tensor | None]]]:
        gone = False
        for place in self._places:
            module = place.module()
            if module is None:
                gone = True
            elif (tensors := vars(module)[place.kind]).get(place.name) is not place.tensor:
                yield place, tensors
        if gone:
            self._places = [place for place in self._places if place.module() is not None]


def _fits(found: torch.Tensor, copy: torch.Tensor) -> bool:
    return found.shape == copy.shape and found.dtype == copy.dtype


def _refusal(place: _TensorPlace, found: torch.Tensor | None) -> ProgramError:
    what = "parameter" if place.kind == "_parameters" else "buffer"
    was, now = _described(place.tensor), _described(found)
    return ProgramError(
        f"A function on a worker replaced the {what} {place.name} of a {type(place.module()).__name__}, {was}, by "
        f"{now}. Workers have copies of the servers' values: a function may assign only to a buffer, a tensor of the "
        "same shape and dtype. Replace it on the coordinator."
    )


def _described(tensor: torch.Tensor | None) -> str:
    return "None" if tensor is None else f"{tensor.dtype} of shape {list(tensor.shape)}"
