"""Whether a collate function may see a replica's slice, or must see the whole global batch.

Torch's own collate function treats examples one by one, so the slice's batch is the batch's slice. One that pads to
the longest example, mixes examples or packs them gives other values for a slice. It is tried out once, on a few
examples from all over the dataset: where single examples, collated one by one, give what the whole gives, slices do.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate

from distnb.errors import StructureError
from distnb.input.cutting import count_examples, cut, map_leaves
from distnb.input.draws import ReplicaDraws, on_host
from distnb.input.sources.base import Place
from distnb.input.sources.loaders import changed
from distnb.options import InputOptions

__all__ = ["CollateRule"]

_EXAMPLES = 16
_SEPARABLE, _INSEPARABLE, _UNKNOWN = "separable", "inseparable", "unknown"


class CollateRule:
    """Decides once per dataset whether whole batches must be loaded by every replica.

    Args:
        loader: The user's loader.
        place: The replica that reads.
        options: What the user says about it: `collate="slice"`, `"global"`, or `"auto"` to try it out.
    """

    def __init__(self, loader: DataLoader[Any], place: Place, options: InputOptions) -> None:
        self._loader = loader
        self._place = place
        self._known: bool | None = {"slice": False, "global": True}.get(options.collate)
        if self._known is None and loader.collate_fn is default_collate:
            self._known = False

    def needs_whole_batches(self) -> bool:
        """Whether the collate function must see whole global batches. The first call may try it out."""
        if self._known is None:
            verdict = self._try_out()
            self._known = verdict != _SEPARABLE
            if self._known:
                name = getattr(self._loader.collate_fn, "__qualname__", type(self._loader.collate_fn).__qualname__)
                what = (
                    "gives other values for a slice than for a whole batch (it pads, mixes or draws)"
                    if verdict == _INSEPARABLE
                    else "could not be tried out on a few examples"
                )
                warnings.warn(
                    f"The collate function {name} {what}, so each of the {self._place.num_replicas} replicas loads "
                    "every global batch whole and keeps its slice: right numbers, but more loading. If a slice may be "
                    'collated by itself, pass InputOptions(collate="slice").',
                    stacklevel=2,
                )
        return self._known

    def _try_out(self) -> str:
        loader = self._loader
        try:
            total = len(loader.dataset)  # type: ignore[arg-type]
        except TypeError:
            return _UNKNOWN  # no examples can be chosen
        step = max(1, total // _EXAMPLES)
        indices = list(range(0, total, step))[:_EXAMPLES]
        if total and indices[-1] != total - 1:
            indices[-1] = total - 1
        trial = _Trial(loader.collate_fn)
        with on_host(self._place.device), ReplicaDraws(0):
            if loader.num_workers == 0:
                several = getattr(loader.dataset, "__getitems__", None)
                try:
                    examples = several(indices) if several else [loader.dataset[index] for index in indices]
                except Exception:  # noqa: BLE001 - the dataset may have other keys
                    return _UNKNOWN
                return trial(examples)
            # In a worker, as ever: a file that the dataset opens lazily must not be opened here and then forked.
            one = changed(
                loader, batch_sampler=[indices], collate_fn=trial, num_workers=1, persistent_workers=False,
                pin_memory=False, generator=torch.Generator(),
            )  # fmt: skip
            try:
                return str(next(iter(one)))
            except Exception:  # noqa: BLE001 - as above
                return _UNKNOWN


class _Trial:
    """A collate function that tells whether another one is separable; it travels to a worker."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, examples: list[Any]) -> str:
        try:
            kept = copy.deepcopy(examples)  # some collate functions take their examples apart
        except Exception:  # noqa: BLE001 - whatever a class of the user's raises: it cannot be tried out
            return _UNKNOWN
        try:
            batch = self._collate(examples)
        except Exception:  # noqa: BLE001 - it will be raised where the user sees it
            return _SEPARABLE
        try:
            if count_examples(batch) != len(kept):
                return _SEPARABLE
        except StructureError:
            return _SEPARABLE  # cannot be cut, so there is no other way than collating the slice
        try:
            for position, example in enumerate(kept):
                expected = map_leaves(batch, len(kept), lambda leaf, at=position: cut(leaf, at, at + 1))  # type: ignore[misc]
                if not _equal(expected, self._collate([example])):
                    return _INSEPARABLE
        except Exception:  # noqa: BLE001 - it takes no single example
            return _INSEPARABLE
        return _SEPARABLE


def _equal(expected: Any, actual: Any) -> bool:
    """Whether two batches are equal bit by bit (NaN equals NaN)."""
    if type(expected) is not type(actual):
        return False
    if isinstance(expected, torch.Tensor):
        same = expected.dtype == actual.dtype and expected.shape == actual.shape
        return same and bool(((expected == actual) | ((expected != expected) & (actual != actual))).all())
    if isinstance(expected, np.ndarray):
        return expected.dtype == actual.dtype and np.array_equal(
            expected, actual, equal_nan=expected.dtype.kind in "fc"
        )
    if isinstance(expected, dict):
        return expected.keys() == actual.keys() and all(_equal(expected[key], actual[key]) for key in expected)
    if isinstance(expected, (list, tuple)):
        return len(expected) == len(actual) and all(map(_equal, expected, actual))
    if hasattr(expected, "__dict__"):
        return _equal(vars(expected), vars(actual))
    return bool(expected == actual)
